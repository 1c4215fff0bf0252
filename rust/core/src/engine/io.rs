//! What the device is asked to do, and what follows when it has done it.

use crate::forest::NodeId;
use crate::io::{IoCompletion, IoFault, IoRequest};

use super::coordinator::Engine;
use super::operations::Purpose;
use super::promotions::count_read;
use super::writeback::table_write_ended;

impl Engine {
    /// Whether [`Engine::next_io`] has something to do: IO to start, given free depth, or the rest of a removal;
    /// or [`Engine::next_checksums`].
    pub fn has_io(&self) -> bool {
        self.has_rest() || self.has_device_io() || self.checksums.has_work()
    }

    /// Whether earlier entries have left work that needs no device: [`Engine::next_io`] does some of it, and
    /// is to be called again soon.
    pub fn has_rest(&self) -> bool {
        self.residency.has_removals() || self.writeback.has_rest()
    }

    fn has_device_io(&self) -> bool {
        self.promotions.has_reads()
            || self.namespaces.has_writes(&self.residency)
            || self.writeback.has_writes(&self.residency)
    }

    /// Whether nothing is in flight and nothing is queued to be written.
    pub fn is_quiet(&self) -> bool {
        self.operations.is_empty() && !self.has_device_io()
    }

    /// Whether the device has reads. Whoever takes their ends then calls [`Engine::next_io`] from time to
    /// time also if none ends: that is how the engine knows that the device answers no more.
    pub fn reads(&self) -> bool {
        self.operations.reads() > 0
    }

    /// Appends IO requests to start now, at most `room` of them: reads before writes. All operations that
    /// have ended have been taken ([`Engine::complete`]).
    pub fn next_io(&mut self, room: usize, out: &mut Vec<IoRequest>) {
        self.last_poll_ns = self.now_ns;
        self.residency.continue_removals(self.config.removals);
        let limit = out.len() + room;
        let reads_limit = out.len() + self.operations.reads_room(room);
        let (promotions, mut parts) = self.promotions();
        promotions.next_reads(reads_limit, &mut parts, out);
        self.next_writes(limit, out);
    }

    fn next_writes(&mut self, limit: usize, out: &mut Vec<IoRequest>) {
        self.namespaces.next_writes(
            limit,
            &self.residency,
            &mut self.operations,
            self.now_ns,
            out,
        );
        // A device that writes much answers reads late.
        let is_reading = self.operations.reads() > 0 || self.promotions.has_reads();
        let mut most = self.operations.writes_max();
        if is_reading {
            most = most.min(self.config.writes_beside_reads);
        }
        let (writeback, mut parts) = self.writeback();
        writeback.next_writes(limit, most, &mut parts, out);
        writeback.next_table_writes(limit, most, &mut parts, out);
    }

    /// Takes the end of an IO operation. An unknown token is ignored.
    pub fn complete(&mut self, completion: IoCompletion) {
        let Some(operation) = self.operations.end(completion.token) else {
            return;
        };
        let result = completion.result;
        match operation {
            Purpose::Read {
                node,
                group,
                started_ns,
            } => self.read_ended(node, group, started_ns, result),
            Purpose::Write {
                node,
                group,
                started_ns,
            } => {
                let (writeback, mut parts) = self.writeback();
                writeback.write_ended((node, group), started_ns, result, &mut parts);
            }
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

    /// A payload read has ended.
    fn read_ended(
        &mut self,
        node: NodeId,
        group: u8,
        started_ns: u64,
        result: Result<u64, IoFault>,
    ) {
        match result {
            Ok(_) => {
                let payload_bytes = self.residency.payload_bytes(node, group);
                let device = self.residency.node(node).device;
                let (_, mut parts) = self.promotions();
                count_read(payload_bytes, started_ns, &mut parts);
                self.residency.disk_mut(device).health.read_succeeded();
                self.payload_arrived(node, group, &mut Vec::new());
            }
            Err(fault) => self.read_failed(node, group, fault),
        }
        let (promotions, mut parts) = self.promotions();
        promotions.read_ended(node, group, result.is_ok(), &mut parts);
    }

    /// A payload's slot in the arena was filled: the nodes that became visible by it are offered to disk.
    /// `visible` is a buffer.
    pub(super) fn payload_arrived(&mut self, node: NodeId, group: u8, visible: &mut Vec<NodeId>) {
        visible.clear();
        self.residency.host_filled(node, group, visible);
        self.writeback
            .offer_new(visible, &mut self.residency, &mut self.counters);
        self.residency.reconcile(node);
    }

    fn read_failed(&mut self, node: NodeId, group: u8, fault: IoFault) {
        let residency = &mut self.residency;
        let device = residency.node(node).device;
        residency.host_failed(node, group);
        match fault {
            IoFault::Stopped => {}
            IoFault::Corrupt => self.counters.checksum_failures += 1,
            IoFault::Truncated | IoFault::Os(_) => self.counters.read_failures += 1,
        }
        if fault != IoFault::Stopped {
            residency.drop_unreadable(node, group);
        }
        residency.reconcile(node);
        // Bytes that are not what they were do not make a device useless; errors do.
        if matches!(fault, IoFault::Os(_)) {
            let health = &mut residency.disk_mut(device).health;
            if health.read_failed(fault, self.now_ns) {
                residency.give_up_disk(device);
            }
        }
    }
}
