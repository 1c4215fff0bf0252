//! The loss that the eviction of a run of pages would cause, added up step by step.

use std::collections::VecDeque;

use rustc_hash::FxHashSet;

use crate::forest::{DiskState, HostState, NodeId, Tier};
use crate::slots::{Class, Owner, Run};
use crate::work;

use super::geometry::Region;
use super::state::Residency;

/// Limit of the nodes below one evicted payload: one entry puts all of them out of reach.
const BELOW_MAX: u32 = 512;

/// The loss that the eviction of a run would cause, as far as its payloads were looked at.
///
/// Invariant: unless `is_used`, neither the payloads that were looked at nor the payloads below are in use.
#[derive(Debug)]
pub(super) struct RunLoss {
    pub(super) run: Run,
    /// Bytes of the run.
    pub(super) bytes: f64,
    /// Sum of the lost bytes, each divided by the ticks since its last use.
    pub(super) loss: f64,
    /// The run stays if its loss exceeds this.
    pub(super) most: f64,
    /// Nodes that may still be looked at.
    visits: u32,
    /// The first unit whose page was not looked at.
    unit: u32,
    /// Payloads of the page being looked at.
    left: VecDeque<(Owner, u32)>,
    /// All payloads that were looked at, with the epochs of their nodes.
    pub(super) payloads: Vec<(Owner, u32)>,
    /// Nodes that were looked at.
    seen: FxHashSet<NodeId>,
    /// The nodes among `seen` whose payloads are counted as lost.
    unreachable: FxHashSet<NodeId>,
    /// A node of `seen` was used since, or another payload has come to the run.
    pub(super) is_used: bool,
}

impl RunLoss {
    pub(super) fn new(run: Run, bytes: f64, most: f64, visits: u32) -> Self {
        Self {
            run,
            bytes,
            loss: 0.0,
            most,
            visits,
            unit: run.first_unit(),
            left: VecDeque::new(),
            payloads: Vec::new(),
            seen: FxHashSet::default(),
            unreachable: FxHashSet::default(),
            is_used: false,
        }
    }

    pub(super) fn note_use(&mut self, id: NodeId) {
        self.is_used |= self.seen.contains(&id);
    }
}

impl Residency {
    /// Worth of a byte that was last used at the tick `last`.
    pub(super) fn worth(&self, last: u64) -> f64 {
        1.0 / (1 + self.tick.saturating_sub(last)) as f64
    }

    /// Adds the loss of the next payload of a run. Returns the work done, in nodes, and, once it is known, whether the
    /// run may be evicted.
    pub(super) fn add_up(
        &self,
        region: Region,
        class: Class,
        losses: &mut RunLoss,
    ) -> (u32, Option<bool>) {
        if losses.is_used || losses.loss >= losses.most {
            return (0, Some(false));
        }
        let Some((owner, epoch)) = losses.left.pop_front() else {
            let page = self.slots(region).owners_from(losses.run, losses.unit);
            let Some((of, owners, unit)) = page else {
                return (1, Some(true));
            };
            let count = owners.len() as u32;
            let owners = owners.into_iter();
            losses.left = owners
                .map(|owner| (owner, self.node(owner.node).epoch))
                .collect();
            losses.unit = unit;
            return (1 + count, (of == class).then_some(false));
        };
        // The payload may have left since the page was read. A payload that took its place is noted by itself.
        if !self.forest.is_live(owner.node, epoch)
            || !self
                .node(owner.node)
                .payload(owner.group)
                .has_slot(region.tier())
        {
            return (1, None);
        }
        let before = losses.visits;
        let may_go = self.add_payload(region, owner, losses);
        losses.payloads.push((owner, epoch));
        (before - losses.visits, (!may_go).then_some(false))
    }

    /// Adds one payload, and the payloads that no lookup reaches without it. False if the payload must stay.
    fn add_payload(&self, region: Region, owner: Owner, losses: &mut RunLoss) -> bool {
        let (tier, id) = (region.tier(), owner.node);
        let node = self.node(id);
        let payload = node.payload(owner.group);
        let Some(visits) = losses.visits.checked_sub(1) else {
            return false;
        };
        losses.visits = visits;
        losses.seen.insert(id);
        if self.is_used(id) || node.uses().holds > 0 || !payload.is_readable(tier) {
            return false;
        }
        let bytes = self
            .slots(region)
            .slot_bytes(self.class(id, region, owner.group)) as f64;
        if !node.requires(owner.group) {
            losses.loss += bytes * self.worth(node.touch().last);
            return true;
        }
        let has_copy = match tier {
            Tier::Host => payload.disk == DiskState::Present,
            Tier::Disk => payload.host == HostState::Present,
        };
        // A restart would not find the payloads below, and the copy in the arena could not be evicted.
        if tier == Tier::Disk && has_copy && node.active_children(Tier::Disk) > 0 {
            return false;
        }
        let Some(last) = self.look_below(id, losses, !has_copy) else {
            return false;
        };
        if has_copy || !node.is_visible() {
            losses.loss += bytes * self.worth(last);
        }
        true
    }

    /// Looks at a node and the nodes below. Returns the tick of their latest use; `None` if a node is in use or has
    /// left the index, or if there are too many nodes. With `lost`, adds the worth of each node once.
    fn look_below(&self, id: NodeId, losses: &mut RunLoss, lost: bool) -> Option<u64> {
        let mut youngest = self.node(id).touch().last;
        let mut bytes = 0.0;
        let mut stack = vec![id];
        let bottom = losses.visits.saturating_sub(BELOW_MAX);
        while let Some(id) = stack.pop() {
            if losses.unreachable.contains(&id) {
                continue;
            }
            if losses.visits == bottom {
                return None;
            }
            losses.visits -= 1;
            work::node();
            if self.is_used(id) {
                return None;
            }
            losses.seen.insert(id);
            let node = self.node(id);
            youngest = youngest.max(node.touch().last);
            if lost {
                losses.unreachable.insert(id);
                if node.is_visible() {
                    bytes += self.held_bytes(id) as f64;
                }
            }
            let before = stack.len();
            let most = (losses.visits - bottom) as usize;
            stack.extend(self.forest.children(id).take(most));
            // A child that has left the index is not in the list. It is freed soon, or it keeps its ancestors in use.
            if stack.len() - before < node.children() as usize {
                return None;
            }
        }
        losses.loss += bytes * self.worth(youngest);
        Some(youngest)
    }

    /// Whether a lease, a copy or an IO operation needs a node, or a payload of the node is to be written.
    fn is_used(&self, id: NodeId) -> bool {
        let node = self.node(id);
        let mut payloads = node.payloads();
        node.is_detached() || !node.is_idle() || payloads.any(|payload| payload.is_in_flight())
    }

    /// Bytes of a node's payloads in all tiers.
    fn held_bytes(&self, id: NodeId) -> u64 {
        let payloads = (0u8..).zip(self.node(id).payloads());
        let held = payloads
            .filter(|(_, payload)| payload.has_slot(Tier::Host) || payload.has_slot(Tier::Disk));
        held.map(|(group, _)| self.slot_bytes(id, group)).sum()
    }
}
