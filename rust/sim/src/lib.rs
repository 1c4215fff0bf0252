//! Whole lives of the engine, from a seed.
//!
//! A world has a virtual clock, virtual devices that tear, reorder, lose, corrupt and delay, and
//! clients that look up, load, save, abort, vanish and come back. Everything follows from the seed.
//! The engine is real; its answers are compared with a plain model at every step ([`run`]):
//!
//! - every byte that a load copies is the byte that the client's own prefix, namespace and weights produce;
//! - a load gets exactly the blocks that the kinds of its groups need, and an answer can be loaded;
//! - a payload whose bytes in the arena change after its save matches no record on disk, and, where hits are
//!   verified, is never loaded;
//! - no slot, of the arena or of a device, has two owners; no payload is read twice at once;
//! - for any behaviour of the devices, every lookup is answered once all requests with earlier answers have finished;
//! - while devices deliver and there is memory, no lookup is given up, however long it waits for its turn;
//! - after a reset nothing from before it is found, also after a crash once the reset was durable;
//! - no entry of the engine does more than a bounded number of units of work;
//! - with room and without faults, everything that was saved is found, also after a restart;
//! - a namespace is forgotten only where there are more than places for them, never while a session uses it, and in the
//!   order of their use; it is never taken for another;
//! - an index that is built from events alone holds exactly the engine's payloads, and no event is redundant;
//! - the blocks of a pin are in some tier until the pin ends, and all pins together take no more than their budget;
//! - what an operator clears is found by no lookup from then on, and what is pinned or in use outlasts a clear by age;
//!   once the order is durable no restart finds it, after a loss of power neither, and erased bytes are gone;
//! - a part of a data file that has no space holds no payload;
//! - a life with a wrong wall clock makes no payload older;
//! - memory and space that are freed to the system hold no payload, and a tier has the size that an operator set once
//!   nothing is in use any more;
//! - a session whose weights change finds only blocks of its weights from then on; copies under way end where they began;
//! - a load or a save that is given up is counted by its reason and is no failure: its request is looked up again;
//! - an engine that drains begins no save and no promotion, and completes the drain;
//! - the objects of a remote store outlive their engine, and may be late, lost, changed or exchanged: they are used
//!   only if they are the requested objects; no operation of the store lasts longer than the engine;
//! - when all is over, nothing is left in use; and the engine's own invariants hold throughout.

use std::panic::{AssertUnwindSafe, catch_unwind};

mod arena;
mod brief;
mod client;
mod content;
mod device;
mod disks;
mod ends;
mod hints;
mod log;
mod model;
mod namespaces;
mod operator;
mod participants;
mod random;
mod remote;
mod settings;
mod shared;
mod surroundings;
mod transfers;
mod world;

/// Counts of a run, so that a test can tell that it tested something.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Runs.
    pub seeds: u64,
    /// Ends of a process without warning.
    pub crashes: u64,
    /// Crashes with loss of power.
    pub power_losses: u64,
    /// Orderly restarts.
    pub restarts: u64,
    /// Answers that promised a hit.
    pub hits: u64,
    /// Payloads compared with the model when a load copied them.
    pub blocks_checked: u64,
    /// Payloads read from disk.
    pub disk_reads: u64,
    /// Starts on a host with empty directories.
    pub moves: u64,
    /// Objects read from the remote store.
    pub remote_gets: u64,
    /// Tokens of loads from the remote store.
    pub remote_tokens: u64,
    /// Objects whose content did not match their names.
    pub remote_corrupt: u64,
    /// Objects that no key decrypted.
    pub remote_undecrypted: u64,
    /// Payloads saved.
    pub blocks_saved: u64,
    /// Payloads evicted from the arena.
    pub evictions: u64,
    /// Runs of pages that went to another size class.
    pub moved_runs: u64,
    /// Evicted payloads that were saved again below others that had stayed.
    pub filled_gaps: u64,
    /// Answers whose explanation was a block that was never seen.
    pub explained: u64,
    /// Payloads found on disk by an engine that starts.
    pub recovered: u64,
    /// Stops after which all saved blocks had to be on disk.
    pub complete_stops: u64,
    /// Resets.
    pub resets: u64,
    /// Sessions that went on in the namespace of other weights.
    pub renamed: u64,
    /// Loads that were given up.
    pub given_up_loads: u64,
    /// Saves that were given up.
    pub given_up_saves: u64,
    /// Namespaces that made room for others.
    pub forgotten: u64,
    /// Checksum mismatches that the device's faults caused.
    pub corruptions: u64,
    /// Devices that hung.
    pub hangs: u64,
    /// Directories that were given up when a life ended.
    pub given_up: u64,
    /// Starts with other directories than before.
    pub away: u64,
    /// Directories that could not be opened at a start.
    pub absent: u64,
    /// Absent directories that were opened later.
    pub late: u64,
    /// Payloads evicted from pages while nodes below kept payloads.
    pub gaps: u64,
    /// Bits that flipped in payloads in the arena.
    pub changes: u64,
    /// Changed payloads that the engine found before a hit or a write.
    pub changes_found: u64,
    /// Loads that copied changed payloads, where hits are not verified.
    pub changes_loaded: u64,
    /// Events that routers took.
    pub events: u64,
    /// Times at which all events were reported anew.
    pub events_cleared: u64,
    /// Comparisons of a router's index with the engine.
    pub routers_checked: u64,
    /// Orders to clear blocks.
    pub clears: u64,
    /// Clears after which nothing of a namespace was there.
    pub clears_checked: u64,
    /// Sizes that an operator set. `resizes_checked` counts the sizes that were reached after all clients had left.
    pub resizes: u64,
    /// See `resizes`.
    pub resizes_checked: u64,
    /// Pages that were freed to the system.
    pub released: u64,
    /// Blocks that could not be decrypted.
    pub undecrypted: u64,
    /// Pairs of records of encrypted stores whose slots somebody exchanged.
    pub exchanged: u64,
    /// Payloads erased from devices.
    pub erased: u64,
    /// Durable orders after which restarts were tried.
    pub promises: u64,
    /// Erased payloads whose bytes were looked for after a durable order.
    pub erased_checked: u64,
    /// Starts of a directory without some of its space.
    pub short_starts: u64,
    /// Tables that took no writes for a while.
    pub freezes: u64,
    /// Lives with a wrong wall clock.
    pub wrong_clocks: u64,
    /// Pairs of encrypted stores whose payloads somebody exchanged.
    pub exchanged_stores: u64,
    /// Hints that clients gave.
    pub hints: u64,
    /// Hints that began a pin.
    pub pins: u64,
    /// Pins whose blocks were looked for.
    pub pins_checked: u64,
    /// Units of work of the entry with the most work.
    pub most_units: u64,
}

impl Stats {
    /// Adds another run's numbers.
    pub fn add(&mut self, other: &Self) {
        self.seeds += other.seeds;
        self.crashes += other.crashes;
        self.power_losses += other.power_losses;
        self.restarts += other.restarts;
        self.hits += other.hits;
        self.blocks_checked += other.blocks_checked;
        self.disk_reads += other.disk_reads;
        self.moves += other.moves;
        self.remote_gets += other.remote_gets;
        self.remote_tokens += other.remote_tokens;
        self.remote_corrupt += other.remote_corrupt;
        self.remote_undecrypted += other.remote_undecrypted;
        self.blocks_saved += other.blocks_saved;
        self.evictions += other.evictions;
        self.moved_runs += other.moved_runs;
        self.filled_gaps += other.filled_gaps;
        self.explained += other.explained;
        self.recovered += other.recovered;
        self.complete_stops += other.complete_stops;
        self.resets += other.resets;
        self.renamed += other.renamed;
        self.given_up_loads += other.given_up_loads;
        self.given_up_saves += other.given_up_saves;
        self.forgotten += other.forgotten;
        self.corruptions += other.corruptions;
        self.hangs += other.hangs;
        self.given_up += other.given_up;
        self.away += other.away;
        self.absent += other.absent;
        self.late += other.late;
        self.gaps += other.gaps;
        self.changes += other.changes;
        self.changes_found += other.changes_found;
        self.changes_loaded += other.changes_loaded;
        self.events += other.events;
        self.events_cleared += other.events_cleared;
        self.routers_checked += other.routers_checked;
        self.resizes += other.resizes;
        self.resizes_checked += other.resizes_checked;
        self.released += other.released;
        self.clears += other.clears;
        self.clears_checked += other.clears_checked;
        self.undecrypted += other.undecrypted;
        self.exchanged += other.exchanged;
        self.erased += other.erased;
        self.promises += other.promises;
        self.erased_checked += other.erased_checked;
        self.short_starts += other.short_starts;
        self.freezes += other.freezes;
        self.wrong_clocks += other.wrong_clocks;
        self.exchanged_stores += other.exchanged_stores;
        self.hints += other.hints;
        self.pins += other.pins;
        self.pins_checked += other.pins_checked;
        self.most_units = self.most_units.max(other.most_units);
    }
}

/// A property that did not hold.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The seed that repeats the run.
    pub seed: u64,
    /// The property that does not hold.
    pub message: String,
    /// The last steps before it.
    pub trace: Vec<String>,
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for line in &self.trace {
            writeln!(f, "  {line}")?;
        }
        writeln!(f, "seed {}: {}", self.seed, self.message)?;
        write!(
            f,
            "replay: UNDERCROFT_SIM_SEED={} cargo test -p undercroft-sim replay -- --nocapture",
            self.seed
        )
    }
}

/// Steps that a failure shows, unless `UNDERCROFT_SIM_LINES` says otherwise.
const TRACE_LINES: usize = 80;

/// Runs a seed; if it fails, once more with a trace and the invariants checked at every step.
///
/// # Errors
/// The first property that did not hold.
pub fn run(seed: u64) -> Result<Stats, Box<Failure>> {
    match attempt(seed, false) {
        Ok(stats) => Ok(stats),
        Err(first) => match attempt(seed, true) {
            Err(second) => Err(second),
            Ok(_) => Err(first),
        },
    }
}

/// Runs a seed. Returns the sum of all its steps, of the engine's counters at the end of each life, and of the entry with
/// the most work: it differs if the engine does anything differently.
///
/// # Errors
/// The first property that did not hold.
pub fn sum_of(seed: u64) -> Result<u64, String> {
    let mut world = world::World::new(seed, false);
    world.log = log::Log::summed();
    world.run()?;
    Ok(world.log.sum().expect("the log is summed"))
}

fn attempt(seed: u64, traced: bool) -> Result<Stats, Box<Failure>> {
    let mut world = world::World::new(seed, traced);
    let result = catch_unwind(AssertUnwindSafe(|| world.run()));
    let message = match result {
        Ok(Ok(())) => return Ok(world.log.stats),
        Ok(Err(message)) => message,
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
            format!("the engine panicked: {}", text.unwrap_or("no message"))
        }
    };
    let lines = std::env::var("UNDERCROFT_SIM_LINES");
    let lines = lines.ok().and_then(|lines| lines.parse().ok());
    let from = world
        .log
        .trace
        .len()
        .saturating_sub(lines.unwrap_or(TRACE_LINES));
    Err(Box::new(Failure {
        seed,
        message,
        trace: world.log.trace.split_off(from),
    }))
}
