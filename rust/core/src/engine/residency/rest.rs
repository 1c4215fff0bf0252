//! The nodes below a payload that arrives late are told in steps that they are visible: some at once, the others in later
//! entries.
//!
//! Other requests save blocks that stand on one whose copy goes on, any number of them. Until they are told, lookups do
//! not find them: a miss is never wrong.

use crate::forest::{NONE, NodeId};

use super::state::Residency;

/// The nodes that have not been told.
#[derive(Debug)]
pub(super) struct Rest {
    /// Nodes that the present entry may still tell.
    left: usize,
    /// Nodes that may become visible, each with the siblings behind it. A node that leaves the index gives its place to the
    /// next.
    hidden: Vec<NodeId>,
}

impl Rest {
    /// Without a limit until [`Residency::allow_rest`].
    pub(super) fn new() -> Self {
        Self {
            left: usize::MAX,
            hidden: Vec::new(),
        }
    }

    /// Whether the entry may tell one node more.
    pub(super) fn take(&mut self) -> bool {
        let may = self.left > 0;
        self.left -= usize::from(may);
        may
    }

    /// The first of each series of siblings.
    #[cfg(feature = "check")]
    pub(super) fn hidden(&self) -> impl Iterator<Item = NodeId> {
        self.hidden.iter().copied()
    }
}

impl Residency {
    /// An entry of the engine begins that may tell so many nodes.
    pub(in crate::engine) fn allow_rest(&mut self, nodes: usize) {
        self.rest.left = nodes;
    }

    /// Whether nodes are left to be told.
    pub(in crate::engine) fn has_rest(&self) -> bool {
        !self.rest.hidden.is_empty()
    }

    /// Tells more nodes. Appends those that became visible.
    pub(in crate::engine) fn continue_rest(&mut self, became_visible: &mut Vec<NodeId>) {
        let hidden = std::mem::take(&mut self.rest.hidden);
        self.show(hidden, became_visible);
    }

    /// Nodes, and the siblings behind each, may have to become visible later.
    pub(super) fn show_later(&mut self, siblings: Vec<NodeId>) {
        self.rest.hidden.extend(siblings);
    }

    /// A node leaves its parent's list of children.
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
