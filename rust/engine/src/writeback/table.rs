//! The table of each directory: records of the payloads on it, and placeholder records of the nodes
//! between them.

use undercroft_contract::format::{BLOCK_BYTES, PLACEHOLDER, RECORD_BYTES, Record};
use undercroft_contract::io::{FileKind, IoFault, IoRequest};

use crate::forest::{DeviceIndex, DiskState, NONE};
use crate::slots::Owner;

use super::super::ages::Ages;
use super::super::namespaces::Namespaces;
use super::super::operations::Purpose;
use super::super::parts::EngineParts;
use super::super::residency::Residency;
use super::queue::WriteBack;

/// Blocks of the table are written together: when this many wait, when one has waited for a second, or when no other
/// write waits.
const DIRTY_BLOCKS_MAX: usize = 8;

impl WriteBack {
    /// Notes a sequence number of a table that was read.
    pub(crate) fn advance_record_seq(&mut self, seq: u64) {
        self.record_seq = self.record_seq.max(seq);
    }

    /// Appends writes of the tables to start now; with `only_late`, only of tables with a block that has waited long
    /// enough.
    pub(crate) fn next_table_writes(
        &mut self,
        parts: &mut EngineParts<'_>,
        only_late: bool,
        out: &mut Vec<IoRequest>,
    ) {
        for device in parts.residency.devices() {
            while parts.operations.may_write(device) {
                let disk = parts.residency.disk_mut(device);
                disk.write_some_touched(parts.now_ns);
                let is_late = disk.is_table_late(parts.now_ns);
                let is_due = disk.dirty_blocks() >= DIRTY_BLOCKS_MAX || self.is_idle();
                let waits = !is_late && (only_late || !is_due);
                if waits || !disk.health.takes_writes(parts.now_ns) {
                    break;
                }
                let Some(block) = disk.take_dirty_block() else {
                    break;
                };
                // No engine comes to the last number, but a forged record may have it.
                self.record_seq = self.record_seq.saturating_add(1);
                let now_s = parts.config.unix_at_zero_s + parts.now_ns / 1_000_000_000;
                let encoder = BlockEncoder {
                    residency: parts.residency,
                    namespaces: parts.namespaces,
                    ages: parts.ages,
                    seq: self.record_seq,
                    // The format counts seconds in 32 bits, until 2106.
                    now_s: now_s.min(u64::from(u32::MAX)) as u32,
                };
                let bytes = encoder.encode(device, block);
                let operation = Purpose::Table { device, block };
                let token = parts.operations.start(operation, device, parts.now_ns);
                out.push(IoRequest::WriteMeta {
                    token,
                    device: device.number(),
                    file: FileKind::Table,
                    file_offset: u64::from(block) * BLOCK_BYTES as u64,
                    bytes,
                    sync: false,
                });
            }
        }
    }
}

/// The write of a block of a table has ended.
pub(crate) fn table_write_ended(
    device: DeviceIndex,
    block: u32,
    result: Result<u64, IoFault>,
    parts: &mut EngineParts<'_>,
) {
    let disk = parts.residency.disk_mut(device);
    let stopped = result == Err(IoFault::Stopped);
    disk.block_written(block, (!stopped).then_some(result.is_ok()));
    match result {
        Ok(_) => disk.health.write_succeeded(parts.now_ns),
        Err(IoFault::Stopped) => {}
        Err(fault) => {
            parts.counters.write_failures += 1;
            disk.health.write_failed(fault, parts.now_ns);
        }
    }
}

/// Encodes blocks of a table.
struct BlockEncoder<'a> {
    residency: &'a Residency,
    namespaces: &'a Namespaces,
    ages: &'a Ages,
    seq: u64,
    now_s: u32,
}

impl BlockEncoder<'_> {
    /// The present records of a block; empty where there is no payload.
    fn encode(&self, device: DeviceIndex, block: u32) -> Box<[u8]> {
        let mut out = vec![0; BLOCK_BYTES];
        let owners = self.residency.disks()[device.index()].block_owners(block);
        for (owner, bytes) in owners.zip(out.chunks_exact_mut(RECORD_BYTES)) {
            if let Some(record) = owner.and_then(|owner| self.record(owner)) {
                record.encode(bytes);
            }
        }
        out.into()
    }

    fn record(&self, Owner { node, group }: Owner) -> Option<Record> {
        let state = self.residency.node(node);
        let (slot, payload_bytes, checksum) = if group == PLACEHOLDER {
            (0, 0, 0)
        } else {
            let payload = state.payload(group);
            // While a payload is being written, its bytes on disk have no owner.
            if payload.disk != DiskState::Present {
                return None;
            }
            let bytes = self.residency.payload_bytes(node, group);
            (payload.disk_slot, bytes, payload.checksum)
        };
        if state.is_detached() {
            return None;
        }
        let parent = state.parent();
        Some(Record {
            group,
            hit_class: state.touch().hit_class,
            seq: self.seq,
            instance: self.namespaces.instance(state.ns),
            slot,
            payload_bytes,
            checksum,
            depth: state.depth,
            last: state.touch().last,
            written_s: self.ages.time_of(state.touch().last, self.now_s),
            hash: state.hash,
            parent: (parent != NONE).then(|| self.residency.node(parent).hash),
        })
    }
}
