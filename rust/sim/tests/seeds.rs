//! Thousands of lives in every test run; one of them again by its seed.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use undercroft_sim::{Stats, run};

const SEEDS: u64 = 6000;

/// Runs seeds on two threads; stops at the first failure.
fn run_all(seeds: std::ops::Range<u64>) -> Stats {
    let next = AtomicU64::new(seeds.start);
    let total = Mutex::new(Stats::default());
    let failure = Mutex::new(None);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds.end {
                        return;
                    }
                    match run(seed) {
                        Ok(stats) => total.lock().expect("no thread panicked").add(&stats),
                        Err(found) => {
                            next.store(seeds.end, Ordering::Relaxed);
                            failure
                                .lock()
                                .expect("no thread panicked")
                                .get_or_insert(found);
                        }
                    }
                }
            });
        }
    });
    if let Some(failure) = failure.into_inner().expect("no thread panicked") {
        panic!("\n{failure}\n");
    }
    total.into_inner().expect("no thread panicked")
}

#[test]
fn lives() {
    let stats = run_all(0..SEEDS);
    println!("{stats:?}");
    assert!(stats.crashes >= 10_000, "too few crashes: {stats:?}");
    assert!(stats.blocks_checked > 100_000, "too few loads: {stats:?}");
    assert!(stats.corruptions > 100, "too few faults: {stats:?}");
    assert!(stats.moved_runs > 1000, "too few moved pages: {stats:?}");
    assert!(stats.exchanged > 1000, "too few exchanges: {stats:?}");
    assert!(stats.undecrypted > 300, "too few bad keys: {stats:?}");
    let other_keys = stats.remote_undecrypted;
    assert!(other_keys > 50, "too few other keys: {stats:?}");
    assert!(stats.gaps > 200, "too few gaps: {stats:?}");
    assert!(stats.filled_gaps > 0, "too few gaps: {stats:?}");
    assert!(stats.given_up > 20, "too few given up: {stats:?}");
    assert!(stats.late > 500, "too few late directories: {stats:?}");
    assert!(stats.explained > 0, "no answer was explained: {stats:?}");
    assert!(stats.changes_found > 400, "too few changes: {stats:?}");
    assert!(stats.changes_loaded > 100, "too few changes: {stats:?}");
    assert!(stats.routers_checked > 10_000, "too few routers: {stats:?}");
    assert!(stats.pins > 5000, "too few pins: {stats:?}");
    assert!(stats.pins_checked > 2000, "too few pins: {stats:?}");
    assert!(stats.events_cleared > 10_000, "too few cleared: {stats:?}");
    assert!(stats.forgotten > 10_000, "too few namespaces: {stats:?}");
    assert!(stats.clears > 1500, "too few clears: {stats:?}");
    assert!(stats.clears_checked > 1500, "too few clears: {stats:?}");
    assert!(stats.resizes > 400, "too few resizes: {stats:?}");
    assert!(stats.released > 400, "too little released: {stats:?}");
    assert!(stats.erased > 1000, "too few erasures: {stats:?}");
    assert!(stats.promises > 300, "too few durable clears: {stats:?}");
    assert!(stats.erased_checked > 50, "too few erasures: {stats:?}");
    assert!(stats.short_starts > 100, "too few holes: {stats:?}");
    assert!(stats.freezes > 500, "too few tables: {stats:?}");
    assert!(stats.wrong_clocks > 200, "too few clocks: {stats:?}");
    assert!(stats.exchanged_stores > 10, "too few exchanges: {stats:?}");
}

/// `UNDERCROFT_SIM_SEED=N cargo test -p undercroft-sim replay -- --nocapture`
#[test]
fn replay() {
    let seed = std::env::var("UNDERCROFT_SIM_SEED");
    let seed = seed.map_or(0, |seed| {
        seed.parse().expect("UNDERCROFT_SIM_SEED is a number")
    });
    match run(seed) {
        Ok(stats) => println!("{stats:?}"),
        Err(failure) => panic!("\n{failure}\n"),
    }
}
