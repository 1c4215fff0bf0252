//! Operations of the io_uring engine in flight, and operations that wait for a device.

use std::collections::VecDeque;

use undercroft_contract::io::{IoCompletion, IoFault, device_depth};

use super::batch::Batch;
use super::fault_hook::Verdict;
use super::operation::{IoOperation, Progress, Summing};

/// The operations of one device, in flight or waiting.
#[derive(Debug)]
pub(super) struct Lane {
    /// Pieces that wait for room in the ring.
    pub(super) ready: VecDeque<(u16, u16)>,
    /// Payload writes that wait for neighbours to join them, or for earlier writes to end.
    pub(super) batch: Batch,
    /// The device's entries in the kernel.
    pub(super) entries: usize,
    /// Operations whose transfers have not ended.
    pub(super) moving: usize,
    /// Operations that have a slot.
    pub(super) slots: usize,
}

impl Lane {
    pub(super) fn new(depth: usize) -> Self {
        Self {
            ready: VecDeque::new(),
            batch: Batch::new(device_depth(depth)),
            entries: 0,
            moving: 0,
            slots: 0,
        }
    }
}

/// The events that operations in flight wait for.
#[derive(Debug)]
pub(super) struct Queues {
    /// Writes whose checksums are to be computed, with the epochs of their slots. The source does not change
    /// until the write has been delivered, so the device does not wait for the checksum.
    pub(super) unsummed: VecDeque<(u32, u16)>,
    /// The first of these checksums, as far as it is computed.
    pub(super) summing: Summing,
    /// Operations whose transfers have ended.
    pub(super) ended: VecDeque<u16>,
    /// Requests that were refused.
    pub(super) refused: Vec<IoCompletion>,
}

/// A slot for an operation in flight. The epoch distinguishes its completions from the completions of earlier
/// operations in the same slot.
#[derive(Debug, Default)]
pub(super) struct Slot {
    pub(super) epoch: u32,
    pub(super) active: Option<Active>,
}

#[derive(Debug)]
pub(super) struct Active {
    pub(super) operation: IoOperation,
    /// Checksum of the source of a write, once it is known.
    pub(super) source: Option<u64>,
    pub(super) pieces: Vec<RingPiece>,
    /// Progress of the call that moves no bytes: an erasure, or the sync after the transfer.
    pub(super) tail: Progress,
    pub(super) unfinished: usize,
    pub(super) synced: bool,
    pub(super) fault: Option<IoFault>,
}

#[derive(Debug)]
pub(super) struct RingPiece {
    pub(super) start: u32,
    pub(super) progress: Progress,
    pub(super) verdict: Verdict,
}

/// Files are registered device by device, in the order of [`FileKind`].
pub(super) fn file_index(operation: &IoOperation) -> u32 {
    u32::from(operation.device) * 3 + operation.file as u32
}

pub(super) fn user_data(epoch: u32, index: u16, piece: u16) -> u64 {
    u64::from(epoch) << 32 | u64::from(index) << 16 | u64::from(piece)
}

pub(super) fn parts(user_data: u64) -> (u32, u16, u16) {
    (
        (user_data >> 32) as u32,
        (user_data >> 16) as u16,
        user_data as u16,
    )
}
