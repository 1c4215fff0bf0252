//! Bytes of payloads on disk that are erased: their slots become free only when the erasure has ended.

use std::collections::{BTreeMap, VecDeque};

use rustc_hash::FxHashSet;

use crate::forest::{DeviceIndex, DiskState, NodeId, Tier};
use crate::io::IoFault;
use crate::slots::slot_offset;
use crate::work;

use super::slots::Loss;
use super::state::Residency;

/// At this number of pending erasures of directories that answer, no further node is removed.
const QUEUED_MAX: usize = 512;

/// Payloads whose bytes are to be erased, or are being erased.
///
/// Invariant: each payload leases its node, which has left the index; each payload is on disk.
#[derive(Debug, Default)]
pub(in crate::engine) struct Erasures {
    /// The payloads whose erasure has not started, by directory.
    queues: BTreeMap<DeviceIndex, VecDeque<(NodeId, u8)>>,
    /// All of the payloads.
    pending: FxHashSet<(NodeId, u8)>,
    /// Bytes erased since the start.
    pub(in crate::engine) bytes: u64,
    /// Payloads whose bytes could not be erased.
    pub(in crate::engine) failures: u64,
}

impl Erasures {
    pub(in crate::engine) fn len(&self) -> usize {
        self.pending.len()
    }

    /// Takes the first payload of a directory whose erasure has not started. The caller starts or ends the erasure.
    pub(in crate::engine) fn take(&mut self, device: DeviceIndex) -> Option<(NodeId, u8)> {
        self.queues.get_mut(&device)?.pop_front()
    }

    /// The payloads, each of which leases its node.
    #[cfg(feature = "check")]
    pub(in crate::engine) fn iter(&self) -> impl Iterator<Item = (NodeId, u8)> {
        self.pending.iter().copied()
    }
}

impl Residency {
    /// Erasures that have not started, of the directories that answer: the erasures of a directory that hangs wait
    /// for the directory, and nothing else waits for them.
    fn waiting_erasures(&self) -> usize {
        let queues = self.erasures.queues.iter();
        let answering = queues.filter(|&(device, _)| self.ends_erasures(*device));
        answering.map(|(_, queue)| queue.len()).sum()
    }

    /// Whether the erasures of a directory end, well or not.
    fn ends_erasures(&self, device: DeviceIndex) -> bool {
        let health = &self.disks[device.index()].health;
        health.answers() || !health.is_alive()
    }

    /// Whether an erasure can be started, now or when others have ended.
    pub(in crate::engine) fn has_waiting_erasures(&self) -> bool {
        self.waiting_erasures() > 0
    }

    /// Whether no further node may be removed before some erasures have ended.
    pub(in crate::engine) fn has_many_erasures(&self) -> bool {
        self.waiting_erasures() >= QUEUED_MAX
    }

    /// Whether the bytes of a node are erased when it is freed.
    pub(super) fn erases(&self, id: NodeId) -> bool {
        let leaving = self.geometry[usize::from(self.node(id).ns)].leaving;
        leaving.is_some_and(|of| of.erases)
    }

    /// Queues the payloads of a node without uses for erasure. Returns whether there are any.
    pub(super) fn queue_erasures(&mut self, id: NodeId) -> bool {
        let mut queued = false;
        for group in self.node(id).groups() {
            if self.node(id).payload(group).disk == DiskState::Present {
                work::queued();
                self.pin(id);
                let device = self.node(id).device;
                let queue = self.erasures.queues.entry(device).or_default();
                queue.push_back((id, group));
                self.erasures.pending.insert((id, group));
                queued = true;
            }
        }
        queued
    }

    /// Where a payload lies in the data file, and the bytes of its slot.
    pub(in crate::engine) fn disk_range(&self, id: NodeId, group: u8) -> (u64, u32) {
        let region = self.region(id, Tier::Disk);
        let bytes = self.slots(region).slot_bytes(self.class(id, region, group));
        let offset = slot_offset(self.node(id).payload(group).disk_slot);
        (
            offset,
            u32::try_from(bytes).expect("a slot is no larger than a page"),
        )
    }

    /// Frees the slot of a payload whose bytes have been erased, or cannot be erased.
    pub(in crate::engine) fn erasure_ended(
        &mut self,
        (id, group): (NodeId, u8),
        result: Result<u64, IoFault>,
    ) {
        self.erasures.pending.remove(&(id, group));
        match result {
            Ok(_) => self.erasures.bytes += u64::from(self.payload_bytes(id, group)),
            Err(_) => self.erasures.failures += 1,
        }
        self.free_disk(id, group, Loss::Dropped);
        self.unpin(id);
    }

    /// Whether a payload waits for its erasure, so that its slot stays in use.
    pub(super) fn is_erased(&self, id: NodeId, group: u8) -> bool {
        self.erasures.pending.contains(&(id, group))
    }
}
