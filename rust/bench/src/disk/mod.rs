//! The disk tier through the whole engine, checksums on, against the bare O_DIRECT loop of
//! [`undercroft_io::raw`] at the same depth and block size, alternating in the same run.
//!
//! Both write and read the same places of the same file, and only where something was written before. The
//! store is full, as it is for most of its life, and each new block takes the slot of an old one. On the
//! virtual disk that this was made on, two files of the same size differ by a third in speed all their
//! lives, and the first write to a place takes twice as long.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use undercroft_io::arena::{Arena, prefault_in_background};
use undercroft_io::raw::{RawLoop, shuffled};
use undercroft_io::{IoEngineChoice, open_file};

mod cold;
mod load;

use crate::rig::{BenchError, Rig, failed, mix, process_time};
use load::{Reader, Writer, run};

pub use cold::ColdReport;

/// Rounds of which the median is taken. Even: each order of the two equally often.
const ROUNDS: u64 = 8;
/// Lookups or saves under way for each operation in flight, so that the IO thread never lacks work
/// between two steps.
const WINDOW: u32 = 4;
/// The same for saves of the write part, which are faster: 2 ms of writes of 128 KiB are a hundred.
const WRITE_WINDOW: u32 = 8;
/// Arena, in blocks for each operation in flight: blocks being moved, waiting, and being looked up.
const ARENA_BLOCKS: u64 = 16;
/// Writes for each read of the mixed part, as a fraction: 30 to 70.
const MIXED: (u64, u64) = (3, 7);

/// A measurement's options.
#[derive(Clone, Debug)]
pub struct DiskBench {
    /// Payload of one block, in bytes; a multiple of 4096.
    pub block_bytes: u32,
    /// Blocks written, then read, in each round.
    pub blocks: u64,
    /// Operations in flight.
    pub depth: u32,
    /// Which IO engine.
    pub io_engine: IoEngineChoice,
    /// File with the key that blocks are encrypted with; empty if they are not encrypted.
    pub key_file: PathBuf,
}

/// Medians over the rounds. Speeds in 10^9 bytes a second, times in milliseconds.
#[derive(Clone, Debug, Serialize)]
pub struct DiskReport {
    /// As asked for.
    pub block_bytes: u32,
    /// As asked for.
    pub blocks: u64,
    /// As asked for.
    pub depth: u32,
    /// Through the engine: from the first save to the last block on disk, all in the place of others.
    pub write_gbps: f64,
    /// Through the engine: from the first lookup to the last answer.
    pub read_gbps: f64,
    /// The bare loop.
    pub raw_write_gbps: f64,
    /// The bare loop.
    pub raw_read_gbps: f64,
    /// The engine's part of the bare loop's speed in the same round.
    pub write_share: f64,
    /// The engine's part of the bare loop's speed in the same round.
    pub read_share: f64,
    /// From a lookup to its answer, with four times `depth` lookups under way.
    pub read_p50_ms: f64,
    /// The same, of the slowest hundredth.
    pub read_p99_ms: f64,
    /// The same while blocks are written, three for seven that are read.
    pub mixed_read_p99_ms: f64,
    /// That, as a multiple of the same round's without writes.
    pub mixed_p99_ratio: f64,
    /// Reads and writes together, meanwhile.
    pub mixed_gbps: f64,
    /// Processor time of the whole process for each 10^9 bytes written or read by the engine.
    pub cpu_s_per_gb: f64,
    /// The same for bytes written.
    pub write_cpu_s_per_gb: f64,
    /// The same for bytes read.
    pub read_cpu_s_per_gb: f64,
    /// The same for bytes written by the bare loop.
    pub raw_write_cpu_s_per_gb: f64,
    /// The same for bytes read by the bare loop.
    pub raw_read_cpu_s_per_gb: f64,
    /// "io_uring" or "thread_pool".
    pub io_engine: &'static str,
    /// Whether the page cache was bypassed.
    pub o_direct: bool,
    /// Whether transfers use registered memory.
    pub registered_buffers: bool,
    /// Requests that come at once for prefixes of six blocks on disk.
    pub cold: Vec<ColdReport>,
}

#[derive(Default)]
struct Round {
    write_s: f64,
    read_s: f64,
    raw_write_s: f64,
    raw_read_s: f64,
    write_cpu_s: f64,
    read_cpu_s: f64,
    raw_write_cpu_s: f64,
    raw_read_cpu_s: f64,
    p50_ms: f64,
    p99_ms: f64,
    mixed_s: f64,
    mixed_p99_ms: f64,
    io_engine: &'static str,
    o_direct: bool,
    registered_buffers: bool,
}

impl DiskBench {
    /// Measures in `dir`, an empty directory, and leaves nothing behind there.
    ///
    /// # Errors
    /// If the directory, the memory or the device cannot be used as asked.
    pub fn run(&self, dir: &Path) -> Result<DiskReport, BenchError> {
        self.check()?;
        let arena = self.arena()?;
        let store = dir.join("store");
        self.fill(&store, &arena)?;
        let mut rounds = Vec::new();
        for index in 0..ROUNDS {
            let mut round = Round::default();
            // Neither always goes first. The bare loop overwrites the engine's blocks.
            if index % 2 == 0 {
                self.raw(&store, index, &arena, &mut round)?;
                self.engine(&store, index, &arena, &mut round)?;
            } else {
                self.engine(&store, index, &arena, &mut round)?;
                self.raw(&store, index, &arena, &mut round)?;
            }
            rounds.push(round);
        }
        std::fs::remove_dir_all(&store).map_err(failed("removing the store"))?;
        Ok(self.report(&rounds, cold::measure(self, dir, &arena)?))
    }

    fn engine(
        &self,
        store: &Path,
        index: u64,
        arena: &Arc<Arena>,
        round: &mut Round,
    ) -> Result<(), BenchError> {
        let first = self.filled() + index * (self.blocks + self.more());
        self.write(store, first, arena, round)?;
        self.read(store, first, arena, round)?;
        self.mixed(store, first, arena, round)
    }

    fn check(&self) -> Result<(), BenchError> {
        if self.block_bytes == 0 || !self.block_bytes.is_multiple_of(4096) {
            let value = u64::from(self.block_bytes);
            return Err(BenchError::Argument {
                name: "block_bytes",
                value,
                allowed: "a multiple of 4096",
            });
        }
        if self.blocks < u64::from(self.depth) || self.depth == 0 {
            let value = self.blocks;
            return Err(BenchError::Argument {
                name: "blocks",
                value,
                allowed: "at least the depth",
            });
        }
        Ok(())
    }

    fn bytes(&self, blocks: u64) -> u64 {
        blocks * u64::from(self.block_bytes)
    }

    /// Writes every place once.
    fn fill(&self, store: &Path, arena: &Arc<Arena>) -> Result<(), BenchError> {
        let rig = self.open(store, self.capacity(), arena)?;
        let mut writer = Writer::new(&rig, 0..self.filled(), 1, self.window());
        run(&rig, "filling the store", |engine| {
            writer.step(&rig, engine, u64::MAX)
        })?;
        rig.close()
    }

    /// The bare loop, about where the engine writes in the same round.
    fn raw(
        &self,
        store: &Path,
        index: u64,
        arena: &Arc<Arena>,
        round: &mut Round,
    ) -> Result<(), BenchError> {
        let (file, o_direct) =
            open_file(&store.join("data"), false).map_err(failed("opening the data file"))?;
        round.o_direct = o_direct;
        let mut raw = RawLoop::new(false, self.block_bytes, self.blocks, self.depth);
        raw.slots = rustix::fs::fstat(&file)
            .map_err(|errno| failed("measuring the data file")(errno.into()))?
            .st_size as u64
            / u64::from(self.block_bytes);
        raw.first = (self.filled() + index * (self.blocks + self.more())) % raw.slots;
        // Slots come free in the order in which they were filled.
        raw.seed = 0;
        let written = raw
            .run(file.as_fd(), arena)
            .map_err(failed("the bare loop"))?;
        (raw.reading, raw.seed) = (true, READ_ORDER);
        let read = raw
            .run(file.as_fd(), arena)
            .map_err(failed("the bare loop"))?;
        round.raw_write_s = written.elapsed.as_secs_f64();
        round.raw_write_cpu_s = written.cpu.as_secs_f64();
        round.raw_read_s = read.elapsed.as_secs_f64();
        round.raw_read_cpu_s = read.cpu.as_secs_f64();
        Ok(())
    }

    /// The memory of all parts, populated before: page faults must not count as the device's time.
    fn arena(&self) -> Result<Arc<Arena>, BenchError> {
        let size = self.bytes(ARENA_BLOCKS * u64::from(self.depth)) + (64 << 20);
        let arena = Arc::new(Arena::create(size)?);
        prefault_in_background(Arc::clone(&arena))
            .map_err(failed("starting the prefault"))?
            .join();
        fill(&arena)?;
        Ok(arena)
    }

    fn open(&self, store: &Path, capacity: u64, arena: &Arc<Arena>) -> Result<Rig, BenchError> {
        Rig::open(
            store,
            capacity,
            Arc::clone(arena),
            self.depth as usize,
            self.block_bytes,
            (self.io_engine, &self.key_file),
        )
    }

    /// Beside the payloads, the capacity holds tables and partly used pages.
    fn capacity(&self) -> u64 {
        self.bytes(self.blocks + self.more()) + (256 << 20)
    }

    /// Blocks that fill the store.
    fn filled(&self) -> u64 {
        self.capacity().div_ceil(u64::from(self.block_bytes))
    }

    /// Blocks that the mixed part adds.
    fn more(&self) -> u64 {
        self.blocks * MIXED.0 / MIXED.1
    }

    fn window(&self) -> u64 {
        u64::from(WINDOW * self.depth)
    }

    fn write(
        &self,
        store: &Path,
        first: u64,
        arena: &Arc<Arena>,
        round: &mut Round,
    ) -> Result<(), BenchError> {
        let rig = self.open(store, self.capacity(), arena)?;
        (round.io_engine, round.registered_buffers) =
            (rig.io().engine, rig.io().registered_buffers);
        let window = u64::from(WRITE_WINDOW * self.depth);
        let mut writer = Writer::new(&rig, first..first + self.blocks, 1, window);
        let cpu = process_time();
        let elapsed = run(&rig, "saving", |engine| writer.step(&rig, engine, u64::MAX))?;
        (round.write_s, round.write_cpu_s) = (elapsed.as_secs_f64(), process_time() - cpu);
        rig.close()
    }

    /// Opened anew, the host tier is empty: every block comes from the device.
    fn reopen(
        &self,
        store: &Path,
        first: u64,
        arena: &Arc<Arena>,
    ) -> Result<(Rig, Reader), BenchError> {
        let rig = self.open(store, self.capacity(), arena)?;
        let found = rig.blocks_recovered();
        if found < self.blocks {
            let blocks = self.blocks;
            return Err(BenchError::Engine(format!(
                "recovered {found} blocks, of {blocks} at least"
            )));
        }
        let order = shuffled(self.blocks, READ_ORDER)
            .map(|block| first + block)
            .collect();
        Ok((rig, Reader::new(order, 1, self.window() as usize)))
    }

    fn read(
        &self,
        store: &Path,
        first: u64,
        arena: &Arc<Arena>,
        round: &mut Round,
    ) -> Result<(), BenchError> {
        let (rig, mut reader) = self.reopen(store, first, arena)?;
        let cpu = process_time();
        let elapsed = run(&rig, "reading", |engine| reader.step(&rig, engine))?;
        (round.read_s, round.read_cpu_s) = (elapsed.as_secs_f64(), process_time() - cpu);
        reader.check()?;
        (round.p50_ms, round.p99_ms) = percentiles(&reader.latencies);
        rig.close()
    }

    fn mixed(
        &self,
        store: &Path,
        first: u64,
        arena: &Arc<Arena>,
        round: &mut Round,
    ) -> Result<(), BenchError> {
        let (rig, mut reader) = self.reopen(store, first, arena)?;
        let added = first + self.blocks..first + self.blocks + self.more();
        let mut writer = Writer::new(&rig, added, 1, self.window());
        let elapsed = run(&rig, "reading and writing", |engine| {
            let all_read = reader.step(&rig, engine);
            let most = reader.answered() * MIXED.0 / MIXED.1 + 1;
            writer.step(&rig, engine, most) && all_read
        })?;
        reader.check()?;
        round.mixed_s = elapsed.as_secs_f64();
        (_, round.mixed_p99_ms) = percentiles(&reader.latencies);
        rig.close()
    }

    fn report(&self, rounds: &[Round], cold: Vec<ColdReport>) -> DiskReport {
        let gb = self.bytes(self.blocks) as f64 / 1e9;
        let mixed_gb = gb * (1.0 + MIXED.0 as f64 / MIXED.1 as f64);
        let median = |of: &dyn Fn(&Round) -> f64| middle(rounds.iter().map(of).collect());
        let last = &rounds[rounds.len() - 1];
        DiskReport {
            block_bytes: self.block_bytes,
            blocks: self.blocks,
            depth: self.depth,
            write_gbps: median(&|round| gb / round.write_s),
            read_gbps: median(&|round| gb / round.read_s),
            raw_write_gbps: median(&|round| gb / round.raw_write_s),
            raw_read_gbps: median(&|round| gb / round.raw_read_s),
            write_share: median(&|round| round.raw_write_s / round.write_s),
            read_share: median(&|round| round.raw_read_s / round.read_s),
            read_p50_ms: median(&|round| round.p50_ms),
            read_p99_ms: median(&|round| round.p99_ms),
            mixed_read_p99_ms: median(&|round| round.mixed_p99_ms),
            mixed_p99_ratio: median(&|round| round.mixed_p99_ms / round.p99_ms),
            mixed_gbps: median(&|round| mixed_gb / round.mixed_s),
            cpu_s_per_gb: median(&|round| (round.write_cpu_s + round.read_cpu_s) / (2.0 * gb)),
            write_cpu_s_per_gb: median(&|round| round.write_cpu_s / gb),
            read_cpu_s_per_gb: median(&|round| round.read_cpu_s / gb),
            raw_write_cpu_s_per_gb: median(&|round| round.raw_write_cpu_s / gb),
            raw_read_cpu_s_per_gb: median(&|round| round.raw_read_cpu_s / gb),
            io_engine: last.io_engine,
            o_direct: last.o_direct,
            registered_buffers: last.registered_buffers,
            cold,
        }
    }
}

/// Fixes the order in which both read.
const READ_ORDER: u64 = 1;

/// Median and 99th percentile, in milliseconds.
fn percentiles(latencies: &[Duration]) -> (f64, f64) {
    let mut sorted: Vec<f64> = latencies
        .iter()
        .map(|latency| latency.as_secs_f64() * 1e3)
        .collect();
    sorted.sort_by(f64::total_cmp);
    let at = |percent: usize| sorted.get(sorted.len() * percent / 100);
    (
        at(50).copied().unwrap_or(0.0),
        at(99).copied().unwrap_or(0.0),
    )
}

/// Fills the memory with bytes that no device can compress or leave out.
fn fill(arena: &Arena) -> Result<(), BenchError> {
    let mut page = vec![0; 1 << 20];
    for (index, word) in (0u64..).zip(page.chunks_exact_mut(8)) {
        word.copy_from_slice(&mix(index).to_le_bytes());
    }
    let mut offset = 0;
    while offset < arena.size() {
        page[..8].copy_from_slice(&offset.to_le_bytes());
        let len = usize::try_from(arena.size() - offset)
            .unwrap_or(usize::MAX)
            .min(page.len());
        arena
            .write(offset, &page[..len])
            .map_err(|error| failed("filling the arena")(std::io::Error::other(error)))?;
        offset += len as u64;
    }
    Ok(())
}

/// The median.
fn middle(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let (lower, upper) = (values[(values.len() - 1) / 2], values[values.len() / 2]);
    f64::midpoint(lower, upper)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_run_writes_and_reads_every_block_and_leaves_nothing() {
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let report = DiskBench {
            block_bytes: 64 << 10,
            blocks: 40,
            depth: 4,
            io_engine: IoEngineChoice::Auto,
            key_file: PathBuf::new(),
        }
        .run(dir.path())
        .unwrap();
        assert!(
            report.write_gbps > 0.0
                && report.read_gbps > 0.0
                && report.read_p99_ms >= report.read_p50_ms
        );
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn arguments_that_make_no_sense_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let refused = |block_bytes, blocks| {
            DiskBench {
                block_bytes,
                blocks,
                depth: 4,
                io_engine: IoEngineChoice::Auto,
                key_file: PathBuf::new(),
            }
            .run(dir.path())
            .unwrap_err()
            .to_string()
        };
        assert!(refused(1000, 40).contains("block_bytes is 1000"));
        assert!(refused(4096, 3).contains("blocks is 3"));
    }
}
