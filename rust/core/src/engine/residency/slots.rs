//! The changes of a payload's state: a slot is reserved, filled, written, freed.

use crate::forest::{DeviceIndex, DiskState, HostState, NodeId, Tier};
use crate::metrics::Counters;
use crate::slots::{Class, Owner, slot_number, slot_offset};

use super::geometry::Region;
use super::state::Residency;

/// Why a payload leaves a tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine) enum Loss {
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
    pub(in crate::engine) fn reserve_host(
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
        self.slot_taken(id, Tier::Host);
        self.refresh(id);
        true
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
        while offset.is_none() && self.make_room(Region::Host, class, waits, counters) {
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
    pub(in crate::engine) fn host_filled(
        &mut self,
        id: NodeId,
        group: u8,
        became_visible: &mut Vec<NodeId>,
    ) {
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
    pub(in crate::engine) fn host_failed(&mut self, id: NodeId, group: u8) {
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
        self.slot_freed(id, Tier::Host, loss);
        if self.node(id).is_host_chain() && self.node(id).requires(group) {
            self.clear_host_chain(id);
        }
    }

    /// Counts a payload that is added to the write queue.
    pub(in crate::engine) fn queue_write(&mut self, id: NodeId, group: u8) {
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
    pub(in crate::engine) fn unqueue_write(&mut self, id: NodeId, group: u8) {
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
    pub(in crate::engine) fn write_started(
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
        self.slot_taken(id, Tier::Disk);
    }

    /// The write of a payload has succeeded: its record is to be written. The caller reconciles `id`.
    pub(in crate::engine) fn write_succeeded(&mut self, id: NodeId, group: u8, checksum: u64) {
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
    pub(in crate::engine) fn write_failed(&mut self, id: NodeId, group: u8) {
        self.end_use(id);
        self.free_disk(id, group, Loss::Dropped);
    }

    /// Drops a payload on disk that differs from its record, or cannot be read: the record is to be
    /// overwritten. The caller reconciles `id`.
    pub(in crate::engine) fn drop_unreadable(&mut self, id: NodeId, group: u8) {
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
        self.slot_freed(id, Tier::Disk, loss);
    }

    /// Counts one more slot of a node in a tier.
    pub(super) fn slot_taken(&mut self, id: NodeId, tier: Tier) {
        let was_active = self.forest.is_active(id, tier);
        let mut node = self.forest.node_mut(id);
        let slots = node.slots(tier) + 1;
        node.set_slots(tier, slots);
        if slots == 1 {
            let (touch, fingerprint) = (node.touch(), node.hash.fingerprint());
            let region = self.region(id, tier);
            let policy = &mut self.policies(region).leaves;
            policy.on_insert(fingerprint, touch.hit_class, touch.last);
        }
        if !was_active {
            self.activity_changed(id, tier, true);
        }
    }

    /// Counts one slot fewer of a node in a tier.
    fn slot_freed(&mut self, id: NodeId, tier: Tier, loss: Loss) {
        self.freed[tier as usize] += 1;
        let mut node = self.forest.node_mut(id);
        let slots = node
            .slots(tier)
            .checked_sub(1)
            .unwrap_or_else(|| panic!("node {id} has no slot in {tier:?}"));
        node.set_slots(tier, slots);
        if slots == 0 {
            let (touch, ns, hash) = (node.touch(), node.ns, node.hash);
            let fingerprint = hash.fingerprint();
            self.note_departure((ns, hash), tier, loss == Loss::Evicted);
            let region = self.region(id, tier);
            let policy = &mut self.policies(region).leaves;
            match loss {
                Loss::Evicted => policy.on_evict(fingerprint, touch.last, touch.hit_class),
                Loss::Erased | Loss::Dropped => policy.on_drop(touch.last, touch.hit_class),
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
