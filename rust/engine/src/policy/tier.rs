//! The two sets of candidates of a tier, and their order.

use crate::slots::Class;

use super::{Leaf, Policy, PolicyKind};

/// The candidates of a tier: leaves, which lose all payloads, and other nodes, which lose only optional payloads.
#[derive(Debug)]
pub(crate) struct TierPolicies {
    /// Leaves, by the configured policy.
    pub(crate) leaves: Policy,
    /// Nodes with optional payloads that are no leaves. Always least recently used.
    pub(crate) optional: Policy,
}

impl TierPolicies {
    pub(crate) fn new(leaves: Policy) -> Self {
        Self {
            leaves,
            optional: Policy::new(PolicyKind::Lru, 0, 0),
        }
    }

    /// The candidate of size class `class` to evict next: the policy's leaf, or the oldest node with
    /// optional payloads if no leaf was touched before it.
    pub(crate) fn victim(&mut self, class: Class, tick: u64) -> Option<Leaf> {
        let leaf = self.leaves.victim(class, tick);
        let optional = self.optional.victim(class, tick);
        match (leaf, optional) {
            (Some(leaf), Some(optional)) if leaf.last < optional.last => Some(leaf),
            (leaf, optional) => optional.or(leaf),
        }
    }

    /// From each set, up to `count` candidates of size class `class` that may be evicted soon.
    pub(crate) fn victims(&mut self, class: Class, count: usize) -> Vec<Leaf> {
        let mut victims = self.leaves.victims(class, count);
        victims.extend(self.optional.victims(class, count));
        victims
    }

    /// Whether the policy keeps every leaf of `class` rather than store a new block.
    pub(crate) fn refuses(&mut self, class: Class, hit_class: u8, tick: u64) -> bool {
        self.optional.victim(class, tick).is_none()
            && self.leaves.touches_every_block()
            && self
                .leaves
                .victim(class, tick)
                .is_some_and(|victim| !self.leaves.admit(hit_class, &victim, tick))
    }
}
