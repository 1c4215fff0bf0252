//! The nodes that were taken over from a store's records: which nodes lookups find, and which are removed.

use crate::forest::{NodeId, Tier};

use crate::disk::Disk;

use super::state::Residency;

impl Residency {
    /// Finishes the takeover after the last record: the policies and the nodes above learn of each node, and nodes
    /// whose chain is complete become visible. Returns the number of payloads.
    pub(in crate::engine) fn finish_adoption(&mut self) -> u64 {
        self.disks.iter_mut().for_each(Disk::finish_claims);
        // Most records lie behind their parents' records. For them one pass is enough, in the order of memory.
        let mut before_parent = Vec::new();
        for id in 0..self.forest.ids_given() as NodeId {
            let parent = self.parent(id);
            if parent.is_some_and(|parent| parent > id) {
                before_parent.push(id);
            } else if self.may_be_visible(id, parent) {
                let reach = self.reach(id);
                self.forest.node_mut(id).set_reach(reach);
            }
            let node = self.node(id);
            if node.slots(Tier::Disk) == 0 {
                continue;
            }
            let (touch, fingerprint) = (node.touch(), node.hash.fingerprint());
            let policy = &mut self.disk_mut(node.device).policies.leaves;
            policy.on_insert(fingerprint, touch.hit_class, touch.last);
            self.count_active(parent);
        }
        self.allow_rest(usize::MAX);
        let mut visible = Vec::new();
        for id in before_parent {
            let parent = self.parent(id);
            if self.may_be_visible(id, parent) {
                self.propagate_visible(id, &mut visible);
                visible.clear();
            }
        }
        self.disk_blocks()
    }

    /// Whether a node is the first of a chain, or its parent is visible.
    fn may_be_visible(&self, id: NodeId, parent: Option<NodeId>) -> bool {
        match parent {
            Some(parent) => self.node(parent).is_visible(),
            // The parent of a deeper node is unknown.
            None => self.node(id).depth == 1,
        }
    }

    /// Counts an active node at its parent, and each ancestor that becomes active by this at the ancestor's parent.
    fn count_active(&mut self, mut parent: Option<NodeId>) {
        while let Some(id) = parent {
            let was_active = self.forest.is_active(id, Tier::Disk);
            let mut node = self.forest.node_mut(id);
            node.change_active_children(Tier::Disk, |count| *count += 1);
            if was_active == self.forest.is_active(id, Tier::Disk) {
                return;
            }
            parent = self.parent(id);
        }
    }

    /// Removes the nodes whose chain is not complete, tells the policies of the others, and renews the placeholders.
    /// Returns how many payloads were lost.
    pub(in crate::engine) fn remove_hidden(&mut self) -> u64 {
        let before = self.disk_blocks();
        let (mut hidden, mut others) = (Vec::new(), Vec::new());
        for id in 0..self.forest.ids_given() as NodeId {
            let (node, parent) = (self.node(id), self.parent(id));
            if node.is_visible() {
                if self.may_change(id, parent) {
                    others.push((id, node.epoch));
                }
            } else if parent.is_none_or(|parent| self.node(parent).is_visible()) {
                hidden.push((id, node.epoch));
            }
        }
        for (id, epoch) in hidden {
            if self.forest.is_live(id, epoch) {
                self.remove_subtree(id);
            }
        }
        self.finish_removals();
        let lost = before - self.disk_blocks();
        // Children first: a placeholder without children is removed, and its parent may then be such a placeholder.
        for (id, epoch) in others.into_iter().rev() {
            if !self.forest.is_live(id, epoch) {
                continue;
            }
            let node = self.node(id);
            if node.slots(Tier::Disk) > 0 {
                // Lost placeholders are written again.
                self.add_placeholders(id, node.device);
            }
            self.reconcile(id);
        }
        self.finish_removals();
        self.continue_placeholders(usize::MAX);
        lost
    }

    /// Whether a node that was found may be removed or evicted, or lacks a placeholder above. Few nodes do.
    fn may_change(&self, id: NodeId, parent: Option<NodeId>) -> bool {
        let node = self.node(id);
        node.groups().len() > 1
            || node.required() == 0
            || node.active_children(Tier::Disk) == 0
            || parent.is_some_and(|parent| self.node(parent).required() == 0)
    }
}
