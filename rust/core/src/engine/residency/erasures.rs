//! Bytes of payloads on disk that are erased: their slots become free only when the erasure has ended.

use std::collections::VecDeque;

use rustc_hash::FxHashSet;

use crate::forest::{DiskState, NodeId, Tier};
use crate::io::IoFault;
use crate::slots::slot_offset;
use crate::work;

use super::slots::Loss;
use super::state::Residency;

/// At this number of pending erasures, no further node is removed.
const QUEUED_MAX: usize = 512;

/// Payloads whose bytes are to be erased, or are being erased.
///
/// Invariant: each payload leases its node, which has left the index; each payload is on disk.
#[derive(Debug, Default)]
pub(in crate::engine) struct Erasures {
    queue: VecDeque<(NodeId, u8)>,
    in_flight: FxHashSet<(NodeId, u8)>,
    /// Bytes erased since the start.
    pub(in crate::engine) bytes: u64,
    /// Payloads whose bytes could not be erased.
    pub(in crate::engine) failures: u64,
}

impl Erasures {
    pub(in crate::engine) fn is_empty(&self) -> bool {
        self.queue.is_empty() && self.in_flight.is_empty()
    }

    /// Whether no further node may be removed before some erasures have ended.
    pub(in crate::engine) fn is_full(&self) -> bool {
        self.queue.len() >= QUEUED_MAX
    }

    pub(in crate::engine) fn len(&self) -> usize {
        self.queue.len() + self.in_flight.len()
    }

    pub(in crate::engine) fn has_waiting(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Takes the first `most` waiting payloads. The caller starts their erasures or puts the payloads back.
    pub(in crate::engine) fn take(&mut self, most: usize) -> Vec<(NodeId, u8)> {
        let count = most.min(self.queue.len());
        self.queue.drain(..count).collect()
    }

    pub(in crate::engine) fn put_back(&mut self, payload: (NodeId, u8)) {
        self.queue.push_back(payload);
    }

    pub(in crate::engine) fn started(&mut self, payload: (NodeId, u8)) {
        self.in_flight.insert(payload);
    }

    /// The payloads, each of which leases its node.
    #[cfg(feature = "check")]
    pub(in crate::engine) fn iter(&self) -> impl Iterator<Item = (NodeId, u8)> {
        self.queue.iter().chain(&self.in_flight).copied()
    }
}

impl Residency {
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
                self.erasures.queue.push_back((id, group));
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
        self.erasures.in_flight.remove(&(id, group));
        match result {
            Ok(_) => self.erasures.bytes += u64::from(self.payload_bytes(id, group)),
            Err(_) => self.erasures.failures += 1,
        }
        self.free_disk(id, group, Loss::Dropped);
        self.unpin(id);
    }

    /// Whether a payload waits for its erasure, so that its slot stays in use.
    pub(super) fn is_erased(&self, id: NodeId, group: u8) -> bool {
        !self.erasures.is_empty()
            && self.node(id).is_detached()
            && (self.erasures.in_flight.contains(&(id, group))
                || self.erasures.queue.contains(&(id, group)))
    }
}
