//! The engine's invariants, checked in full: what the simulator calls after every few steps.

use std::collections::{HashMap, HashSet};

use super::evict::Standing;
use super::places::bytes;
use super::transfer::Kind;
use super::{Engine, Op, RequestId};
use crate::forest::{DiskState, HostState, NONE, NodeId, Tier};
use crate::slots::Owner;

type Counts = HashMap<NodeId, u32>;

/// `Err` with the message unless the condition holds.
macro_rules! ensure {
    ($condition:expr, $($message:tt)+) => {
        if !$condition {
            return Err(format!($($message)+));
        }
    };
}

impl Engine {
    /// Whether every invariant of the engine's state holds.
    ///
    /// # Errors
    /// Names the first one that does not, and where.
    pub fn check(&self) -> Result<(), String> {
        let (pins, holds) = self.count_pins()?;
        let mut busy: HashMap<NodeId, u32> = HashMap::new();
        let mut leaves: HashMap<(Option<usize>, u16, bool), usize> = HashMap::new();
        let mut places = (0, vec![0; self.disks.len()]);
        let mut queued = 0;
        for id in self.forest.ids() {
            self.check_links(id)?;
            self.check_flags(id)?;
            let node = self.forest.node(id);
            let expected = pins.get(&id).copied().unwrap_or(0);
            ensure!(
                node.pins == expected,
                "node {id}: {} pins, {expected} leases",
                node.pins
            );
            let expected = holds.get(&id).copied().unwrap_or(0);
            ensure!(
                node.holds == expected,
                "node {id}: {} holds, {expected} leases below",
                node.holds
            );
            for (group, place) in (0u8..).zip(node.places()) {
                let in_flight = u32::from(matches!(
                    place.host,
                    HostState::Filling | HostState::Reading
                )) + u32::from(place.disk == DiskState::Writing);
                *busy.entry(id).or_default() += in_flight;
                places.0 += u64::from(place.host != HostState::Empty);
                if matches!(place.disk, DiskState::Writing | DiskState::Present) {
                    places.1[usize::from(node.device)] += 1;
                }
                if place.disk == DiskState::Queued {
                    queued += self.host.slot_bytes(self.host_class(id, group));
                }
                self.check_slots(id, group)?;
            }
            let expected = busy.get(&id).copied().unwrap_or(0);
            ensure!(
                node.busy == expected,
                "node {id}: busy {}, in flight {expected}",
                node.busy
            );
            for tier in [Tier::Host, Tier::Disk] {
                let device = (tier == Tier::Disk).then_some(usize::from(node.device));
                if node.leaf[tier as usize] {
                    for class in self.classes(id, tier) {
                        *leaves.entry((device, class, false)).or_default() += 1;
                    }
                }
                if node.spare[tier as usize] {
                    for class in self.spare_classes(id, tier) {
                        *leaves.entry((device, class, true)).or_default() += 1;
                    }
                }
            }
        }
        ensure!(
            places.0 == self.host.blocks(),
            "{} slots in the arena, {} places",
            self.host.blocks(),
            places.0
        );
        ensure!(
            self.host.used_bytes() <= self.host.capacity(),
            "arena over capacity"
        );
        for (device, disk) in self.disks.iter().enumerate() {
            let expected = places.1[device];
            ensure!(
                expected == disk.slots.blocks(),
                "disk {device}: {} slots, {expected} places",
                disk.slots.blocks()
            );
            ensure!(
                disk.slots.used_bytes() <= disk.slots.capacity(),
                "disk {device} over capacity"
            );
            let (records, linked) = disk.records_in_use();
            ensure!(
                linked,
                "disk {device}: the record of a link belongs to another"
            );
            ensure!(
                records as u64 == expected,
                "disk {device}: {records} records, {expected} places"
            );
        }
        ensure!(
            queued == self.queued_bytes,
            "queued_bytes {}, places {queued}",
            self.queued_bytes
        );
        self.check_leaves(&leaves)?;
        self.check_queue()?;
        self.check_ops()?;
        self.check_requests()
    }

    /// Leases of each node, and leases below it that need something of it.
    fn count_pins(&self) -> Result<(Counts, Counts), String> {
        let (mut pins, mut hits) = (Counts::new(), Vec::new());
        for request in self.requests.values() {
            hits.push(request.lease);
            if let Some(promotion) = &request.promotion
                && promotion.reached != NONE
            {
                *pins.entry(promotion.reached).or_default() += 1;
            }
        }
        for transfer in self.transfers.values() {
            ensure!(
                self.sessions.contains_key(transfer.session),
                "transfer of no session"
            );
            if let Kind::Load { lease, .. } = &transfer.kind {
                hits.push(*lease);
            }
        }
        let mut holds = Counts::new();
        for id in hits.into_iter().filter(|&id| id != NONE) {
            *pins.entry(id).or_default() += 1;
            for above in self.window_above(id) {
                *holds.entry(above).or_default() += 1;
            }
        }
        Ok((pins, holds))
    }

    fn check_links(&self, id: NodeId) -> Result<(), String> {
        let node = self.forest.node(id);
        let found = self.forest.find(node.ns, &node.hash);
        if node.detached {
            ensure!(found != Some(id), "node {id}: detached and in the index");
            ensure!(
                !node.is_idle() || node.children > 0,
                "node {id}: detached, in no use, not freed"
            );
        } else {
            ensure!(found == Some(id), "node {id}: not in the index");
        }
        let mut depth = 1;
        if node.parent != NONE {
            let parent = self.forest.node(node.parent);
            ensure!(
                node.detached || !parent.detached,
                "node {id}: parent {} is not present",
                node.parent
            );
            depth = parent.depth + 1;
        }
        ensure!(
            node.depth == depth,
            "node {id}: depth {}, should be {depth}",
            node.depth
        );
        let (mut children, mut active) = (0, [0, 0]);
        let mut child = self.forest.first_child(id);
        while child != NONE {
            ensure!(
                self.forest.node(child).parent == id,
                "node {child}: among the children of {id}"
            );
            children += 1;
            for tier in [Tier::Host, Tier::Disk] {
                active[tier as usize] += u32::from(self.forest.is_active(child, tier));
            }
            child = self.forest.next_sibling(child);
        }
        ensure!(
            node.children == children,
            "node {id}: {} children, linked {children}",
            node.children
        );
        ensure!(
            node.tier_children == active,
            "node {id}: tier_children {:?}, active {active:?}",
            node.tier_children
        );
        Ok(())
    }

    fn check_flags(&self, id: NodeId) -> Result<(), String> {
        let node = self.forest.node(id);
        let mut used = [0, 0];
        for place in node.places() {
            used[0] += u8::from(place.host != HostState::Empty);
            used[1] += u8::from(matches!(
                place.disk,
                DiskState::Writing | DiskState::Present
            ));
        }
        ensure!(
            node.places_used == used,
            "node {id}: places_used {:?}, used {used:?}",
            node.places_used
        );
        for tier in [Tier::Host, Tier::Disk] {
            let (leaf, spare) = (node.leaf[tier as usize], node.spare[tier as usize]);
            let standing = self.standing(id, tier);
            ensure!(
                (leaf, spare) == (standing == Standing::Leaf, standing == Standing::Spare),
                "node {id}: leaf of {tier:?} is {leaf}, spare {spare}, and should be {standing:?}"
            );
        }
        if node.detached {
            ensure!(
                !node.visible && !node.host_chain,
                "node {id}: detached and visible"
            );
            return Ok(());
        }
        let (visible, host_chain) = match node.parent {
            NONE => (true, true),
            parent => (
                self.forest.node(parent).visible,
                self.forest.node(parent).host_chain,
            ),
        };
        let complete = self.is_complete(id);
        // A payload that is read from a directory given up meanwhile is in no tier, and may yet come.
        let coming = node
            .places()
            .iter()
            .any(|place| place.host == HostState::Reading);
        ensure!(
            !node.visible || visible && (complete || coming),
            "node {id}: visible on incomplete ground"
        );
        ensure!(
            node.visible || !(visible && complete),
            "node {id}: complete and not visible"
        );
        let in_host = host_chain && self.is_in_host(id);
        ensure!(
            node.host_chain == in_host,
            "node {id}: host_chain is {}",
            node.host_chain
        );
        // A write that fails leaves what stands on it without, until it is written again.
        if used[1] > 0 && self.counters.write_failures == 0 {
            let ground = self.ground(id);
            ensure!(
                ground == NONE || self.is_on_disk(ground),
                "node {id}: on disk without {ground}, which it stands on"
            );
        }
        let shell = node.children == 0 && node.is_idle() && used == [0, 0];
        ensure!(!shell, "node {id}: an empty leaf");
        Ok(())
    }

    fn check_slots(&self, id: NodeId, group: u8) -> Result<(), String> {
        let node = self.forest.node(id);
        let place = node.place(group);
        let owner = Some(Owner { node: id, group });
        if place.host != HostState::Empty {
            let found = self
                .host
                .owner_at(self.host_class(id, group), bytes(place.host_at));
            ensure!(
                found == owner,
                "node {id} group {group}: its slot in the arena belongs to {found:?}"
            );
        }
        if matches!(place.disk, DiskState::Writing | DiskState::Present) {
            let device = usize::from(node.device);
            let (disk, class) = (&self.disks[device], self.disk_class(id, device, group));
            let found = disk.slots.owner_at(class, bytes(place.disk_at));
            ensure!(
                found == owner,
                "node {id} group {group}: its slot on disk {device} belongs to {found:?}"
            );
            if node.parent != NONE && self.forest.node(node.parent).required == 0 {
                let linked = disk.has_link(node.parent) || disk.has_all_links();
                ensure!(
                    linked,
                    "node {id}: on disk {device}, and its parent has no record there"
                );
            }
            let record = disk.record_at(class, bytes(place.disk_at));
            let found = record.and_then(|(_, owner)| owner);
            ensure!(
                found == owner,
                "node {id} group {group}: its record belongs to {found:?}"
            );
        }
        Ok(())
    }

    fn check_leaves(
        &self,
        leaves: &HashMap<(Option<usize>, u16, bool), usize>,
    ) -> Result<(), String> {
        let of = |device: Option<usize>| match device {
            None => (&self.host, [&self.host_policy, &self.host_spares]),
            Some(device) => {
                let disk = &self.disks[device];
                (&disk.slots, [&disk.policy, &disk.spares])
            }
        };
        for device in [None].into_iter().chain((0..self.disks.len()).map(Some)) {
            let (slots, policies) = of(device);
            for class in 0..slots.class_count() as u16 {
                for (policy, spare) in policies.into_iter().zip([false, true]) {
                    let expected = leaves.get(&(device, class, spare)).copied().unwrap_or(0);
                    let known = policy.leaves(class);
                    ensure!(
                        known == expected,
                        "{device:?} class {class}, spare {spare}: the policy knows {known} leaves of {expected}"
                    );
                }
            }
        }
        Ok(())
    }

    fn check_queue(&self) -> Result<(), String> {
        let mut entries: HashMap<(NodeId, u8), u32> = HashMap::new();
        for (node, generation, group) in self.queued() {
            let live = self.forest.is_live(node, generation);
            if live && self.forest.node(node).place(group).disk == DiskState::Queued {
                *entries.entry((node, group)).or_default() += 1;
            }
        }
        for id in self.forest.ids() {
            for (group, place) in (0u8..).zip(self.forest.node(id).places()) {
                let expected = u32::from(place.disk == DiskState::Queued);
                let found = entries.get(&(id, group)).copied().unwrap_or(0);
                ensure!(
                    found == expected,
                    "node {id} group {group}: {found} times in the write queue"
                );
            }
        }
        Ok(())
    }

    fn check_ops(&self) -> Result<(), String> {
        let (mut reads, mut writes) = (0, 0);
        let mut on: HashSet<(NodeId, u8, bool)> = HashSet::new();
        for op in self.ops.values() {
            match *op {
                Op::Read { node, group, .. } => {
                    reads += 1;
                    let state = self.forest.node(node).place(group).host;
                    ensure!(
                        state == HostState::Reading,
                        "node {node}: read while {state:?}"
                    );
                    ensure!(
                        on.insert((node, group, true)),
                        "node {node} group {group}: read twice at once"
                    );
                }
                Op::Write { node, group, .. } => {
                    writes += 1;
                    let state = self.forest.node(node).place(group).disk;
                    ensure!(
                        state == DiskState::Writing,
                        "node {node}: written while {state:?}"
                    );
                    ensure!(
                        on.insert((node, group, false)),
                        "node {node} group {group}: written twice at once"
                    );
                }
                Op::Table { .. } | Op::Namespace { .. } => writes += 1,
            }
        }
        ensure!(
            reads == self.reads_in_flight,
            "reads_in_flight {}, ops {reads}",
            self.reads_in_flight
        );
        ensure!(
            writes == self.writes_in_flight,
            "writes_in_flight {}, ops {writes}",
            self.writes_in_flight
        );
        for &(node, group) in self.waiters.keys() {
            ensure!(
                on.contains(&(node, group, true)),
                "node {node} group {group}: awaited and not read"
            );
        }
        Ok(())
    }

    fn check_requests(&self) -> Result<(), String> {
        let mut waiting: HashMap<RequestId, u32> = HashMap::new();
        for &(id, started) in self.waiters.values().flatten() {
            let live = self
                .requests
                .get(id)
                .filter(|request| request.promotions_started == started);
            if live.is_some_and(|request| request.promotion.is_some()) {
                *waiting.entry(id).or_default() += 1;
            }
        }
        let (mut promoted, mut prefetched) = (0, 0);
        for (id, request) in &self.requests {
            promoted += request.promoted_bytes;
            if !request.hastened {
                prefetched += request.promoted_bytes;
            }
            let Some(promotion) = &request.promotion else {
                continue;
            };
            let (has, expected) = (promotion.waiting, waiting.get(&id).copied().unwrap_or(0));
            ensure!(
                has == expected,
                "{id:?} waits for {has} reads, {expected} know of it"
            );
            let queue = usize::from(!request.hastened);
            let queued = self.turns[queue].contains(&id);
            ensure!(
                queued || promotion.is_issued() && has > 0,
                "{id:?}: nobody goes on with its promotion"
            );
        }
        ensure!(
            promoted == self.promoted_bytes,
            "promoted_bytes {}, held {promoted}",
            self.promoted_bytes
        );
        ensure!(
            prefetched == self.prefetched_bytes,
            "prefetched_bytes {}, held {prefetched}",
            self.prefetched_bytes
        );
        let of_sessions: usize = self
            .sessions
            .values()
            .map(|session| session.requests.len())
            .sum();
        ensure!(
            of_sessions == self.requests.len(),
            "{} requests, sessions know {of_sessions}",
            self.requests.len()
        );
        Ok(())
    }
}
