//! Eviction: which leaf goes when a tier is full, and whether a new block is worth its place.
//!
//! A [`Policy`] serves one tier. It knows leaves, ages and hit classes, never keys' bytes, payloads
//! or trees: the forest tells it which nodes are evictable and what happened to blocks, and asks for
//! a victim. Ages are counted in ticks, one per request.
//!
//! The contract with the forest, for each tier:
//! - *Evictable leaves* are handed in with [`Policy::insert_leaf`] and taken out with
//!   [`Policy::remove_leaf`]. A node that has a child in this tier, is leased, or has I/O in flight
//!   is not in the set. In particular, the blocks of the request being served are not.
//! - To store a block: [`Policy::on_offer`] gives its hit class. If the tier has room, store it;
//!   else ask for a [`Policy::victim`], then [`Policy::admit`]; evict the victim ([`Policy::remove_leaf`],
//!   [`Policy::on_evict`]) and store ([`Policy::on_insert`]), or refuse ([`Policy::on_refuse`]). The blocks
//!   behind a refused one are offered and refused without asking for a victim.
//! - Under least-recently-used only the deepest block of a request need be touched; whoever evicts a
//!   leaf hands its `last` on to the parent (the later of the two counts). When
//!   [`Policy::touches_every_block`] is true, every block of a hit goes through [`Policy::on_hit`].

mod cohorts;
mod density;
mod ghost;
mod leafhd;
mod lru;
mod seen;
#[cfg(test)]
mod tests;

use leafhd::LeafHd;
use lru::Lru;
pub use seen::Seen;

/// Number of hit classes: hits of a block since it was first seen, capped.
pub const HIT_CLASSES: u8 = 4;

/// Which policy a tier runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PolicyKind {
    /// The least recently used leaf goes; every block is admitted.
    Lru,
    /// Learned hit density: the leaf with the fewest expected hits per tick goes; a block worth less
    /// than that is not admitted.
    LeafHd,
}

impl PolicyKind {
    /// Every policy with the name that configuration and command line use.
    pub const NAMES: [(&'static str, Self); 2] = [("lru", Self::Lru), ("leafhd", Self::LeafHd)];

    /// The policy called `name`.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::NAMES
            .iter()
            .find(|(known, _)| *known == name)
            .map(|(_, kind)| *kind)
    }

    /// The name that configuration and command line use.
    pub fn name(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::LeafHd => "leafhd",
        }
    }
}

/// An evictable leaf as the policy sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leaf {
    /// The forest's number of the node.
    pub node: u32,
    /// Tick of the last touch.
    pub last: u64,
    /// Hits since first sight, below [`HIT_CLASSES`].
    pub hit_class: u8,
}

/// The eviction policy of one tier.
#[derive(Debug)]
pub struct Policy {
    engine: PolicyEngine,
}

#[derive(Debug)]
enum PolicyEngine {
    Lru(Lru),
    LeafHd(Box<LeafHd>),
}

impl Policy {
    /// A policy for a tier that holds about `capacity_blocks` blocks. `seed` fixes every random
    /// choice: the same calls on the same seed give the same victims.
    pub fn new(kind: PolicyKind, capacity_blocks: usize, seed: u64) -> Self {
        let engine = match kind {
            PolicyKind::Lru => PolicyEngine::Lru(Lru::new()),
            PolicyKind::LeafHd => {
                PolicyEngine::LeafHd(Box::new(LeafHd::new(capacity_blocks, seed)))
            }
        };
        Self { engine }
    }

    /// Which policy this is.
    pub fn kind(&self) -> PolicyKind {
        match self.engine {
            PolicyEngine::Lru(_) => PolicyKind::Lru,
            PolicyEngine::LeafHd(_) => PolicyKind::LeafHd,
        }
    }

    /// Whether [`Policy::on_hit`] must be called for each block of a hit. If not, touching the deepest
    /// one is enough.
    pub fn touches_every_block(&self) -> bool {
        matches!(self.engine, PolicyEngine::LeafHd(_))
    }

    /// Makes `leaf` a candidate of size class `class`. A node that is in the set already is updated
    /// under a learning policy; under LRU the caller removes it first.
    pub fn insert_leaf(&mut self, class: u16, leaf: Leaf) {
        match &mut self.engine {
            PolicyEngine::Lru(lru) => lru.insert_leaf(class, leaf),
            PolicyEngine::LeafHd(leafhd) => leafhd.insert_leaf(class, leaf),
        }
    }

    /// Takes a node out of the candidates of size class `class`; `last` is what it was inserted with.
    /// Returns whether it was there.
    pub fn remove_leaf(&mut self, class: u16, node: u32, last: u64) -> bool {
        match &mut self.engine {
            PolicyEngine::Lru(lru) => lru.remove_leaf(class, node, last),
            PolicyEngine::LeafHd(leafhd) => leafhd.remove_leaf(class, node),
        }
    }

    /// The leaf of size class `class` to evict next, which stays in the set. `None` when there is none.
    /// Asked again in the same tick, it is the same one unless that has left the set or changed.
    pub fn victim(&mut self, class: u16, tick: u64) -> Option<Leaf> {
        match &mut self.engine {
            PolicyEngine::Lru(lru) => lru.victim(class),
            PolicyEngine::LeafHd(leafhd) => leafhd.victim(class, tick),
        }
    }

    /// Number of candidates of size class `class`.
    pub fn leaves(&self, class: u16) -> usize {
        match &self.engine {
            PolicyEngine::Lru(lru) => lru.leaves(class),
            PolicyEngine::LeafHd(leafhd) => leafhd.leaves(class),
        }
    }

    /// A resident block of hit class `hit_class`, last touched at `last`, is hit at `tick`. Returns
    /// its new class; its new `last` is `tick`.
    pub fn on_hit(&mut self, hit_class: u8, last: u64, tick: u64) -> u8 {
        if let PolicyEngine::LeafHd(leafhd) = &mut self.engine {
            leafhd.on_hit(hit_class, last, tick);
        }
        next_class(hit_class)
    }

    /// A block that is not resident is offered. Returns the class it would enter with: above 0 when
    /// the policy remembers it. `fingerprint` is any well-mixed 64-bit digest of the key.
    pub fn on_offer(&mut self, fingerprint: u64, tick: u64) -> u8 {
        match &mut self.engine {
            PolicyEngine::Lru(_) => 0,
            PolicyEngine::LeafHd(leafhd) => leafhd.on_offer(fingerprint, tick),
        }
    }

    /// Whether a new block of class `hit_class` is worth the place of `victim`.
    pub fn admit(&self, hit_class: u8, victim: &Leaf, tick: u64) -> bool {
        match &self.engine {
            PolicyEngine::Lru(_) => true,
            PolicyEngine::LeafHd(leafhd) => leafhd.admit(hit_class, victim, tick),
        }
    }

    /// A block became resident: stored at `last`, promoted from a lower tier, or found on disk at start
    /// with the `last` and class of its record.
    pub fn on_insert(&mut self, fingerprint: u64, hit_class: u8, last: u64) {
        if let PolicyEngine::LeafHd(leafhd) = &mut self.engine {
            leafhd.on_insert(fingerprint, hit_class, last);
        }
    }

    /// A block that was offered at `tick` and got class `hit_class` was not stored.
    pub fn on_refuse(&mut self, fingerprint: u64, hit_class: u8, tick: u64) {
        if let PolicyEngine::LeafHd(leafhd) = &mut self.engine {
            leafhd.on_refuse(fingerprint, hit_class, tick);
        }
    }

    /// A resident block was evicted for space: what it was worth stays remembered for a while.
    pub fn on_evict(&mut self, fingerprint: u64, last: u64, hit_class: u8) {
        if let PolicyEngine::LeafHd(leafhd) = &mut self.engine {
            leafhd.on_evict(fingerprint, last, hit_class);
        }
    }

    /// A resident block was lost otherwise (bad checksum, failed read, dropped namespace): it is
    /// forgotten.
    pub fn on_drop(&mut self, last: u64, hit_class: u8) {
        if let PolicyEngine::LeafHd(leafhd) = &mut self.engine {
            leafhd.on_drop(last, hit_class);
        }
    }

    /// The request of `tick` is done; relearns now and then. Bounded work, whatever the capacity.
    pub fn end_of_request(&mut self, tick: u64) {
        if let PolicyEngine::LeafHd(leafhd) = &mut self.engine {
            leafhd.end_of_request(tick);
        }
    }
}

/// The class after one more hit.
fn next_class(hit_class: u8) -> u8 {
    hit_class.saturating_add(1).min(HIT_CLASSES - 1)
}
