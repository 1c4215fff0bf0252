//! Requests to the device, and the effects of their completions.

use undercroft_contract::io::{ChecksumRequest, IoCompletion, IoFault, IoRequest};

use crate::forest::{DeviceIndex, NodeId};

use super::super::checksums::drop_changed;
use super::super::operations::Purpose;
use super::super::promotions::count_read;
use super::super::writeback::table_write_ended;
use super::engine::Engine;

/// How many operations are in flight, on all devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OperationCount {
    /// Reads.
    pub reads: usize,
    /// Reads, writes and checksums.
    pub all: usize,
}

impl Engine {
    /// How many devices there are.
    pub fn device_count(&self) -> usize {
        self.residency.disks().len()
    }

    /// The operations in flight.
    pub fn operations(&self) -> OperationCount {
        let reads = self
            .residency
            .devices()
            .map(|device| self.operations.reads(device));
        OperationCount {
            reads: reads.sum(),
            all: self.operations.len(),
        }
    }

    /// Marks the ages of all payloads to be written, at the end of the engine.
    pub fn write_touched(&mut self) {
        for device in self.residency.devices() {
            self.residency.disk_mut(device).write_all_touched();
        }
    }

    /// Marks more nodes as visible below payloads that have arrived, and offers their payloads to disk.
    pub(super) fn show_more(&mut self, nodes: usize) {
        self.residency.allow_rest(nodes);
        if self.residency.has_rest() {
            let mut visible = Vec::new();
            self.residency.continue_rest(&mut visible);
            self.offer_arrived(&visible);
        }
    }

    /// Goes on to move pages between size classes. Each region may look at `visits` nodes, for the rest of
    /// the turn, too.
    pub(super) fn continue_page_moves(&mut self, visits: usize) {
        self.residency.allow_page_moves(visits as u32);
        self.residency.continue_page_moves(&mut self.counters);
    }

    /// Continues to resize tiers. Each region may look at `visits` nodes.
    pub(super) fn continue_resizing(&mut self, visits: usize) {
        let visits = (visits as u32).max(1);
        self.residency
            .continue_resizing(self.now_ns, visits, &mut self.counters);
    }

    /// Notes which devices answer. A device that does not answer gets no new operations, and no request waits for it.
    pub(super) fn look_at_devices(&mut self) {
        for device in self.residency.devices() {
            self.look_at_device(device);
        }
    }

    fn look_at_device(&mut self, device: DeviceIndex) {
        let limit_ns = self.config.stall_ns;
        let (reads, writes) = self.operations.stalled(device, limit_ns, self.now_ns);
        // Where writes take all of the depth, no read can start.
        let reads = reads || writes && !self.operations.has_room(device);
        let health = &mut self.residency.disk_mut(device).health;
        let answered = health.answers_reads();
        self.health_changed |= health.set_stalled(reads, writes);
        if reads && answered {
            let reads = self.operations.reads_of(device);
            let (promotions, mut parts) = self.promotions();
            promotions.give_up_reads(&reads, &mut parts);
        }
    }

    pub(super) fn next_reads(&mut self, looked_at: usize, out: &mut Vec<IoRequest>) {
        let (promotions, mut parts) = self.promotions();
        promotions.next_reads(&mut parts, looked_at, out);
    }

    pub(super) fn next_probes(&mut self, out: &mut Vec<IoRequest>) {
        let (promotions, mut parts) = self.promotions();
        promotions.next_probes(&mut parts, out);
    }

    /// Limits the writes to devices that read. A device that writes much answers reads late. A request that waits for
    /// memory or for the budget does not wait for the device: its wait may last until the scheduler admits another
    /// request.
    pub(super) fn limit_writes_beside_reads(&mut self) {
        // A payload that waits to be written stays in the arena. If the write waited for a read, and the read for the
        // payload's memory, both would wait for ever.
        let least = usize::from(self.promotions.is_short());
        let beside_reads = self.config.writes_beside_reads.max(least);
        for device in self.residency.devices() {
            let waits_for_device =
                !self.operations.may_read(device) && self.promotions.waits_for(Some(device));
            let is_reading = self.operations.reads(device) > 0 || waits_for_device;
            let most = is_reading.then_some(beside_reads);
            self.operations.limit_writes(device, most);
        }
    }

    /// Appends writes of namespace tables.
    pub(super) fn next_entry_writes(&mut self, out: &mut Vec<IoRequest>) {
        self.namespaces
            .next_writes(&self.residency, &mut self.operations, self.now_ns, out);
    }

    /// Appends the other writes that are due, if payloads went before them last.
    pub(super) fn next_writes_before_payloads(
        &mut self,
        erasures: usize,
        out: &mut Vec<IoRequest>,
    ) {
        if self.writeback.payloads_went {
            let before = out.len();
            self.next_record_writes(true, out);
            self.next_erasures(erasures, out);
            self.next_releases(out);
            self.next_syncs(out);
            self.writeback.payloads_went = out.len() == before;
        }
    }

    /// Appends writes of payloads. At most `looked_at` of those in the queue are looked at.
    pub(super) fn next_payload_writes(&mut self, looked_at: usize, out: &mut Vec<IoRequest>) {
        let before = out.len();
        let (writeback, mut parts) = self.writeback();
        writeback.next_writes(&mut parts, looked_at, out);
        writeback.payloads_went |= out.len() > before;
    }

    /// Appends writes of records; with `only_late`, only those that have waited for long.
    pub(super) fn next_record_writes(&mut self, only_late: bool, out: &mut Vec<IoRequest>) {
        let (writeback, mut parts) = self.writeback();
        writeback.next_table_writes(&mut parts, only_late, out);
    }

    /// Takes the end of an IO operation. An unknown token is ignored.
    pub fn complete(&mut self, completion: IoCompletion) {
        self.residency.allow_rest(self.config.tells);
        let Some((device, operation)) = self.operations.end(completion.token, self.now_ns) else {
            return;
        };
        let limit_ns = self.config.stall_ns;
        // Any answer ends a stall, that of a failed operation too.
        if let Some(device) = device {
            let (reads, writes) = self.operations.stalled(device, limit_ns, self.now_ns);
            let health = &mut self.residency.disk_mut(device).health;
            self.health_changed |= health.answered(reads, writes);
        }
        let result = completion.result;
        // How soon an operation fails says nothing of the device's speed.
        if let (Some(device), true) = (device, result.is_ok()) {
            self.note_latency(device, operation);
        }
        match operation {
            Purpose::Read {
                node,
                group,
                started_ns,
                ahead,
            } => {
                let device = device.expect("a read belongs to a device");
                self.read_ended((node, group), device, (started_ns, ahead), result);
            }
            Purpose::Write {
                node,
                group,
                started_ns,
            } => {
                self.note_unerased(node, result.is_ok());
                let (writeback, mut parts) = self.writeback();
                writeback.write_ended((node, group), started_ns, result, &mut parts);
            }
            Purpose::Erase { node, group } => self.residency.erasure_ended((node, group), result),
            Purpose::Release { device } => self.residency.release_ended(device, result.is_ok()),
            Purpose::Sync { device, file } => self.sync_ended((device, file), result),
            Purpose::Checksum { node, group } => self.checksum_ended(node, group, result),
            Purpose::Table { device, block } => {
                let (_, mut parts) = self.promotions();
                table_write_ended(device, block, result, &mut parts);
            }
            Purpose::Namespace { device, index } => {
                let ended = self.namespaces.write_ended(
                    (device, index),
                    result,
                    &mut self.residency,
                    self.now_ns,
                );
                self.counters.write_failures += u64::from(ended.is_err());
            }
        }
    }

    fn note_latency(&mut self, device: DeviceIndex, operation: Purpose) {
        let (kind, started_ns) = match operation {
            Purpose::Read { started_ns, .. } => (0, started_ns),
            Purpose::Write { started_ns, .. } => (1, started_ns),
            _ => return,
        };
        let ns = self.now_ns - started_ns;
        self.residency.disk_mut(device).latencies[kind].note(ns);
    }

    /// A payload read has ended. `device` is where the read went: when a directory has been given up, the node's
    /// other payloads may be on another directory by now.
    fn read_ended(
        &mut self,
        (node, group): (NodeId, u8),
        device: DeviceIndex,
        (started_ns, ahead): (u64, u64),
        result: Result<u64, IoFault>,
    ) {
        let bytes = self.residency.slot_bytes(node, group);
        let times = (started_ns, self.now_ns);
        let rates = &mut self.planner.rates;
        rates.read_ended(device, bytes, ahead, times, result.is_ok());
        match result {
            Ok(checksum) => {
                let payload_bytes = self.residency.payload_bytes(node, group);
                let (_, mut parts) = self.promotions();
                count_read(payload_bytes, started_ns, &mut parts);
                let disk = self.residency.disk_mut(device);
                disk.health.read_succeeded();
                if disk.encrypted_store().is_some() {
                    // The payload's record on disk has no checksum.
                    self.residency
                        .set_host_checksum(node, group, Some(checksum));
                }
                self.payload_arrived(node, group, &mut Vec::new());
            }
            Err(fault) => self.read_failed((node, group), device, fault),
        }
        let (promotions, mut parts) = self.promotions();
        promotions.read_ended(node, group, result.is_ok(), &mut parts);
    }

    /// A payload's slot in the arena was filled. `visible` is a buffer.
    pub(super) fn payload_arrived(&mut self, node: NodeId, group: u8, visible: &mut Vec<NodeId>) {
        visible.clear();
        self.residency.host_filled(node, group, visible);
        self.offer_arrived(visible);
        if visible.first() != Some(&node) {
            self.writeback
                .offer_late(node, group, &mut self.residency, &mut self.counters);
        }
        // Payloads that wait to be written stay in the arena, so they are offered first.
        self.residency.reconcile(node);
    }

    /// Nodes have become visible: offers their payloads to disk, and their segments to the remote store.
    fn offer_arrived(&mut self, visible: &[NodeId]) {
        self.writeback
            .offer_new(visible, &mut self.residency, &mut self.counters);
        self.offer_remote(visible);
    }

    fn read_failed(&mut self, (node, group): (NodeId, u8), device: DeviceIndex, fault: IoFault) {
        let residency = &mut self.residency;
        residency.host_failed(node, group);
        match fault {
            IoFault::Stopped => {}
            IoFault::Corrupt => self.counters.checksum_failures += 1,
            IoFault::Cipher => self.counters.decryption_failures += 1,
            IoFault::Truncated | IoFault::Os(_) => self.counters.read_failures += 1,
        }
        if fault != IoFault::Stopped {
            residency.drop_unreadable(node, group);
        }
        residency.reconcile(node);
        // Changed bytes do not make a device useless; errors do.
        if matches!(fault, IoFault::Os(_)) {
            let health = &mut residency.disk_mut(device).health;
            if health.read_failed(fault, self.now_ns, self.config.read_failures_max) {
                residency.give_up_disk(device);
            }
        }
    }
}

impl Engine {
    /// Moves the checksums to compute now to `out`. At most `looked_at` of the payloads that were saved are looked at.
    /// `bytes`: as much as the caller computes before the next turn.
    pub(super) fn next_checksums(
        &mut self,
        looked_at: usize,
        bytes: u32,
        out: &mut Vec<ChecksumRequest>,
    ) {
        let (residency, operations) = (&mut self.residency, &mut self.operations);
        self.checksums
            .start_saved(looked_at, u64::from(bytes), residency, operations);
        out.append(&mut self.checksums.started);
    }

    /// Whether the engine compares checksums of saved payloads at all.
    pub(super) fn needs_checksums(&self) -> bool {
        self.config.verify_host || !self.residency.disks().is_empty() || self.remote.is_some()
    }

    /// Takes the checksum that was computed of a payload in the arena.
    pub(super) fn checksum_ended(&mut self, node: NodeId, group: u8, result: Result<u64, IoFault>) {
        self.checksums.end(node, group);
        let is_same = result.is_ok_and(|found| self.residency.is_unchanged(node, group, found));
        if !is_same && result.is_ok() {
            drop_changed(node, &mut self.residency, &mut self.counters);
        }
        self.residency.unpin(node);
        let (promotions, mut parts) = self.promotions();
        promotions.read_ended(node, group, is_same, &mut parts);
    }
}
