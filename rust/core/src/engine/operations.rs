//! IO operations in flight.

use slotmap::{KeyData, SlotMap};

use crate::forest::{DeviceIndex, NodeId};
use crate::io::device_depth;

slotmap::new_key_type! {
    struct OperationId;
}

/// The purpose of an IO operation in flight. `Uses::busy` keeps the node that it works on.
#[derive(Clone, Copy, Debug)]
pub(super) enum Purpose {
    Read {
        node: NodeId,
        group: u8,
        started_ns: u64,
    },
    Write {
        node: NodeId,
        group: u8,
        started_ns: u64,
    },
    Checksum {
        node: NodeId,
        group: u8,
    },
    Table {
        device: DeviceIndex,
        block: u32,
    },
    Namespace {
        device: DeviceIndex,
        index: usize,
    },
}

/// The operations in flight, and how many more may start.
///
/// Invariant: `reads` and `writes` count the operations of each kind.
#[derive(Debug, Default)]
pub(super) struct Operations {
    in_flight: SlotMap<OperationId, Purpose>,
    reads: usize,
    writes: usize,
    /// See [`Engine::set_io_depth`](super::Engine::set_io_depth).
    depth: Option<usize>,
}

impl Operations {
    pub(super) fn set_depth(&mut self, depth: usize) {
        self.depth = Some(depth);
    }

    /// Notes an operation; its completion brings the token back.
    pub(super) fn start(&mut self, purpose: Purpose) -> u64 {
        if let Some(count) = self.count_of(purpose) {
            *count += 1;
        }
        slotmap::Key::data(&self.in_flight.insert(purpose)).as_ffi()
    }

    /// The operation of a token has ended. `None` if there is none, or no longer.
    pub(super) fn end(&mut self, token: u64) -> Option<Purpose> {
        let id = OperationId::from(KeyData::from_ffi(token));
        let operation = self.in_flight.remove(id)?;
        if let Some(count) = self.count_of(operation) {
            let left = count.checked_sub(1);
            *count = left.expect("every operation in flight is counted");
        }
        Some(operation)
    }

    /// The count that an operation is in. A checksum does not concern the device.
    fn count_of(&mut self, purpose: Purpose) -> Option<&mut usize> {
        match purpose {
            Purpose::Read { .. } => Some(&mut self.reads),
            Purpose::Checksum { .. } => None,
            Purpose::Write { .. } | Purpose::Table { .. } | Purpose::Namespace { .. } => {
                Some(&mut self.writes)
            }
        }
    }

    pub(super) fn reads(&self) -> usize {
        self.reads
    }

    pub(super) fn writes(&self) -> usize {
        self.writes
    }

    pub(super) fn is_empty(&self) -> bool {
        self.in_flight.is_empty()
    }

    /// How many reads may start while `room` operations may.
    pub(super) fn reads_room(&self, room: usize) -> usize {
        let Some(depth) = self.depth else {
            return room;
        };
        // A payload that is read and being verified has left its room already.
        let reads = depth.saturating_sub(room + self.writes);
        device_depth(depth).saturating_sub(reads).min(room)
    }

    /// How many writes may be in flight.
    pub(super) fn writes_max(&self) -> usize {
        self.depth
            .map_or(usize::MAX, |depth| 2 * device_depth(depth))
    }

    #[cfg(feature = "check")]
    pub(super) fn iter(&self) -> impl Iterator<Item = &Purpose> {
        self.in_flight.values()
    }
}
