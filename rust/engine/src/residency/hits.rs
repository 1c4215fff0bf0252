//! The payloads that a hit or a pin needs, where they lie, and the leases that keep them there. Touches tell the policies
//! which payloads were used.

use undercroft_contract::key::HashSource;
use undercroft_contract::namespace::GroupKind;
use undercroft_contract::session::{ArenaOffset, Extent};
use undercroft_contract::tier::Tier;

use crate::forest::{DeviceIndex, DiskState, HostState, NONE, NodeId, NsId, Touch};
use crate::metrics::Counters;
use crate::policy::{HIT_CLASSES, sampled_depths};
use crate::resolve::{may_end_at, resolve_part};
use crate::slots::slot_offset;
use crate::work;

use super::state::Residency;

/// A promotion that fits a budget.
#[derive(Debug)]
pub(crate) struct PromotionPlan {
    /// Node at the boundary.
    pub(crate) target: NodeId,
    /// Depth of the target.
    pub(crate) boundary: u32,
    /// Hash blocks that the device has.
    pub(crate) local: u32,
    /// Payloads that a load needs, front to back.
    pub(crate) payloads: Vec<(NodeId, u8)>,
    /// Slot bytes of the payloads that are not in the arena.
    pub(crate) unread: u64,
    /// These slot bytes by directory.
    pub(crate) unread_by_device: Vec<(DeviceIndex, u64)>,
    /// Directory of the first payload that is not in the arena, if there is one.
    pub(crate) device: Option<DeviceIndex>,
}

impl Residency {
    /// The deepest boundary at or above `top`, a multiple of `align` hash blocks. Payloads in the arena count, and
    /// without `host_only` also payloads on directories that answer. Looks at about `nodes_max` nodes only. `Err`: the
    /// node of the boundary that is to be looked at next; no deeper boundary is possible.
    pub(crate) fn boundary_within(
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
    pub(crate) fn is_hit_in_host(&self, end: NodeId, local: u32) -> bool {
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
    pub(crate) fn has_windows_in_host(&self, end: NodeId) -> bool {
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
    pub(crate) fn plan_promotion(
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
    pub(crate) fn needed_payloads(&self, target: NodeId, local: u32) -> Vec<(NodeId, u8)> {
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
    pub(crate) fn all_in_host(&self, payloads: &[(NodeId, u8)]) -> bool {
        payloads
            .iter()
            .all(|&(id, group)| self.node(id).payload(group).is_readable(Tier::Host))
    }

    /// Slots of payloads in the arena, by KV cache group and block index.
    pub(crate) fn extents(&self, payloads: &[(NodeId, u8)]) -> Vec<Extent> {
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

impl Residency {
    /// Adds a lease to a node.
    pub(crate) fn pin(&mut self, id: NodeId) {
        self.withdraw(id);
        self.forest.node_mut(id).change_uses(|uses| uses.pins += 1);
    }

    /// Ends a lease.
    pub(crate) fn unpin(&mut self, id: NodeId) {
        self.forest.node_mut(id).change_uses(|uses| {
            let pins = uses.pins.checked_sub(1);
            uses.pins = pins.unwrap_or_else(|| panic!("a lease of node {id} ends twice"));
        });
        self.reconcile(id);
    }

    /// Leases a node, and the nodes above whose windows or chunks a hit at the node needs.
    pub(crate) fn pin_hit(&mut self, id: NodeId) {
        self.pin(id);
        for above in self.window_above(id) {
            self.withdraw(above);
            let mut node = self.forest.node_mut(above);
            node.change_uses(|uses| uses.holds += 1);
        }
    }

    /// Ends a lease of [`Residency::pin_hit`].
    pub(crate) fn unpin_hit(&mut self, id: NodeId) {
        for above in self.window_above(id) {
            let mut node = self.forest.node_mut(above);
            node.change_uses(|uses| {
                let holds = uses.holds.checked_sub(1);
                uses.holds = holds.unwrap_or_else(|| panic!("a hold of node {above} ends twice"));
            });
            if !node.is_detached() {
                self.refresh(above);
            }
        }
        self.unpin(id);
    }

    /// The nodes above `id` with payloads of windows or chunks that a hit at `id` needs.
    pub(crate) fn window_above(&self, id: NodeId) -> Vec<NodeId> {
        let top = self.node(id);
        let spec = self.spec(top.ns);
        let kinds = spec.groups.iter().enumerate();
        let windows = kinds.filter(|(_, of)| {
            matches!(
                of.kind,
                GroupKind::SlidingWindow { .. } | GroupKind::ChunkedLocal { .. }
            )
        });
        let lowest = windows
            .map(|(group, _)| spec.needed_after(group, top.depth))
            .min();
        let Some(lowest) = lowest else {
            return Vec::new();
        };
        let above = self.forest.ancestors(id);
        above
            .take_while(|&at| self.node(at).depth > lowest)
            .collect()
    }

    /// Notes a touch of a hit that ends at `id`, at the current tick.
    pub(crate) fn touch_hit(&mut self, id: NodeId) {
        self.touch(id);
        for above in self.window_above(id) {
            if (self.host_policies.leaves).counts(self.node(above).depth) {
                self.touch(above);
            } else {
                self.renew(above);
            }
        }
    }

    /// Notes the hits of the blocks of a chain, down to `depth`, that the policies count, at the current tick. Blocks that
    /// were last touched at `tick` were counted with the end of the hit.
    pub(crate) fn count_hit(&mut self, ns: NsId, hashes: &dyn HashSource, depth: u32, tick: u64) {
        if !self.host_policies.leaves.learns() {
            return;
        }
        for depth in sampled_depths(depth) {
            let hash = hashes.get(depth as usize - 1);
            let found = hash.and_then(|hash| self.forest.find(ns, &hash));
            let Some(id) = found else {
                return;
            };
            // If the hashes are no chain, only a node whose depth is its hash's position counts.
            if self.node(id).depth == depth && self.node(id).touch().last != tick {
                self.touch(id);
            }
        }
    }

    /// Sets a node's last use to the current tick, without counting a hit.
    pub(crate) fn renew(&mut self, id: NodeId) {
        let before = self.node(id).touch();
        if before.last != self.tick {
            let last = self.tick;
            self.set_touch(id, Touch { last, ..before });
            self.note_touch(id);
        }
    }

    /// A hit that ends at a node is expected soon: it counts as one that has been hit often. As a leaf of its own hit class it
    /// might be the first to go, although it was used last, and the blocks above it would follow at once.
    pub(crate) fn expect_hit(&mut self, id: NodeId) {
        let expected = Touch {
            last: self.tick,
            hit_class: HIT_CLASSES - 1,
        };
        if self.node(id).touch() != expected {
            self.set_touch(id, expected);
            self.note_touch(id);
        }
    }

    /// Changes a node's last touch and hit class.
    pub(super) fn set_touch(&mut self, id: NodeId, touch: Touch) {
        self.withdraw(id);
        let (before, depth) = (self.node(id).touch(), self.node(id).depth);
        let pair = |touch: Touch| (touch.hit_class, touch.last);
        for tier in Tier::ALL {
            if self.node(id).slots(tier) > 0 {
                let policy = &mut self.policies(self.region(id, tier)).leaves;
                policy.on_touch(depth, pair(before), pair(touch));
            }
        }
        self.forest.node_mut(id).set_touch(touch);
        self.refresh(id);
    }

    /// Marks the records of a node's payloads on disk: a later write stores the last touch in them.
    fn note_touch(&mut self, id: NodeId) {
        if self.node(id).slots(Tier::Disk) == 0 {
            return;
        }
        let region = self.region(id, Tier::Disk);
        for group in self.node(id).groups() {
            let payload = self.node(id).payload(group);
            if payload.disk == DiskState::Present {
                let (class, device) = (self.class(id, region, group), self.node(id).device);
                let offset = slot_offset(payload.disk_slot);
                self.disk_mut(device).mark_touched(class, offset);
            }
        }
    }

    /// Notes a touch at the current tick.
    fn touch(&mut self, id: NodeId) {
        let tick = self.tick;
        let (before, depth) = (self.node(id).touch(), self.node(id).depth);
        if before.last == tick {
            return;
        }
        let mut hit_class = before.hit_class;
        for tier in Tier::ALL {
            if self.node(id).slots(tier) > 0 {
                let region = self.region(id, tier);
                let policy = &mut self.policies(region).leaves;
                hit_class = policy.on_hit(depth, before.hit_class, before.last, tick);
            }
        }
        let last = tick;
        self.set_touch(id, Touch { last, hit_class });
        self.note_touch(id);
    }
}

/// Nodes that are looked at, from the end of a chain upwards, in search of a node with a state.
const STATE_SEARCH: usize = 256;

impl Residency {
    /// The deepest node of a chain where a hit may end: its depth is at most `depth`, all nodes above are in the index,
    /// and each of its states is in a tier, or is being saved.
    pub(crate) fn pin_end(&self, ns: NsId, hashes: &dyn HashSource, depth: u32) -> Option<NodeId> {
        let spec = self.spec(ns);
        let boundary = (1..=depth).rev().find(|&depth| spec.may_end(depth))?;
        let hash = hashes.get(boundary as usize - 1)?;
        let mut at = self.forest.find(ns, &hash)?;
        for _ in 0..STATE_SEARCH {
            work::node();
            if spec.may_end(self.node(at).depth) && self.has_states(at) {
                return Some(at);
            }
            at = self.parent(at)?;
        }
        None
    }

    /// Whether the states of a node are in a tier, or are being saved.
    fn has_states(&self, id: NodeId) -> bool {
        let groups = self.spec_of(id).groups.iter();
        let mut groups = groups.zip(self.node(id).payloads());
        groups.all(|(group, payload)| {
            group.kind != GroupKind::State
                || payload.host != HostState::Empty
                || payload.disk != DiskState::Empty
        })
    }

    /// Slot bytes in the arena of a chain's required payloads between two depths (exclusive, inclusive).
    pub(crate) fn chain_bytes(&self, ns: NsId, after: u32, to: u32) -> u64 {
        let after_of = |kind| if kind == GroupKind::Full { after } else { to };
        let groups = self.spec(ns).groups.iter();
        let after: Vec<u32> = groups.map(|group| after_of(group.kind)).collect();
        self.bytes_of(ns, to, &after)
    }

    /// Slot bytes in the arena of a block of a group in a chain, 0 if no hit below needs the block.
    pub(crate) fn chain_bytes_of(&self, ns: NsId, group: usize, of_block: u32) -> u64 {
        let groups = self.spec(ns).groups.len();
        let after: Vec<u32> = (0..groups)
            .map(|other| if other == group { 0 } else { of_block })
            .collect();
        let is_required = self.spec(ns).groups[group].kind == GroupKind::Full;
        if is_required {
            self.bytes_of(ns, of_block, &after)
        } else {
            0
        }
    }

    /// Slot bytes in the arena of the windows and states that a hit at a depth needs.
    pub(crate) fn end_bytes(&self, ns: NsId, depth: u32) -> u64 {
        let spec = self.spec(ns);
        let groups = 0..spec.groups.len();
        let after: Vec<u32> = groups
            .map(|group| match spec.groups[group].kind {
                GroupKind::Full | GroupKind::Ignored => depth,
                _ => spec.needed_after(group, depth),
            })
            .collect();
        self.bytes_of(ns, depth, &after)
    }

    /// Whether a payload of a node waits to be written to disk, or is being saved.
    pub(crate) fn is_unsettled(&self, id: NodeId) -> bool {
        let mut payloads = self.node(id).payloads();
        payloads.any(|payload| payload.is_in_flight())
    }

    /// Demotes a node that will not be used soon: its payloads in the arena are evicted now if they are on disk, else
    /// before the payloads of other nodes. Returns the parent, unless other requests or chains use the node.
    pub(crate) fn demote(&mut self, id: NodeId, counters: &mut Counters) -> Option<NodeId> {
        work::node();
        let uses = self.node(id).uses();
        if uses.pins > 0 || uses.holds > 0 || self.node(id).children() > 1 {
            return None;
        }
        let mut payloads = self.node(id).payloads();
        let on_disk = payloads
            .all(|payload| !payload.is_readable(Tier::Host) || payload.disk == DiskState::Present);
        let parent = self.parent(id);
        if on_disk && self.is_host_leaf(id) {
            self.evict(id, Tier::Host, counters);
        } else {
            let touch = self.node(id).touch();
            self.set_touch(id, Touch { last: 0, ..touch });
        }
        parent
    }
}
