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
    /// Bytes erased since the start: the medium was told.
    pub(in crate::engine) bytes: u64,
    /// By directory: bytes erased since the last sync began, and bytes whose sync is under way.
    unsynced: BTreeMap<DeviceIndex, (u64, u64)>,
    /// Writes whose bytes were not erased.
    pub(in crate::engine) failures: u64,
    /// The bytes of nodes whose last use was at this tick or before are erased, by an order whose pass is not over.
    pub(in crate::engine) until: Option<u64>,
}

impl Erasures {
    pub(in crate::engine) fn len(&self) -> usize {
        self.pending.len()
    }

    /// Takes the first payload of a directory whose erasure has not started. The caller starts or ends the erasure.
    pub(in crate::engine) fn take(&mut self, device: DeviceIndex) -> Option<(NodeId, u8)> {
        self.queues.get_mut(&device)?.pop_front()
    }

    /// Whether a directory has erased bytes whose sync has not begun.
    pub(in crate::engine) fn needs_sync(&self, device: DeviceIndex) -> bool {
        let of = self.unsynced.get(&device);
        of.is_some_and(|&(waiting, syncing)| waiting > 0 && syncing == 0)
    }

    /// Whether a directory has erasures of which its medium may not know.
    pub(in crate::engine) fn is_unsynced(&self, device: DeviceIndex) -> bool {
        self.unsynced.contains_key(&device)
    }

    /// Whether the medium was told of all erasures.
    pub(in crate::engine) fn is_durable(&self) -> bool {
        self.pending.is_empty() && self.unsynced.is_empty()
    }

    /// A sync of a data file begins.
    pub(in crate::engine) fn sync_begins(&mut self, device: DeviceIndex) {
        if let Some((waiting, syncing)) = self.unsynced.get_mut(&device) {
            *syncing = std::mem::take(waiting);
        }
    }

    /// A sync of a data file has ended.
    pub(in crate::engine) fn sync_ended(&mut self, device: DeviceIndex, ok: bool) {
        let Some((mut waiting, syncing)) = self.unsynced.remove(&device) else {
            return;
        };
        match ok {
            true => self.bytes += syncing,
            false => waiting += syncing,
        }
        if waiting > 0 {
            self.unsynced.insert(device, (waiting, 0));
        }
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
    pub(in crate::engine) fn erases(&self, id: NodeId) -> bool {
        let leaving = self.geometry[usize::from(self.node(id).ns)].leaving;
        leaving.is_some_and(|of| of.erases)
    }

    /// Whether an order wants the bytes of a node erased, in this pass or when the node is freed.
    pub(in crate::engine) fn is_to_be_erased(&self, id: NodeId) -> bool {
        let last = self.node(id).touch().last;
        self.erases(id) || self.erasures.until.is_some_and(|until| last <= until)
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
            Ok(_) => {
                let (device, bytes) = (self.node(id).device, self.payload_bytes(id, group));
                let of_device = self.erasures.unsynced.entry(device).or_default();
                of_device.0 += u64::from(bytes);
            }
            Err(_) => self.erasures.failures += 1,
        }
        self.free_disk(id, group, Loss::Erased);
        self.unpin(id);
    }

    /// Whether a payload waits for its erasure, so that its slot stays in use.
    pub(super) fn is_erased(&self, id: NodeId, group: u8) -> bool {
        self.erasures.pending.contains(&(id, group))
    }
}
