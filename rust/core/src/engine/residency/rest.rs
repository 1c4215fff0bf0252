//! The nodes below a payload that arrives late are marked as visible in steps: some at once, the others in later
//! entries.
//!
//! Other requests may save any number of blocks below a block whose copy is still under way. Until their nodes are
//! marked, lookups do not find them: a miss is never wrong.

use crate::forest::{NONE, NodeId};

use super::state::Residency;

/// The nodes that have not been marked yet.
#[derive(Debug)]
pub(super) struct Rest {
    /// Number of nodes that the present entry may still mark.
    left: usize,
    /// Nodes that may become visible, each with the siblings behind it. When a node leaves the index, its next sibling
    /// takes its place.
    hidden: Vec<NodeId>,
}

impl Rest {
    /// No nodes, and no limit until [`Residency::allow_rest`].
    pub(super) fn new() -> Self {
        Self {
            left: usize::MAX,
            hidden: Vec::new(),
        }
    }

    /// Whether the entry may mark one node more, which counts from now on.
    pub(super) fn take(&mut self) -> bool {
        let may = self.left > 0;
        self.left -= usize::from(may);
        may
    }

    /// The first node of each series of siblings.
    #[cfg(feature = "check")]
    pub(super) fn hidden(&self) -> impl Iterator<Item = NodeId> {
        self.hidden.iter().copied()
    }
}

impl Residency {
    /// Allows the entry of the engine that begins now to mark this many nodes.
    pub(in crate::engine) fn allow_rest(&mut self, nodes: usize) {
        self.rest.left = nodes;
    }

    /// Whether nodes are left to be marked.
    pub(in crate::engine) fn has_rest(&self) -> bool {
        !self.rest.hidden.is_empty()
    }

    /// Marks more nodes. Appends the nodes that became visible.
    pub(in crate::engine) fn continue_rest(&mut self, became_visible: &mut Vec<NodeId>) {
        let hidden = std::mem::take(&mut self.rest.hidden);
        self.show(hidden, became_visible);
    }

    /// Leaves nodes, and the siblings behind each, to later entries.
    pub(super) fn show_later(&mut self, siblings: Vec<NodeId>) {
        self.rest.hidden.extend(siblings);
    }

    /// Replaces a node that leaves its parent's list of children by its next sibling.
    pub(super) fn pass_over(&mut self, id: NodeId) {
        let next = self.forest.next_sibling(id);
        self.rest.hidden.retain_mut(|first| {
            if *first == id {
                *first = next;
            }
            *first != NONE
        });
    }
}
