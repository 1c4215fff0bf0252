//! The bare loop with which benchmarks compare the engine. It has the same file, ring, registrations and sizes as the
//! engine, but no queue and no checksum.

use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use super::SPLIT;
use super::batch::{BATCH_BYTES, is_many};
use super::operation::{Next, Progress};
use super::ring::{Buffer, Ring, RingTransfer};
use crate::arena::Arena;

/// The bytes to move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawLoop {
    /// File to memory, or memory to file.
    pub reading: bool,
    /// Bytes of a block, a multiple of 4096, and of the slots of the file.
    pub block_bytes: u32,
    /// Blocks to move, each once.
    pub blocks: u64,
    /// Slot of the first block.
    pub first: u64,
    /// Slots of the file: after the last slot, the first follows again.
    pub slots: u64,
    /// Blocks in flight.
    pub depth: u32,
    /// Longest single transfer in bytes; longer blocks are moved in several transfers.
    pub split: u32,
    /// Whether to register the memory.
    pub register_buffers: bool,
    /// Seed of the order in which the blocks are moved; 0: from the first to the last.
    pub seed: u64,
}

/// The times of a run of the loop.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RawResult {
    /// Wall-clock time.
    pub elapsed: Duration,
    /// Processor time of the whole process.
    pub cpu: Duration,
    /// Bytes moved.
    pub bytes: u64,
}

impl RawLoop {
    /// A loop with the engine's settings.
    pub fn new(reading: bool, block_bytes: u32, blocks: u64, depth: u32) -> Self {
        Self {
            reading,
            block_bytes,
            blocks,
            first: 0,
            slots: blocks,
            depth,
            split: SPLIT,
            register_buffers: true,
            seed: 1,
        }
    }

    /// Moves the blocks between `file`, opened with O_DIRECT and long enough for reads, and the whole of
    /// `arena` in turn, like the engine: a few reused buffers would stay in the
    /// processor's caches, and be faster than any cache of blocks. Fails with the first error of
    /// any transfer.
    pub fn run(&self, file: BorrowedFd<'_>, arena: &Arc<Arena>) -> io::Result<RawResult> {
        let pieces = self.block_bytes.div_ceil(self.split);
        let ring = Ring::new(
            self.depth * pieces,
            &[file],
            Arc::clone(arena),
            self.register_buffers,
        )?;
        let buffers = arena.size() / u64::from(self.block_bytes);
        if buffers < u64::from(self.depth) {
            return Err(io::Error::other(
                "the arena is smaller than the transfers in flight",
            ));
        }
        let mut run = RawRun {
            options: *self,
            pieces,
            ring,
            blocks: Vec::new(),
            ready: VecDeque::new(),
            free: (0..buffers).collect(),
        };
        while run.ring.register_more() {}
        let order = shuffled(self.blocks, self.seed).map(|block| (self.first + block) % self.slots);
        let (start, cpu) = (Instant::now(), process_time());
        run.run(order)?;
        let bytes = self.blocks * u64::from(self.block_bytes);
        Ok(RawResult {
            elapsed: start.elapsed(),
            cpu: process_time() - cpu,
            bytes,
        })
    }
}

struct RawRun {
    options: RawLoop,
    pieces: u32,
    ring: Ring,
    blocks: Vec<RawBlock>,
    ready: VecDeque<(u32, u32)>,
    /// Buffers, the least recently used first.
    free: VecDeque<u64>,
}

/// A block in flight.
struct RawBlock {
    slot: u64,
    buffer: u64,
    unfinished: u32,
    pieces: Vec<Progress>,
}

impl RawRun {
    fn run(&mut self, mut order: impl Iterator<Item = u64>) -> io::Result<()> {
        for index in 0..self.options.depth {
            let Some(slot) = order.next() else { break };
            self.begin(index, slot);
        }
        while !self.ready.is_empty() || self.ring.pending() > 0 {
            if !self.waits_for_more() {
                self.push_ready();
            }
            self.ring.enter(None)?;
            while let Some((user_data, outcome)) = self.ring.reap() {
                let (index, piece) = ((user_data >> 32) as u32, user_data as u32);
                let block = &mut self.blocks[index as usize];
                match block.pieces[piece as usize].advance(outcome, self.options.reading) {
                    Next::Again => self.ready.push_back((index, piece)),
                    Next::Failed(fault) => {
                        self.drain()?;
                        return Err(io::Error::other(format!("a transfer failed: {fault:?}")));
                    }
                    Next::Done => {
                        block.unfinished -= 1;
                        if block.unfinished == 0 {
                            self.free.push_back(block.buffer);
                            if let Some(slot) = order.next() {
                                self.begin(index, slot);
                            }
                        }
                    }
                }
            }
        }
        Ok(())
    }

    fn begin(&mut self, index: u32, slot: u64) {
        let RawLoop {
            block_bytes, split, ..
        } = self.options;
        let pieces =
            (0..self.pieces).map(|piece| Progress::new(split.min(block_bytes - piece * split)));
        let block = RawBlock {
            slot,
            buffer: self.free.pop_front().unwrap_or(0),
            unfinished: self.pieces,
            pieces: pieces.collect(),
        };
        match self.blocks.get_mut(index as usize) {
            Some(ended) => *ended = block,
            None => self.blocks.push(block),
        }
        self.ready
            .extend((0..self.pieces).map(|piece| (index, piece)));
    }

    /// Whether writes are held back until the device can get several at once, as in the engine.
    fn waits_for_more(&self) -> bool {
        let RawLoop {
            reading,
            block_bytes,
            split,
            ..
        } = self.options;
        let bytes = |pieces: usize| pieces as u64 * u64::from(split.min(block_bytes));
        !reading
            && !is_many(self.ready.len(), bytes(self.ready.len()))
            && bytes(self.ring.pending()) >= BATCH_BYTES
    }

    fn push_ready(&mut self) {
        while self.ring.has_room()
            && let Some((index, piece)) = self.ready.pop_front()
        {
            let block = &self.blocks[index as usize];
            let progress = block.pieces[piece as usize];
            let within = u64::from(piece * self.options.split + progress.done());
            let block_bytes = u64::from(self.options.block_bytes);
            let transfer = RingTransfer {
                reading: self.options.reading,
                file: 0,
                file_offset: block.slot * block_bytes + within,
                buffer: Buffer::Arena(block.buffer * block_bytes + within),
                len: progress.remaining(),
            };
            self.ring
                .push_transfer(transfer, u64::from(index) << 32 | u64::from(piece));
        }
    }

    fn drain(&mut self) -> io::Result<()> {
        while self.ring.pending() > 0 {
            self.ring.enter(None)?;
            while self.ring.reap().is_some() {}
        }
        Ok(())
    }
}

/// Processor time of this process so far.
pub fn process_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(
        time.tv_sec.unsigned_abs(),
        time.tv_nsec.unsigned_abs() as u32,
    )
}

/// The numbers below `count` in an order that depends only on `seed` (0: ascending). For comparisons with the loop,
/// since the speed of the device depends on the order.
pub fn shuffled(count: u64, seed: u64) -> impl Iterator<Item = u64> {
    let mut order: Vec<u64> = (0..count).collect();
    let mut state = seed;
    let swapped = if seed == 0 { 1 } else { order.len() };
    for last in (1..swapped).rev() {
        // SplitMix64.
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let other = ((mixed ^ (mixed >> 31)) % (last as u64 + 1)) as usize;
        order.swap(last, other);
    }
    order.into_iter()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::open_file;

    #[test]
    fn every_block_is_moved_once() {
        if let Err(reason) = crate::probe_io_uring() {
            return eprintln!("not run: {reason}");
        }
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let (file, _) = open_file(&dir.path().join("raw"), true).unwrap();
        let arena = Arc::new(Arena::create(4 << 20).unwrap());
        arena.write(0, &[7; 4 << 20]).unwrap();
        let (block_bytes, blocks) = (96 << 10, 37);
        let mut raw = RawLoop::new(false, block_bytes, blocks, 32);
        raw.split = 40 << 10;
        let written = raw.run(std::os::fd::AsFd::as_fd(&file), &arena).unwrap();
        assert_eq!(written.bytes, blocks * u64::from(block_bytes));
        let stored = std::fs::read(dir.path().join("raw")).unwrap();
        assert!(stored == vec![7; blocks as usize * block_bytes as usize]);
        arena.write(0, &[0; 4 << 20]).unwrap();
        raw.reading = true;
        raw.run(std::os::fd::AsFd::as_fd(&file), &arena).unwrap();
        let used = blocks * u64::from(block_bytes);
        let read = arena.read(0, 4 << 20).unwrap();
        let (used, rest) = read.split_at(used as usize);
        assert!(
            used.iter().all(|byte| *byte == 7),
            "each buffer in its turn"
        );
        assert!(rest.iter().all(|byte| *byte == 0), "and no other");
        rustix::fs::ftruncate(&file, 1 << 20).unwrap();
        assert!(
            raw.run(std::os::fd::AsFd::as_fd(&file), &arena).is_err(),
            "past the end"
        );
    }

    #[test]
    fn the_order_is_a_permutation_of_the_seed() {
        let first: Vec<_> = shuffled(1000, 1).collect();
        assert_eq!(first, shuffled(1000, 1).collect::<Vec<_>>());
        assert_ne!(first, shuffled(1000, 2).collect::<Vec<_>>());
        let mut sorted = first;
        sorted.sort_unstable();
        assert_eq!(sorted, (0..1000).collect::<Vec<_>>());
    }
}
