//! Writes wait until enough of them for one call have come.
//!
//! No request waits for a write, and single writes cost most. So while the device has enough to do, writes wait until
//! there are many: writes to adjacent slots then become one transfer to the device, and one call submits all writes to
//! the kernel.

use std::collections::VecDeque;

/// Bytes in flight that keep a device busy, and bytes of waiting writes that are worth a batch.
pub(super) const BATCH_BYTES: u64 = 1 << 20;
/// Number of waiting writes that is worth a batch: the kernel joins transfers only if it gets more than two at a time.
const BATCH_PIECES: usize = 4;

/// Whether the waiting writes are worth a call.
pub(super) fn is_many(pieces: usize, bytes: u64) -> bool {
    pieces >= BATCH_PIECES && bytes >= BATCH_BYTES
}

/// Writes that wait until more writes have come, or until the device has ended other writes. The device then gets
/// several writes at once.
#[derive(Debug)]
pub(super) struct Batch {
    held: VecDeque<HeldWrite>,
    /// Writes that the device may have at a time.
    most: usize,
    moving: usize,
    moving_bytes: u64,
}

/// A write: the number of its operation, and how many pieces it has.
#[derive(Clone, Copy, Debug)]
struct HeldWrite {
    index: u16,
    pieces: u16,
    bytes: u32,
}

impl Batch {
    /// A batch for a device that may have `most` writes at a time.
    pub(super) fn new(most: usize) -> Self {
        Self {
            held: VecDeque::new(),
            most,
            moving: 0,
            moving_bytes: 0,
        }
    }

    /// Takes a write.
    pub(super) fn push(&mut self, index: u16, pieces: u16, bytes: u32) {
        self.held.push_back(HeldWrite {
            index,
            pieces,
            bytes,
        });
    }

    /// Whether the writes that wait only for more writes are worth a batch.
    pub(super) fn is_full(&self) -> bool {
        let (mut pieces, mut bytes) = (0, 0);
        self.held
            .iter()
            .take(self.most.saturating_sub(self.moving))
            .any(|held| {
                pieces += usize::from(held.pieces);
                bytes += u64::from(held.bytes);
                is_many(pieces, bytes)
            })
    }

    /// Moves waiting writes to `ready`, as many as the device may have, if they are worth a batch or the device has
    /// too little to do.
    pub(super) fn release(&mut self, ready: &mut VecDeque<(u16, u16)>) {
        if self.is_full() || self.moving_bytes < BATCH_BYTES {
            self.let_go(self.most.saturating_sub(self.moving), ready);
        }
    }

    /// Moves waiting writes to `ready`.
    pub(super) fn release_all(&mut self, ready: &mut VecDeque<(u16, u16)>) {
        self.let_go(self.held.len(), ready);
    }

    fn let_go(&mut self, most: usize, ready: &mut VecDeque<(u16, u16)>) {
        for held in self.held.drain(..most.min(self.held.len())) {
            self.moving += 1;
            self.moving_bytes += u64::from(held.bytes);
            ready.extend((0..held.pieces).map(|piece| (held.index, piece)));
        }
    }

    /// Counts the end of a write that was moved to `ready`.
    pub(super) fn ended(&mut self, bytes: u32) {
        self.moving -= 1;
        self.moving_bytes -= u64::from(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_wait_for_one_another_while_the_device_is_busy() {
        let eighth = (BATCH_BYTES / 8) as u32;
        let (mut batch, mut ready) = (Batch::new(100), VecDeque::new());
        for index in 0..8 {
            batch.push(index, 1, eighth);
            batch.release(&mut ready);
            assert_eq!(ready.len(), usize::from(index) + 1, "the device has little");
        }
        for index in 8..15 {
            batch.push(index, 1, eighth);
            batch.release(&mut ready);
            assert_eq!(ready.len(), 8, "it has enough");
        }
        batch.push(15, 1, eighth);
        assert!(batch.is_full());
        batch.release(&mut ready);
        let order: Vec<u16> = ready.drain(..).map(|(index, _)| index).collect();
        assert_eq!(order, (0..16).collect::<Vec<_>>());

        batch.push(16, 2, 8 * eighth);
        assert!(!batch.is_full(), "two pieces are not joined");
        (0..8).for_each(|_| batch.ended(eighth));
        batch.release(&mut ready);
        assert!(ready.is_empty(), "still enough");
        batch.ended(eighth);
        batch.release(&mut ready);
        assert_eq!(ready, [(16, 0), (16, 1)], "it runs dry");
    }

    #[test]
    fn the_device_never_has_more_than_it_may() {
        let bytes = BATCH_BYTES as u32;
        let (mut batch, mut ready) = (Batch::new(2), VecDeque::new());
        for index in 0..4 {
            batch.push(index, 4, bytes);
            batch.release(&mut ready);
        }
        assert_eq!(ready.len(), 2 * 4);
        assert!(!batch.is_full(), "nothing may go now");
        batch.ended(bytes);
        assert!(batch.is_full());
        batch.release(&mut ready);
        assert_eq!(ready.len(), 3 * 4);
        batch.release_all(&mut ready);
        assert_eq!(ready.len(), 4 * 4);
        (0..3).for_each(|_| batch.ended(bytes));
        batch.release(&mut ready);
        assert_eq!(ready.len(), 4 * 4);
    }
}
