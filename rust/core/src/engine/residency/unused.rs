//! Eviction of payloads on disk that have been unused for long, in steps, whatever the policy.

use crate::forest::{Evictability, NodeId, Tier};
use crate::metrics::Counters;
use crate::work;

use super::state::Residency;

/// The cost of an eviction, in nodes that are looked at.
const EVICTION_STEPS: usize = 16;

/// The progress of the search over all nodes.
#[derive(Clone, Copy, Debug)]
pub(in crate::engine) struct UnusedCursor {
    /// Payloads whose last use was at this tick or before are evicted.
    last: u64,
    next: NodeId,
    /// The parent of a node that was evicted, and the parent's epoch: the parent may be a leaf now.
    above: Option<(NodeId, u32)>,
}

impl UnusedCursor {
    pub(in crate::engine) fn new(last: u64) -> Self {
        Self {
            last,
            next: 0,
            above: None,
        }
    }

    pub(in crate::engine) fn last(&self) -> u64 {
        self.last
    }
}

impl Residency {
    /// Looks at `steps` nodes more, and evicts from disk the leaves among them that have been unused for too long.
    /// Returns whether there are more nodes.
    pub(in crate::engine) fn evict_unused(
        &mut self,
        cursor: &mut UnusedCursor,
        steps: usize,
        counters: &mut Counters,
    ) -> bool {
        let mut left = steps;
        while left > 0 {
            work::node();
            left -= 1;
            let above = cursor.above.take();
            let above = above.filter(|&(id, epoch)| self.forest.is_live(id, epoch));
            let id = above.map_or(cursor.next, |(id, _)| id);
            if id as usize >= self.forest.ids_given() {
                return false;
            }
            cursor.next += u32::from(above.is_none());
            if !self.is_unused_since(id, cursor.last) {
                continue;
            }
            left = left.saturating_sub(EVICTION_STEPS);
            let parent = self.parent(id);
            cursor.above = parent.map(|parent| (parent, self.node(parent).epoch));
            self.evict(id, Tier::Disk, counters);
        }
        true
    }

    /// Whether a node is a leaf on disk that may be evicted, and that no request has used since a tick.
    fn is_unused_since(&self, id: NodeId, tick: u64) -> bool {
        self.forest.is_used(id) && {
            let node = self.node(id);
            node.evictability(Tier::Disk) == Evictability::Leaf && node.touch().last <= tick
        }
    }
}
