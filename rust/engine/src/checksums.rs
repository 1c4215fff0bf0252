//! Checksums of payloads in the arena. A process that has mapped the arena can change a payload after its save, and so
//! can a failing memory module. The checksum is computed behind the save, and goes into the record of a payload that
//! waits for its write. Later and encrypted writes compare it and, with [`EngineConfig::verify_host`], each hit. The driver
//! computes it, outside the engine.
//!
//! [`EngineConfig::verify_host`]: super::EngineConfig::verify_host

use std::collections::VecDeque;

use rustc_hash::FxHashSet;
use undercroft_contract::io::ChecksumRequest;

use crate::forest::{DiskState, HostState, NodeId};
use crate::metrics::Counters;
use crate::slots::slot_offset;
use crate::work;

use super::operations::Operations;
use super::residency::Residency;

/// Checksums that are computed at a time.
const CHECKSUMS_MAX: usize = 16;

/// Saved payloads that one entry looks at. Most of them may have been written or evicted meanwhile.
pub(super) const SAVED_LOOKED_AT: usize = 256;

/// The checksums to be computed.
///
/// Invariant: `in_flight` has the payloads of all operations for checksums; each is in the arena, and leased.
#[derive(Debug, Default)]
pub(super) struct Checksums {
    /// Payloads that were saved, with the epochs of their nodes.
    saved: VecDeque<(NodeId, u32, u8)>,
    in_flight: FxHashSet<(NodeId, u8)>,
    /// Checksums that were started, and not passed to the driver yet.
    pub(super) started: Vec<ChecksumRequest>,
}

impl Checksums {
    /// A payload was saved: its checksum is to be computed, unless it is written to disk or evicted first.
    pub(super) fn add_saved(&mut self, node: NodeId, group: u8, residency: &Residency) {
        let epoch = residency.node(node).epoch;
        self.saved.push_back((node, epoch, group));
    }

    /// Whether a checksum may be started.
    pub(super) fn has_room(&self) -> bool {
        self.in_flight.len() < CHECKSUMS_MAX
    }

    /// Whether any checksum is to be started, or passed to the driver.
    pub(super) fn has_work(&self) -> bool {
        !self.saved.is_empty() || !self.started.is_empty()
    }

    pub(super) fn is_in_flight(&self, node: NodeId, group: u8) -> bool {
        self.in_flight.contains(&(node, group))
    }

    /// Starts to compute the checksum of a payload in the arena, unless the checksum is being computed.
    pub(super) fn start(
        &mut self,
        node: NodeId,
        group: u8,
        residency: &mut Residency,
        operations: &mut Operations,
    ) {
        if !self.in_flight.insert((node, group)) {
            return;
        }
        residency.pin(node);
        let payload = residency.node(node).payload(group);
        self.started.push(ChecksumRequest {
            token: operations.start_checksum(node, group),
            arena_offset: slot_offset(payload.host_slot),
            payload_len: residency.payload_bytes(node, group),
        });
    }

    /// Starts the checksums of saved payloads that no other operation has computed meanwhile: of `bytes`, or of the
    /// payload that exceeds them.
    pub(super) fn start_saved(
        &mut self,
        looked_at: usize,
        bytes: u64,
        residency: &mut Residency,
        operations: &mut Operations,
    ) {
        let mut started = 0;
        for _ in 0..looked_at.min(self.saved.len()) {
            if !self.has_room() || started >= bytes {
                return;
            }
            let Some((node, epoch, group)) = self.saved.pop_front() else {
                return;
            };
            work::queued();
            if !residency.forest().is_live(node, epoch) {
                continue;
            }
            let payload = residency.node(node).payload(group);
            // A write computes the checksum, too.
            let is_wanted =
                payload.host == HostState::Present && payload.disk != DiskState::Writing;
            if is_wanted && residency.host_checksum(node, group).is_none() {
                self.start(node, group, residency, operations);
                started += u64::from(residency.payload_bytes(node, group));
            }
        }
    }

    pub(super) fn end(&mut self, node: NodeId, group: u8) {
        let was_in_flight = self.in_flight.remove(&(node, group));
        assert!(
            was_in_flight,
            "a checksum of node {node} group {group} ends that was never begun"
        );
    }

    /// The payloads whose checksums are being computed; each leases its node.
    #[cfg(feature = "check")]
    pub(super) fn in_flight(&self) -> impl Iterator<Item = (NodeId, u8)> {
        self.in_flight.iter().copied()
    }
}

/// Removes the node of a payload that changed in the arena, and all its descendants, from the index. Workers may still
/// copy the payload.
pub(super) fn drop_changed(node: NodeId, residency: &mut Residency, counters: &mut Counters) {
    if !residency.node(node).is_detached() {
        counters.host_checksum_failures += 1;
        residency.remove_subtree(node);
    }
}
