//! Which directory a payload is written to, and the slot there.

use crate::disk::Disk;
use crate::forest::{DeviceIndex, DiskState, HostState, NONE, NodeId, Tier};
use crate::metrics::Counters;
use crate::slots::Owner;

use super::geometry::Region;
use super::state::Residency;

/// Why a payload gets no slot on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine) enum DiskRefusal {
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
    pub(in crate::engine) fn required_ancestor(&self, id: NodeId) -> NodeId {
        if !self.spec_of(id).has_full() {
            return NONE;
        }
        let mut ancestors = self.forest.ancestors(id);
        let found = ancestors.find(|&at| self.node(at).required() != 0);
        found.unwrap_or(NONE)
    }

    /// Whether every required payload of a node is on disk or being written.
    pub(in crate::engine) fn is_on_disk(&self, id: NodeId) -> bool {
        let node = self.node(id);
        let mut payloads = (0u8..).zip(node.payloads());
        payloads.all(|(group, payload)| !node.requires(group) || payload.has_slot(Tier::Disk))
    }

    /// Whether a required payload of a node is in the write queue.
    pub(in crate::engine) fn is_queued(&self, id: NodeId) -> bool {
        let node = self.node(id);
        let mut payloads = (0u8..).zip(node.payloads());
        payloads.any(|(group, payload)| node.requires(group) && payload.disk == DiskState::Queued)
    }

    /// Group of a required payload of a node that is in the arena, and neither on disk nor queued.
    pub(in crate::engine) fn writable_group(&self, id: NodeId) -> Option<u8> {
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
    pub(in crate::engine) fn reserve_disk(
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
    pub(in crate::engine) fn choose_disk(&self, id: NodeId, now_ns: u64) -> Option<DeviceIndex> {
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
            if !self.make_room(region, class, true, counters) {
                return None;
            }
        }
    }

    /// Lets the policy of the chosen directory remember a node that has no payloads on disk and was not written.
    pub(in crate::engine) fn note_refused_write(&mut self, id: NodeId, now_ns: u64) {
        let node = self.node(id);
        if node.slots(Tier::Disk) > 0 {
            return;
        }
        let (touch, fingerprint) = (node.touch(), node.hash.fingerprint());
        if let Some(device) = self.choose_disk(id, now_ns) {
            let policy = &mut self.disk_mut(device).policies.leaves;
            policy.on_refuse(fingerprint, touch.hit_class, touch.last);
        }
    }
}
