//! The threads around the engine: one IO thread, and the callers' threads.
//!
//! Locking: one mutex holds the engine. Callers and the IO thread hold it for one entry of the state
//! machine each, microseconds; no IO of payloads, checksum, or wait happens under it, but the files of a
//! directory that opens late are handed over there. The IO thread alone owns the [`IoEngine`]. `waits` says, under the lock, that the IO thread is going to sleep and must be
//! woken for new work, so a wake-up is neither lost nor sent twice.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, TryLockError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use undercroft_contract::checksum;
use undercroft_contract::image::DeviceImage;
use undercroft_contract::io::{IoCompletion, IoRoom};
use undercroft_contract::log::{self, Level};
use undercroft_contract::panics::contained;
use undercroft_contract::remote::{RemoteCompletion, RemoteStore};
use undercroft_engine::{Due, Engine, Room, Started};
use undercroft_io::{ChecksumQueue, DeviceFiles, IoEngine, Waker, join_within};

use crate::ends;

/// How soon the IO thread looks again at work that could not start (no memory, budget or writes).
const RETRY: Duration = Duration::from_millis(10);

/// How often a thread in `give_way` checks whether other threads still wait for the engine.
const GIVE_WAY_LOOKS: usize = 100;

/// Pause of the IO thread between two parts of the work that earlier entries have left. Callers enter the engine in the
/// pause.
const REST_PAUSE: Duration = Duration::from_micros(100);

/// How often the IO thread looks at devices that have operations and do not answer.
const LOOK: Duration = Duration::from_millis(250);

/// How often a wait checks its time limits, since their end causes no event. In the tests of this file, a wait ends by
/// events only.
const TICK: Duration = match cfg!(test) {
    true => Duration::from_secs(3600),
    false => Duration::from_millis(5),
};

/// How often the IO thread looks after work for which no request waits, such as the ages of payloads that were used.
const LATER: Duration = Duration::from_secs(1);

/// Bytes of payloads in the arena whose checksums are computed before the IO thread polls the devices again. Fewer
/// while reads are in flight, since requests wait for these: some 30 us instead of 120 us.
const SUM_BYTES: u32 = 512 << 10;
const SUM_BYTES_READING: u32 = 128 << 10;

/// How long an end waits, after the time for pending writes, for operations that the devices have begun. A device that
/// has ended nothing for a second counts as one that hangs. With the ten seconds for writes, an end takes half of the time
/// after which Kubernetes kills a pod.
pub const END_GRACE: Duration = Duration::from_secs(5);

/// Gives access to an engine, one entry at a time: a [`Driver`] with its threads, or a simulator.
/// `None`, or `false`, once the engine is broken.
pub trait EngineAccess: std::fmt::Debug + Send + Sync {
    /// Enters the engine.
    fn enter<R>(&self, work: impl FnOnce(&mut Engine) -> R) -> Option<R>;

    /// Reads the engine, which starts nothing.
    fn read<R>(&self, work: impl FnOnce(&Engine) -> R) -> Option<R>;

    /// Reads the engine with `known`, and enters it with `work` if `known` has no answer.
    fn read_or_enter<R>(
        &self,
        known: impl FnOnce(&Engine) -> Option<R>,
        work: impl FnOnce(&mut Engine) -> R,
    ) -> Option<R>;

    /// Enters the engine now and whenever it has progressed, until `done` or the timeout.
    fn wait_until(&self, timeout: Duration, done: impl FnMut(&mut Engine) -> bool) -> bool;

    /// Lets waiting threads enter the engine before a thread that enters it again and again: a thread that takes the
    /// mutex again at once keeps out threads that must be woken first. Waits for microseconds.
    fn give_way(&self);

    /// Does work of several entries: enters the engine until `step` answers, and gives way in between.
    fn drive<R>(&self, mut step: impl FnMut(&mut Engine) -> Option<R>) -> Option<R> {
        loop {
            if let Some(answer) = self.enter(&mut step)? {
                return Some(answer);
            }
            self.give_way();
        }
    }
}

/// The engine's clock.
pub trait Clock: std::fmt::Debug + Send + Sync {
    /// Nanoseconds since the engine started; never decreases.
    fn now_ns(&self) -> u64;
}

#[derive(Debug)]
struct Monotonic(Instant);

impl Clock for Monotonic {
    fn now_ns(&self) -> u64 {
        u64::try_from(self.0.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

#[derive(Debug)]
struct DriverState {
    engine: Engine,
    waits: bool,
    stop_at: Option<Instant>,
    stopped: bool,
    /// Directories that have been opened since the engine started.
    opened: Vec<OpenedDevice>,
    /// A remote store that was attached after the start.
    remote: Option<Box<dyn RemoteStore>>,
}

/// A directory that was opened for a device that was absent.
#[derive(Debug)]
struct OpenedDevice {
    device: u16,
    files: DeviceFiles,
    image: DeviceImage,
}

/// The hook that the IO thread calls when operations have ended.
struct Hook(Box<dyn Fn() + Send + Sync>);

impl std::fmt::Debug for Hook {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Hook")
    }
}

#[derive(Debug)]
struct SharedEngine {
    state: Mutex<DriverState>,
    /// Threads that wait for the lock.
    waiting: AtomicUsize,
    progress: Condvar,
    hook: OnceLock<Hook>,
    clock: Box<dyn Clock>,
    waker: Waker,
}

impl SharedEngine {
    /// Locks the engine. `None` if a thread panicked inside the engine, which is then never entered again.
    fn lock(&self) -> Option<MutexGuard<'_, DriverState>> {
        let mut state = match self.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(_)) => return None,
            Err(TryLockError::WouldBlock) => {
                self.waiting.fetch_add(1, Ordering::Relaxed);
                let state = self.state.lock();
                self.waiting.fetch_sub(1, Ordering::Relaxed);
                state.ok()?
            }
        };
        self.tell_time(&mut state);
        Some(state)
    }

    /// Does `work` in the locked engine, and wakes the IO thread for work that it leaves.
    fn enter<R>(
        &self,
        mut state: MutexGuard<'_, DriverState>,
        work: impl FnOnce(&mut Engine) -> R,
    ) -> R {
        let result = work(&mut state.engine);
        let progress = state.engine.end_entry();
        let wake = state.waits && state.engine.needs_turn();
        state.waits &= !wake;
        drop(state);
        if progress {
            self.progress.notify_all();
        }
        if wake {
            self.waker.wake();
        }
        result
    }

    fn tell_time(&self, state: &mut DriverState) {
        state.engine.set_now(self.clock.now_ns());
    }
}

/// A running engine.
#[derive(Debug)]
pub struct Driver {
    shared: Arc<SharedEngine>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Driver {
    /// Starts the IO thread.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn start(engine: Engine, io: Box<dyn IoEngine>) -> std::io::Result<Self> {
        Self::with_clock(engine, io, Box::new(Monotonic(Instant::now())))
    }

    /// Starts the IO thread with another clock, for tests.
    ///
    /// # Errors
    /// Like [`Driver::start`].
    pub fn with_clock(
        mut engine: Engine,
        io: Box<dyn IoEngine>,
        clock: Box<dyn Clock>,
    ) -> std::io::Result<Self> {
        engine.set_io_depth(io.depth());
        let shared = Arc::new(SharedEngine {
            state: Mutex::new(DriverState {
                engine,
                waits: false,
                stop_at: None,
                stopped: false,
                opened: Vec::new(),
                remote: None,
            }),
            waiting: AtomicUsize::new(0),
            progress: Condvar::new(),
            hook: OnceLock::new(),
            clock,
            waker: io.waker(),
        });
        let of_thread = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("undercroft-io".to_owned())
            .spawn(move || run_or_break(&of_thread, io))?;
        Ok(Self {
            shared,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// Sets the hook that is called, outside the engine, whenever IO operations have ended. Only the first hook is
    /// kept.
    pub fn on_progress(&self, hook: impl Fn() + Send + Sync + 'static) {
        // A second hook is dropped: an engine has one server.
        let _ = self.shared.hook.set(Hook(Box::new(hook)));
    }

    /// Gives the engine a directory, without blocks, that could not be opened when it started.
    pub fn open_device(&self, device: u16, files: DeviceFiles, image: DeviceImage) {
        if let Some(mut state) = self.shared.lock()
            // Nobody would take the files, and they keep the directory locked.
            && state.stop_at.is_none()
        {
            state.opened.push(OpenedDevice {
                device,
                files,
                image,
            });
            state.waits = false;
        }
        self.shared.waker.wake();
    }

    /// The waker of the IO thread: a remote store wakes the thread when a completion is ready.
    pub fn waker(&self) -> Waker {
        self.shared.waker.clone()
    }

    /// Attaches a remote store, which wakes the IO thread by [`Driver::waker`]. Only the first store is used, and only
    /// with [`EngineConfig::remote`](undercroft_engine::EngineConfig::remote).
    pub fn attach_remote(&self, store: Box<dyn RemoteStore>) {
        if let Some(mut state) = self.shared.lock() {
            state.remote = Some(store);
            state.waits = false;
        }
        self.shared.waker.wake();
    }

    /// Finishes pending writes, for at most `timeout`, and stops the IO thread. Idempotent.
    ///
    /// The thread ends only when the devices have ended all operations that they have begun, because the kernel may use
    /// the arena and the files until then. This waits for it no longer than `timeout` and [`END_GRACE`]. A thread that it
    /// lets go keeps the arena mapped and the directories locked.
    pub fn stop(&self, timeout: Duration) {
        if let Some(mut state) = self.shared.lock() {
            if state.stop_at.is_none() {
                state.stop_at = Some(Instant::now() + timeout);
                state.engine.write_touched();
            }
            state.waits = false;
        }
        self.shared.waker.wake();
        let thread = self.thread.lock().ok().and_then(|mut thread| thread.take());
        let Some(thread) = thread else {
            return;
        };
        let has_ended = join_within(thread, timeout + END_GRACE);
        if let Some(line) = self.read(ends::lost).flatten() {
            log::say(Level::Warning, line);
        }
        if !has_ended {
            log::say(Level::Warning, ends::LET_GO.to_owned());
        }
    }
}

impl EngineAccess for Driver {
    fn enter<R>(&self, work: impl FnOnce(&mut Engine) -> R) -> Option<R> {
        contained(|| Some(self.shared.enter(self.shared.lock()?, work)))
    }

    // Unlike `enter`, a read never wakes the IO thread: each wake-up would retry requests that wait for memory or
    // budget.
    fn read<R>(&self, work: impl FnOnce(&Engine) -> R) -> Option<R> {
        contained(|| self.shared.lock().map(|state| work(&state.engine)))
    }

    fn read_or_enter<R>(
        &self,
        known: impl FnOnce(&Engine) -> Option<R>,
        work: impl FnOnce(&mut Engine) -> R,
    ) -> Option<R> {
        contained(|| {
            let state = self.shared.lock()?;
            let answer = known(&state.engine);
            Some(answer.unwrap_or_else(|| self.shared.enter(state, work)))
        })
    }

    fn wait_until(&self, timeout: Duration, mut done: impl FnMut(&mut Engine) -> bool) -> bool {
        let deadline = Instant::now() + timeout;
        let waited = contained(|| {
            let mut state = self.shared.lock()?;
            loop {
                let is_done = done(&mut state.engine);
                if state.engine.end_entry() {
                    self.shared.progress.notify_all();
                }
                if state.waits && state.engine.needs_turn() {
                    state.waits = false;
                    self.shared.waker.wake();
                }
                let left = deadline.saturating_duration_since(Instant::now());
                if is_done || left.is_zero() || state.stopped {
                    return Some(is_done);
                }
                let wait = left.min(TICK);
                (state, _) = self.shared.progress.wait_timeout(state, wait).ok()?;
                self.shared.tell_time(&mut state);
            }
        });
        waited.unwrap_or(false)
    }

    fn give_way(&self) {
        for _ in 0..GIVE_WAY_LOOKS {
            if self.shared.waiting.load(Ordering::Relaxed) == 0 {
                return;
            }
            std::thread::yield_now();
        }
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.stop(Duration::ZERO);
    }
}

/// The IO thread. Without it no wait would ever end, so its panic breaks the engine, too.
fn run_or_break(shared: &SharedEngine, io: Box<dyn IoEngine>) {
    // Dropped last: this waits for the devices.
    let mut thread = IoThread::new(io);
    let Err(panic) = catch_unwind(AssertUnwindSafe(|| run(shared, &mut thread))) else {
        return;
    };
    let _poisoned = shared.state.lock();
    shared.progress.notify_all();
    resume_unwind(panic);
}

fn run(shared: &SharedEngine, thread: &mut IoThread) {
    // Here no operation waits for the measurement.
    checksum::measure();
    let mut timeout = Some(Duration::ZERO);
    loop {
        let sum_bytes = thread.wait(timeout);
        let Some(mut state) = shared.lock() else {
            return;
        };
        let mut progress = thread.report(&mut state);
        let stopping = state.stop_at;
        let is_late = stopping.is_some_and(|at| Instant::now() >= at);
        let sums_all = thread.checksums.is_empty();
        let store = thread.store.as_ref().filter(|_| stopping.is_none());
        let room = Room {
            io: (!is_late).then_some(IoRoom::Each(&thread.rooms)),
            memory: !is_late,
            checksum_bytes: (!is_late && sums_all).then_some(sum_bytes),
            store: store.map(|store| store.room()),
        };
        state.engine.turn(room, &mut thread.started);
        // Promotions may have ended without a completion.
        progress |= state.engine.end_entry();
        let wake = state.engine.wake();
        thread.reads_in_flight = state.engine.operations().reads;
        state.waits = true;
        if progress {
            shared.progress.notify_all();
        }
        let is_done = || state.engine.is_quiet() && thread.started.io.is_empty();
        if is_late || stopping.is_some() && is_done() {
            state.stopped = true;
            shared.progress.notify_all();
            return;
        }
        drop(state);
        if progress && let Some(hook) = shared.hook.get() {
            (hook.0)();
        }
        thread.start();
        timeout = match stopping {
            _ if !thread.checksums.is_empty() => Some(Duration::ZERO),
            Some(_) => Some(RETRY),
            None => pause(wake),
        };
    }
}

/// How long the IO thread waits for an event.
fn pause(wake: Due) -> Option<Duration> {
    match wake {
        Due::Never | Due::Event => None,
        Due::Later => Some(LATER),
        Due::Look => Some(LOOK),
        // Requests that could not be started are tried again.
        Due::Poll | Due::Start => Some(RETRY),
        Due::Now => Some(REST_PAUSE),
    }
}

/// The IO thread's own: the devices and the remote store, with the operations that have ended or are to be started.
struct IoThread {
    io: Box<dyn IoEngine>,
    checksums: ChecksumQueue,
    store: Option<Box<dyn RemoteStore>>,
    reads_in_flight: usize,
    ended: Vec<IoCompletion>,
    store_ended: Vec<RemoteCompletion>,
    /// A part of the arena was to be returned to the system, and this succeeded.
    released: Option<bool>,
    /// Operations that each device takes.
    rooms: Vec<usize>,
    started: Started,
}

impl IoThread {
    fn new(io: Box<dyn IoEngine>) -> Self {
        Self {
            checksums: ChecksumQueue::new(Arc::clone(io.arena())),
            io,
            store: None,
            reads_in_flight: 0,
            ended: Vec::new(),
            store_ended: Vec::new(),
            released: None,
            rooms: Vec::new(),
            started: Started::default(),
        }
    }

    /// Waits until operations end, and computes checksums. Returns how many bytes it sums at once now.
    fn wait(&mut self, timeout: Option<Duration>) -> u32 {
        self.io.wait(timeout, &mut self.ended);
        let most = if self.reads_in_flight == 0 {
            SUM_BYTES
        } else {
            SUM_BYTES_READING
        };
        self.checksums.advance(most, &mut self.ended);
        if let Some(store) = &mut self.store {
            store.drain(&mut self.store_ended);
        }
        most
    }

    /// Tells the engine of the operations that have ended, and attaches directories and a store. Returns whether
    /// operations have ended.
    fn report(&mut self, state: &mut DriverState) -> bool {
        let any = !self.ended.is_empty() || !self.store_ended.is_empty();
        for completion in self.ended.drain(..) {
            state.engine.complete(completion);
        }
        if let Some(store) = state.remote.take()
            && self.store.is_none()
        {
            self.store = Some(store);
            state.engine.attach_remote();
        }
        for completion in self.store_ended.drain(..) {
            state.engine.complete_remote(completion);
        }
        if let Some(ok) = self.released.take() {
            state.engine.arena_release_ended(ok);
        }
        for opened in std::mem::take(&mut state.opened) {
            if self.io.replace_files(opened.device, opened.files).is_ok() {
                state.engine.open_disk(opened.device, &opened.image);
            }
        }
        let devices = 0..state.engine.device_count() as u16;
        self.rooms.clear();
        self.rooms
            .extend(devices.map(|device| self.io.room(device)));
        any
    }

    /// Starts the operations that the engine has asked for.
    fn start(&mut self) {
        self.checksums.extend(self.started.checksums.drain(..));
        for request in self.started.io.drain(..) {
            self.io.submit(request);
        }
        if let Some(store) = &mut self.store {
            for request in self.started.store.drain(..) {
                store.submit(request);
            }
        }
        let release = self.started.memory.take();
        self.released = release.map(|(offset, len)| self.io.release_memory(offset, len).is_ok());
    }
}

#[cfg(test)]
mod tests {
    use undercroft_contract::key::BlockHash;
    use undercroft_contract::namespace::{GroupKind, NamespaceSpec};
    use undercroft_contract::session::{SaveRequest, Tokens};
    use undercroft_engine::EngineConfig;
    use undercroft_io::arena::Arena;
    use undercroft_io::pool::ThreadPool;

    use super::*;

    const WAITERS: usize = 4;
    const PATIENCE: Duration = Duration::from_secs(60);

    #[test]
    fn the_end_of_an_operation_wakes_all_who_wait() {
        let config = EngineConfig {
            verify_host: true,
            ..EngineConfig::new(1 << 20)
        };
        let arena = Arc::new(Arena::create(config.host_bytes).expect("there is memory"));
        let io = ThreadPool::new(4, arena, Vec::new()).expect("there are threads");
        let mut engine = Engine::new(config);
        let spec = NamespaceSpec::uniform("weights", 16, &[(GroupKind::Full, 4096)]);
        let session = engine.open_session(spec).expect("a payload fits");
        let driver = Driver::start(engine, Box::new(io)).expect("there are threads");
        let (waiting, start) = (AtomicUsize::new(0), Instant::now());
        let woken = std::thread::scope(|scope| {
            let wait = || {
                let mut calls = 0;
                driver.wait_until(PATIENCE, |_| {
                    calls += 1;
                    waiting.fetch_add(usize::from(calls == 1), Ordering::SeqCst);
                    // The end of the wait is no wake-up.
                    calls > 1 && start.elapsed() < PATIENCE / 2
                })
            };
            let waiters: Vec<_> = (0..WAITERS).map(|_| scope.spawn(wait)).collect();
            while waiting.load(Ordering::SeqCst) < WAITERS {
                std::thread::yield_now();
            }
            // The IO thread sums the payload. This is the only operation.
            driver.enter(|engine| {
                let hashes = vec![BlockHash::new(&[7; 32]).expect("32 bytes")];
                let save = SaveRequest::new("a", &hashes, Tokens(16));
                let transfer = engine.begin_save(session, &save).transfer;
                engine.end_transfer(transfer.expect("there is room").id, true);
            });
            let ends = waiters.into_iter().map(|waiter| waiter.join());
            ends.filter(|end| matches!(end, Ok(true))).count()
        });
        assert_eq!(woken, WAITERS);
    }
}
