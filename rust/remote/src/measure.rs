//! Measures a store's speed from this machine: writes, reads like the engine's, bare reads, and probes.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;
use undercroft_contract::key::{BlockHash, NamespaceDigest};
use undercroft_contract::remote::segment::SEGMENT_ALIGN;
use undercroft_contract::remote::{
    Expected, ObjectKey, RemoteError, RemotePart, RemoteRequest, RemoteStore, SegmentHeader,
    SegmentPayload,
};
use undercroft_io::arena::{ARENA_ALIGN, Arena};
use undercroft_io::{Wake, Waker};

use crate::body::ObjectBody;
use crate::objects::Objects;
use crate::pool::RequestPool;
use crate::receiver::Receiver;
use crate::store_error::{ObjectStoreError, Result, out_of_arena};

/// Number of probes. Their median time is reported.
const PROBES: usize = 21;
const PROBED: usize = 32;
/// Bytes of reads in flight: the most of the engine.
const WINDOW: u64 = 256 << 20;
/// Number of reads of all objects, for each kind of read. The median counts.
const ROUNDS: usize = 3;
/// A size is large enough if reads of it reach this share of the best rate.
const ENOUGH: f64 = 0.9;

/// The result of a measurement.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Measured {
    /// Median time of a probe of one object, in milliseconds.
    pub probe_ms: f64,
    /// Median time of a probe of 32 objects, in milliseconds.
    pub probe_32_ms: f64,
    /// The rates by size of the objects.
    pub sizes: Vec<OfSize>,
    /// The smallest size whose reads reach nine tenths of the best rate, in bytes.
    pub advised_bytes: u64,
}

/// The rates of one size.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OfSize {
    /// Bytes of each object's payload.
    pub object_bytes: u64,
    /// Bytes a second that were written.
    pub put_bytes_per_s: f64,
    /// Bytes a second that were read into an arena and verified, as the engine reads.
    pub get_bytes_per_s: f64,
    /// Bytes a second that were read by the same client and dropped.
    pub bare_get_bytes_per_s: f64,
    /// Seconds of this process's CPU for each GB written.
    pub put_cpu_s_per_gb: f64,
    /// Seconds of this process's CPU for each GB read.
    pub get_cpu_s_per_gb: f64,
    /// Seconds of this process's CPU for each GB of bare reads.
    pub bare_get_cpu_s_per_gb: f64,
}

/// Writes about `total` bytes of objects of each size, reads them, and removes them. `progress` gets each size's rates.
/// `stopped` ends the measurement at the next object, and the objects are removed.
///
/// # Errors
/// If the store fails, there is no memory, or `stopped` is true. If the store fails, objects may stay, which
/// `undercroft remote gc` removes.
pub fn measure(
    objects: &Arc<dyn Objects>,
    sizes: &[u64],
    total: u64,
    stopped: &AtomicBool,
    mut progress: impl FnMut(&OfSize),
) -> Result<Measured> {
    // The store may have to start first. The calls below report its failure.
    let _ = objects.greet();
    let mut rates = Vec::with_capacity(sizes.len());
    for size in sizes {
        let samples = Samples::new(objects, *size, total, stopped)?;
        let rate = samples.measure();
        let removed = objects.delete(&samples.paths());
        let rate = rate?;
        removed?;
        progress(&rate);
        rates.push(rate);
    }
    let reads = rates.iter().map(|rate| rate.get_bytes_per_s);
    let best = reads.fold(0.0, f64::max);
    let enough = (rates.iter()).filter(|rate| rate.get_bytes_per_s >= ENOUGH * best);
    let advised_bytes = enough.map(|rate| rate.object_bytes).min().unwrap_or(0);
    Ok(Measured {
        probe_ms: probe(&**objects, 1)?,
        probe_32_ms: probe(&**objects, PROBED)?,
        sizes: rates,
        advised_bytes,
    })
}

/// Objects of one size, and an arena to read them into.
struct Samples<'a> {
    objects: &'a Arc<dyn Objects>,
    arena: Arc<Arena>,
    stopped: &'a AtomicBool,
    size: u64,
    headers: Vec<SegmentHeader>,
    /// Reads in flight, each with its place in the arena.
    slots: usize,
}

impl<'a> Samples<'a> {
    fn new(
        objects: &'a Arc<dyn Objects>,
        size: u64,
        total: u64,
        stopped: &'a AtomicBool,
    ) -> Result<Self> {
        // A bare read also reads the header.
        let place = place_of(size);
        let most = (WINDOW / place).clamp(1, objects.parallel() as u64);
        let arena = Arena::create((most * place).next_multiple_of(ARENA_ALIGN));
        let arena = arena.map_err(|error| ObjectStoreError::new(RemoteError::Stopped, error))?;
        let bytes: Vec<u8> = (0..size).map(|at| (at ^ (at >> 8)) as u8).collect();
        arena.write(0, &bytes).map_err(out_of_arena)?;
        let checksum = arena.checksum(0, size).map_err(out_of_arena)?;
        let header = |index: u64| SegmentHeader {
            described: Expected {
                namespace: NamespaceDigest::of("undercroft bench remote"),
                parent: None,
                hashes: BlockHash::new(&[size.to_le_bytes(), index.to_le_bytes()].concat())
                    .into_iter()
                    .collect(),
                payloads: vec![SegmentPayload {
                    hash_block: 0,
                    group: 0,
                    len: size as u32,
                }],
            },
            checksums: vec![checksum],
        };
        Ok(Self {
            objects,
            arena: Arc::new(arena),
            stopped,
            size,
            headers: (0..(total / size).max(1)).map(header).collect(),
            slots: most as usize,
        })
    }

    fn key(header: &SegmentHeader) -> ObjectKey {
        ObjectKey {
            namespace: header.described.namespace,
            end: header.described.hashes[0],
            hash_blocks: 1,
            group: None,
        }
    }

    fn paths(&self) -> Vec<String> {
        let keys = self.headers.iter().map(|header| Self::key(header).path());
        keys.collect()
    }

    fn place(&self) -> u64 {
        place_of(self.size)
    }

    fn part(&self, slot: usize) -> RemotePart {
        RemotePart {
            payload: 0,
            arena_offset: slot as u64 * self.place(),
            len: self.size as u32,
        }
    }

    fn measure(&self) -> Result<OfSize> {
        let put = timed(|| {
            self.each(|_, header| {
                let (parts, encoded) = ([self.part(0)], header.encode());
                let body = ObjectBody::segment(&encoded, &self.arena, &parts);
                let path = Self::key(header).path();
                self.objects.put(&path, &body, false).map(drop)
            })
        })?;
        // An engine starts its threads once, and checks the store once: neither is a part of a read.
        let bell = Arc::new(Bell::default());
        let waker = Waker::new(Arc::clone(&bell) as Arc<dyn Wake>);
        let pool = RequestPool::start(Arc::clone(self.objects), Arc::clone(&self.arena), waker);
        let mut pool = pool.map_err(|error| ObjectStoreError::new(RemoteError::Stopped, error))?;
        pool.wait_for_first_check();
        // In turns, since other work on the machine changes.
        let (mut bares, mut gets) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            // Objects of other hosts are not in this host's page cache.
            self.objects.uncache(&self.paths());
            bares.push(timed(|| self.read_bare())?);
            self.objects.uncache(&self.paths());
            gets.push(timed(|| self.read(&mut pool, &bell))?);
        }
        let (bare, get) = (middle(bares), middle(gets));
        let all = (self.headers.len() as u64 * self.size) as f64;
        Ok(OfSize {
            object_bytes: self.size,
            put_bytes_per_s: all / put.0,
            get_bytes_per_s: all / get.0,
            bare_get_bytes_per_s: all / bare.0,
            put_cpu_s_per_gb: put.1 / all * 1e9,
            get_cpu_s_per_gb: get.1 / all * 1e9,
            bare_get_cpu_s_per_gb: bare.1 / all * 1e9,
        })
    }

    /// Reads all objects with the same client, and drops them.
    fn read_bare(&self) -> Result<()> {
        self.each(|slot, header| {
            let bytes = header.described.object_bytes();
            let place = slot as u64 * self.place();
            let mut receiver = Receiver::discard(&self.arena, place, bytes);
            self.objects.get(&Self::key(header).path(), &mut receiver)?;
            receiver.finish().map(drop)
        })
    }

    /// Makes a call for each object, at most `slots` at a time, each with a slot of its own.
    fn each(&self, call: impl Fn(usize, &SegmentHeader) -> Result<()> + Sync) -> Result<()> {
        let next = AtomicUsize::new(0);
        let failed: Mutex<Option<ObjectStoreError>> = Mutex::new(None);
        std::thread::scope(|scope| {
            for slot in 0..self.slots.min(self.headers.len()) {
                let (next, failed, call) = (&next, &failed, &call);
                scope.spawn(move || {
                    while let Some(header) = self.headers.get(next.fetch_add(1, Ordering::Relaxed))
                    {
                        if let Err(error) = self.unless_stopped().and_then(|()| call(slot, header))
                        {
                            *failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                            next.store(self.headers.len(), Ordering::Relaxed);
                        }
                    }
                });
            }
        });
        let failed = failed.into_inner().unwrap_or_else(PoisonError::into_inner);
        failed.map_or(Ok(()), Err)
    }

    fn unless_stopped(&self) -> Result<()> {
        if self.stopped.load(Ordering::Relaxed) {
            return Err(ObjectStoreError::new(RemoteError::Stopped, "interrupted"));
        }
        Ok(())
    }

    /// Reads all objects as the engine does.
    fn read(&self, pool: &mut RequestPool, bell: &Bell) -> Result<()> {
        let mut waiting = self.headers.iter();
        let mut free: Vec<usize> = (0..self.slots).collect();
        let (mut left, mut done) = (self.headers.len(), Vec::new());
        while left > 0 {
            self.unless_stopped()?;
            while !free.is_empty()
                && let Some(header) = waiting.next()
            {
                let slot = free.remove(0);
                pool.submit(RemoteRequest::Get {
                    token: slot as u64,
                    key: Self::key(header),
                    expect: Box::new(header.described.clone()),
                    parts: vec![self.part(slot)],
                });
            }
            bell.wait();
            pool.drain(&mut done);
            for completion in done.drain(..) {
                completion.result.map_err(ObjectStoreError::from)?;
                free.push(completion.token as usize);
                left -= 1;
            }
        }
        Ok(())
    }
}

/// Waits for completions.
#[derive(Debug, Default)]
struct Bell(Mutex<bool>, Condvar);

impl Wake for Bell {
    fn wake(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.1.notify_one();
    }
}

impl Bell {
    fn wait(&self) {
        let mut rung = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        while !*rung {
            rung = self.1.wait(rung).unwrap_or_else(PoisonError::into_inner);
        }
        *rung = false;
    }
}

/// Room in the arena for an object with a payload of so many bytes.
fn place_of(size: u64) -> u64 {
    size.next_multiple_of(SEGMENT_ALIGN) + SEGMENT_ALIGN
}

/// The entry with the median time.
fn middle(mut times: Vec<(f64, f64)>) -> (f64, f64) {
    times.sort_by(|(a, _), (b, _)| a.total_cmp(b));
    times[times.len() / 2]
}

/// The time and the CPU time of `work`, in seconds.
fn timed(work: impl FnOnce() -> Result<()>) -> Result<(f64, f64)> {
    let (started, cpu) = (Instant::now(), cpu_seconds());
    work()?;
    Ok((started.elapsed().as_secs_f64(), cpu_seconds() - cpu))
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
