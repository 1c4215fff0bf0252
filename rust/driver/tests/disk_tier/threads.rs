//! The engine behind its threads, by a clock that the test sets.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use undercroft_contract::io::{IoCompletion, IoRequest};
use undercroft_contract::session::{LookupRequest, SaveRequest, Tokens};
use undercroft_driver::{Clock, Driver, EngineAccess};
use undercroft_engine::disk::Health;
use undercroft_engine::{Engine, EngineConfig, ResizeOrder, SessionId};
use undercroft_io::arena::Arena;
use undercroft_io::fault::FaultEngine;
use undercroft_io::pool::ThreadPool;
use undercroft_io::{IoEngine, Waker};

use crate::rig::{DEPTH, DISK, HASH_BLOCK, HOST, MODEL, Model, Open, PATIENCE, SECOND, dir};

#[derive(Clone, Debug, Default)]
struct Hand(Arc<AtomicU64>);

impl Hand {
    fn pass(&self, ns: u64) {
        self.0.fetch_add(ns, Ordering::SeqCst);
    }
}

impl Clock for Hand {
    fn now_ns(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }
}

/// The answer to a request: at once, or when the disk has answered.
fn ask(driver: &Driver, session: SessionId, prompt: u64, patient: bool) -> Option<Tokens> {
    let hashes = Model::hashes(prompt, 10);
    let name = prompt.to_string();
    let mut answer = None;
    let mut look = |engine: &mut Engine| {
        answer = engine
            .lookup(session, &LookupRequest::new(&name, &hashes))
            .tokens();
        answer.is_some()
    };
    if patient {
        driver.wait_until(PATIENCE, look);
    } else {
        driver.enter(|engine| look(engine)).unwrap();
    }
    answer
}

/// Loads the promised tokens of a request, and compares them.
fn load(driver: &Driver, arena: &Arena, session: SessionId, prompt: u64) -> u32 {
    let (hashes, name) = (Model::hashes(prompt, 10), prompt.to_string());
    let transfer = driver
        .enter(|engine| engine.begin_load(session, &name, Tokens(0), Tokens(10 * HASH_BLOCK)))
        .flatten()
        .unwrap();
    let found = MODEL.verify(arena, &hashes, &transfer.extents);
    driver.enter(|engine| {
        engine.end_transfer(transfer.id, true);
        engine.finish_request(session, &name);
    });
    found
}

/// Waits for another thread.
fn until(mut condition: impl FnMut() -> bool) {
    let start = std::time::Instant::now();
    while !condition() {
        assert!(start.elapsed() < PATIENCE);
        std::thread::yield_now();
    }
}

#[test]
fn a_disk_that_answers_after_ten_seconds_holds_up_nobody() {
    let (_guard, store) = dir();
    Open::new(std::slice::from_ref(&store)).plain().save(1, 10);
    let directory = undercroft_io::disk::open::open(&store, DISK, 1).unwrap();
    let (files, image, _lock) = directory.into_parts();
    let arena = Arc::new(Arena::create(HOST).unwrap());
    let pool = ThreadPool::new(DEPTH, Arc::clone(&arena), vec![files]).unwrap();
    let (io, device) = FaultEngine::new(pool);
    let config = EngineConfig::new(HOST);
    let stall_ns = config.stall_ns;
    let mut engine = Engine::new(config);
    engine.attach_disks(vec![image]);
    let session = engine.open_session(MODEL.spec()).unwrap();
    let clock = Hand::default();
    let driver = Driver::with_clock(engine, Box::new(io), Box::new(clock.clone())).unwrap();
    assert!(driver.wait_until(PATIENCE, |engine| engine.is_quiet()));

    device.hang();
    assert_eq!(ask(&driver, session, 1, false), None);
    until(|| driver.read(|engine| engine.operations().all > 0) == Some(true));
    // Meanwhile others save, and are served from memory.
    let hashes = Model::hashes(2, 10);
    let save = |engine: &mut Engine| {
        engine
            .begin_save(
                session,
                &SaveRequest::new("2", &hashes, Tokens(10 * HASH_BLOCK)),
            )
            .transfer
    };
    let transfer = driver.enter(save).flatten().unwrap();
    MODEL.fill(&arena, &hashes, &transfer.extents);
    driver.enter(|engine| engine.end_transfer(transfer.id, true));
    assert_eq!(
        ask(&driver, session, 2, false),
        Some(Tokens(10 * HASH_BLOCK))
    );
    assert_eq!(load(&driver, &arena, session, 2), 10);

    clock.pass(stall_ns - 1);
    assert_eq!(ask(&driver, session, 1, false), None);
    clock.pass(1);
    // Once the device was looked at.
    until(|| ask(&driver, session, 1, false).is_some());
    let health = || driver.read(|engine| engine.devices()[0].health).unwrap();
    assert_eq!(health(), Health::Stalled);
    assert_eq!(
        ask(&driver, session, 1, false),
        Some(Tokens(0)),
        "it computes"
    );
    driver.enter(|engine| engine.finish_request(session, "1"));

    clock.pass(10 * SECOND - stall_ns);
    device.release();
    assert!(driver.wait_until(PATIENCE, |engine| engine.is_quiet()));
    let answer = ask(&driver, session, 1, true);
    assert_eq!(answer, Some(Tokens(10 * HASH_BLOCK)));
    assert_eq!(load(&driver, &arena, session, 1), 10);
    let gauges = driver.enter(|engine| engine.gauges()).unwrap();
    assert_eq!((gauges.active_lookups, gauges.disk_degraded), (0, 0));
}

/// An engine with nothing in it.
fn empty(io: impl IoEngine + 'static) -> Driver {
    Driver::start(Engine::new(EngineConfig::new(HOST)), Box::new(io)).unwrap()
}

fn pool() -> ThreadPool {
    ThreadPool::new(DEPTH, Arc::new(Arena::create(HOST).unwrap()), Vec::new()).unwrap()
}

#[test]
fn a_panic_in_the_engine_stays_there_and_nobody_enters_it_again() {
    let panics: [fn(&Driver); 3] = [
        |driver| assert_eq!(driver.enter(|_| panic!("for a test")), None::<()>),
        |driver| assert_eq!(driver.read(|_| panic!("for a test")), None::<()>),
        |driver| assert!(!driver.wait_until(PATIENCE, |_| panic!("for a test"))),
    ];
    for panics in panics {
        let driver = empty(pool());
        assert_eq!(driver.enter(|_| 1), Some(1));
        panics(&driver);
        assert_eq!(driver.enter(|_| 1), None);
        assert_eq!(driver.read(|_| 1), None);
        assert!(!driver.wait_until(PATIENCE, |_| true));
        driver.stop(PATIENCE);
    }
}

/// Fails where a test says so.
#[derive(Debug)]
struct Broken {
    pool: ThreadPool,
    /// As soon as it is woken.
    panics: bool,
    /// Another process has pinned the arena.
    keeps_memory: bool,
}

impl IoEngine for Broken {
    fn arena(&self) -> &Arc<Arena> {
        self.pool.arena()
    }
    fn name(&self) -> &'static str {
        "broken"
    }
    fn in_flight(&self) -> usize {
        self.pool.in_flight()
    }
    fn wait(&mut self, timeout: Option<Duration>, out: &mut Vec<IoCompletion>) {
        assert!(timeout.is_some() || !self.panics, "for a test");
        self.pool.wait(timeout, out);
    }
    fn submit(&mut self, request: IoRequest) {
        self.pool.submit(request);
    }
    fn release_memory(&mut self, offset: u64, len: u64) -> std::io::Result<()> {
        if self.keeps_memory {
            return Err(std::io::ErrorKind::WouldBlock.into());
        }
        self.arena().release(offset, len)
    }

    fn depth(&self) -> usize {
        self.pool.depth()
    }
    fn room(&self, device: u16) -> usize {
        self.pool.room(device)
    }
    fn waker(&self) -> Waker {
        self.pool.waker()
    }
}

#[test]
fn a_panic_of_the_io_thread_ends_every_wait() {
    let driver = empty(Broken {
        pool: pool(),
        panics: true,
        keeps_memory: false,
    });
    assert!(
        !driver.wait_until(PATIENCE, |_| false),
        "woken, not timed out"
    );
    assert_eq!(driver.enter(|_| 1), None);
    driver.stop(PATIENCE);
}

#[test]
fn a_resize_ends_whether_the_system_takes_the_memory_back_or_not() {
    for keeps_memory in [false, true] {
        let driver = empty(Broken {
            pool: pool(),
            panics: false,
            keeps_memory,
        });
        let order = ResizeOrder {
            host_bytes: Some(HOST / 2),
            ..ResizeOrder::default()
        };
        driver
            .enter(|engine| engine.resize(&order, None).unwrap())
            .unwrap();
        let kept = if keeps_memory { HOST / 2 } else { 0 };
        let ended = |engine: &mut Engine| {
            let host = engine.resized().host;
            !host.resizing && host.kept_bytes == kept
        };
        assert!(driver.wait_until(PATIENCE, ended), "{keeps_memory}");
        driver.stop(PATIENCE);
    }
}

/// Does one operation, well, at each look, once it may.
#[derive(Debug)]
struct Slow {
    may: Arc<AtomicBool>,
    queue: std::collections::VecDeque<u64>,
    pool: ThreadPool,
}

impl IoEngine for Slow {
    fn arena(&self) -> &Arc<Arena> {
        self.pool.arena()
    }
    fn name(&self) -> &'static str {
        "slow"
    }
    fn release_memory(&mut self, offset: u64, len: u64) -> std::io::Result<()> {
        self.arena().release(offset, len)
    }

    fn depth(&self) -> usize {
        DEPTH
    }
    fn in_flight(&self) -> usize {
        self.queue.len()
    }
    fn room(&self, _device: u16) -> usize {
        DEPTH - self.queue.len()
    }
    fn submit(&mut self, request: IoRequest) {
        self.queue.push_back(request.token());
    }
    fn wait(&mut self, timeout: Option<Duration>, out: &mut Vec<IoCompletion>) {
        if self.queue.is_empty() || !self.may.load(Ordering::SeqCst) {
            return self.pool.wait(timeout, out);
        }
        std::thread::sleep(Duration::from_millis(1));
        let done = self.queue.pop_front();
        out.extend(done.map(|token| IoCompletion {
            token,
            result: Ok(0),
        }));
    }
    fn waker(&self) -> Waker {
        self.pool.waker()
    }
}

#[test]
fn a_stop_writes_no_longer_than_it_may() {
    let (_guard, store) = dir();
    let directory = undercroft_io::disk::open::open(&store, DISK, 1).unwrap();
    let (_, image, _lock) = directory.into_parts();
    let mut engine = Engine::new(EngineConfig::new(HOST));
    engine.attach_disks(vec![image]);
    let session = engine.open_session(MODEL.spec()).unwrap();
    let may = Arc::new(AtomicBool::new(false));
    let slow = Slow {
        may: Arc::clone(&may),
        queue: std::collections::VecDeque::new(),
        pool: pool(),
    };
    let driver = Driver::start(engine, Box::new(slow)).unwrap();
    let hashes = Model::hashes(1, 300);
    let save = |engine: &mut Engine| {
        engine
            .begin_save(
                session,
                &SaveRequest::new("s", &hashes, Tokens(300 * HASH_BLOCK)),
            )
            .transfer
    };
    let transfer = driver.enter(save).flatten().unwrap();
    driver.enter(|engine| engine.end_transfer(transfer.id, true));
    // A third of a second of writes at least.
    may.store(true, Ordering::SeqCst);
    driver.stop(Duration::ZERO);
    let written = driver
        .enter(|engine| engine.counters().disk_writes)
        .unwrap();
    assert!(written < 100, "{written} were written");
}
