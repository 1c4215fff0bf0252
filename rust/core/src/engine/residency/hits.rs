//! The payloads that a hit needs, and where they lie.

use crate::forest::{DeviceIndex, HostState, NONE, NodeId, Tier};
use crate::resolve::{may_end_at, resolve_part};
use crate::session::{ArenaOffset, Extent};
use crate::slots::slot_offset;
use crate::work;

use super::state::Residency;

/// A promotion that fits a budget.
#[derive(Debug)]
pub(in crate::engine) struct PromotionPlan {
    /// Node at the boundary.
    pub(in crate::engine) target: NodeId,
    /// Depth of the target.
    pub(in crate::engine) boundary: u32,
    /// Hash blocks that the device has.
    pub(in crate::engine) local: u32,
    /// Payloads that a load needs, front to back.
    pub(in crate::engine) payloads: Vec<(NodeId, u8)>,
    /// Slot bytes of the payloads that are not in the arena.
    pub(in crate::engine) unread: u64,
    /// These slot bytes by directory.
    pub(in crate::engine) unread_by_device: Vec<(DeviceIndex, u64)>,
    /// Directory of the first payload that is not in the arena, if there is one.
    pub(in crate::engine) device: Option<DeviceIndex>,
}

impl Residency {
    /// The deepest boundary at or above `top`, a multiple of `align` hash blocks. Payloads in the arena count, and
    /// without `host_only` also payloads on directories that answer. Looks at about `nodes_max` nodes only. `Err`: the
    /// node of the boundary that is to be looked at next; no deeper boundary is possible.
    pub(in crate::engine) fn boundary_within(
        &self,
        top: NodeId,
        (local, align): (u32, u32),
        host_only: bool,
        nodes_max: u32,
    ) -> Result<u32, NodeId> {
        let depth = self.node(top).depth;
        let reach = if host_only {
            self.host_reach(top, local, |_| false)
        } else if self.disks().iter().all(|disk| disk.health.answers_reads()) {
            depth
        } else {
            self.host_reach(top, local, |device| self.answers_reads(device))
        };
        let mut chain = self.chain(top, host_only);
        let bottom = depth.saturating_sub(nodes_max);
        let spec = self.spec_of(top);
        let found = resolve_part(spec, align, reach, local, bottom, |depth, group| {
            chain.has(depth, group)
        });
        found.map_err(|boundary| self.forest.ancestor(top, boundary))
    }

    /// Whether all payloads that a hit at `end` needs beyond `local` are in the arena.
    pub(in crate::engine) fn is_hit_in_host(&self, end: NodeId, local: u32) -> bool {
        let mut at = end;
        while at != NONE {
            work::node();
            let node = self.node(at);
            // All above a node of the host chain are in the arena, too.
            if node.depth <= local || node.is_host_chain() {
                break;
            }
            if !self.is_in_host(at) {
                return false;
            }
            at = node.parent();
        }
        let mut chain = self.chain(end, true);
        may_end_at(
            self.spec_of(end),
            self.node(end).depth,
            local,
            |depth, group| chain.has(depth, group),
        )
    }

    /// Whether the windows and states that a hit at `end` needs are in the arena.
    pub(in crate::engine) fn has_windows_in_host(&self, end: NodeId) -> bool {
        let (spec, depth) = (self.spec_of(end), self.node(end).depth);
        let mut chain = self.chain(end, true);
        may_end_at(spec, depth, 0, |depth, group| chain.has(depth, group))
    }

    fn chain(&self, deepest: NodeId, host_only: bool) -> Chain<'_> {
        Chain {
            residency: self,
            deepest,
            top: self.node(deepest).depth,
            nodes: Vec::new(),
            host_only,
        }
    }

    fn answers_reads(&self, device: DeviceIndex) -> bool {
        self.disks()[device.index()].health.answers_reads()
    }

    /// The depth, from `local` towards `top`, to which every required payload is in the arena, or on a directory for
    /// which `counts` holds.
    fn host_reach(&self, top: NodeId, local: u32, counts: impl Fn(DeviceIndex) -> bool) -> u32 {
        let mut reach = self.node(top).depth;
        let mut at = top;
        while at != NONE {
            work::node();
            let node = self.node(at);
            // All above a node of the host chain are in the arena, too.
            if node.depth <= local || node.is_host_chain() {
                break;
            }
            if !counts(node.device) && !self.is_in_host(at) {
                reach = node.depth - 1;
            }
            at = node.parent();
        }
        reach
    }

    /// Plans the promotion of the payloads that a hit at `target` needs beyond `local`, or of its longest part
    /// that fits `budget` bytes and ends at a multiple of `align` hash blocks. `None` if no part fits.
    pub(in crate::engine) fn plan_promotion(
        &self,
        target: NodeId,
        (local, align): (u32, u32),
        budget: u64,
    ) -> Option<PromotionPlan> {
        let mut boundary = self.node(target).depth;
        let mut payloads = self.needed_payloads(target, local);
        let mut unread = self.missing_bytes(&payloads);
        let mut room = budget;
        while unread > budget {
            let reach = self.affordable(&payloads, room).min(boundary - 1);
            if reach <= local {
                return None;
            }
            let top = self.forest.ancestor(target, reach);
            let found = self.boundary_within(top, (local, align), false, u32::MAX);
            boundary = found.unwrap_or(local);
            if boundary <= local {
                return None;
            }
            payloads = self.needed_payloads(self.forest.ancestor(target, boundary), local);
            unread = self.missing_bytes(&payloads);
            // A window or a state at the new end may take more bytes than were left out.
            room -= room / 16;
        }
        let mut reads = payloads.iter();
        let first =
            reads.find(|&&(id, group)| !self.node(id).payload(group).is_readable(Tier::Host));
        Some(PromotionPlan {
            target: self.forest.ancestor(target, boundary),
            boundary,
            local,
            unread,
            unread_by_device: self.missing_by_device(&payloads),
            device: first.map(|&(id, _)| self.node(id).device),
            payloads,
        })
    }

    /// Payloads that a load of `(local, depth of target]` needs, front to back.
    pub(in crate::engine) fn needed_payloads(
        &self,
        target: NodeId,
        local: u32,
    ) -> Vec<(NodeId, u8)> {
        let top = self.node(target);
        let spec = self.spec(top.ns);
        let after: Vec<u32> = top
            .groups()
            .map(|group| spec.needed_after(usize::from(group), top.depth).max(local))
            .collect();
        let lowest = after.iter().copied().min();
        let lowest = lowest.expect("a namespace has at least one group");
        let mut payloads = Vec::with_capacity((top.depth - lowest.min(top.depth)) as usize);
        let mut at = target;
        while at != NONE && self.node(at).depth > lowest {
            work::node();
            let depth = self.node(at).depth;
            for (group, &after) in (0u8..).zip(&after) {
                if depth > after && spec.ends_block(usize::from(group), depth) {
                    payloads.push((at, group));
                }
            }
            at = self.node(at).parent();
        }
        payloads.reverse();
        payloads
    }

    fn missing_bytes(&self, payloads: &[(NodeId, u8)]) -> u64 {
        payloads.iter().map(|&payload| self.missing(payload)).sum()
    }

    fn missing_by_device(&self, payloads: &[(NodeId, u8)]) -> Vec<(DeviceIndex, u64)> {
        let mut bytes: Vec<(DeviceIndex, u64)> = Vec::new();
        for &payload in payloads {
            let (device, missing) = (self.node(payload.0).device, self.missing(payload));
            match bytes.iter_mut().find(|(index, _)| *index == device) {
                _ if missing == 0 => {}
                Some((_, of_device)) => *of_device += missing,
                None => bytes.push((device, missing)),
            }
        }
        bytes
    }

    /// Bytes of the arena that a payload would take in addition.
    fn missing(&self, (id, group): (NodeId, u8)) -> u64 {
        match self.node(id).payload(group).host {
            HostState::Present | HostState::Reading => 0,
            HostState::Empty | HostState::Filling => self.slot_bytes(id, group),
        }
    }

    /// The depth to which `room` bytes suffice for the missing payloads, front to back.
    fn affordable(&self, payloads: &[(NodeId, u8)], mut room: u64) -> u32 {
        for &payload in payloads {
            match room.checked_sub(self.missing(payload)) {
                Some(left) => room = left,
                None => return self.node(payload.0).depth - 1,
            }
        }
        payloads.last().map_or(0, |&(id, _)| self.node(id).depth)
    }

    /// Whether all of these payloads are readable in the arena.
    pub(in crate::engine) fn all_in_host(&self, payloads: &[(NodeId, u8)]) -> bool {
        payloads
            .iter()
            .all(|&(id, group)| self.node(id).payload(group).is_readable(Tier::Host))
    }

    /// Slots of payloads in the arena, by KV cache group and block index.
    pub(in crate::engine) fn extents(&self, payloads: &[(NodeId, u8)]) -> Vec<Extent> {
        let mut extents: Vec<Extent> = Vec::new();
        let Some(&(first, _)) = payloads.first() else {
            return extents;
        };
        // All payloads of one transfer are of one namespace: one division for each group.
        let spec = self.spec_of(first);
        let hash_blocks: Vec<u32> = (0..spec.groups.len())
            .map(|group| spec.hash_blocks(group))
            .collect();
        for &(id, group) in payloads {
            work::queued();
            let node = self.node(id);
            let payload = node.payload(group);
            assert_ne!(
                payload.host,
                HostState::Empty,
                "node {id} group {group} has no slot in the arena"
            );
            let block = node.depth / hash_blocks[usize::from(group)] - 1;
            let offset = ArenaOffset::new(slot_offset(payload.host_slot));
            match extents.iter_mut().find(|extent| extent.group == group) {
                None => extents.push(Extent {
                    group,
                    first_block: block,
                    offsets: vec![offset],
                }),
                Some(extent) => {
                    // Blocks in between are not copied.
                    let index = (block - extent.first_block) as usize;
                    assert!(
                        index >= extent.offsets.len(),
                        "the payloads of group {group} come front to back"
                    );
                    extent.offsets.resize(index, ArenaOffset::NONE);
                    extent.offsets.push(offset);
                }
            }
        }
        extents
    }
}

/// Reads a chain from its deepest node upwards, and remembers the nodes that it has passed.
struct Chain<'a> {
    residency: &'a Residency,
    deepest: NodeId,
    /// Depth of the deepest node.
    top: u32,
    /// The nodes that were passed. Empty, and not allocated, until a payload is asked for: full attention needs none.
    nodes: Vec<NodeId>,
    host_only: bool,
}

impl Chain<'_> {
    fn has(&mut self, depth: u32, group: usize) -> bool {
        if self.nodes.is_empty() {
            self.nodes.push(self.deepest);
        }
        let index = (self.top - depth) as usize;
        while let Some(&last) = self.nodes.last().filter(|_| self.nodes.len() <= index) {
            work::node();
            self.nodes.push(self.residency.node(last).parent());
        }
        let node = self.residency.node(self.nodes[index]);
        let payload =
            node.payload(u8::try_from(group).expect("a namespace has at most GROUPS_MAX groups"));
        payload.is_readable(Tier::Host)
            || !self.host_only
                && payload.is_readable(Tier::Disk)
                && self.residency.answers_reads(node.device)
    }
}
