//! The load on the engine during a measurement: one thread that steps as a scheduler does, asking
//! and saving within each step and letting the IO thread work in between.

use std::collections::VecDeque;
use std::thread::sleep;
use std::time::{Duration, Instant};

use undercroft_contract::key::BlockHash;
use undercroft_contract::session::{LookupRequest, SaveRequest, Tokens};
use undercroft_driver::EngineAccess;
use undercroft_engine::Engine;

use crate::rig::{BLOCK_TOKENS, BenchError, PATIENCE, Rig, hash};

/// Time between two steps: shorter than a step of any model.
const STEP: Duration = Duration::from_millis(2);

/// Steps until `done` returns true. Returns how long that took.
pub(super) fn run(
    rig: &Rig,
    what: &str,
    mut done: impl FnMut(&mut Engine) -> bool,
) -> Result<Duration, BenchError> {
    let start = Instant::now();
    loop {
        match rig.driver.enter(&mut done) {
            Some(true) => return Ok(start.elapsed()),
            Some(false) if start.elapsed() < PATIENCE => sleep(STEP),
            _ => return Err(BenchError::Engine(format!("did not end: {what}"))),
        }
    }
}

/// Saves prefixes as the connector would, except that the bytes are in the arena already.
pub(super) struct Writer {
    /// Blocks of one prefix.
    pub(super) len: u64,
    /// Prefixes to save, by number.
    pub(super) next: u64,
    pub(super) end: u64,
    /// Blocks that may wait for the disk.
    pub(super) window: u64,
    /// Blocks on disk when it began.
    pub(super) written_before: u64,
    pub(super) saved: u64,
}

impl Writer {
    pub(super) fn new(rig: &Rig, prefixes: std::ops::Range<u64>, len: u64, window: u64) -> Self {
        let written = rig.driver.enter(|engine| engine.counters().disk_writes);
        Self {
            len,
            next: prefixes.start,
            end: prefixes.end,
            window,
            written_before: written.unwrap_or(0),
            saved: 0,
        }
    }

    /// Saves as many blocks as are allowed now, at most `most` in all. True when everything is on disk.
    pub(super) fn step(&mut self, rig: &Rig, engine: &mut Engine, most: u64) -> bool {
        let written = engine.counters().disk_writes - self.written_before;
        while self.next < self.end && self.saved + self.len <= most.min(written + self.window) {
            let hashes = prefix(self.next, self.len);
            let tokens = BLOCK_TOKENS * hashes.len() as u32;
            engine.lookup(
                rig.session,
                &LookupRequest::new("save", &hashes)
                    .max(Tokens(0))
                    .prefetch(),
            );
            let save = engine
                .begin_save(
                    rig.session,
                    &SaveRequest::new("save", &hashes, Tokens(tokens)),
                )
                .transfer;
            engine.finish_request(rig.session, "save");
            // The arena is full of blocks that wait for the disk.
            let Some(save) = save else { break };
            let blocks: usize = save.extents.iter().map(|extent| extent.offsets.len()).sum();
            engine.end_transfer(save.id, true);
            self.saved += blocks as u64;
            self.next += 1;
        }
        self.next == self.end && written >= self.saved
    }
}

/// The hashes of a prefix. Each has its own; they share none.
pub(super) fn prefix(number: u64, len: u64) -> Vec<BlockHash> {
    (0..len).map(|block| hash(number << 16 | block)).collect()
}

/// Looks prefixes up and loads them, each once.
pub(super) struct Reader {
    len: u64,
    order: std::vec::IntoIter<u64>,
    window: usize,
    under_way: VecDeque<(String, Vec<BlockHash>, Instant)>,
    count: u64,
    /// From lookup to answer, of full hits.
    pub(super) latencies: Vec<Duration>,
    pub(super) missed: u64,
}

impl Reader {
    /// Reads the prefixes in `order`, `window` at a time.
    pub(super) fn new(order: Vec<u64>, len: u64, window: usize) -> Self {
        Self {
            len,
            order: order.into_iter(),
            window,
            under_way: VecDeque::new(),
            count: 0,
            latencies: Vec::new(),
            missed: 0,
        }
    }

    /// Takes the answers, and asks for as much again. True when all are answered.
    pub(super) fn step(&mut self, rig: &Rig, engine: &mut Engine) -> bool {
        let session = rig.session;
        let all = BLOCK_TOKENS * self.len as u32;
        let (now, len) = (Instant::now(), self.len);
        self.under_way.retain(|(name, hashes, asked)| {
            match engine
                .lookup(session, &LookupRequest::new(name, &hashes))
                .tokens()
            {
                None => return true,
                Some(Tokens(found)) if found == all => {
                    self.latencies.push(now - *asked);
                    // A worker would copy now.
                    if let Some(load) = engine.begin_load(session, name, Tokens(0), Tokens(all)) {
                        engine.end_transfer(load.id, true);
                    }
                }
                Some(Tokens(_)) => self.missed += 1,
            }
            engine.finish_request(session, name);
            false
        });
        while self.under_way.len() < self.window
            && let Some(number) = self.order.next()
        {
            self.count += 1;
            let name = self.count.to_string();
            let hashes = prefix(number, len);
            engine.lookup(session, &LookupRequest::new(&name, &hashes).prefetch());
            self.under_way.push_back((name, hashes, Instant::now()));
        }
        self.under_way.is_empty()
    }

    /// Lookups that have ended.
    pub(super) fn answered(&self) -> u64 {
        self.latencies.len() as u64 + self.missed
    }

    /// # Errors
    /// If a lookup missed: the figures would mean nothing.
    pub(super) fn check(&self) -> Result<(), BenchError> {
        if self.missed > 0 {
            return Err(BenchError::Engine(format!(
                "missed {} of {} lookups, as it does when the device stands still for a second",
                self.missed,
                self.answered()
            )));
        }
        Ok(())
    }
}
