//! The disk tier through the whole engine, checksums on, against the bare O_DIRECT loop of
//! [`undercroft_core::io::raw`] at the same depth and block size, alternating in the same run.

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::FallocateFlags;
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;
use undercroft_core::arena::Arena;
use undercroft_core::engine::{Answer, Engine};
use undercroft_core::io::open_file;
use undercroft_core::io::raw::RawLoop;

use crate::rig::{BLOCK_TOKENS, BenchError, PATIENCE, Rig, failed, hash, mix};

/// Rounds of which the median is taken.
const ROUNDS: usize = 3;
/// Lookups under way for each operation in flight, so that the IO thread never lacks work.
const WINDOW: usize = 2;
/// Arena, in blocks for each operation in flight: blocks being moved, waiting, and being looked up.
const ARENA_BLOCKS: u64 = 8;

/// What to measure.
#[derive(Clone, Copy, Debug)]
pub struct DiskBench {
    /// Payload of one block, in bytes; a multiple of 4096.
    pub block_bytes: u32,
    /// Blocks written, then read, in each round.
    pub blocks: u64,
    /// Operations in flight.
    pub depth: u32,
}

/// Medians over the rounds. Speeds in 10^9 bytes a second, times of one block in milliseconds.
#[derive(Clone, Debug, Serialize)]
pub struct DiskReport {
    /// As asked for.
    pub block_bytes: u32,
    /// As asked for.
    pub blocks: u64,
    /// As asked for.
    pub depth: u32,
    /// Through the engine: from the first save to the last block on disk.
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
    /// From a lookup to its answer, with twice `depth` lookups under way.
    pub read_p50_ms: f64,
    /// The same, of the slowest hundredth.
    pub read_p99_ms: f64,
    /// Processor time of the whole process for each 10^9 bytes written or read by the engine.
    pub cpu_s_per_gb: f64,
    /// "io_uring" or "thread_pool".
    pub io_engine: &'static str,
    /// Whether the page cache was bypassed.
    pub o_direct: bool,
}

#[derive(Default)]
struct Round {
    write_s: f64,
    read_s: f64,
    raw_write_s: f64,
    raw_read_s: f64,
    cpu_s: f64,
    latencies: Vec<Duration>,
}

impl DiskBench {
    /// Measures in `dir`, an empty directory, and leaves nothing behind there.
    ///
    /// # Errors
    /// If the directory, the memory or the device cannot be used as asked.
    pub fn run(&self, dir: &Path) -> Result<DiskReport, BenchError> {
        self.check()?;
        let mut rounds = Vec::new();
        let (mut io_engine, mut o_direct) = ("", false);
        for index in 0..ROUNDS {
            let mut round = Round::default();
            // Neither always goes first: the first may find the device's caches empty.
            if index % 2 == 0 {
                o_direct = self.raw(dir, &mut round)?;
                io_engine = self.engine(dir, &mut round)?;
            } else {
                io_engine = self.engine(dir, &mut round)?;
                o_direct = self.raw(dir, &mut round)?;
            }
            rounds.push(round);
        }
        Ok(self.report(&rounds, io_engine, o_direct))
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

    fn raw(&self, dir: &Path, round: &mut Round) -> Result<bool, BenchError> {
        let path = dir.join("raw");
        let (file, o_direct) = open_file(&path, true).map_err(failed("making the raw file"))?;
        let bytes = self.blocks * u64::from(self.block_bytes);
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, bytes)
            .map_err(|errno| failed("preallocating the raw file")(errno.into()))?;
        let arena = Arc::new(Arena::create(
            u64::from(self.depth) * u64::from(self.block_bytes),
        )?);
        fill(&arena)?;
        for (reading, seconds) in [
            (false, &mut round.raw_write_s),
            (true, &mut round.raw_read_s),
        ] {
            let raw = RawLoop::new(reading, self.block_bytes, self.blocks, self.depth);
            let result = raw
                .run(file.as_fd(), &arena)
                .map_err(failed("the bare loop"))?;
            *seconds = result.elapsed.as_secs_f64();
        }
        std::fs::remove_file(&path).map_err(failed("removing the raw file"))?;
        Ok(o_direct)
    }

    fn engine(&self, dir: &Path, round: &mut Round) -> Result<&'static str, BenchError> {
        let store = dir.join("store");
        let payload = self.blocks * u64::from(self.block_bytes);
        // Beside the payloads, the capacity holds tables and partly used pages.
        let capacity = payload + payload / 8 + (256 << 20);
        let host = ARENA_BLOCKS * u64::from(self.depth) * u64::from(self.block_bytes) + (64 << 20);
        let open = || {
            Rig::open(
                &store,
                capacity,
                host,
                self.depth as usize,
                self.block_bytes,
            )
        };
        let rig = open()?;
        fill(&rig.arena)?;
        let cpu = process_time();
        round.write_s = self.write(&rig)?.as_secs_f64();
        round.cpu_s = process_time() - cpu;
        rig.shell.stop(PATIENCE);
        drop(rig);
        // Opened anew, the host tier is empty: every block comes from the device.
        let rig = open()?;
        if rig.recovery.blocks != self.blocks {
            let found = rig.recovery.blocks;
            return Err(BenchError::Engine(format!(
                "recovered {found} of {} blocks",
                self.blocks
            )));
        }
        // Memory that the kernel has not given yet is no part of the device's speed.
        fill(&rig.arena)?;
        let cpu = process_time();
        (round.read_s, round.latencies) = self.read(&rig)?;
        round.cpu_s += process_time() - cpu;
        let io_engine = rig.io_engine;
        rig.shell.stop(PATIENCE);
        drop(rig);
        std::fs::remove_dir_all(&store).map_err(failed("removing the store"))?;
        Ok(io_engine)
    }

    /// Saves every block as the connector would, except that the bytes are in the arena already.
    fn write(&self, rig: &Rig) -> Result<Duration, BenchError> {
        let start = Instant::now();
        let window = (WINDOW * self.depth as usize) as u64;
        let mut next = 0;
        let done = rig.shell.wait_until(PATIENCE, |engine| {
            let counters = engine.counters();
            let failed = counters.write_failures > 0 || counters.refused_write_rate > 0;
            // What waits to be written is bounded, in the engine too.
            while next < self.blocks && next < engine.counters().disk_writes + window {
                let hashes = vec![hash(next)];
                let save = engine.begin_save(rig.session, "save", &hashes, BLOCK_TOKENS, &[]);
                let Some(save) = save else { break };
                engine.end_transfer(save.id, true);
                next += 1;
            }
            failed || engine.counters().disk_writes >= self.blocks
        });
        let elapsed = start.elapsed();
        let written = rig
            .shell
            .enter(|engine| engine.counters().disk_writes)
            .unwrap_or(0);
        if !done || written < self.blocks {
            return Err(BenchError::Engine(format!(
                "wrote {written} of {} blocks",
                self.blocks
            )));
        }
        Ok(elapsed)
    }

    fn read(&self, rig: &Rig) -> Result<(f64, Vec<Duration>), BenchError> {
        let mut reader = Reader::new(rig, self.blocks, WINDOW * self.depth as usize);
        let start = Instant::now();
        let done = rig.shell.wait_until(PATIENCE, |engine| reader.turn(engine));
        let elapsed = start.elapsed();
        if !done || reader.missed > 0 {
            let (missed, done) = (reader.missed, reader.latencies.len());
            return Err(BenchError::Engine(format!(
                "answered {done} lookups and missed {missed}"
            )));
        }
        Ok((elapsed.as_secs_f64(), reader.latencies))
    }

    fn report(&self, rounds: &[Round], io_engine: &'static str, o_direct: bool) -> DiskReport {
        let gb = self.blocks as f64 * f64::from(self.block_bytes) / 1e9;
        let median = |of: &dyn Fn(&Round) -> f64| middle(rounds.iter().map(of).collect());
        let mut latencies: Vec<f64> = rounds
            .iter()
            .flat_map(|round| &round.latencies)
            .map(|time| time.as_secs_f64() * 1e3)
            .collect();
        latencies.sort_by(f64::total_cmp);
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
            read_p50_ms: latencies[latencies.len() / 2],
            read_p99_ms: latencies[latencies.len() * 99 / 100],
            cpu_s_per_gb: median(&|round| round.cpu_s / (2.0 * gb)),
            io_engine,
            o_direct,
        }
    }
}

/// Looks every block up once, in an order that has nothing to do with that of writing.
struct Reader<'a> {
    rig: &'a Rig,
    order: std::vec::IntoIter<u64>,
    window: usize,
    under_way: VecDeque<(String, u64, Instant)>,
    latencies: Vec<Duration>,
    missed: u64,
}

impl<'a> Reader<'a> {
    fn new(rig: &'a Rig, blocks: u64, window: usize) -> Self {
        let mut order: Vec<u64> = (0..blocks).collect();
        order.sort_by_key(|&index| mix(index ^ 0x5bd1_e995));
        Self {
            rig,
            order: order.into_iter(),
            window,
            under_way: VecDeque::new(),
            latencies: Vec::new(),
            missed: 0,
        }
    }

    /// Takes what is answered, and asks for as much again. True when all are answered.
    fn turn(&mut self, engine: &mut Engine) -> bool {
        let session = self.rig.session;
        let now = Instant::now();
        self.under_way.retain(|(name, index, asked)| {
            match engine.poll(session, name, &vec![hash(*index)], 0, u32::MAX) {
                Answer::Pending => return true,
                Answer::Ready(BLOCK_TOKENS) => self.latencies.push(now - *asked),
                Answer::Ready(_) => self.missed += 1,
            }
            engine.discard(session, name);
            false
        });
        while self.under_way.len() < self.window
            && let Some(index) = self.order.next()
        {
            let name = index.to_string();
            engine.submit(session, &name, &vec![hash(index)], 0, u32::MAX);
            self.under_way.push_back((name, index, Instant::now()));
        }
        self.under_way.is_empty()
    }
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

/// Processor time of this process so far, in seconds.
fn process_time() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// The median; of two in the middle, the upper.
fn middle(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
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
            }
            .run(dir.path())
            .unwrap_err()
            .to_string()
        };
        assert!(refused(1000, 40).contains("block_bytes is 1000"));
        assert!(refused(4096, 3).contains("blocks is 3"));
    }
}
