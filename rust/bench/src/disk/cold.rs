//! Many requests at once for prefixes that lie on disk only.

use std::path::Path;
use std::sync::Arc;

use serde::Serialize;
use undercroft_driver::EngineAccess;
use undercroft_io::arena::Arena;

use super::DiskBench;
use super::load::{Reader, Writer, run};
use crate::rig::{BenchError, Rig};

/// Blocks of one prefix.
const LEN: u64 = 6;
/// Requests at once.
const REQUESTS: [u64; 3] = [1, 8, 32];

/// Outcome of requests that came at once.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct ColdReport {
    /// How many.
    pub requests: u64,
    /// For how many different prefixes.
    pub prefixes: u64,
    /// How many got their whole prefix.
    pub full_hits: u64,
    /// Bytes of the prefixes, each counted once.
    pub bytes_asked: u64,
    /// Bytes read from the device.
    pub bytes_read: u64,
    /// Until the last had its answer, in milliseconds.
    pub last_ms: f64,
}

/// Distinct prefixes, and the same number of requests for one prefix.
pub(super) fn measure(
    bench: &DiskBench,
    dir: &Path,
    arena: &Arc<Arena>,
) -> Result<Vec<ColdReport>, BenchError> {
    let store = dir.join("cold");
    let total: u64 = REQUESTS.iter().map(|requests| requests + 1).sum();
    let block = u64::from(bench.block_bytes);
    let capacity = total * LEN * block * 5 / 4 + (256 << 20);
    let rig = bench.open(&store, capacity, arena)?;
    let mut writer = Writer::new(&rig, 0..total, LEN, 4 * u64::from(bench.depth));
    run(&rig, "saving the prefixes", |engine| {
        writer.step(&rig, engine, u64::MAX)
    })?;
    rig.close()?;
    let mut reports = Vec::new();
    let mut next = 0;
    for requests in REQUESTS {
        for prefixes in [requests, 1] {
            // Opened anew, the host tier is empty.
            let rig = bench.open(&store, capacity, arena)?;
            reports.push(ask(&rig, requests, next..next + prefixes, block)?);
            rig.close()?;
            next += prefixes;
        }
    }
    std::fs::remove_dir_all(&store).map_err(crate::rig::failed("removing the store"))?;
    Ok(reports)
}

fn ask(
    rig: &Rig,
    requests: u64,
    prefixes: std::ops::Range<u64>,
    block: u64,
) -> Result<ColdReport, BenchError> {
    let count = prefixes.end - prefixes.start;
    let order = prefixes.clone().cycle().take(requests as usize).collect();
    let mut reader = Reader::new(order, LEN, requests as usize);
    let elapsed = run(rig, "cold prefixes", |engine| reader.step(rig, engine))?;
    let read = rig.driver.enter(|engine| engine.counters().disk_read_bytes);
    Ok(ColdReport {
        requests,
        prefixes: count,
        full_hits: reader.latencies.len() as u64,
        bytes_asked: count * LEN * block,
        bytes_read: read.unwrap_or(0),
        last_ms: elapsed.as_secs_f64() * 1e3,
    })
}
