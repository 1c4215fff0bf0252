//! Whether the engine does exactly what it did before, step by step: the sums of some seeds, in `golden.txt`.
//!
//! A commit that only moves code leaves the file as it is. A commit that changes the engine's behaviour, or the
//! simulator's, writes the file anew with `UNDERCROFT_GOLDEN=write cargo test -p undercroft-sim golden`, and says in its
//! message why.

use std::fmt::Write;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use undercroft_sim::sum_of;

const SEEDS: u64 = 500;
/// Threads that run seeds.
const THREADS: usize = 2;

/// A line for each seed: the seed and its sum.
fn sums() -> String {
    let next = AtomicU64::new(0);
    let work = || {
        let mut found = Vec::new();
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= SEEDS {
                return found;
            }
            let sum = sum_of(seed).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
            found.push((seed, sum));
        }
    };
    let mut all: Vec<(u64, u64)> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(work)).collect();
        let ended = threads
            .into_iter()
            .map(|thread| thread.join().expect("no seed panics"));
        ended.flatten().collect()
    });
    all.sort_unstable();
    all.iter().fold(String::new(), |mut text, (seed, sum)| {
        writeln!(text, "{seed} {sum:016x}").expect("a string takes lines");
        text
    })
}

#[test]
fn golden() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden.txt");
    let now = sums();
    if std::env::var("UNDERCROFT_GOLDEN").is_ok_and(|value| value == "write") {
        return std::fs::write(path, now).unwrap();
    }
    let before = std::fs::read_to_string(&path).unwrap();
    let pairs = before.lines().zip(now.lines());
    let changed: Vec<&str> = pairs
        .filter(|(before, now)| before != now)
        .filter_map(|(before, _)| before.split(' ').next())
        .collect();
    assert!(
        before == now,
        "{} of {SEEDS} seeds run otherwise than before, first seeds: {:?}. Moving code changes none; if the behaviour is \
         meant to change, UNDERCROFT_GOLDEN=write cargo test -p undercroft-sim golden",
        changed.len(),
        &changed[..changed.len().min(5)],
    );
}
