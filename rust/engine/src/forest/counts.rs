//! Counts of a node that are above 1, or of uses: few nodes have any.

use super::node::{FEW_ACTIVE, FEW_CHILDREN, NONE, Node, Uses};
use super::slab::{Linked, Slab};

/// The counts of references to a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    /// The node's uses.
    pub(super) uses: Uses,
    /// The node's children, detached children included. In a free place: the next free place.
    pub(super) children: u32,
    /// Children that are active, by tier (see [`super::Forest::is_active`]).
    pub(super) active: [u32; 2],
}

impl Linked for Counts {
    fn link(&mut self) -> &mut u32 {
        &mut self.children
    }
}

impl Counts {
    /// The counts of a node.
    #[inline]
    pub(super) fn of(node: &Node, counts: &Slab<Self>) -> Self {
        match node.counts {
            NONE => Self {
                uses: Uses::default(),
                children: node.get(FEW_CHILDREN),
                active: FEW_ACTIVE.map(|bits| node.get(bits)),
            },
            at => *counts.get(at),
        }
    }

    /// Stores the counts in a node.
    pub(super) fn store(self, node: &mut Node, counts: &mut Slab<Self>) {
        let fits = self.uses == Uses::default()
            && self.children <= 1
            && self.active.iter().all(|&active| active <= 1);
        if !fits {
            match node.counts {
                NONE => node.counts = counts.insert(self),
                at => *counts.get_mut(at) = self,
            }
            return;
        }
        if node.counts != NONE {
            counts.remove(std::mem::replace(&mut node.counts, NONE));
        }
        node.put(FEW_CHILDREN, self.children);
        for (bits, active) in FEW_ACTIVE.into_iter().zip(self.active) {
            node.put(bits, active);
        }
    }
}
