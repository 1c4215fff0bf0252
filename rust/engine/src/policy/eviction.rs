//! The policy of one set of leaves, of one of two kinds.

use serde::{Deserialize, Serialize};

use crate::work;

use super::leaf::{Leaf, next_class};
use super::leafhd::LeafHd;
use super::lru::Lru;

/// Which policy a tier runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum PolicyKind {
    /// The least recently used leaf is evicted; every block is admitted.
    #[default]
    Lru,
    /// Learned hit density: the leaf with the fewest expected hits per tick is evicted; a block with fewer
    /// expected hits is not admitted.
    LeafHd,
}

/// The eviction policy of one tier.
#[derive(Debug)]
pub struct Policy {
    engine: Learner,
}

#[derive(Debug)]
enum Learner {
    Lru(Lru),
    LeafHd(Box<LeafHd>),
}

impl Policy {
    /// A policy for a tier that holds about `capacity_blocks` blocks. `seed` fixes every random
    /// choice: the same calls on the same seed give the same victims.
    pub fn new(kind: PolicyKind, capacity_blocks: usize, seed: u64) -> Self {
        let engine = match kind {
            PolicyKind::Lru => Learner::Lru(Lru::new()),
            PolicyKind::LeafHd => Learner::LeafHd(Box::new(LeafHd::new(capacity_blocks, seed))),
        };
        Self { engine }
    }

    /// Which policy this is.
    pub fn kind(&self) -> PolicyKind {
        match self.engine {
            Learner::Lru(_) => PolicyKind::Lru,
            Learner::LeafHd(_) => PolicyKind::LeafHd,
        }
    }

    /// Whether [`Policy::on_hit`] must be called for each block of a hit. If not, a touch of the deepest
    /// block is enough.
    pub fn touches_every_block(&self) -> bool {
        matches!(self.engine, Learner::LeafHd(_))
    }

    /// Makes `leaf` a candidate of a set. A node that is in the set already is updated
    /// under a learning policy; under LRU the caller removes it first.
    pub fn insert_leaf(&mut self, set: usize, leaf: Leaf) {
        work::candidate();
        match &mut self.engine {
            Learner::Lru(lru) => lru.insert_leaf(set, leaf),
            Learner::LeafHd(leafhd) => leafhd.insert_leaf(set, leaf),
        }
    }

    /// Removes a node from the candidates of a set; `last` is its value at the
    /// insertion. Returns whether it was a candidate.
    pub fn remove_leaf(&mut self, set: usize, node: u32, last: u64) -> bool {
        work::candidate();
        match &mut self.engine {
            Learner::Lru(lru) => lru.remove_leaf(set, node, last),
            Learner::LeafHd(leafhd) => leafhd.remove_leaf(set, node),
        }
    }

    /// The leaf of a set to evict next, which stays in the set. `None` when there is none.
    /// A second call in the same tick returns the same leaf, unless that leaf has left the set or changed.
    pub fn victim(&mut self, set: usize, tick: u64) -> Option<Leaf> {
        work::candidate();
        match &mut self.engine {
            Learner::Lru(lru) => lru.victim(set),
            Learner::LeafHd(leafhd) => leafhd.victim(set, tick),
        }
    }

    /// Whether `leaf` is evicted before `other`, a leaf of another set.
    pub fn is_before(&self, leaf: &Leaf, other: &Leaf, tick: u64) -> bool {
        match &self.engine {
            Learner::Lru(_) => leaf.last < other.last,
            Learner::LeafHd(leafhd) => leafhd.density(leaf, tick) < leafhd.density(other, tick),
        }
    }

    /// Up to `count` leaves of a set that may be evicted soon. They stay in the set.
    pub fn victims(&mut self, set: usize, count: usize) -> Vec<Leaf> {
        match &mut self.engine {
            Learner::Lru(lru) => lru.victims(set).take(count).collect(),
            Learner::LeafHd(leafhd) => leafhd.sample(set, count),
        }
    }

    /// Number of candidates of a set.
    pub fn leaves(&self, set: usize) -> usize {
        match &self.engine {
            Learner::Lru(lru) => lru.leaves(set),
            Learner::LeafHd(leafhd) => leafhd.leaves(set),
        }
    }

    /// Notes that a resident block of hit class `hit_class`, last touched at `last`, is hit at `tick`. Returns
    /// its new class; its new `last` is `tick`.
    pub fn on_hit(&mut self, hit_class: u8, last: u64, tick: u64) -> u8 {
        if let Learner::LeafHd(leafhd) = &mut self.engine {
            leafhd.on_hit(hit_class, last, tick);
        }
        next_class(hit_class)
    }

    /// Offers a block that is not resident. Returns the class with which the block would enter: above 0 if
    /// the policy remembers it. `fingerprint` is any well-mixed 64-bit digest of the key.
    pub fn on_offer(&mut self, fingerprint: u64, tick: u64) -> u8 {
        match &mut self.engine {
            Learner::Lru(_) => 0,
            Learner::LeafHd(leafhd) => leafhd.on_offer(fingerprint, tick),
        }
    }

    /// Whether a new block of class `hit_class` is worth the place of `victim`.
    pub fn admit(&self, hit_class: u8, victim: &Leaf, tick: u64) -> bool {
        match &self.engine {
            Learner::Lru(_) => true,
            Learner::LeafHd(leafhd) => leafhd.admit(hit_class, victim, tick),
        }
    }

    /// Notes that a block became resident: stored at `last`, promoted from a lower tier, or found on disk at
    /// start with the `last` and class of its record.
    pub fn on_insert(&mut self, fingerprint: u64, hit_class: u8, last: u64) {
        if let Learner::LeafHd(leafhd) = &mut self.engine {
            leafhd.on_insert(fingerprint, hit_class, last);
        }
    }

    /// Notes that a block that was offered at `tick` and got class `hit_class` was not stored.
    pub fn on_refuse(&mut self, fingerprint: u64, hit_class: u8, tick: u64) {
        if let Learner::LeafHd(leafhd) = &mut self.engine {
            leafhd.on_refuse(fingerprint, hit_class, tick);
        }
    }

    /// A resident block was evicted for space: its worth is remembered for a while.
    pub fn on_evict(&mut self, fingerprint: u64, last: u64, hit_class: u8) {
        if let Learner::LeafHd(leafhd) = &mut self.engine {
            leafhd.on_evict(fingerprint, last, hit_class);
        }
    }

    /// A resident block was lost otherwise (bad checksum, failed read, dropped namespace): it is
    /// forgotten.
    pub fn on_drop(&mut self, last: u64, hit_class: u8) {
        if let Learner::LeafHd(leafhd) = &mut self.engine {
            leafhd.on_drop(last, hit_class);
        }
    }

    /// Ends the request of `tick`; relearns now and then. The work is bounded for every
    /// capacity.
    pub fn end_of_request(&mut self, tick: u64) {
        if let Learner::LeafHd(leafhd) = &mut self.engine {
            leafhd.end_of_request(tick);
        }
    }
}
