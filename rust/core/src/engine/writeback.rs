//! Write-back: arena to disk, payload first, then record. Nothing waits for it, and it never goes
//! before a read.

use rustc_hash::FxHashMap;

use crate::forest::{DiskState, HostState, NONE, NodeId, Tier};
use crate::io::{IoFault, IoRequest};
use crate::slots::Owner;

use super::places::{Loss, bytes, units};
use super::{Engine, Op};

/// The write budget may be saved up for this long, in nanoseconds.
const BURST_NS: u64 = 250_000_000;

/// How long a refusal stands if no place on disk becomes free, in nanoseconds: what is in use may be let go.
const REFUSED_NS: u64 = 10_000_000_000;

/// A payload that waits to be written.
#[derive(Clone, Copy, Debug)]
pub(super) struct Queued {
    node: NodeId,
    generation: u32,
    group: u8,
    /// Group of the payload that it stands on and that was to be written first.
    after: Option<u8>,
    /// Children of the node are on disk: it is written whatever the policy thinks of it.
    rescued: bool,
}

/// Why a payload stays in the arena only.
#[derive(Clone, Copy, Debug)]
pub(super) enum Refusal {
    /// The policy keeps what the disk has.
    Admission,
    /// Nothing on disk can go.
    Full,
    /// No directory takes writes.
    Degraded,
    /// What it stands on is not on disk.
    Ground,
}

/// Nodes, with their generations, that were refused a place on disk since one became free there: down a long
/// chain, each block would ask all above it again.
#[derive(Debug, Default)]
pub(super) struct Refused {
    nodes: FxHashMap<(NodeId, u32), Refusal>,
    since_ns: u64,
}

impl Refused {
    /// A place has become free.
    pub(super) fn forget(&mut self) {
        self.nodes.clear();
    }
}

impl Engine {
    /// A node has become visible: queues its payloads, unless they have to show their worth first.
    pub(super) fn offer_new_to_disk(&mut self, id: NodeId) {
        if self.disks.is_empty() {
            return;
        }
        if self.config.second_touch && self.forest.node(id).hit_class == 0 {
            self.counters.refused_admission += 1;
            return;
        }
        self.queue_writes(id);
    }

    /// A payload that a hit can do without has come to a node that may have been visible before.
    pub(super) fn offer_late_to_disk(&mut self, id: NodeId, group: u8) {
        let node = self.forest.node(id);
        if node.visible && !node.requires(usize::from(group)) {
            self.offer_new_to_disk(id);
        }
    }

    /// A chain down to `id` was hit: what of it was not admitted to disk before is offered again.
    pub(super) fn offer_hit_to_disk(&mut self, id: NodeId) {
        let choosy = self.config.second_touch || self.host_policy.touches_every_block();
        if self.disks.is_empty() || !choosy {
            return;
        }
        let mut chain = Vec::new();
        let mut at = id;
        while at != NONE
            && (self.forest.node(at).required == 0 || self.writable_place(at).is_some())
        {
            chain.push(at);
            at = self.forest.node(at).parent;
        }
        for id in chain.into_iter().rev() {
            self.queue_writes(id);
        }
    }

    /// Queues what a visible node has in the arena and not on disk.
    fn queue_writes(&mut self, id: NodeId) {
        if !self.forest.node(id).visible {
            return;
        }
        let groups = u8::try_from(self.forest.node(id).places().len()).unwrap_or(0);
        // First what the node cannot do without.
        let (required, others): (Vec<u8>, Vec<u8>) =
            (0..groups).partition(|&group| self.forest.node(id).requires(usize::from(group)));
        for group in required.into_iter().chain(others) {
            let place = self.forest.node(id).place(group);
            if place.host != HostState::Present || place.disk != DiskState::Empty {
                continue;
            }
            let slot = self.host.slot_bytes(self.host_class(id, group));
            if self.queued_bytes + slot > self.host.capacity() / 2 {
                self.counters.refused_write_rate += 1;
                continue;
            }
            self.enqueue(id, group, false);
        }
        self.refresh(id);
    }

    fn enqueue(&mut self, node: NodeId, group: u8, front: bool) {
        self.unleaf(node, Tier::Host);
        self.unleaf(node, Tier::Disk);
        self.queued_bytes += self.host.slot_bytes(self.host_class(node, group));
        let state = self.forest.node_mut(node);
        state.place_mut(group).disk = DiskState::Queued;
        let generation = state.generation;
        let queued = Queued {
            node,
            generation,
            group,
            after: None,
            rescued: false,
        };
        if front {
            self.write_queue.push_front(queued);
        } else {
            self.write_queue.push_back(queued);
        }
    }

    /// Appends writes to start now.
    pub(super) fn next_writes(&mut self, limit: usize, out: &mut Vec<IoRequest>) {
        self.next_namespace_writes(limit, out);
        if self.now_ns >= self.refused.since_ns.saturating_add(REFUSED_NS) {
            self.refused.since_ns = self.now_ns;
            self.refused.forget();
        }
        self.rescue();
        self.refill();
        let reading = self.reads_in_flight > 0 || self.turns.iter().any(|turns| !turns.is_empty());
        let most = if reading {
            self.config.writes_beside_reads.min(self.writes_max())
        } else {
            self.writes_max()
        };
        while out.len() < limit && self.writes_in_flight < most {
            let Some(&queued) = self.write_queue.front() else {
                break;
            };
            let length = u64::from(self.payload_bytes_of(queued).unwrap_or(0));
            if self.config.write_rate > 0 && self.write_tokens < length {
                break;
            }
            self.write_queue.pop_front();
            let Some(request) = self.start_write(queued) else {
                continue;
            };
            self.write_tokens = self.write_tokens.saturating_sub(length);
            out.push(request);
        }
        self.next_table_writes(limit, most, out);
    }

    fn payload_bytes_of(&self, queued: Queued) -> Option<u32> {
        if !self.forest.is_live(queued.node, queued.generation) {
            return None;
        }
        let ns = usize::from(self.forest.node(queued.node).ns);
        Some(self.namespaces[ns].spec.groups[usize::from(queued.group)].payload_bytes)
    }

    /// Adds to the write budget what has accrued since the last time. A payload larger than the
    /// burst is written when the bucket is full.
    fn refill(&mut self) {
        let rate = self.config.write_rate;
        if rate == 0 {
            return;
        }
        let elapsed = self.now_ns - self.write_tokens_at_ns;
        let accrued = u128::from(rate) * u128::from(elapsed) / 1_000_000_000;
        if accrued == 0 {
            return;
        }
        self.write_tokens_at_ns = self.now_ns;
        let burst = u128::from(rate) * u128::from(BURST_NS) / 1_000_000_000;
        let largest = self
            .write_queue
            .front()
            .and_then(|&queued| self.payload_bytes_of(queued));
        let most = burst.max(u128::from(largest.unwrap_or(0)));
        let tokens = (u128::from(self.write_tokens) + accrued).min(most);
        self.write_tokens = u64::try_from(tokens).unwrap_or(u64::MAX);
    }

    /// Starts the write of a queued payload, unless that has become pointless or impossible.
    fn start_write(&mut self, queued: Queued) -> Option<IoRequest> {
        let Queued {
            node: id,
            generation,
            group,
            after,
            rescued,
        } = queued;
        if !self.forest.is_live(id, generation) {
            return None;
        }
        let node = self.forest.node(id);
        let ns = usize::from(node.ns);
        if node.detached || node.place(group).disk != DiskState::Queued {
            return None;
        }
        let ground = self.ground(id);
        if ground != NONE && self.is_queued(ground) {
            // What stands on it would be lost at a restart: it goes first.
            self.write_queue.push_back(queued);
            return None;
        }
        let slot = self.host.slot_bytes(self.host_class(id, group));
        self.queued_bytes -= slot;
        if !self.forest.node(id).requires(usize::from(group)) && !self.is_on_disk(id) {
            // Alone it is of no use after a restart.
            self.refuse_write(id, group, Refusal::Ground);
            return None;
        }
        if ground != NONE
            && let Some(missing) = self.writable_place(ground)
        {
            let choosy = self.host_policy.touches_every_block() && !rescued;
            if let Some(why) = self.refused_lately(ground) {
                self.refuse_write(id, group, why);
                return None;
            }
            if after == Some(missing) || choosy {
                // It was offered first, and was refused.
                self.refuse_write(id, group, Refusal::Ground);
                return None;
            }
            self.write_queue.push_front(Queued {
                after: Some(missing),
                ..queued
            });
            self.queued_bytes += slot;
            self.enqueue(ground, missing, true);
            return None;
        }
        // Room must not be made at the cost of what this stands on.
        if ground != NONE {
            self.pin(ground);
        }
        let taken = self.take_disk(id, group, rescued);
        if ground != NONE {
            self.unpin(ground);
        }
        let (device, offset) = match taken {
            Ok(taken) => taken,
            Err(why) => {
                self.refuse_write(id, group, why);
                return None;
            }
        };
        self.unleaf(id, Tier::Host);
        let started_ns = self.now_ns;
        let token = self.start_op(Op::Write {
            node: id,
            group,
            started_ns,
        });
        let node = self.forest.node_mut(id);
        node.busy += 1;
        node.device = u8::try_from(device).unwrap_or(u8::MAX);
        let place = node.place_mut(group);
        place.disk = DiskState::Writing;
        place.disk_at = units(offset);
        let arena_offset = bytes(place.host_at);
        self.place_taken(id, Tier::Disk);
        self.add_links(id, device);
        Some(IoRequest::WritePayload {
            token,
            device: u16::try_from(device).unwrap_or(u16::MAX),
            file_offset: offset,
            arena_offset,
            len: u32::try_from(slot).unwrap_or(u32::MAX),
            payload_len: self.namespaces[ns].spec.groups[usize::from(group)].payload_bytes,
        })
    }

    /// The nearest ancestor that cannot do without a payload, or `NONE`.
    pub(super) fn ground(&self, id: NodeId) -> NodeId {
        let ns = usize::from(self.forest.node(id).ns);
        if !self.namespaces[ns].spec.has_full() {
            return NONE;
        }
        let mut at = self.forest.node(id).parent;
        while at != NONE && self.forest.node(at).required == 0 {
            at = self.forest.node(at).parent;
        }
        at
    }

    /// Why a node was refused, if asking again would be in vain.
    fn refused_lately(&self, id: NodeId) -> Option<Refusal> {
        let now_ns = self.now_ns;
        if !self.disks.iter().any(|disk| disk.takes_writes(now_ns)) {
            return Some(Refusal::Degraded);
        }
        let generation = self.forest.node(id).generation;
        self.refused.nodes.get(&(id, generation)).copied()
    }

    /// Leaves a queued payload in the arena only.
    fn refuse_write(&mut self, id: NodeId, group: u8, why: Refusal) {
        let node = self.forest.node(id);
        if node.requires(usize::from(group)) {
            self.refused.nodes.insert((id, node.generation), why);
        }
        match why {
            Refusal::Admission => self.counters.refused_admission += 1,
            Refusal::Full => self.counters.refused_disk_full += 1,
            Refusal::Degraded => self.counters.refused_disk_degraded += 1,
            Refusal::Ground => {}
        }
        let node = self.forest.node_mut(id);
        node.place_mut(group).disk = DiskState::Empty;
        let (last, hit_class) = (node.last, node.hit_class);
        if node.places_used[Tier::Disk as usize] == 0 {
            let fingerprint = Self::fingerprint(&node.hash);
            if let Some(device) = self.choose_disk(id) {
                self.disks[device]
                    .policy
                    .on_refuse(fingerprint, hit_class, last);
            }
        }
        self.refresh(id);
        self.strand(id);
    }

    /// Remembers a node that is not on disk while children of it are: it cannot leave the arena
    /// before it has been written.
    fn strand(&mut self, id: NodeId) {
        let node = self.forest.node(id);
        if node.tier_children[Tier::Disk as usize] > 0 && !node.detached {
            self.stranded.push_back((id, node.generation));
        }
    }

    /// Whether a stranded node may be written, now or after a pause.
    pub(super) fn has_stranded(&self) -> bool {
        let alive = self.disks.iter().any(crate::disk::Disk::is_alive);
        !self.stranded.is_empty() && !self.rescue_waits && alive
    }

    /// Queues one stranded node again.
    fn rescue(&mut self) {
        let now_ns = self.now_ns;
        let writable = self.disks.iter().any(|disk| disk.takes_writes(now_ns));
        if self.rescue_waits || !self.write_queue.is_empty() || !writable {
            return;
        }
        if let Some((id, generation)) = self.stranded.pop_front()
            && self.forest.is_live(id, generation)
            && !self.forest.node(id).detached
        {
            let mut chain = Vec::new();
            let mut at = id;
            while at != NONE && self.writable_place(at).is_some() {
                chain.push(at);
                at = self.ground(at);
            }
            for id in chain.into_iter().rev() {
                while let Some(group) = self.writable_place(id) {
                    self.enqueue(id, group, false);
                    if let Some(queued) = self.write_queue.back_mut() {
                        queued.rescued = true;
                    }
                }
                self.refresh(id);
            }
        }
    }

    /// The write queue, front to back.
    #[cfg(feature = "check")]
    pub(super) fn queued(&self) -> impl Iterator<Item = (NodeId, u32, u8)> {
        let entries = self.write_queue.iter();
        entries.map(|queued| (queued.node, queued.generation, queued.group))
    }

    /// Whether every required payload of a node is on disk or on its way there.
    pub(super) fn is_on_disk(&self, id: NodeId) -> bool {
        let node = self.forest.node(id);
        node.places().iter().enumerate().all(|(group, place)| {
            !node.requires(group) || matches!(place.disk, DiskState::Writing | DiskState::Present)
        })
    }

    /// Whether a required payload of a node waits to be written.
    fn is_queued(&self, id: NodeId) -> bool {
        let node = self.forest.node(id);
        let mut places = node.places().iter().enumerate();
        places.any(|(group, place)| node.requires(group) && place.disk == DiskState::Queued)
    }

    /// A required payload of a node that is in the arena and neither on disk nor on its way there.
    fn writable_place(&self, id: NodeId) -> Option<u8> {
        let node = self.forest.node(id);
        (0u8..).zip(node.places()).find_map(|(group, place)| {
            let wanted = node.requires(usize::from(group))
                && place.host == HostState::Present
                && place.disk == DiskState::Empty;
            wanted.then_some(group)
        })
    }

    /// The device for a node's payloads: the one it has; else its parent's, unless they part here from
    /// another branch; else one by its hash, in proportion to capacity, among those that take writes.
    ///
    /// A block is of use only together with what it stands on. So branches spread over the devices,
    /// and each stays on one: a device that fails takes few blocks with it that lie on others.
    fn choose_disk(&mut self, id: NodeId) -> Option<usize> {
        let node = self.forest.node(id);
        let now_ns = self.now_ns;
        let takes = |disk: &crate::disk::Disk| disk.takes_writes(now_ns);
        if node.places_used[Tier::Disk as usize] > 0 {
            return Some(usize::from(node.device)).filter(|&device| takes(&self.disks[device]));
        }
        if node.parent != NONE {
            let parent = self.forest.node(node.parent);
            let device = usize::from(parent.device);
            if parent.children == 1
                && parent.places_used[Tier::Disk as usize] > 0
                && takes(&self.disks[device])
            {
                return Some(device);
            }
        }
        let pages = |disk: &crate::disk::Disk| disk.slots.capacity() / disk.slots.page_bytes();
        let takers = self.disks.iter().filter(|disk| takes(disk));
        let total: u64 = takers.map(pages).sum();
        let mut point = Self::fingerprint(&node.hash) % total.max(1);
        self.disks.iter().position(|disk| {
            let share = pages(disk);
            if !takes(disk) {
                return false;
            }
            let here = point < share;
            point = point.saturating_sub(share);
            here
        })
    }

    /// A slot on disk for a payload, and where: on another device if the chosen one holds nothing that
    /// could go.
    fn take_disk(&mut self, id: NodeId, group: u8, rescued: bool) -> Result<(usize, u64), Refusal> {
        let chosen = self.choose_disk(id).ok_or(Refusal::Degraded)?;
        let bound = self.forest.node(id).places_used[Tier::Disk as usize] > 0;
        let others = (0..self.disks.len()).filter(|&device| device != chosen && !bound);
        for device in std::iter::once(chosen).chain(others) {
            if !self.disks[device].takes_writes(self.now_ns) {
                continue;
            }
            if !rescued && !self.is_admitted(id, group, device) {
                return Err(Refusal::Admission);
            }
            if let Some(offset) = self.take_slot(id, group, device) {
                return Ok((device, offset));
            }
        }
        self.rescue_waits |= rescued;
        Err(Refusal::Full)
    }

    fn is_admitted(&mut self, id: NodeId, group: u8, device: usize) -> bool {
        let class = self.disk_class(id, device, group);
        let hit_class = self.forest.node(id).hit_class;
        !self.disks[device].slots.is_full(class)
            || !self.refuses(Tier::Disk, device, class, hit_class)
    }

    fn take_slot(&mut self, id: NodeId, group: u8, device: usize) -> Option<u64> {
        let class = self.disk_class(id, device, group);
        let mut drains = 0;
        loop {
            if let Some(offset) = self.disks[device].alloc(class, Owner { node: id, group }) {
                return Some(offset);
            }
            if !self.make_room(Tier::Disk, device, class, &mut drains) {
                return None;
            }
        }
    }

    /// A payload write has ended.
    pub(super) fn write_ended(
        &mut self,
        id: NodeId,
        group: u8,
        started_ns: u64,
        result: Result<u64, IoFault>,
    ) {
        let device = usize::from(self.forest.node(id).device);
        let ns = usize::from(self.forest.node(id).ns);
        let class = self.disk_class(id, device, group);
        match result {
            Ok(_) if self.is_given_up(device) => {
                // Given up meanwhile.
                self.forest.node_mut(id).busy -= 1;
                self.drop_disk(id, group, Loss::Dropped);
            }
            Ok(checksum) => {
                let payload = self.namespaces[ns].spec.groups[usize::from(group)].payload_bytes;
                self.counters.disk_writes += 1;
                self.counters.disk_write_bytes += u64::from(payload);
                self.counters.disk_write_ns += self.now_ns - started_ns;
                self.disks[device].write_succeeded(self.now_ns);
                let node = self.forest.node_mut(id);
                node.busy -= 1;
                let place = node.place_mut(group);
                place.disk = DiskState::Present;
                place.checksum = checksum;
                let offset = bytes(place.disk_at);
                self.disks[device].mark_dirty(class, offset);
            }
            Err(fault) => {
                if fault != IoFault::Stopped {
                    self.counters.write_failures += 1;
                    self.disks[device].write_failed(fault, self.now_ns);
                }
                self.forest.node_mut(id).busy -= 1;
                self.drop_disk(id, group, Loss::Dropped);
                self.strand(id);
            }
        }
        self.settle(id);
    }

    /// Whether a directory was given up, and is not to be tried again yet.
    fn is_given_up(&self, device: usize) -> bool {
        let disk = &self.disks[device];
        !disk.is_alive() && !disk.takes_writes(self.now_ns)
    }

    /// Gives a directory up: what only it holds is gone.
    pub(super) fn give_up_disk(&mut self, device: usize) {
        let mut ids: Vec<(NodeId, u32)> = self
            .forest
            .ids()
            .map(|id| (id, self.forest.node(id).generation))
            .collect();
        // The first one that is lost takes all that stands on it along.
        ids.sort_unstable_by_key(|&(id, _)| self.forest.node(id).depth);
        for (id, generation) in ids {
            if !self.forest.is_live(id, generation)
                || usize::from(self.forest.node(id).device) != device
            {
                continue;
            }
            let mut dropped = false;
            for group in 0..u8::try_from(self.forest.node(id).places().len()).unwrap_or(0) {
                if self.forest.node(id).place(group).disk == DiskState::Present {
                    self.drop_disk(id, group, Loss::Dropped);
                    dropped = true;
                }
            }
            if dropped {
                self.settle(id);
            }
        }
    }
}
