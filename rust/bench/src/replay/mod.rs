//! Replays a trace of prefix blocks and reports hit rates and insert rates.

mod engine;
mod trace;

use std::path::Path;
use std::time::{Duration, Instant};

use undercroft_contract::error::RegisterError;

pub use trace::{BLOCK_TOKENS, Trace, TraceError};
pub use undercroft_host::replay::{Options, ReplayEngine, reference_hits};

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReplayError {
    /// The trace cannot be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The engine refuses the capacity.
    #[error(transparent)]
    Engine(#[from] RegisterError),
}

/// A cache that a trace can be replayed on. It has no clock: an offered block is present at once.
pub trait ReplayCache {
    /// Serves a request: counts its leading blocks that are present, then offers each block to be
    /// stored. Returns the count.
    fn request(&mut self, blocks: &[u64]) -> usize;

    /// The decisions of each tier so far, from the upper one down.
    fn counts(&self) -> Vec<Counts>;
}

/// Decisions of one tier, in blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Blocks stored.
    pub inserted: u64,
    /// Blocks evicted for space.
    pub evicted: u64,
}

/// The result of a replay.
#[derive(Clone, Debug)]
pub struct Report {
    /// Requests replayed.
    pub requests: u64,
    /// Block references, the base of all shares.
    pub blocks: u64,
    /// Blocks hit under the prefix rule, in any tier.
    pub hits: u64,
    /// Decisions of each tier, from the upper one down.
    pub tiers: Vec<Counts>,
    /// Time spent in the cache.
    pub elapsed: Duration,
}

impl Report {
    /// Hits in percent of all block references.
    pub fn hit_percent(&self) -> f64 {
        self.percent(self.hits)
    }

    /// Blocks stored in a tier in percent of all block references.
    pub fn insert_percent(&self, tier: usize) -> f64 {
        self.percent(self.tiers.get(tier).map_or(0, |counts| counts.inserted))
    }

    /// Block references a second.
    pub fn accesses_per_second(&self) -> f64 {
        self.blocks as f64 / self.elapsed.as_secs_f64().max(1e-9)
    }

    fn percent(&self, blocks: u64) -> f64 {
        100.0 * blocks as f64 / (self.blocks as f64).max(1.0)
    }
}

/// Replays the trace in a file on an engine.
///
/// # Errors
/// If the file cannot be read as a trace, or the host tier is too small for an engine.
pub fn replay_file(path: &Path, options: &Options) -> Result<Report, ReplayError> {
    let trace = Trace::read(path)?;
    Ok(replay(&trace, &mut ReplayEngine::new(options)?))
}

/// Replays `trace` on `cache`, in order of arrival.
pub fn replay(trace: &Trace, cache: &mut impl ReplayCache) -> Report {
    let start = Instant::now();
    let mut requests = 0;
    let mut hits = 0;
    for blocks in trace.requests() {
        hits += cache.request(blocks) as u64;
        requests += 1;
    }
    let elapsed = start.elapsed();
    Report {
        requests,
        blocks: trace.blocks() as u64,
        hits,
        tiers: cache.counts(),
        elapsed,
    }
}
