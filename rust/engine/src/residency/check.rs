//! The invariants of residency, checked in full.

use std::collections::{HashMap, HashSet};

use undercroft_contract::tier::Tier;

use crate::forest::{DiskState, Evictability, HostState, NONE, NodeId, NodeRef, NsId, Reach};
use crate::slots::{Class, Owner, slot_offset};

use super::super::ensure::ensure;
use super::state::{Region, Residency};

/// How often each node is leased, and how many leases below need its payloads.
#[derive(Debug, Default)]
pub(crate) struct LeaseCounts {
    pub(crate) pins: HashMap<NodeId, u32>,
    pub(crate) holds: HashMap<NodeId, u32>,
}

/// Sums over all nodes, to compare with the counters.
#[derive(Debug, Default)]
struct TierSums {
    /// Slots by region: the arena, then the directories.
    slots: Vec<u64>,
    /// Candidates by region, size class, and whether they are leaves.
    candidates: HashMap<(usize, Class, bool), usize>,
    queued_bytes: u64,
    /// Slot bytes by namespace and region.
    bytes: HashMap<(NsId, usize), u64>,
    /// Detached children of each node, which are not in its list of children.
    detached: HashMap<NodeId, Children>,
    /// Nodes that later entries mark as visible.
    to_show: HashSet<NodeId>,
}

/// Children of a node, and active children by tier.
#[derive(Clone, Copy, Debug, Default)]
struct Children {
    children: u32,
    active: [u32; 2],
}

impl Residency {
    /// Whether every invariant holds, if nodes are leased as `leases` says. `has_failed` says whether a
    /// write has ever failed, or a directory may have been given up: then a node may be on disk without its required
    /// ancestor.
    pub(crate) fn check(&self, leases: &LeaseCounts, has_failed: bool) -> Result<(), String> {
        let mut sums = TierSums {
            slots: vec![0; 1 + self.disks.len()],
            to_show: self.nodes_to_show().collect(),
            ..TierSums::default()
        };
        for id in self.forest.ids().filter(|&id| self.node(id).is_detached()) {
            let above = sums.detached.entry(self.node(id).parent()).or_default();
            above.children += 1;
            for tier in Tier::ALL {
                above.active[tier as usize] += u32::from(self.forest.is_active(id, tier));
            }
        }
        for id in self.forest.ids() {
            self.check_tree(id, &sums)?;
            self.check_counts(id)?;
            self.check_uses(id, leases)?;
            self.check_reach(id, &sums)?;
            self.check_disk_chain(id, has_failed)?;
            for group in self.node(id).groups() {
                self.check_slots(id, group)?;
            }
            self.sum_up(id, &mut sums);
        }
        ensure!(
            sums.queued_bytes == self.queued_bytes,
            "queued_bytes {}, payloads {}",
            self.queued_bytes,
            sums.queued_bytes
        );
        for region in self.regions() {
            self.check_region(region, &sums)?;
        }
        Ok(())
    }

    /// Number of payloads on disk at nodes whose whole chain is on disk.
    pub(crate) fn durable_blocks(&self) -> u64 {
        let is_whole = |id: NodeId| {
            let mut chain = std::iter::once(id).chain(self.forest.ancestors(id));
            !self.node(id).is_detached() && chain.all(|at| self.is_on_disk(at))
        };
        let whole = self.forest.ids().filter(|&id| is_whole(id));
        let payloads = whole.flat_map(|id| self.node(id).payloads());
        let durable = payloads.filter(|payload| payload.disk == DiskState::Present);
        durable.count() as u64
    }

    fn nodes_to_show(&self) -> impl Iterator<Item = NodeId> {
        let next = |&id: &NodeId| Some(self.forest.next_sibling(id)).filter(|&id| id != NONE);
        let firsts = self.rest.hidden();
        firsts.flat_map(move |first| std::iter::successors(Some(first), next))
    }

    fn sum_up(&self, id: NodeId, sums: &mut TierSums) {
        let node = self.node(id);
        for (group, payload) in (0u8..).zip(node.payloads()) {
            for tier in Tier::ALL {
                if payload.has_slot(tier) {
                    let region = self.region(id, tier);
                    sums.slots[region.index()] += 1;
                    let bytes = self.slots(region).slot_bytes(self.class(id, region, group));
                    *sums.bytes.entry((node.ns, region.index())).or_default() += bytes;
                }
            }
            if payload.disk == DiskState::Queued {
                sums.queued_bytes += self.slot_bytes(id, group);
            }
        }
        for tier in Tier::ALL {
            let evictability = node.evictability(tier);
            let is_leaf = evictability == Evictability::Leaf;
            for class in self.candidate_classes(id, tier, evictability) {
                let key = (self.region(id, tier).index(), class, is_leaf);
                *sums.candidates.entry(key).or_default() += 1;
            }
        }
    }

    fn check_tree(&self, id: NodeId, sums: &TierSums) -> Result<(), String> {
        let node = self.node(id);
        let found = self.forest.find(node.ns, &node.hash);
        if node.is_detached() {
            ensure!(found != Some(id), "node {id}: detached and in the index");
            ensure!(
                !node.is_idle() || node.children() > 0 || self.removals.is_bare(id),
                "node {id}: detached, in no use, not freed"
            );
        } else {
            ensure!(found == Some(id), "node {id}: not in the index");
        }
        if let Some(parent) = self.parent(id) {
            ensure!(
                node.is_detached() || !self.node(parent).is_detached() || self.is_being_removed(id),
                "node {id}: its parent {parent} has left the index"
            );
        }
        let depth = self.forest.depth(node.parent()) + 1;
        ensure!(
            node.depth == depth,
            "node {id}: depth {}, should be {depth}",
            node.depth
        );
        let (mut children, mut active) = (0, [0, 0]);
        for child in self.forest.children(id) {
            ensure!(
                self.node(child).parent() == id,
                "node {child}: among the children of {id}"
            );
            children += 1;
            for tier in Tier::ALL {
                active[tier as usize] += u32::from(self.forest.is_active(child, tier));
            }
        }
        let detached = sums.detached.get(&id).copied().unwrap_or_default();
        children += detached.children;
        for tier in Tier::ALL {
            active[tier as usize] += detached.active[tier as usize];
        }
        ensure!(
            node.children() == children,
            "node {id}: {} children, linked or detached {children}",
            node.children()
        );
        let counted = Tier::ALL.map(|tier| node.active_children(tier));
        ensure!(
            counted == active,
            "node {id}: active_children {counted:?}, active {active:?}"
        );
        Ok(())
    }

    /// Whether a node is to be removed in later entries, and cannot be found.
    fn is_being_removed(&self, id: NodeId) -> bool {
        let mut above = self.forest.ancestors(id);
        self.is_ending(self.node(id).ns) || above.any(|at| self.node(at).is_detached())
    }

    fn check_counts(&self, id: NodeId) -> Result<(), String> {
        let node = self.node(id);
        let slots = slots_of(node);
        let counted = Tier::ALL.map(|tier| node.slots(tier));
        ensure!(
            counted == slots,
            "node {id}: slots {counted:?}, in use {slots:?}"
        );
        for tier in Tier::ALL {
            let known = node.evictability(tier);
            let expected = self.evictability(id, tier);
            ensure!(
                known == expected,
                "node {id}: evictability of {tier:?} is {known:?}, and should be {expected:?}"
            );
        }
        ensure!(
            !self.lacks_payload(id) || node.is_gap() || node.is_detached(),
            "node {id}: lacks a required payload"
        );
        ensure!(
            !node.is_gap() || !node.is_visible(),
            "node {id}: visible although a payload was evicted"
        );
        let writes = |disk| matches!(disk, DiskState::Queued | DiskState::Writing);
        let mut written = node.payloads().filter(|of| writes(of.disk));
        ensure!(
            written.all(|of| of.host == HostState::Present),
            "node {id}: a payload is to be written that is not in the arena"
        );
        let is_empty_leaf = node.children() == 0
            && node.is_idle()
            && node.payloads().all(|payload| {
                payload.host == HostState::Empty && payload.disk == DiskState::Empty
            });
        ensure!(
            !is_empty_leaf || self.is_being_removed(id) || self.removals.is_bare(id),
            "node {id}: an empty leaf"
        );
        Ok(())
    }

    fn check_uses(&self, id: NodeId, leases: &LeaseCounts) -> Result<(), String> {
        let uses = self.node(id).uses();
        let expected = leases.pins.get(&id).copied().unwrap_or(0);
        ensure!(
            uses.pins == expected,
            "node {id}: {} pins, {expected} leases",
            uses.pins
        );
        let expected = leases.holds.get(&id).copied().unwrap_or(0);
        ensure!(
            uses.holds == expected,
            "node {id}: {} holds, {expected} leases below",
            uses.holds
        );
        let payloads = self.node(id).payloads();
        let in_flight = payloads.map(|payload| {
            let host = matches!(payload.host, HostState::Filling | HostState::Reading);
            u32::from(host) + u32::from(payload.disk == DiskState::Writing)
        });
        let expected: u32 = in_flight.sum();
        ensure!(
            uses.busy == expected,
            "node {id}: busy {}, in flight {expected}",
            uses.busy
        );
        Ok(())
    }

    fn check_reach(&self, id: NodeId, sums: &TierSums) -> Result<(), String> {
        let node = self.node(id);
        let is_to_show = sums.to_show.contains(&id) && !node.is_visible();
        if node.is_detached() || self.is_being_removed(id) || is_to_show {
            return Ok(());
        }
        let above = self.parent(id).map(|parent| self.node(parent).reach());
        let above = above.unwrap_or(Reach::HostChain);
        let complete = self.is_complete(id);
        // A payload that is being read from a directory that was given up is in no tier, and may still arrive.
        let mut payloads = node.payloads();
        let is_coming = payloads.any(|payload| payload.host == HostState::Reading);
        ensure!(
            !node.is_visible() || above >= Reach::Visible && (complete || is_coming),
            "node {id}: visible on an incomplete chain"
        );
        ensure!(
            node.is_visible() || !(above >= Reach::Visible && complete),
            "node {id}: complete and not visible"
        );
        let in_host = above == Reach::HostChain && self.is_in_host(id);
        ensure!(
            node.is_host_chain() == in_host || in_host && self.is_rise_cut,
            "node {id}: reach is {:?}",
            node.reach()
        );
        Ok(())
    }

    fn check_disk_chain(&self, id: NodeId, has_failed: bool) -> Result<(), String> {
        let node = self.node(id);
        let has_slots = node.slots(Tier::Disk) > 0;
        let may_lack = has_failed || self.disk_gaps || self.is_being_removed(id);
        if node.is_detached() || !has_slots || may_lack {
            return Ok(());
        }
        let ancestor = self.required_ancestor(id);
        ensure!(
            ancestor == NONE || self.is_on_disk(ancestor),
            "node {id}: on disk without {ancestor}, its required ancestor"
        );
        Ok(())
    }

    fn check_slots(&self, id: NodeId, group: u8) -> Result<(), String> {
        let node = self.node(id);
        let payload = node.payload(group);
        let owner = Some(Owner { node: id, group });
        if payload.has_slot(Tier::Host) {
            let class = self.class(id, Region::Host, group);
            let found = self.host.owner_at(class, slot_offset(payload.host_slot));
            ensure!(
                found == owner,
                "node {id} group {group}: its slot in the arena belongs to {found:?}"
            );
        }
        if !payload.has_slot(Tier::Disk) {
            return Ok(());
        }
        let (device, offset) = (node.device.index(), slot_offset(payload.disk_slot));
        let class = self.class(id, Region::Disk(node.device), group);
        let disk = &self.disks[device];
        let found = disk.slots().owner_at(class, offset);
        ensure!(
            found == owner,
            "node {id} group {group}: its slot on disk {device} belongs to {found:?}"
        );
        if let Some(parent) = self.parent(id)
            && self.node(parent).required() == 0
        {
            ensure!(
                disk.has_placeholder(parent) || disk.has_all_placeholders(),
                "node {id}: on disk {device}, and its parent has no record there"
            );
        }
        Ok(())
    }

    fn check_region(&self, region: Region, sums: &TierSums) -> Result<(), String> {
        let slots = self.slots(region);
        let expected = sums.slots[region.index()];
        ensure!(
            slots.blocks() == expected,
            "{region:?}: {} slots, {expected} payloads",
            slots.blocks()
        );
        ensure!(
            slots.used_bytes() <= slots.capacity(),
            "{region:?}: over capacity"
        );
        self.check_resizing(region)?;
        for ns in 0..self.geometry.len() as NsId {
            let expected = sums.bytes.get(&(ns, region.index()));
            let counted = self.shares.bytes(ns, region.index());
            ensure!(
                counted == expected.copied().unwrap_or(0),
                "{region:?}: {counted} bytes of namespace {ns}, payloads {expected:?}"
            );
        }
        let policies = match region {
            Region::Host => &self.host_policies,
            Region::Disk(device) => &self.disks[device.index()].policies,
        };
        for class in slots.classes() {
            for is_leaf in [true, false] {
                let key = (region.index(), class, is_leaf);
                let expected = sums.candidates.get(&key).copied().unwrap_or(0);
                let known = policies.count(is_leaf, class);
                ensure!(
                    known == expected,
                    "{region:?} class {class}, leaves {is_leaf}: the policy knows {known} candidates of {expected}"
                );
            }
        }
        if let Region::Disk(device) = region {
            let may_have = |id| self.forest.is_used(id) && self.node(id).required() == 0;
            let (records, owned) = self.disks[device.index()].records_in_use(may_have);
            ensure!(
                owned,
                "{region:?}: the record of a placeholder belongs to another, or to no node"
            );
            ensure!(
                records as u64 == expected,
                "{region:?}: {records} records, {expected} payloads"
            );
        }
        Ok(())
    }
}

fn slots_of(node: NodeRef<'_>) -> [u8; 2] {
    let mut slots = [0, 0];
    for payload in node.payloads() {
        for tier in Tier::ALL {
            slots[tier as usize] += u8::from(payload.has_slot(tier));
        }
    }
    slots
}
