//! The number of requests from an engine to a store, and the delay that a slow store causes.

use std::sync::Mutex;

use undercroft_remote::{ListedObject, Location, ObjectBody, Receiver, Result};

use super::bad_stores::redis;
use super::proxy::{Fault, Proxy};
use super::*;

/// A store that notes its probes.
#[derive(Debug)]
struct Watched {
    store: Arc<dyn Objects>,
    /// The end of each probe, and its number of objects.
    probes: Mutex<Vec<(Instant, usize)>>,
}

impl Objects for Watched {
    fn name(&self) -> &'static str {
        self.store.name()
    }
    fn parallel(&self) -> usize {
        self.store.parallel()
    }
    fn greet(&self) -> Result<()> {
        self.store.greet()
    }
    fn probe(&self, paths: &[String]) -> Result<u64> {
        let found = self.store.probe(paths);
        let probe = (Instant::now(), paths.len());
        self.probes.lock().unwrap().push(probe);
        found
    }
    fn get(&self, path: &str, receiver: &mut Receiver<'_>) -> Result<()> {
        self.store.get(path, receiver)
    }
    fn put(&self, path: &str, body: &ObjectBody<'_>, if_absent: bool) -> Result<bool> {
        self.store.put(path, body, if_absent)
    }
    fn delete(&self, paths: &[String]) -> Result<()> {
        self.store.delete(paths)
    }
    fn list(&self, below: &str, each: &mut dyn FnMut(ListedObject) -> bool) -> Result<()> {
        self.store.list(below, each)
    }
    fn delete_unchanged(&self, entries: &[ListedObject]) -> Result<Vec<bool>> {
        self.store.delete_unchanged(entries)
    }
    fn clock_skew(&self) -> Result<Option<f64>> {
        self.store.clock_skew()
    }
}

/// A host without a disk, whose segments are single blocks.
fn of_single_blocks(url: &str) -> HostConfig {
    HostConfig {
        host_memory: 256 << 20,
        remote: url.to_owned(),
        remote_object: Some(1),
        remote_write_rate: Some(0),
        ..HostConfig::default()
    }
}

/// The first half of a prompt of 1,024 segments is in a store that answers after 20 ms. Checks the number of requests
/// and the time until the engine knows this. The time is the least of several prompts, since the machine may be busy.
#[test]
fn a_thousand_segments_are_looked_up_with_seventy_requests_in_two_round_trips() {
    const LATENCY: Duration = Duration::from_millis(20);
    const PROMPTS: u32 = 5;
    let Some(server) = redis() else { return };
    let config = of_single_blocks(&server.url());
    let writer = Host::without_store(&config);
    writer.engine.attach_remote(&config).unwrap();
    for prompt in 1..=PROMPTS {
        assert_eq!(writer.compute_blocks(prompt, 512), 512);
    }
    writer.wait_for("half of each prompt is in the store", |host| {
        host.stat("remote_puts") == 512 * u64::from(PROMPTS)
    });
    let proxy = Proxy::start(0, server.port());
    proxy.set(Fault::Delay(LATENCY));
    let url = format!("redis://127.0.0.1:{}/0/test", proxy.port());
    let reader = Host::without_store(&of_single_blocks(&url));
    let store = undercroft_remote::open(&Location::parse(&url).unwrap(), Default::default());
    let watched = Arc::new(Watched {
        store: store.unwrap(),
        probes: Mutex::default(),
    });
    let driver = reader.engine.driver();
    let arena = Arc::clone(reader.engine.arena());
    let objects = Arc::clone(&watched) as Arc<dyn Objects>;
    let pool = RequestPool::start(objects, arena, driver.waker()).unwrap();
    driver.attach_remote(Box::new(pool));
    assert!(driver.wait_until(PATIENCE, |engine| engine.has_remote()));
    let mut least = PATIENCE;
    for prompt in 1..=PROMPTS {
        watched.probes.lock().unwrap().clear();
        let began = Instant::now();
        assert_eq!(reader.hit_blocks(prompt, 1024), 512 * BLOCK);
        let probes = watched.probes.lock().unwrap();
        assert_eq!(probes.len(), 2, "round trips");
        // Two segments are fetched without a probe.
        let requests = 2 + probes.iter().map(|(_, asked)| asked).sum::<usize>();
        assert!((32..=70).contains(&requests), "{requests} requests");
        let known = probes[1].0 - began;
        eprintln!("{requests} requests, known after {known:?}");
        least = least.min(known);
    }
    let goal = 2 * LATENCY + Duration::from_millis(10);
    assert!(least <= goal, "{least:?} until the length is known");
}

/// Saves prompts for at least `time`, and more than fit into the write queue. Returns their number and the seconds.
fn compute_for(host: &Host, time: Duration, next: &mut u32) -> (f64, f64) {
    const LEAST: u32 = 20;
    let (began, first) = (Instant::now(), *next);
    while began.elapsed() < time || *next - first < LEAST {
        let saved = host.compute_blocks(*next, BLOCKS);
        assert_eq!(saved, BLOCKS as usize, "a save has room at any time");
        *next += 1;
    }
    (f64::from(*next - first), began.elapsed().as_secs_f64())
}

/// The number of segments of saved prompts that a host has written, and the number that it has not written.
fn segments(host: &Host) -> (u64, u64) {
    let written = host.stat("remote_puts") + host.stat("remote_puts_known");
    let dropped = ["failed", "dropped_queue", "dropped_gone"];
    let dropped = dropped.map(|why| host.stat(&format!("remote_puts_{why}")));
    (written, dropped.iter().sum())
}

/// Prompts arrive ten times faster than a slow store writes them. Measures in turns with a host without a store, for
/// `UNDERCROFT_SECONDS` altogether if this is set.
#[test]
fn computing_does_not_wait_for_a_slow_store_and_dropped_segments_are_counted() {
    const TURNS: u32 = 5;
    let Some(server) = redis() else { return };
    let seconds = std::env::var("UNDERCROFT_SECONDS").map_or(3.0, |text| text.parse().unwrap());
    let turn = Duration::from_secs_f64(seconds / f64::from(2 * TURNS));
    let root = tempfile::tempdir().unwrap();
    let proxy = Proxy::start(0, server.port());
    let without = Host::start(root.path(), "without", |config| config.remote.clear());
    let with = Host::start(root.path(), "with", |config| {
        config.remote = format!("redis://127.0.0.1:{}/0/test", proxy.port());
    });
    let (mut next, mut counts, mut times) = (0, [0.0; 2], [0.0; 2]);
    for _ in 0..TURNS {
        let (count, seconds) = compute_for(&without, turn, &mut next);
        let bytes = count * f64::from(BLOCKS) * BYTES as f64;
        // The rate is divided by two, since two connections write.
        proxy.set(Fault::Slow(1 + (bytes / seconds / 10.0 / 2.0) as u64));
        (counts[0], times[0]) = (counts[0] + count, times[0] + seconds);
        let (count, seconds) = compute_for(&with, turn, &mut next);
        (counts[1], times[1]) = (counts[1] + count, times[1] + seconds);
    }
    let rates = [counts[0] / times[0], counts[1] / times[1]];
    proxy.set(Fault::None);
    with.wait_for("no write waits", |host| {
        let (written, dropped) = segments(host);
        written + dropped == 4 * counts[1] as u64
    });
    let (written, dropped) = segments(&with);
    eprintln!(
        "{rates:.1?} prompts a second without and with the store, {written} segments written, {dropped} dropped"
    );
    assert!(written > 0 && dropped > written, "{written}, {dropped}");
    assert!(rates[1] * 2.0 > rates[0], "{rates:?} prompts a second");
}
