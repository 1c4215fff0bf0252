//! `undercroft-soak [SECONDS [FIRST_SEED]]`: seeds from a random start on all cores, until the time is
//! over or one fails.

use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use undercroft_sim::{Stats, run};

fn main() -> ExitCode {
    let mut arguments = std::env::args()
        .skip(1)
        .map(|argument| argument.parse::<u64>());
    let (Ok(seconds), Ok(first)) = (
        arguments.next().unwrap_or(Ok(60)),
        arguments.next().unwrap_or_else(|| Ok(clock())),
    ) else {
        eprintln!("usage: undercroft-soak [SECONDS [FIRST_SEED]]");
        return ExitCode::FAILURE;
    };
    println!("from seed {first}, for {seconds} s");
    let deadline = Instant::now() + Duration::from_secs(seconds);
    let (next, failed) = (AtomicU64::new(first), AtomicBool::new(false));
    let total = Mutex::new(Stats::default());
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..cores {
            scope.spawn(|| {
                while Instant::now() < deadline && !failed.load(Ordering::Relaxed) {
                    match run(next.fetch_add(1, Ordering::Relaxed)) {
                        Ok(stats) => {
                            if let Ok(mut total) = total.lock() {
                                total.add(&stats);
                            }
                        }
                        Err(failure) => {
                            failed.store(true, Ordering::Relaxed);
                            eprintln!("{failure}");
                        }
                    }
                }
            });
        }
    });
    if let Ok(total) = total.lock() {
        println!("from seed {first}: {total:?}");
    }
    if failed.load(Ordering::Relaxed) {
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

fn clock() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |now| now.as_micros() as u64)
}
