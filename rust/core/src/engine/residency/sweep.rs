//! A pass over all nodes that removes nodes without a recent use, from the leaves up, in steps.

use crate::disk::Disk;
use crate::forest::{NONE, NodeId, NsId, Tier};
use crate::work;

use super::geometry::Leaving;
use super::state::Residency;

/// Payloads that an order has taken out of the index, by tier, and their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::engine) struct ClearTotals {
    /// Number of the order.
    pub(in crate::engine) order: u64,
    pub(in crate::engine) blocks: [u64; 2],
    pub(in crate::engine) bytes: [u64; 2],
}

/// The progress of a pass.
#[derive(Clone, Debug)]
pub(in crate::engine) struct Sweep {
    /// Number of the order.
    pub(in crate::engine) order: u64,
    /// Nodes whose last use was at this tick or before are removed.
    pub(in crate::engine) until: u64,
    pub(in crate::engine) erases: bool,
    next: NodeId,
    /// Nodes that are in use although they are old enough to be cleared.
    pub(in crate::engine) in_use: u64,
    /// Nodes that this pass has removed.
    pub(in crate::engine) removed: u64,
}

impl Sweep {
    pub(in crate::engine) fn new(order: u64, until: u64, erases: bool) -> Self {
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
    pub(in crate::engine) fn again(&mut self) {
        (self.next, self.in_use, self.removed) = (0, 0, 0);
    }
}

impl Residency {
    /// Continues a pass for about `steps` nodes; one pass at a time is under way. Returns whether the pass is over.
    pub(in crate::engine) fn step_sweep(&mut self, sweep: &mut Sweep, steps: usize) -> bool {
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
    pub(in crate::engine) fn end_pass(&mut self) {
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
    pub(in crate::engine) fn order_records(&mut self) {
        self.disks.iter_mut().for_each(Disk::order_records);
    }

    /// Notes that a namespace is about to end because of an order.
    pub(in crate::engine) fn set_leaving(&mut self, ns: NsId, leaving: Option<Leaving>) {
        self.geometry[usize::from(ns)].leaving = leaving;
    }

    /// Number of nodes, in the index or in use, that are left of a namespace that ended because of an order.
    pub(in crate::engine) fn left_of(&self, ns: NsId, order: u64) -> u64 {
        let leaving = self.geometry[usize::from(ns)].leaving;
        match leaving.filter(|of| of.order == order) {
            Some(_) => u64::from(self.forest.count(ns)),
            None => 0,
        }
    }
}
