//! Removal of many nodes, in steps: an entry of the engine does a bounded part of it.
//!
//! From the first step on, no lookup finds a node that is being removed: no session uses a namespace that ends,
//! and the root of a subtree leaves the index at once, so that [`Residency::deepest`] stops above the root.

use std::collections::VecDeque;

use crate::forest::{DeviceIndex, DiskState, NONE, NodeId, NsId, Tier};
use crate::key::HashSource;
use crate::slots::slot_offset;
use crate::work;

use super::geometry::Region;
use super::slots::Loss;
use super::state::Residency;

/// The removals under way.
///
/// Invariants: the root of a subtree is detached, and has children; all nodes of the subtree are below it.
#[derive(Debug, Default)]
pub(super) struct Removals {
    /// Namespaces that have ended.
    namespaces: VecDeque<NsId>,
    /// Roots of subtrees, with their epochs.
    subtrees: VecDeque<(NodeId, u32)>,
    /// Nodes to be reconciled, with their epochs, because nodes below were removed.
    bare: VecDeque<(NodeId, u32)>,
    /// Directories that were given up, and the first node that was not looked at yet.
    devices: VecDeque<(DeviceIndex, NodeId)>,
    /// A node on the way to the next leaf to remove, and its epoch.
    cursor: Option<(NodeId, u32)>,
}

impl Removals {
    fn is_empty(&self) -> bool {
        self.namespaces.is_empty()
            && self.subtrees.is_empty()
            && self.bare.is_empty()
            && self.devices.is_empty()
    }

    /// Whether a node is to be reconciled.
    #[cfg(feature = "check")]
    pub(super) fn is_bare(&self, id: NodeId) -> bool {
        self.bare.iter().any(|&(bare, _)| bare == id)
    }
}

impl Residency {
    /// Whether a namespace has ended, and its nodes wait for their removal.
    pub(in crate::engine) fn is_ending(&self, ns: NsId) -> bool {
        self.removals.namespaces.contains(&ns)
    }

    /// Whether anything is left to be removed.
    pub(in crate::engine) fn has_removals(&self) -> bool {
        !self.removals.is_empty() && !self.has_many_erasures()
    }

    /// Continues the removals for about `steps` nodes. Returns whether there was a node to remove.
    pub(in crate::engine) fn continue_removals(&mut self, steps: usize) -> bool {
        let was_any = self.has_removals();
        for _ in 0..steps {
            if self.has_many_erasures() || !self.remove_one() {
                break;
            }
        }
        was_any
    }

    /// Carries out all pending removals at once.
    pub(in crate::engine) fn finish_removals(&mut self) {
        while self.remove_one() {}
    }

    /// A step of a removal. False if there is nothing to remove.
    fn remove_one(&mut self) -> bool {
        // Each lost payload of a directory may begin the removal of a subtree, or leave a bare chain. These are
        // finished first, so few are open at once.
        if let Some((id, epoch)) = self.removals.bare.pop_front() {
            let is_live = self.forest.is_live(id, epoch);
            if let Some(above) = is_live.then(|| self.reconcile_one(id)).flatten() {
                self.reconcile_later(above);
            }
        } else if let Some(&(root, epoch)) = self.removals.subtrees.front() {
            if self.forest.is_live(root, epoch)
                && self.remove_leaf_below(self.forest.first_child(root), root)
            {
                return true;
            }
            self.removals.subtrees.pop_front();
            self.removals.cursor = None;
            if self.forest.is_live(root, epoch) {
                self.reconcile(root);
            }
        } else if let Some(&ns) = self.removals.namespaces.front() {
            if !self.remove_leaf_below(self.forest.first_root(ns), NONE) {
                self.removals.namespaces.pop_front();
                self.removals.cursor = None;
            }
        } else if let Some((device, first)) = self.removals.devices.pop_front() {
            work::node();
            if (first as usize) < self.forest.ids_given() {
                self.removals.devices.push_front((device, first + 1));
                self.lose_on(device, first);
            }
        }
        !self.removals.is_empty()
    }

    /// Goes one node down from the cursor, or from `first`, or removes the node if it is a leaf. False if
    /// there is none: `first` is `NONE`.
    fn remove_leaf_below(&mut self, first: NodeId, root: NodeId) -> bool {
        let cursor = self.removals.cursor.take();
        let is_here = |&(id, epoch): &(NodeId, u32)| {
            self.forest.is_live(id, epoch) && !self.node(id).is_detached()
        };
        let at = cursor.filter(is_here).map_or(first, |(id, _)| id);
        if at == NONE {
            return false;
        }
        work::node();
        let child = self.forest.first_child(at);
        if child != NONE {
            self.removals.cursor = Some((child, self.node(child).epoch));
            return true;
        }
        let above = self.node(at).parent();
        if above != NONE && above != root {
            self.removals.cursor = Some((above, self.node(above).epoch));
        }
        if let Some(leaving) = self.geometry[usize::from(self.node(at).ns)].leaving {
            self.count_cleared(at, leaving.order);
        }
        self.detach(at);
        match self.free_detached(at) {
            // The removal reaches this parent later.
            Some(parent) if !self.node(parent).is_detached() => self.refresh(parent),
            // A detached parent may have waited for its last child.
            Some(parent) => self.reconcile(parent),
            None => {}
        }
        true
    }

    /// Reconciles a node in a later entry if nothing keeps it in the index. Else refreshes the policies at once.
    pub(super) fn reconcile_later(&mut self, id: NodeId) {
        if !self.node(id).is_detached() {
            self.refresh(id);
            if !self.is_to_go(id) {
                return;
            }
        }
        let epoch = self.node(id).epoch;
        self.removals.bare.push_front((id, epoch));
    }

    /// Takes a node out of the index: no lookup finds it any more, and no policy knows it.
    fn detach(&mut self, id: NodeId) {
        self.withdraw(id);
        self.note_detached(id);
        self.pass_over(id);
        let node = self.node(id);
        if !node.has_no_slots() {
            // An earlier note of an eviction stays: `explain` names the eviction later.
            let (ns, hash) = (node.ns, node.hash);
            self.note_departure((ns, hash), Tier::Host, false);
        }
        self.forest.unindex(id);
        self.note_bared(id);
        for group in self.node(id).groups() {
            let (device, payload) = (self.node(id).device, self.node(id).payload(group));
            match payload.disk {
                DiskState::Queued => self.unqueue_write(id, group),
                // Its record stays on disk, although the slot may stay in use.
                DiskState::Present => {
                    let class = self.class(id, Region::Disk(device), group);
                    self.disk_mut(device)
                        .slot_is_stale(class, slot_offset(payload.disk_slot));
                }
                DiskState::Empty | DiskState::Writing => {}
            }
        }
    }

    /// Removes all nodes of a namespace that no lookup finds any more. The namespace's index is free when the last
    /// node is removed.
    pub(in crate::engine) fn remove_namespace(&mut self, ns: NsId) {
        if self.forest.first_root(ns) != NONE {
            self.removals.namespaces.push_back(ns);
        }
    }

    /// Forgets the removal of a namespace that has no nodes any more: another namespace may take its index.
    pub(super) fn forget_removal(&mut self, ns: NsId) {
        self.removals.namespaces.retain(|&other| other != ns);
    }

    /// Removes a node and all nodes below from the index. Nodes in use become detached, and are freed when their last
    /// use ends.
    pub(in crate::engine) fn remove_subtree(&mut self, id: NodeId) {
        if let Some(parent) = self.unlink_subtree(id) {
            self.reconcile(parent);
        }
    }

    /// Like [`Residency::remove_subtree`]; returns the parent if the parent has to be reconciled.
    pub(super) fn unlink_subtree(&mut self, id: NodeId) -> Option<NodeId> {
        self.detach(id);
        if self.forest.first_child(id) != NONE {
            let epoch = self.node(id).epoch;
            self.removals.subtrees.push_back((id, epoch));
            return None;
        }
        self.free_detached(id)
    }

    /// The deepest node of the chain for which `accept` holds, and its depth, see
    /// [`Forest::deepest`](crate::forest::Forest::deepest).
    pub(in crate::engine) fn deepest<H: HashSource + ?Sized>(
        &self,
        ns: NsId,
        hashes: &H,
        accept: impl Fn(&crate::forest::Node) -> bool,
    ) -> Option<(NodeId, u32)> {
        let (deepest, depth) = self.forest.deepest(ns, hashes, accept)?;
        if self.removals.subtrees.is_empty() {
            return Some((deepest, depth));
        }
        let ancestors = self.forest.ancestors(deepest);
        let removed = ancestors.filter(|&id| self.node(id).is_detached());
        let Some(first) = removed.last() else {
            return Some((deepest, depth));
        };
        let above = self.parent(first)?;
        Some((above, self.node(above).depth))
    }

    /// Whether a node or one of its ancestors has left the index.
    pub(in crate::engine) fn has_left_index(&self, id: NodeId) -> bool {
        let is_below = || {
            let mut ancestors = self.forest.ancestors(id);
            ancestors.any(|id| self.node(id).is_detached())
        };
        self.node(id).is_detached() || !self.removals.subtrees.is_empty() && is_below()
    }

    /// Gives a directory up: payloads that only this directory holds are lost. No read of the directory begins any
    /// more.
    pub(in crate::engine) fn give_up_disk(&mut self, device: DeviceIndex) {
        self.removals.devices.retain(|&(other, _)| other != device);
        self.removals.devices.push_back((device, 0));
    }

    /// Whether a directory is being given up. All of its payloads are lost, even if their nodes are not removed yet.
    pub(in crate::engine) fn is_being_given_up(&self, device: DeviceIndex) -> bool {
        let mut devices = self.removals.devices.iter();
        devices.any(|&(other, _)| other == device)
    }

    /// Drops a node's payloads on a directory that is given up.
    fn lose_on(&mut self, device: DeviceIndex, id: NodeId) {
        if !self.forest.is_used(id) || self.node(id).device != device {
            return;
        }
        let mut dropped = false;
        for group in self.node(id).groups() {
            let is_there = self.node(id).payload(group).disk == DiskState::Present;
            if is_there && !self.is_erased(id, group) {
                self.free_disk(id, group, Loss::Dropped);
                dropped = true;
            }
        }
        if dropped {
            self.reconcile(id);
        }
    }
}
