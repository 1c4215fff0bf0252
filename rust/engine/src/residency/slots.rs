//! The changes of a payload's state: a slot is reserved, filled, written, freed. Which directory a payload is written to.

use undercroft_contract::explain::Reason;
use undercroft_contract::tier::Tier;

use crate::disk::Disk;
use crate::forest::{DeviceIndex, DiskState, HostState, NONE, NodeId, Touch};
use crate::metrics::Counters;
use crate::slots::{Class, Owner, slot_number, slot_offset};

use super::state::{Region, Residency};

/// Why a payload leaves a tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Loss {
    /// To make room: the policy remembers the payload's worth.
    Evicted,
    /// Its bytes have been erased.
    Erased,
    /// For any other reason.
    Dropped,
}

impl Residency {
    /// Reserves a slot of the arena for a payload that is about to be filled, evicting if need be. False
    /// if everything that could make room is in use: the caller then reconciles `id`, unless something else keeps it.
    pub(crate) fn reserve_host(
        &mut self,
        id: NodeId,
        group: u8,
        state: HostState,
        counters: &mut Counters,
    ) -> bool {
        assert!(
            matches!(state, HostState::Filling | HostState::Reading),
            "a reserved slot is {state:?}"
        );
        let class = self.class(id, Region::Host, group);
        let owner = Owner { node: id, group };
        // A read is tried again in the next entry. A save would have to be offered again.
        let waits = state == HostState::Reading;
        let offset = match self.host.alloc(class, owner) {
            Some(offset) => offset,
            None => match self.alloc_by_eviction(class, owner, waits, counters) {
                Some(offset) => offset,
                None => return false,
            },
        };
        self.withdraw(id);
        // The record of an encrypted payload has no checksum.
        let disk = self.disks().get(self.node(id).device.index());
        let has_sum = state == HostState::Reading
            && disk.is_some_and(|disk| disk.encrypted_store().is_none());
        let mut node = self.forest.node_mut(id);
        let checksum = node.change_payload(group, |payload| {
            assert_eq!(
                payload.host,
                HostState::Empty,
                "node {id} group {group} has a slot in the arena already"
            );
            payload.host = state;
            payload.host_slot = slot_number(offset);
            // A read from disk yields the checksum of its record, or fails.
            has_sum.then_some(payload.checksum)
        });
        node.change_uses(|uses| uses.busy += 1);
        self.set_host_checksum(id, group, checksum);
        self.slot_taken(id, Tier::Host, class);
        self.refresh(id);
        true
    }

    /// Like [`Residency::reserve_host`], for a block that a save adds below `above`, which it leases (`NONE`: a root). If
    /// everything else is in use, `above` gives its slots up: the lease keeps the node, and the disk has its payloads.
    /// Else a chain that fills the arena could not grow, since no block above is a leaf.
    pub(crate) fn reserve_below(
        &mut self,
        above: NodeId,
        (id, group): (NodeId, u8),
        counters: &mut Counters,
    ) -> bool {
        self.reserve_host(id, group, HostState::Filling, counters)
            || self.evict_leased(above, counters)
                && self.reserve_host(id, group, HostState::Filling, counters)
    }

    /// Allocates a slot of the arena that has no room. The owner's node is leased meanwhile: a node without payloads
    /// stays in the index only for the sake of the nodes below, and another payload of the node may be the next to be
    /// evicted.
    fn alloc_by_eviction(
        &mut self,
        class: Class,
        owner: Owner,
        waits: bool,
        counters: &mut Counters,
    ) -> Option<u64> {
        self.pin(owner.node);
        let mut offset = None;
        let ns = self.node(owner.node).ns;
        while offset.is_none() && self.make_room(Region::Host, class, ns, waits, counters) {
            offset = self.host.alloc(class, owner);
        }
        let mut node = self.forest.node_mut(owner.node);
        node.change_uses(|uses| uses.pins -= 1);
        self.refresh(owner.node);
        offset
    }

    /// The copy or read into a payload's slot has succeeded. Appends the nodes that became visible to
    /// `became_visible`: a save fills thousands of payloads in one entry, which share one buffer. The
    /// caller reconciles `id`.
    pub(crate) fn host_filled(&mut self, id: NodeId, group: u8, became_visible: &mut Vec<NodeId>) {
        self.end_use(id);
        let mut node = self.forest.node_mut(id);
        node.change_payload(group, |payload| {
            assert!(
                matches!(payload.host, HostState::Filling | HostState::Reading),
                "node {id} group {group} was filled while {:?}",
                payload.host
            );
            payload.host = HostState::Present;
        });
        if node.is_detached() {
            return;
        }
        self.note_event(id, group, Tier::Host, true);
        if self.node(id).is_gap() && self.is_complete(id) {
            self.forest.node_mut(id).set_gap(false);
            self.moves.filled_gaps += 1;
        }
        self.propagate_visible(id, became_visible);
    }

    /// The copy or read into a payload's slot has failed: frees the slot. The caller reconciles `id`.
    pub(crate) fn host_failed(&mut self, id: NodeId, group: u8) {
        self.end_use(id);
        self.free_host(id, group, Loss::Dropped);
    }

    /// A copy or an IO operation on a node has ended.
    fn end_use(&mut self, id: NodeId) {
        self.forest.node_mut(id).change_uses(|uses| {
            let busy = uses.busy.checked_sub(1);
            uses.busy =
                busy.unwrap_or_else(|| panic!("more operations on node {id} ended than began"));
        });
    }

    /// Frees a payload's slot in the arena; the caller reconciles the node.
    pub(super) fn free_host(&mut self, id: NodeId, group: u8, loss: Loss) {
        let class = self.class(id, Region::Host, group);
        self.withdraw(id);
        let mut node = self.forest.node_mut(id);
        let (was_readable, offset) = node.change_payload(group, |payload| {
            assert_ne!(
                payload.host,
                HostState::Empty,
                "node {id} group {group} has no slot in the arena to free"
            );
            let was_readable = payload.is_readable(Tier::Host);
            payload.host = HostState::Empty;
            (was_readable, slot_offset(payload.host_slot))
        });
        self.host.free(class, offset);
        if was_readable {
            self.note_event(id, group, Tier::Host, false);
        }
        self.slot_freed(id, Tier::Host, class, loss);
        if self.node(id).is_host_chain() && self.node(id).requires(group) {
            self.clear_host_chain(id);
        }
    }

    /// Counts a payload that is added to the write queue.
    pub(crate) fn queue_write(&mut self, id: NodeId, group: u8) {
        self.withdraw(id);
        self.forest.node_mut(id).change_payload(group, |payload| {
            assert_eq!(
                payload.host,
                HostState::Present,
                "node {id} group {group} is queued to be written and not in the arena"
            );
            assert_eq!(
                payload.disk,
                DiskState::Empty,
                "node {id} group {group} is queued to be written and on disk"
            );
            payload.disk = DiskState::Queued;
        });
        self.queued_bytes += self.slot_bytes(id, group);
    }

    /// Ends the count of a payload that leaves the write queue; the caller refreshes the node.
    pub(crate) fn unqueue_write(&mut self, id: NodeId, group: u8) {
        self.forest.node_mut(id).change_payload(group, |payload| {
            assert_eq!(
                payload.disk,
                DiskState::Queued,
                "node {id} group {group} is not in the write queue"
            );
            payload.disk = DiskState::Empty;
        });
        let left = self.queued_bytes.checked_sub(self.slot_bytes(id, group));
        self.queued_bytes = left.expect("queued_bytes counts every queued payload");
    }

    /// The write of a queued payload to its new slot at `offset` begins.
    pub(crate) fn write_started(
        &mut self,
        id: NodeId,
        group: u8,
        device: DeviceIndex,
        offset: u64,
    ) {
        self.unqueue_write(id, group);
        self.withdraw(id);
        let mut node = self.forest.node_mut(id);
        assert!(
            node.slots(Tier::Disk) == 0 || node.device == device,
            "node {id} is on two directories"
        );
        node.change_uses(|uses| uses.busy += 1);
        node.device = device;
        node.change_payload(group, |payload| {
            payload.disk = DiskState::Writing;
            payload.disk_slot = slot_number(offset);
        });
        let class = self.class(id, Region::Disk(device), group);
        self.slot_taken(id, Tier::Disk, class);
    }

    /// The write of a payload has succeeded: its record is to be written. The caller reconciles `id`.
    pub(crate) fn write_succeeded(&mut self, id: NodeId, group: u8, checksum: u64) {
        self.end_use(id);
        let region = self.region(id, Tier::Disk);
        let class = self.class(id, region, group);
        let mut node = self.forest.node_mut(id);
        let device = node.device;
        let offset = node.change_payload(group, |payload| {
            assert_eq!(
                payload.disk,
                DiskState::Writing,
                "node {id} group {group} was written without a write"
            );
            payload.disk = DiskState::Present;
            payload.checksum = checksum;
            slot_offset(payload.disk_slot)
        });
        self.disk_mut(device).mark_dirty(class, offset);
        self.note_event(id, group, Tier::Disk, true);
    }

    /// The write of a payload has failed, or was not made: frees the slot on disk. The caller reconciles `id`.
    pub(crate) fn write_failed(&mut self, id: NodeId, group: u8) {
        self.end_use(id);
        self.free_disk(id, group, Loss::Dropped);
    }

    /// Drops a payload on disk that differs from its record, or cannot be read: the record is to be
    /// overwritten. The caller reconciles `id`.
    pub(crate) fn drop_unreadable(&mut self, id: NodeId, group: u8) {
        let node = self.node(id);
        let (device, payload) = (node.device, node.payload(group));
        if payload.disk == DiskState::Present {
            let class = self.class(id, Region::Disk(device), group);
            let offset = slot_offset(payload.disk_slot);
            self.disk_mut(device).mark_dirty(class, offset);
            self.free_disk(id, group, Loss::Dropped);
        }
    }

    /// Frees a payload's slot on disk; the caller reconciles the node.
    pub(super) fn free_disk(&mut self, id: NodeId, group: u8, loss: Loss) {
        let device = self.node(id).device;
        let class = self.class(id, Region::Disk(device), group);
        let is_unerased = loss != Loss::Erased && self.is_to_be_erased(id);
        self.withdraw(id);
        let mut node = self.forest.node_mut(id);
        let (was_readable, offset) = node.change_payload(group, |payload| {
            assert!(
                matches!(payload.disk, DiskState::Writing | DiskState::Present),
                "node {id} group {group} has no slot on disk to free"
            );
            let was_readable = payload.is_readable(Tier::Disk);
            payload.disk = DiskState::Empty;
            (was_readable, slot_offset(payload.disk_slot))
        });
        self.disk_mut(device).free(class, offset);
        if was_readable {
            self.note_event(id, group, Tier::Disk, false);
            self.erasures.failures += u64::from(is_unerased);
        }
        self.slot_freed(id, Tier::Disk, class, loss);
    }

    /// Counts one more slot of a node in a tier.
    fn slot_taken(&mut self, id: NodeId, tier: Tier, class: Class) {
        self.count_bytes(id, tier, class);
        let was_active = self.forest.is_active(id, tier);
        let mut node = self.forest.node_mut(id);
        let slots = node.slots(tier) + 1;
        node.set_slots(tier, slots);
        if slots == 1 {
            let (touch, fingerprint, depth) = (node.touch(), node.hash.fingerprint(), node.depth);
            let region = self.region(id, tier);
            let policy = &mut self.policies(region).leaves;
            policy.on_insert(fingerprint, depth, touch.hit_class, touch.last);
        }
        if !was_active {
            self.activity_changed(id, tier, true);
        }
    }

    /// Counts the bytes of one more slot of a node's namespace.
    pub(super) fn count_bytes(&mut self, id: NodeId, tier: Tier, class: Class) {
        let (ns, region) = (self.node(id).ns, self.region(id, tier));
        let bytes = self.slots(region).slot_bytes(class);
        self.shares.slot_taken(ns, region.index(), bytes);
    }

    /// Ends the count of the bytes of a slot of a node's namespace.
    pub(super) fn uncount_bytes(&mut self, id: NodeId, tier: Tier, class: Class) {
        let (ns, region) = (self.node(id).ns, self.region(id, tier));
        let bytes = self.slots(region).slot_bytes(class);
        self.shares.slot_freed(ns, region.index(), bytes);
    }

    /// Counts one slot fewer of a node in a tier.
    fn slot_freed(&mut self, id: NodeId, tier: Tier, class: Class, loss: Loss) {
        self.uncount_bytes(id, tier, class);
        self.freed[tier as usize] += 1;
        let mut node = self.forest.node_mut(id);
        let slots = node
            .slots(tier)
            .checked_sub(1)
            .unwrap_or_else(|| panic!("node {id} has no slot in {tier:?}"));
        node.set_slots(tier, slots);
        if slots == 0 {
            let (touch, ns, hash, depth) = (node.touch(), node.ns, node.hash, node.depth);
            let Touch { last, hit_class } = touch;
            let fingerprint = hash.fingerprint();
            let reason = match tier {
                _ if loss != Loss::Evicted => Reason::Lost,
                Tier::Host => Reason::EvictedHost,
                Tier::Disk => Reason::EvictedDisk,
            };
            self.note_departure(ns, hash, reason);
            let region = self.region(id, tier);
            let policy = &mut self.policies(region).leaves;
            match loss {
                Loss::Evicted => policy.on_evict(fingerprint, depth, hit_class, last),
                Loss::Erased | Loss::Dropped => policy.on_drop(depth, hit_class, last),
            }
        }
        if !self.forest.is_active(id, tier) {
            self.activity_changed(id, tier, false);
        }
    }

    /// Updates the counts of the ancestors after a node became active in a tier, or inactive.
    fn activity_changed(&mut self, id: NodeId, tier: Tier, active: bool) {
        let mut child = id;
        // A parent with slots of its own stays active: the walk ends there.
        while let Some(parent) = self.parent(child) {
            let was_active = self.forest.is_active(parent, tier);
            let mut node = self.forest.node_mut(parent);
            node.change_active_children(tier, |count| {
                *count = if active {
                    *count + 1
                } else {
                    count
                        .checked_sub(1)
                        .unwrap_or_else(|| panic!("node {parent} has no active child in {tier:?}"))
                };
            });
            self.refresh(parent);
            if was_active == self.forest.is_active(parent, tier) {
                return;
            }
            child = parent;
        }
    }
}

/// Why a payload gets no slot on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DiskRefusal {
    /// The policy keeps the payloads that are on disk.
    Admission,
    /// Everything on disk is in use.
    Full,
    /// Pages of another size class may become free: the next entry tries again.
    Later,
    /// No directory takes writes.
    Degraded,
}

impl Residency {
    /// The nearest ancestor that requires a payload, or `NONE`: `id` is of no use after a restart without
    /// that ancestor's payload.
    pub(crate) fn required_ancestor(&self, id: NodeId) -> NodeId {
        if !self.spec_of(id).has_full() {
            return NONE;
        }
        let mut ancestors = self.forest.ancestors(id);
        let found = ancestors.find(|&at| self.node(at).required() != 0);
        found.unwrap_or(NONE)
    }

    /// Whether every required payload of a node is on disk or being written.
    pub(crate) fn is_on_disk(&self, id: NodeId) -> bool {
        let node = self.node(id);
        let mut payloads = (0u8..).zip(node.payloads());
        payloads.all(|(group, payload)| !node.requires(group) || payload.has_slot(Tier::Disk))
    }

    /// Whether a required payload of a node is in the write queue.
    pub(crate) fn is_queued(&self, id: NodeId) -> bool {
        let node = self.node(id);
        let mut payloads = (0u8..).zip(node.payloads());
        payloads.any(|(group, payload)| node.requires(group) && payload.disk == DiskState::Queued)
    }

    /// The first group whose payload of this node may be written: it is required, in the arena, and neither on disk nor
    /// queued for it.
    pub(crate) fn writable_group(&self, id: NodeId) -> Option<u8> {
        let node = self.node(id);
        (0u8..).zip(node.payloads()).find_map(|(group, payload)| {
            let wanted = node.requires(group)
                && payload.host == HostState::Present
                && payload.disk == DiskState::Empty;
            wanted.then_some(group)
        })
    }

    /// Reserves a slot on disk for a payload: on another directory if everything on the chosen directory is in
    /// use. Only directories that have room for a write are tried. The policy does not weigh `admitted` payloads.
    /// The required ancestor is not evicted to make room.
    pub(crate) fn reserve_disk(
        &mut self,
        id: NodeId,
        group: u8,
        admitted: bool,
        now_ns: u64,
        has_room: impl Fn(DeviceIndex) -> bool,
        counters: &mut Counters,
    ) -> Result<(DeviceIndex, u64), DiskRefusal> {
        let ancestor = self.required_ancestor(id);
        if ancestor != NONE {
            self.pin(ancestor);
        }
        let reserved = self.reserve_on_any(id, group, admitted, now_ns, has_room, counters);
        if ancestor != NONE {
            self.unpin(ancestor);
        }
        reserved
    }

    fn reserve_on_any(
        &mut self,
        id: NodeId,
        group: u8,
        admitted: bool,
        now_ns: u64,
        has_room: impl Fn(DeviceIndex) -> bool,
        counters: &mut Counters,
    ) -> Result<(DeviceIndex, u64), DiskRefusal> {
        let chosen = self.choose_disk(id, now_ns).ok_or(DiskRefusal::Degraded)?;
        let bound = self.node(id).slots(Tier::Disk) > 0;
        let others = self.devices().filter(|&device| device != chosen && !bound);
        let mut may_have_room = false;
        for device in std::iter::once(chosen).chain(others) {
            let takes = self.disks[device.index()].health.takes_writes(now_ns);
            let class = self.class_on_disk(self.node(id).ns, device, usize::from(group));
            if !takes || class.is_none() || !has_room(device) {
                continue;
            }
            let region = Region::Disk(device);
            let hit_class = self.node(id).touch().hit_class;
            if !admitted && self.refuses_new(id, group, region, hit_class) {
                return Err(DiskRefusal::Admission);
            }
            if let Some(offset) = self.reserve_on(id, group, device, counters) {
                return Ok((device, offset));
            }
            may_have_room |= self.may_have_room_soon(region);
        }
        Err(match may_have_room {
            true => DiskRefusal::Later,
            false => DiskRefusal::Full,
        })
    }

    /// The directory for a node's payloads: the directory that the node has; else the parent's directory, unless
    /// another branch begins here; else a directory by the node's hash, in proportion to capacity, among those that
    /// take writes.
    ///
    /// A block is of use only together with its ancestors. So branches spread over the directories, and each branch
    /// stays on one directory: when a directory fails, few blocks on other directories lose their ancestors.
    pub(crate) fn choose_disk(&self, id: NodeId, now_ns: u64) -> Option<DeviceIndex> {
        let node = self.node(id);
        let takes = |disk: &Disk| disk.health.takes_writes(now_ns);
        if node.slots(Tier::Disk) > 0 {
            return Some(node.device).filter(|device| takes(&self.disks[device.index()]));
        }
        if let Some(parent) = self.parent(id) {
            let parent = self.node(parent);
            if parent.children() == 1
                && parent.slots(Tier::Disk) > 0
                && takes(&self.disks[parent.device.index()])
            {
                return Some(parent.device);
            }
        }
        let pages = |disk: &Disk| disk.slots().capacity().div_ceil(disk.slots().page_bytes());
        let takers = self.disks.iter().filter(|disk| takes(disk));
        let total: u64 = takers.map(pages).sum();
        let mut point = node.hash.fingerprint() % total.max(1);
        let found = self.disks.iter().position(|disk| {
            let share = pages(disk);
            if !takes(disk) {
                return false;
            }
            let here = point < share;
            point = point.saturating_sub(share);
            here
        });
        found.map(DeviceIndex::new)
    }

    fn reserve_on(
        &mut self,
        id: NodeId,
        group: u8,
        device: DeviceIndex,
        counters: &mut Counters,
    ) -> Option<u64> {
        let region = Region::Disk(device);
        let class = self.class(id, region, group);
        loop {
            let owner = Owner { node: id, group };
            if let Some(offset) = self.disk_mut(device).alloc(class, owner) {
                return Some(offset);
            }
            let ns = self.node(id).ns;
            if !self.make_room(region, class, ns, true, counters) {
                return None;
            }
        }
    }

    /// Lets the policy of the chosen directory remember a node that has no payloads on disk and was not written.
    pub(crate) fn note_refused_write(&mut self, id: NodeId, now_ns: u64) {
        let node = self.node(id);
        if node.slots(Tier::Disk) > 0 {
            return;
        }
        let (touch, fingerprint, depth) = (node.touch(), node.hash.fingerprint(), node.depth);
        if let Some(device) = self.choose_disk(id, now_ns) {
            let policy = &mut self.disk_mut(device).policies.leaves;
            policy.on_refuse(fingerprint, depth, touch.hit_class, touch.last);
        }
    }
}
