//! Holding writes back until they are worth a call.
//!
//! Nobody waits for a write, and one at a time is the dearest way to do them. So while the device has
//! enough to do, writes wait until they are many: those of adjacent slots then become one transfer to the
//! device, and all of them one call to the kernel.

use std::collections::VecDeque;

/// How much the device has enough with, and how much is many; in bytes.
pub(super) const BATCH_BYTES: u64 = 1 << 20;
/// How many pieces are many: the kernel joins transfers only where it gets more than two at a time.
const BATCH_PIECES: usize = 4;

/// Whether so many pieces of writes are worth a call.
pub(super) fn is_many(pieces: usize, bytes: u64) -> bool {
    pieces >= BATCH_PIECES && bytes >= BATCH_BYTES
}

/// Writes that wait for one another, as operations and their pieces.
#[derive(Debug, Default)]
pub(super) struct Batch {
    held: VecDeque<(u16, u16)>,
    held_bytes: u64,
    /// Of writes that were let go and have not ended.
    moving_bytes: u64,
}

impl Batch {
    /// Takes a write.
    pub(super) fn push(&mut self, pieces: impl Iterator<Item = (u16, u16)>, bytes: u32) {
        self.held.extend(pieces);
        self.held_bytes += u64::from(bytes);
    }

    /// Whether the writes that wait are many.
    pub(super) fn is_full(&self) -> bool {
        is_many(self.held.len(), self.held_bytes)
    }

    /// Moves what waits to `ready`, if it is many or the device has too little to do.
    pub(super) fn release(&mut self, ready: &mut VecDeque<(u16, u16)>) {
        if self.is_full() || self.moving_bytes < BATCH_BYTES {
            self.release_all(ready);
        }
    }

    /// Moves what waits to `ready`.
    pub(super) fn release_all(&mut self, ready: &mut VecDeque<(u16, u16)>) {
        self.moving_bytes += std::mem::take(&mut self.held_bytes);
        ready.append(&mut self.held);
    }

    /// A write that was let go has ended.
    pub(super) fn ended(&mut self, bytes: u32) {
        self.moving_bytes -= u64::from(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_wait_for_one_another_while_the_device_is_busy() {
        let eighth = (BATCH_BYTES / 8) as u32;
        let (mut batch, mut ready) = (Batch::default(), VecDeque::new());
        for index in 0..8 {
            batch.push([(index, 0)].into_iter(), eighth);
            batch.release(&mut ready);
            assert_eq!(ready.len(), usize::from(index) + 1, "the device has little");
        }
        for index in 8..15 {
            batch.push([(index, 0)].into_iter(), eighth);
            batch.release(&mut ready);
            assert_eq!(ready.len(), 8, "it has enough");
        }
        batch.push([(15, 0)].into_iter(), eighth);
        assert!(batch.is_full());
        batch.release(&mut ready);
        let order: Vec<u16> = ready.drain(..).map(|(index, _)| index).collect();
        assert_eq!(order, (0..16).collect::<Vec<_>>());

        batch.push([(16, 0), (16, 1)].into_iter(), 8 * eighth);
        assert!(!batch.is_full(), "two pieces are not joined");
        (0..8).for_each(|_| batch.ended(eighth));
        batch.release(&mut ready);
        assert!(ready.is_empty(), "still enough");
        batch.ended(eighth);
        batch.release(&mut ready);
        assert_eq!(ready, [(16, 0), (16, 1)], "it runs dry");
    }
}
