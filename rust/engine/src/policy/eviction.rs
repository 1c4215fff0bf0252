//! The policy of one tier, of one of two kinds.

use serde::{Deserialize, Serialize};

use crate::work;

use super::leaf::{Leaf, next_class};
use super::leafhd::{CLEARLY, LeafHd};
use super::leaves::Leaves;
use super::sample::weight;

/// Which policy a tier runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum PolicyKind {
    /// The least recently used leaf is evicted; every block is admitted.
    Lru,
    /// Learned hit density: the oldest leaf is evicted unless another one has clearly fewer expected hits per tick; a block
    /// with clearly fewer expected hits is not admitted.
    #[default]
    LeafHd,
}

/// A candidate with its expected hits per tick.
#[derive(Clone, Copy)]
struct Weighed<T> {
    of: T,
    leaf: Leaf,
    density: f64,
}

/// The eviction policy of one tier. The same calls give the same victims.
#[derive(Debug)]
pub struct Policy {
    sets: Vec<Leaves>,
    /// None: least recently used.
    learned: Option<Box<LeafHd>>,
}

impl Policy {
    /// A policy for a tier that holds about `capacity_blocks` blocks.
    pub fn new(kind: PolicyKind, capacity_blocks: usize) -> Self {
        let learned = match kind {
            PolicyKind::Lru => None,
            PolicyKind::LeafHd => Some(Box::new(LeafHd::new(capacity_blocks))),
        };
        Self {
            sets: Vec::new(),
            learned,
        }
    }

    /// Whether the policy learns: it may refuse a new block, and wants to know of the hits of sampled blocks.
    pub fn learns(&self) -> bool {
        self.learned.is_some()
    }

    /// Whether the policy counts hits of blocks at this depth.
    pub fn counts(&self, depth: u32) -> bool {
        self.learned.is_some() && weight(depth) > 0
    }

    /// Makes `leaf` a candidate of a set. The node is not in the set.
    pub fn insert_leaf(&mut self, set: usize, leaf: Leaf) {
        work::candidate();
        if set >= self.sets.len() {
            self.sets.resize_with(set + 1, Leaves::default);
        }
        self.sets[set].insert(leaf);
    }

    /// Removes a leaf, as it was inserted, from the candidates of a set. Returns whether it was a candidate.
    pub fn remove_leaf(&mut self, set: usize, leaf: Leaf) -> bool {
        work::candidate();
        let leaves = self.sets.get_mut(set);
        leaves.is_some_and(|leaves| leaves.remove(leaf))
    }

    /// The leaf of a set to evict next, which stays in the set. `None` when there is none.
    ///
    /// A policy that learns weighs the oldest leaf of each hit class: within a class, density falls with age, so that
    /// younger leaves are hardly ever the worst.
    pub fn victim(&self, set: usize, tick: u64) -> Option<Leaf> {
        work::candidate();
        let leaves = self.sets.get(set)?.oldest_of_each();
        let first = self.first(leaves.map(|leaf| ((), leaf)), tick);
        first.map(|(_, leaf)| leaf)
    }

    /// The candidate to evict first: the oldest one, unless another one is clearly worse.
    pub(super) fn first<T: Copy>(
        &self,
        candidates: impl Iterator<Item = (T, Leaf)>,
        tick: u64,
    ) -> Option<(T, Leaf)> {
        let density = |leaf: &Leaf| match &self.learned {
            None => 0.0,
            Some(learned) => learned.density(leaf, tick),
        };
        let (mut oldest, mut worst): (Option<Weighed<T>>, Option<Weighed<T>>) = (None, None);
        for (of, leaf) in candidates {
            let density = density(&leaf);
            let weighed = Weighed { of, leaf, density };
            if oldest.is_none_or(|oldest| leaf.is_older(&oldest.leaf)) {
                oldest = Some(weighed);
            }
            if worst.is_none_or(|worst| density < worst.density) {
                worst = Some(weighed);
            }
        }
        let (oldest, worst) = (oldest?, worst?);
        let first = match worst.density < CLEARLY * oldest.density {
            true => worst,
            false => oldest,
        };
        Some((first.of, first.leaf))
    }

    /// Up to `count` leaves of a set that may be evicted soon. They stay in the set.
    pub fn victims(&self, set: usize, count: usize) -> Vec<Leaf> {
        let Some(leaves) = self.sets.get(set) else {
            return Vec::new();
        };
        match self.learned {
            None => leaves.oldest_of_all(count),
            Some(_) => leaves.oldest_in_turn(count),
        }
    }

    /// Number of candidates of a set.
    pub fn leaves(&self, set: usize) -> usize {
        self.sets.get(set).map_or(0, Leaves::len)
    }

    /// Notes that a resident block of hit class `hit_class`, last touched at `last`, is hit at `tick`. Returns
    /// its new class; its new `last` is `tick`. [`Policy::on_touch`] follows.
    pub fn on_hit(&mut self, depth: u32, hit_class: u8, last: u64, tick: u64) -> u8 {
        if let Some(learned) = &mut self.learned {
            learned.on_hit(depth, hit_class, last, tick);
        }
        next_class(hit_class)
    }

    /// Notes that the hit class and last touch of a resident block change.
    pub fn on_touch(&mut self, depth: u32, before: (u8, u64), after: (u8, u64)) {
        if let Some(learned) = &mut self.learned {
            learned.on_touch(depth, before, after);
        }
    }

    /// Offers a block that is not resident. Returns the class with which the block would enter: above 0 if
    /// the policy remembers it. `fingerprint` is any well-mixed 64-bit digest of the key.
    pub fn on_offer(&mut self, fingerprint: u64, tick: u64) -> u8 {
        let learned = self.learned.as_mut();
        learned.map_or(0, |learned| learned.on_offer(fingerprint, tick))
    }

    /// Whether a new block of class `hit_class` is worth the place of `victim`.
    pub fn admit(&self, hit_class: u8, victim: &Leaf, tick: u64) -> bool {
        let learned = self.learned.as_ref();
        learned.is_none_or(|learned| learned.admit(hit_class, victim, tick))
    }

    /// Notes that a block became resident: stored at `last`, promoted from a lower tier, or found on disk at
    /// start with the `last` and class of its record.
    pub fn on_insert(&mut self, fingerprint: u64, depth: u32, hit_class: u8, last: u64) {
        if let Some(learned) = &mut self.learned {
            learned.on_insert(fingerprint, depth, hit_class, last);
        }
    }

    /// Notes that a block that was offered at `tick` and got class `hit_class` was not stored.
    pub fn on_refuse(&mut self, fingerprint: u64, depth: u32, hit_class: u8, tick: u64) {
        if let Some(learned) = &mut self.learned {
            learned.on_refuse(fingerprint, depth, hit_class, tick);
        }
    }

    /// A resident block was evicted for space: its worth is remembered for a while.
    pub fn on_evict(&mut self, fingerprint: u64, depth: u32, hit_class: u8, last: u64) {
        if let Some(learned) = &mut self.learned {
            learned.on_evict(fingerprint, depth, hit_class, last);
        }
    }

    /// A resident block was lost otherwise (bad checksum, failed read, dropped namespace): it is
    /// forgotten.
    pub fn on_drop(&mut self, depth: u32, hit_class: u8, last: u64) {
        if let Some(learned) = &mut self.learned {
            learned.on_drop(weight(depth), hit_class, last);
        }
    }

    /// Ends the request of `tick`; relearns now and then. Returns whether it did. The work is bounded for every
    /// capacity.
    pub fn end_of_request(&mut self, tick: u64) -> bool {
        let learned = self.learned.as_mut();
        learned.is_some_and(|learned| learned.end_of_request(tick))
    }
}
