//! Records: what the table of each directory says about the payloads on it, and about the nodes
//! between them.

use crate::disk::format::{BLOCK_BYTES, LINK, RECORD_BYTES, Record};
use crate::forest::{DiskState, NONE, NodeId};
use crate::io::{FileKind, IoFault, IoRequest};
use crate::slots::Owner;

use super::{Engine, Op};

/// Blocks of the table are written together: when so many wait, or nothing else does.
const DIRTY_BLOCKS_MAX: usize = 8;

impl Engine {
    /// Gives records to the ancestors that may be without payloads, up to one that is not: without
    /// them `id` could not be found after a restart.
    pub(super) fn add_links(&mut self, id: NodeId, device: usize) {
        let mut at = self.forest.node(id).parent;
        while at != NONE && self.forest.node(at).required == 0 && self.disks[device].add_link(at) {
            at = self.forest.node(at).parent;
        }
    }

    /// Appends writes of the table.
    pub(super) fn next_table_writes(
        &mut self,
        limit: usize,
        most: usize,
        out: &mut Vec<IoRequest>,
    ) {
        for device in 0..self.disks.len() {
            while out.len() < limit && self.writes_in_flight < most {
                let disk = &mut self.disks[device];
                let wait = disk.dirty_blocks() < DIRTY_BLOCKS_MAX && !self.write_queue.is_empty();
                if wait || !disk.takes_writes(self.now_ns) {
                    break;
                }
                let Some(block) = disk.take_dirty_block() else {
                    break;
                };
                let bytes = self.encode_block(device, block);
                let token = self.start_op(Op::Table { device, block });
                out.push(IoRequest::WriteMeta {
                    token,
                    device: u16::try_from(device).unwrap_or(u16::MAX),
                    file: FileKind::Table,
                    file_offset: u64::from(block) * BLOCK_BYTES as u64,
                    bytes,
                    sync: false,
                });
            }
        }
    }

    /// The records of a block of the table as they are now; empty where there is no payload.
    fn encode_block(&mut self, device: usize, block: u32) -> Box<[u8]> {
        let mut out = vec![0; BLOCK_BYTES];
        self.record_generation += 1;
        let written_s = self.config.unix_at_zero_s + self.now_ns / 1_000_000_000;
        for (owner, record) in self.disks[device]
            .block_owners(block)
            .zip(out.chunks_exact_mut(RECORD_BYTES))
        {
            let Some(Owner { node, group }) = owner else {
                continue;
            };
            let node = self.forest.node(node);
            let ns = &self.namespaces[usize::from(node.ns)];
            let (slot, payload_bytes, checksum) = if group == LINK {
                (0, 0, 0)
            } else {
                let place = node.place(group);
                if place.disk != DiskState::Present {
                    continue;
                }
                let bytes = ns.spec.groups[usize::from(group)].payload_bytes;
                (place.disk_at, bytes, place.checksum)
            };
            if node.detached {
                continue;
            }
            Record {
                group,
                hit_class: node.hit_class,
                generation: self.record_generation,
                instance: ns.instance,
                slot,
                payload_bytes,
                checksum,
                depth: node.depth,
                last: node.last,
                written_s: u32::try_from(written_s).unwrap_or(u32::MAX),
                hash: node.hash,
                parent: (node.parent != NONE).then(|| self.forest.node(node.parent).hash),
            }
            .encode(record);
        }
        out.into()
    }

    pub(super) fn table_write_ended(
        &mut self,
        device: usize,
        block: u32,
        result: Result<u64, IoFault>,
    ) {
        let stopped = result == Err(IoFault::Stopped);
        self.disks[device].block_written(block, result.is_ok() || stopped);
        match result {
            Ok(_) => self.disks[device].write_succeeded(self.now_ns),
            Err(IoFault::Stopped) => {}
            Err(fault) => {
                self.counters.write_failures += 1;
                self.disks[device].write_failed(fault, self.now_ns);
            }
        }
    }
}
