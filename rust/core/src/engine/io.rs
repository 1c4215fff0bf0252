//! Requests to the device, and the effects of their completions.

use crate::disk::Disk;
use crate::forest::{DeviceIndex, NodeId};
use crate::io::{IoCompletion, IoFault, IoRequest, IoRoom};

use super::coordinator::Engine;
use super::operations::Purpose;
use super::promotions::count_read;
use super::writeback::table_write_ended;

/// The cost of a placeholder record, in nodes that are removed.
const PLACEHOLDER_STEPS: usize = 2;

/// How many operations are in flight, on all devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OperationCount {
    /// Reads.
    pub reads: usize,
    /// Reads, writes and checksums.
    pub all: usize,
}

impl Engine {
    /// Whether [`Engine::next_io`] or [`Engine::next_checksums`] has something to do: IO to start on a device with
    /// room, the rest of a removal, or checksums.
    pub fn has_io(&self) -> bool {
        let (operations, disks) = (&self.operations, self.residency.disks());
        let reads = |device: DeviceIndex| {
            let answers = disks[device.index()].health.answers_reads();
            (operations.may_read(device) || !answers) && self.promotions.waits_for(Some(device))
        };
        self.has_rest()
            || self.checksums.has_work()
            || self.promotions.waits_for(None) && self.checksums.has_room()
            || self.residency.devices().any(reads)
            || self.promotions.has_probes()
            || self.remote.as_ref().is_some_and(|remote| remote.has_work())
            || self.has_writes()
                && (self.residency.devices()).any(|device| operations.may_write(device))
    }

    /// Whether earlier entries have left work that needs no device. [`Engine::next_io`] does a part of this work;
    /// the caller calls it again soon.
    pub fn has_rest(&self) -> bool {
        self.residency.has_removals()
            || self.residency.has_searches()
            || self.residency.has_rest()
            || self.residency.has_resizing(self.now_ns)
            || self.residency.has_placeholders()
            || self.writeback.has_rest()
            || self.has_passes()
            || self.has_hints()
            || self.remote.as_ref().is_some_and(|remote| remote.has_rest())
            || self.retention.has_rest()
    }

    fn has_writes(&self) -> bool {
        self.namespaces.has_writes(&self.residency)
            || self.writeback.has_writes(&self.residency)
            || self.residency.has_waiting_erasures()
            || self.residency.has_releases()
            || self.has_syncs()
    }

    /// Whether nothing is in flight and nothing is queued to be written or read.
    pub fn is_quiet(&self) -> bool {
        self.operations.is_empty()
            && !self.promotions.has_reads()
            && !self.has_writes()
            && !self.residency.has_placeholders()
    }

    /// How many devices there are.
    pub fn device_count(&self) -> usize {
        self.residency.disks().len()
    }

    /// Whether [`Engine::next_io`] will have something to start within seconds. Nothing waits for it.
    pub fn has_touched(&self) -> bool {
        // Pins end, and payloads expire, as time passes.
        !self.pins.is_empty()
            || self.waits_for_pass()
            || self.residency.waits_to_resize()
            || self.retention.is_on()
            || self.residency.disks().iter().any(Disk::has_touched)
    }

    /// Marks the ages of all payloads to be written, at the end of the engine.
    pub fn write_touched(&mut self) {
        for device in self.residency.devices() {
            self.residency.disk_mut(device).write_all_touched();
        }
    }

    /// The operations in flight. While there are some, the caller calls [`Engine::next_io`] from time to time even if
    /// no operation ends: so the engine notices that a device has stopped answering.
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

    /// Appends the IO requests that start now: reads before writes, at most `room` of each device. The caller has
    /// reported all operations that have ended ([`Engine::complete`]).
    pub fn next_io<'a>(&mut self, room: impl Into<IoRoom<'a>>, out: &mut Vec<IoRequest>) {
        self.last_poll_ns = self.now_ns;
        self.residency.allow_searches(self.config.visits / 2);
        if !self.residency.continue_removals(self.config.removals) && !self.step_pass() {
            self.evict_unused();
        }
        self.continue_rest();
        self.residency
            .continue_placeholders(self.config.removals / PLACEHOLDER_STEPS + 1);
        self.residency.continue_searches(&mut self.counters);
        self.step_hints();
        self.operations.set_room(room.into());
        for device in self.residency.devices() {
            self.look_at_device(device);
        }
        let (promotions, mut parts) = self.promotions();
        promotions.next_reads(&mut parts, out);
        promotions.next_probes(&mut parts, out);
        self.next_writes(out);
        let visits = self.config.visits / 4;
        self.residency
            .continue_resizing(self.now_ns, visits.max(1), &mut self.counters);
    }

    /// Marks more nodes as visible below payloads that have arrived, and offers their payloads to disk.
    fn continue_rest(&mut self) {
        self.residency.allow_rest(self.config.tells);
        if self.residency.has_rest() {
            let mut visible = Vec::new();
            self.residency.continue_rest(&mut visible);
            self.writeback
                .offer_new(&visible, &mut self.residency, &mut self.counters);
            self.offer_remote(&visible);
        }
    }

    /// Notes whether a device answers. A device that does not answer gets no new operations, and no
    /// request waits for it.
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

    fn next_writes(&mut self, out: &mut Vec<IoRequest>) {
        // A payload that waits to be written stays in the arena. If the write waited for a read, and the read for the
        // payload's memory, both would wait for ever.
        let least = usize::from(self.promotions.is_short());
        let beside_reads = self.config.writes_beside_reads.max(least);
        for device in self.residency.devices() {
            // A device that writes much answers reads late. A request that waits for memory or for the budget does not
            // wait for the device: its wait may last until the scheduler admits another request.
            let waits_for_device =
                !self.operations.may_read(device) && self.promotions.waits_for(Some(device));
            let is_reading = self.operations.reads(device) > 0 || waits_for_device;
            let most = is_reading.then_some(beside_reads);
            self.operations.limit_writes(device, most);
        }
        self.namespaces
            .next_writes(&self.residency, &mut self.operations, self.now_ns, out);
        // Payloads may always wait. They take turns with the other writes, so that a device that is never idle gets
        // these, too.
        let before = out.len();
        if self.payloads_went {
            self.next_late_writes(out);
            self.payloads_went = out.len() == before;
        }
        let before = out.len();
        let (writeback, mut parts) = self.writeback();
        writeback.next_writes(&mut parts, out);
        self.payloads_went |= out.len() > before;
        let (writeback, mut parts) = self.writeback();
        writeback.next_table_writes(&mut parts, false, out);
        self.next_erasures(out);
        self.next_releases(out);
        self.next_syncs(out);
    }

    /// Appends the writes that are due beside payloads.
    fn next_late_writes(&mut self, out: &mut Vec<IoRequest>) {
        let (writeback, mut parts) = self.writeback();
        writeback.next_table_writes(&mut parts, true, out);
        self.next_erasures(out);
        self.next_releases(out);
        self.next_syncs(out);
    }

    /// Takes the end of an IO operation. An unknown token is ignored.
    pub fn complete(&mut self, completion: IoCompletion) {
        self.residency.allow_rest(self.config.tells);
        let Some((device, operation)) = self.operations.end(completion.token, self.now_ns) else {
            return;
        };
        let limit_ns = self.config.stall_ns;
        if let Some(device) = device {
            let (reads, writes) = self.operations.stalled(device, limit_ns, self.now_ns);
            let health = &mut self.residency.disk_mut(device).health;
            self.health_changed |= health.answered(reads, writes);
        }
        let result = completion.result;
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

    /// A payload's slot in the arena was filled: offers the nodes that became visible to disk. `visible` is a
    /// buffer.
    pub(super) fn payload_arrived(&mut self, node: NodeId, group: u8, visible: &mut Vec<NodeId>) {
        visible.clear();
        self.residency.host_filled(node, group, visible);
        self.writeback
            .offer_new(visible, &mut self.residency, &mut self.counters);
        self.offer_remote(visible);
        self.residency.reconcile(node);
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
