//! Removal of many nodes, in steps: an entry of the engine does a bounded part of it.
//!
//! From the first step on, no lookup finds a node that is being removed: no session uses a namespace that ends,
//! and the root of a subtree leaves the index at once, so that [`Residency::deepest`] stops above the root. A pass over
//! all nodes removes those without a recent use, from the leaves up. If bytes on disk are to be erased, their slots
//! become free only when the erasure has ended.

use undercroft_contract::explain::Reason;
use undercroft_contract::io::IoFault;
use undercroft_contract::tier::Tier;

use crate::disk::Disk;
use crate::forest::{DeviceIndex, DiskState, Evictability, NONE, NodeId, NsId};
use crate::metrics::Counters;
use crate::slots::slot_offset;
use crate::work;

use super::slots::Loss;
use super::state::{Leaving, Region, Residency};

impl Residency {
    /// Whether a namespace has ended, and its nodes wait for their removal.
    pub(crate) fn is_ending(&self, ns: NsId) -> bool {
        self.removals.namespaces.contains(&ns)
    }

    /// Whether anything is left to be removed.
    #[inline]
    pub(crate) fn has_removals(&self) -> bool {
        !self.removals.is_empty() && !self.has_many_erasures()
    }

    /// Whether blocks that are still in the index may have been removed already, as far as users know.
    pub(crate) fn awaits_removals(&self) -> bool {
        !self.removals.is_empty()
    }

    /// Continues the removals for about `steps` nodes. Returns whether there was a node to remove.
    pub(crate) fn continue_removals(&mut self, steps: usize) -> bool {
        let was_any = self.has_removals();
        for _ in 0..steps {
            if self.has_many_erasures() || !self.remove_one() {
                break;
            }
        }
        was_any
    }

    /// Carries out all pending removals at once.
    pub(crate) fn finish_removals(&mut self) {
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
            self.note_departure(ns, hash, Reason::Lost);
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
    pub(crate) fn remove_namespace(&mut self, ns: NsId) {
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
    pub(crate) fn remove_subtree(&mut self, id: NodeId) {
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

    /// Gives a directory up: payloads that only this directory holds are lost. No read of the directory begins any
    /// more.
    pub(crate) fn give_up_disk(&mut self, device: DeviceIndex) {
        self.removals.devices.retain(|&(other, _)| other != device);
        self.removals.devices.push_back((device, 0));
    }

    /// Whether a directory is being given up. All of its payloads are lost, even if their nodes are not removed yet.
    pub(crate) fn is_being_given_up(&self, device: DeviceIndex) -> bool {
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

/// The progress of a pass.
#[derive(Clone, Debug)]
pub(crate) struct Sweep {
    /// Number of the order.
    pub(crate) order: u64,
    /// Nodes whose last use was at this tick or before are removed.
    pub(crate) until: u64,
    pub(crate) erases: bool,
    next: NodeId,
    /// Nodes that are in use although they are old enough to be cleared.
    pub(crate) in_use: u64,
    /// Nodes that this pass has removed.
    pub(crate) removed: u64,
}

impl Sweep {
    pub(crate) fn new(order: u64, until: u64, erases: bool) -> Self {
        Self {
            order,
            until,
            erases,
            next: 0,
            in_use: 0,
            removed: 0,
        }
    }

    /// Begins another pass.
    pub(crate) fn again(&mut self) {
        (self.next, self.in_use, self.removed) = (0, 0, 0);
    }
}

impl Residency {
    /// Continues a pass for about `steps` nodes; one pass at a time is under way. Returns whether the pass is over.
    pub(crate) fn step_sweep(&mut self, sweep: &mut Sweep, steps: usize) -> bool {
        let mut steps = steps;
        while steps > 0 {
            if self.has_many_erasures() {
                return false;
            }
            let bared = self.bared.get_or_insert_default().pop();
            let bared = bared.filter(|&(id, epoch)| self.forest.is_live(id, epoch));
            let id = bared.map_or(sweep.next, |(id, _)| id);
            if bared.is_none() {
                if sweep.next as usize >= self.forest.ids_given() {
                    self.bared = None;
                    return true;
                }
                sweep.next += 1;
            }
            work::node();
            // The removal of a node costs more than a look at a node.
            let of_node = if self.sweep_node(id, sweep) { 2 } else { 1 };
            steps = steps.saturating_sub(of_node);
        }
        false
    }

    /// Removes a node if it is a leaf without a later use. Returns whether the node has left the index.
    fn sweep_node(&mut self, id: NodeId, sweep: &mut Sweep) -> bool {
        if !self.forest.is_used(id) || !self.is_stale_leaf(id, sweep.until) {
            return false;
        }
        if self.is_needed(id) {
            sweep.in_use += 1;
            return false;
        }
        self.count_cleared(id, sweep.order);
        sweep.removed += 1;
        if sweep.erases {
            // Detached nodes below may keep this node for a while, but need not keep its bytes.
            self.queue_erasures(id);
        }
        self.remove_subtree(id);
        true
    }

    /// Ends the pass under way.
    pub(crate) fn end_pass(&mut self) {
        self.bared = None;
    }

    /// Lets a pass look again at the parent of a node that has left the index: the parent may have become a leaf.
    pub(super) fn note_bared(&mut self, id: NodeId) {
        let Some(parent) = self.parent(id).filter(|_| self.bared.is_some()) else {
            return;
        };
        let node = self.node(parent);
        if node.is_detached() || self.forest.first_child(parent) != NONE || self.is_ending(node.ns)
        {
            return;
        }
        let bared = (parent, node.epoch);
        self.bared.get_or_insert_default().push(bared);
    }

    fn is_stale_leaf(&self, id: NodeId, until: u64) -> bool {
        let node = self.node(id);
        !node.is_detached() && node.touch().last <= until && self.forest.first_child(id) == NONE
    }

    /// Whether a lease, a copy or an IO operation needs a node.
    fn is_needed(&self, id: NodeId) -> bool {
        let node = self.node(id);
        !node.is_idle() || node.uses().holds > 0
    }

    /// Counts a node that is about to leave the index because of an order.
    pub(super) fn count_cleared(&mut self, id: NodeId, order: u64) {
        if self.cleared.order != order {
            return;
        }
        for group in self.node(id).groups() {
            let payload = self.node(id).payload(group);
            let bytes = u64::from(self.payload_bytes(id, group));
            for tier in Tier::ALL
                .into_iter()
                .filter(|&tier| payload.is_readable(tier))
            {
                self.cleared.blocks[tier as usize] += 1;
                self.cleared.bytes[tier as usize] += bytes;
            }
        }
    }

    /// Brings the tables up to date, durably: no restart finds a block that is not there now, also none that was evicted
    /// before.
    pub(crate) fn order_records(&mut self) {
        self.disks.iter_mut().for_each(Disk::order_records);
    }

    /// Notes that a namespace is about to end because of an order.
    pub(crate) fn set_leaving(&mut self, ns: NsId, leaving: Option<Leaving>) {
        self.geometry[usize::from(ns)].leaving = leaving;
    }

    /// Number of nodes, in the index or in use, that are left of a namespace that ended because of an order.
    pub(crate) fn left_of(&self, ns: NsId, order: u64) -> u64 {
        let leaving = self.geometry[usize::from(ns)].leaving;
        match leaving.filter(|of| of.order == order) {
            Some(_) => u64::from(self.forest.count(ns)),
            None => 0,
        }
    }
}

/// At this number of pending erasures of directories that answer, no further node is removed.
const QUEUED_MAX: usize = 512;

impl Residency {
    /// Erasures that have not started, of the directories that answer: the erasures of a directory that hangs wait
    /// for the directory, and nothing else waits for them.
    fn waiting_erasures(&self) -> usize {
        let queues = self.erasures.queues.iter();
        let answering = queues.filter(|&(device, _)| self.ends_erasures(*device));
        answering.map(|(_, queue)| queue.len()).sum()
    }

    /// Whether the erasures of a directory end, well or not.
    fn ends_erasures(&self, device: DeviceIndex) -> bool {
        let health = &self.disks[device.index()].health;
        health.answers() || !health.is_alive()
    }

    /// Whether an erasure can be started, now or when others have ended.
    #[inline]
    pub(crate) fn has_waiting_erasures(&self) -> bool {
        self.waiting_erasures() > 0
    }

    /// Whether no further node may be removed before some erasures have ended.
    pub(crate) fn has_many_erasures(&self) -> bool {
        self.waiting_erasures() >= QUEUED_MAX
    }

    /// Whether the bytes of a node are erased when it is freed.
    pub(crate) fn erases(&self, id: NodeId) -> bool {
        let leaving = self.geometry[usize::from(self.node(id).ns)].leaving;
        leaving.is_some_and(|of| of.erases)
    }

    /// Whether an order wants the bytes of a node erased, in this pass or when the node is freed.
    pub(crate) fn is_to_be_erased(&self, id: NodeId) -> bool {
        let last = self.node(id).touch().last;
        self.erases(id) || self.erasures.until.is_some_and(|until| last <= until)
    }

    /// Queues the payloads of a node without uses for erasure. Returns whether there are any.
    pub(super) fn queue_erasures(&mut self, id: NodeId) -> bool {
        let mut queued = false;
        for group in self.node(id).groups() {
            if self.node(id).payload(group).disk == DiskState::Present {
                work::queued();
                self.pin(id);
                let device = self.node(id).device;
                let queue = self.erasures.queues.entry(device).or_default();
                queue.push_back((id, group));
                self.erasures.pending.insert((id, group));
                queued = true;
            }
        }
        queued
    }

    /// Where a payload lies in the data file, and the bytes of its slot.
    pub(crate) fn disk_range(&self, id: NodeId, group: u8) -> (u64, u32) {
        let region = self.region(id, Tier::Disk);
        let bytes = self.slots(region).slot_bytes(self.class(id, region, group));
        let offset = slot_offset(self.node(id).payload(group).disk_slot);
        (
            offset,
            u32::try_from(bytes).expect("a slot is no larger than a page"),
        )
    }

    /// Frees the slot of a payload whose bytes have been erased, or cannot be erased.
    pub(crate) fn erasure_ended(
        &mut self,
        (id, group): (NodeId, u8),
        result: Result<u64, IoFault>,
    ) {
        self.erasures.pending.remove(&(id, group));
        match result {
            Ok(_) => {
                let (device, bytes) = (self.node(id).device, self.payload_bytes(id, group));
                let of_device = self.erasures.unsynced.entry(device).or_default();
                of_device.0 += u64::from(bytes);
            }
            Err(_) => self.erasures.failures += 1,
        }
        self.free_disk(id, group, Loss::Erased);
        self.unpin(id);
    }

    /// Whether a payload waits for its erasure, so that its slot stays in use.
    pub(super) fn is_erased(&self, id: NodeId, group: u8) -> bool {
        self.erasures.pending.contains(&(id, group))
    }
}

/// The cost of an eviction, in nodes that are looked at.
const EVICTION_STEPS: usize = 16;

/// The progress of the search over all nodes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UnusedCursor {
    /// Payloads whose last use was at this tick or before are evicted.
    last: u64,
    next: NodeId,
    /// The parent of a node that was evicted, and the parent's epoch: the parent may be a leaf now.
    above: Option<(NodeId, u32)>,
}

impl UnusedCursor {
    pub(crate) fn new(last: u64) -> Self {
        Self {
            last,
            next: 0,
            above: None,
        }
    }

    pub(crate) fn last(&self) -> u64 {
        self.last
    }
}

impl Residency {
    /// Looks at `steps` nodes more, and evicts from disk the leaves among them that have been unused for too long.
    /// Returns whether there are more nodes.
    pub(crate) fn evict_unused(
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
