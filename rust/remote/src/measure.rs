//! How fast a store is from here: puts and gets of several sizes, and probes.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;

use crate::body::Body;
use crate::objects::{Objects, Result, StoreError};
use crate::receiver::Receiver;

/// Probes whose middle time is told, and objects of one probe of many.
const PROBES: usize = 21;
const PROBED: usize = 32;
/// A size is large enough if gets of it reach this share of the best rate.
const ENOUGH: f64 = 0.9;

/// The outcome.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Measured {
    /// Middle time of a probe of one object, in milliseconds.
    pub probe_ms: f64,
    /// Of a probe of 32 objects.
    pub probe_32_ms: f64,
    /// By size of the objects.
    pub sizes: Vec<OfSize>,
    /// The smallest size whose gets reach nine tenths of the best rate, in bytes.
    pub advised_bytes: u64,
}

/// The rates of one size.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OfSize {
    /// Bytes of each object.
    pub object_bytes: u64,
    /// Bytes a second that were written.
    pub put_bytes_per_s: f64,
    /// Bytes a second that were read.
    pub get_bytes_per_s: f64,
    /// Middle time of a get, in milliseconds.
    pub get_ms: f64,
    /// Seconds of this process's CPU for each GB written.
    pub put_cpu_s_per_gb: f64,
    /// Seconds of this process's CPU for each GB read.
    pub get_cpu_s_per_gb: f64,
}

/// Writes about `total` bytes of objects of each size, reads them, and removes them. `progress` is told each size's
/// rates; no other size follows once it returns false.
///
/// # Errors
/// If the store fails. Objects may stay below `bench/` then.
pub fn measure(
    objects: &dyn Objects,
    sizes: &[u64],
    total: u64,
    mut progress: impl FnMut(&OfSize) -> bool,
) -> Result<Measured> {
    let mut rates = Vec::with_capacity(sizes.len());
    for size in sizes {
        let rate = of_size(objects, *size, total)?;
        let goes_on = progress(&rate);
        rates.push(rate);
        if !goes_on {
            break;
        }
    }
    let best = rates
        .iter()
        .map(|rate| rate.get_bytes_per_s)
        .fold(0.0, f64::max);
    let enough = rates
        .iter()
        .filter(|rate| rate.get_bytes_per_s >= ENOUGH * best);
    let advised_bytes = enough.map(|rate| rate.object_bytes).min().unwrap_or(0);
    Ok(Measured {
        probe_ms: probe(objects, 1)?,
        probe_32_ms: probe(objects, PROBED)?,
        sizes: rates,
        advised_bytes,
    })
}

fn of_size(objects: &dyn Objects, size: u64, total: u64) -> Result<OfSize> {
    let count = (total / size).max(1);
    let paths: Vec<String> = (0..count).map(|at| format!("bench/{size}-{at}")).collect();
    let bytes: Vec<u8> = (0..size).map(|at| (at ^ (at >> 8)) as u8).collect();
    let put = at_once(objects.parallel(), &paths, |path| {
        objects.put(path, &Body::bytes(&bytes), false).map(drop)
    });
    let get = put.as_ref().ok().map(|_| {
        at_once(objects.parallel(), &paths, |path| {
            let mut receiver = Receiver::discard(size);
            objects.get(path, &mut receiver)?;
            receiver.finish().map(drop)
        })
    });
    let removed = objects.delete(&paths);
    let (put, get) = (put?, get.transpose()?.unwrap_or_default());
    removed?;
    let (gigabytes, all) = ((count * size) as f64 / 1e9, (count * size) as f64);
    Ok(OfSize {
        object_bytes: size,
        put_bytes_per_s: all / put.seconds,
        get_bytes_per_s: all / get.seconds,
        get_ms: get.middle_ms,
        put_cpu_s_per_gb: put.cpu_seconds / gigabytes,
        get_cpu_s_per_gb: get.cpu_seconds / gigabytes,
    })
}

#[derive(Debug, Default)]
struct Run {
    seconds: f64,
    cpu_seconds: f64,
    middle_ms: f64,
}

/// Makes a call for each path, `parallel` at a time.
fn at_once(
    parallel: usize,
    paths: &[String],
    call: impl Fn(&str) -> Result<()> + Sync,
) -> Result<Run> {
    let next = AtomicUsize::new(0);
    let failed: Mutex<Option<StoreError>> = Mutex::new(None);
    let times: Vec<AtomicU64> = paths.iter().map(|_| AtomicU64::new(0)).collect();
    let (started, cpu) = (Instant::now(), cpu_seconds());
    std::thread::scope(|scope| {
        for _ in 0..parallel.min(paths.len()) {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(path) = paths.get(index) else {
                        return;
                    };
                    let begun = Instant::now();
                    if let Err(error) = call(path) {
                        *failed
                            .lock()
                            .unwrap_or_else(|poisoned| poisoned.into_inner()) = Some(error);
                        next.store(paths.len(), Ordering::Relaxed);
                    }
                    let micros = begun.elapsed().as_micros() as u64;
                    times[index].store(micros, Ordering::Relaxed);
                }
            });
        }
    });
    let failed = failed
        .into_inner()
        .unwrap_or_else(|poisoned| poisoned.into_inner());
    if let Some(error) = failed {
        return Err(error);
    }
    let mut times: Vec<u64> = times
        .iter()
        .map(|time| time.load(Ordering::Relaxed))
        .collect();
    times.sort_unstable();
    Ok(Run {
        seconds: started.elapsed().as_secs_f64(),
        cpu_seconds: cpu_seconds() - cpu,
        middle_ms: times[times.len() / 2] as f64 / 1e3,
    })
}

fn probe(objects: &dyn Objects, count: usize) -> Result<f64> {
    let paths: Vec<String> = (0..count).map(|at| format!("bench/absent-{at}")).collect();
    let mut times = Vec::with_capacity(PROBES);
    for _ in 0..PROBES {
        let started = Instant::now();
        objects.probe(&paths)?;
        times.push(started.elapsed());
    }
    times.sort_unstable();
    Ok(times[PROBES / 2].as_secs_f64() * 1e3)
}

fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    let whole = Duration::from_secs(u64::try_from(time.tv_sec).unwrap_or(0));
    (whole + Duration::from_nanos(time.tv_nsec as u64)).as_secs_f64()
}
