//! A session on a server: one background thread owns the socket; whoever calls only reads and writes the
//! table, under a lock that is held for microseconds.
//!
//! The thread connects, registers, and does so again for as long as the client lives: a server that is
//! killed, frozen or restarted costs misses, never an error.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd};
use undercroft_core::key::HashSource;
use undercroft_core::namespace::NamespaceSpec;
use undercroft_core::panics::contained;

use crate::connection::{ConnectError, Connection, wait};
use crate::doze::Doze;
use crate::protocol::{Reply, Request, WireExtent};
use crate::table::{Grant, Link, Polled, Table};

/// Pauses between attempts to connect: the first, and the longest.
const PAUSE_MIN: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_secs(2);

/// How long a server may take to open the session before another connection is tried.
const REGISTER_TIMEOUT: Duration = Duration::from_secs(30);

/// How long the last frames of a client that ends may take.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(200);

/// How long the thread stays awake after frames have come or gone: those that follow at once, the next
/// requests of a step and the reply, wake nobody. Waking a core that sleeps costs the scheduler 10 us and more.
const LINGER: Duration = Duration::from_micros(100);

/// How much nicer than the process the thread is that serves a connection.
const NICER: i32 = 5;

/// Finds the socket to connect to; the error says why there is none.
pub type Resolve = Box<dyn FnMut() -> Result<PathBuf, String> + Send>;

/// What a client is for, and how patient it is.
#[derive(Clone, Debug)]
pub struct ClientConfig {
    /// The namespace.
    pub spec: NamespaceSpec,
    /// How far before the end of what is cached every hit must end.
    pub dropped_tokens: u32,
    /// A server that owes a reply for longer than this is not asked until it has answered.
    pub deadline: Duration,
    /// Longest wait of a poll for an answer that is on its way.
    pub spin: Duration,
}

/// Whether there is a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkState {
    /// There is.
    Up,
    /// There is, but the server does not answer in time.
    Late,
    /// There is none, and why.
    Down(String),
    /// The server refuses this client, and why.
    Refused(String),
}

#[derive(Debug)]
struct Shared {
    table: Mutex<Table>,
    changed: Condvar,
    wake: OwnedFd,
    doze: Doze,
    stop: AtomicBool,
    config: ClientConfig,
}

impl Shared {
    fn lock(&self) -> Option<MutexGuard<'_, Table>> {
        self.table.lock().ok()
    }

    /// Does something with the table, and has the thread send what that left to be sent.
    fn with<R>(&self, work: impl FnOnce(&mut Table) -> R) -> Option<R> {
        contained(|| {
            let mut table = self.lock()?;
            let result = work(&mut table);
            let queued = !table.outbox.is_empty();
            drop(table);
            if queued && self.doze.queued() {
                self.wake();
            }
            Some(result)
        })
    }

    fn wake(&self) {
        // Cannot fail: the count is far from its limit.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    fn stopping(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }
}

/// A session on a server. Dropping it ends the session.
#[derive(Debug)]
pub struct Client {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Client {
    /// Starts the thread, which connects in the background.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn start(config: ClientConfig, resolve: Resolve) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            table: Mutex::new(Table::new(config.spec.clone(), config.deadline)),
            changed: Condvar::new(),
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            doze: Doze::new(),
            stop: AtomicBool::new(false),
            config,
        });
        let of_thread = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("undercroft-link".to_owned())
            .spawn(move || run(&of_thread, resolve))?;
        Ok(Self {
            shared,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// Waits until the session is open or refused, at most for `timeout`.
    pub fn wait_for_link(&self, timeout: Duration) -> LinkState {
        self.wait_until(Instant::now() + timeout, |table| {
            table.up.is_some() || table.refused.is_some()
        });
        self.state()
    }

    /// Whether there is a session now.
    pub fn state(&self) -> LinkState {
        let Some(table) = self.shared.lock() else {
            return LinkState::Down("the client has failed".to_owned());
        };
        match (&table.up, &table.refused) {
            (Some(_), _) if table.is_late(Instant::now()) => LinkState::Late,
            (Some(_), _) => LinkState::Up,
            (None, Some(reason)) => LinkState::Refused(reason.clone()),
            (None, None) => LinkState::Down(table.trouble.clone()),
        }
    }

    /// The session, or the last one that there was.
    pub fn link(&self) -> Option<Link> {
        self.shared.lock()?.last.clone()
    }

    /// Digest of the namespace, hexadecimal.
    pub fn namespace(&self) -> String {
        self.read(|table| table.namespace.clone())
    }

    /// What the server said of itself when the session was opened, and of its statistics lately, as JSON.
    pub fn reports(&self) -> (String, String) {
        self.read(|table| (table.info.clone(), table.stats.clone()))
    }

    /// Starts a request's lookup. Idempotent. `local_tokens`: what the device holds; `max_tokens`: the
    /// deepest boundary of use; `wait_ns`: limit on the wait for the disk, a base and a part for every
    /// 1,000 tokens.
    pub fn submit<H: HashSource + ?Sized>(
        &self,
        request: &str,
        hashes: &H,
        local_tokens: u32,
        max_tokens: u32,
        wait_ns: Option<(u64, u64)>,
    ) {
        let span = (local_tokens, max_tokens);
        self.shared
            .with(|table| table.submit(request, hashes, span, wait_ns, Instant::now()));
    }

    /// The deepest usable boundary; `None` while it is pending. Waits only for an answer that is on its
    /// way, once, and at most for the time that the configuration gives.
    pub fn poll<H: HashSource + ?Sized>(
        &self,
        request: &str,
        hashes: &H,
        local_tokens: u32,
        max_tokens: u32,
        wait_ns: Option<(u64, u64)>,
    ) -> Option<u32> {
        let span = (local_tokens, max_tokens);
        let look = |table: &mut Table| table.poll(request, hashes, span, wait_ns, Instant::now());
        let mut polled = self.shared.with(look).unwrap_or(Polled::Ready(0));
        if polled == Polled::Soon {
            let until = Instant::now() + self.shared.config.spin;
            self.wait_until(until, |table| !table.is_sent(request));
            let again = |table: &mut Table| {
                table.waited(request);
                look(table)
            };
            polled = self.shared.with(again).unwrap_or(Polled::Ready(0));
        }
        match polled {
            Polled::Ready(tokens) => Some(tokens),
            Polled::Pending | Polled::Soon => None,
        }
    }

    /// Waits until a lookup is answered, woken by the answer, at most for `timeout`. Whether it is.
    pub fn wait(&self, request: &str, timeout: Duration) -> bool {
        self.wait_until(Instant::now() + timeout, |table| table.is_answered(request))
    }

    /// Tokens of the request's prompt that its last lookup found a chain for, usable or not.
    pub fn shared_tokens(&self, request: &str) -> u32 {
        self.read(|table| table.shared_tokens(request))
    }

    /// Of the tokens in `(local, local + external]`, how many came from (host, disk).
    pub fn sources(&self, request: &str, local_tokens: u32, external_tokens: u32) -> (u32, u32) {
        self.read(|table| table.sources(request, local_tokens, external_tokens))
    }

    /// Begins the load of what was answered: its number, its session's token, and where to copy from.
    pub fn begin_load(
        &self,
        request: &str,
        local_tokens: u32,
        external_tokens: u32,
    ) -> Option<(u64, u128, Vec<WireExtent>)> {
        self.shared
            .with(|table| table.begin_load(request, local_tokens, external_tokens))
            .flatten()
    }

    /// All ranks have ended a load.
    pub fn end_load(&self, load: u64, ok: bool) {
        self.shared.with(|table| table.end_load(load, ok));
    }

    /// Asks for slots to save to: the number of the save, whose grant comes later. `None` without a server.
    pub fn begin_save<H: HashSource + ?Sized>(
        &self,
        request: &str,
        hashes: &H,
        tokens: u32,
        offers: &[(u8, u32, u32)],
    ) -> Option<u64> {
        self.shared
            .with(|table| table.begin_save(request, hashes, tokens, offers, Instant::now()))
            .flatten()
    }

    /// The grants that have come since the last call.
    pub fn grants(&self) -> Vec<Grant> {
        self.shared.with(Table::take_grants).unwrap_or_default()
    }

    /// All ranks have ended a save, or nobody will copy.
    pub fn end_save(&self, save: u64, ok: bool) {
        self.shared.with(|table| table.end_save(save, ok));
    }

    /// A request's lookup is not needed any more. Idempotent.
    pub fn release(&self, request: &str) {
        self.shared.with(|table| table.release(request));
    }

    /// A request has ended. Idempotent.
    pub fn forget(&self, request: &str) {
        self.shared.with(|table| table.forget(request));
    }

    /// Drops everything of the namespace; whether that was durable within `timeout`.
    pub fn reset(&self, timeout: Duration) -> bool {
        let Some(ticket) = self.shared.with(Table::reset).flatten() else {
            return false;
        };
        let mut ended = None;
        self.wait_until(Instant::now() + timeout, |table| {
            ended = ended.or_else(|| table.take_reset(ticket));
            ended.is_some()
        });
        ended.unwrap_or(false)
    }

    /// Sends what is left to be sent (bounded), and ends the session. Idempotent.
    pub fn close(&self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.wake();
        let thread = self.thread.lock().ok().and_then(|mut thread| thread.take());
        if let Some(thread) = thread {
            // A panic of the thread has been reported by the panic hook.
            drop(thread.join());
        }
    }

    fn read<R: Default>(&self, work: impl FnOnce(&Table) -> R) -> R {
        contained(|| self.shared.lock().map(|table| work(&table))).unwrap_or_default()
    }

    fn wait_until(&self, deadline: Instant, mut done: impl FnMut(&mut Table) -> bool) -> bool {
        let waited = contained(|| {
            let mut table = self.shared.lock()?;
            loop {
                let is_done = done(&mut table);
                let left = deadline.saturating_duration_since(Instant::now());
                if is_done || left.is_zero() || self.shared.stopping() {
                    return Some(is_done);
                }
                (table, _) = self.shared.changed.wait_timeout(table, left).ok()?;
            }
        });
        waited.unwrap_or(false)
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.close();
    }
}

fn run(shared: &Shared, mut resolve: Resolve) {
    let mut pause = PAUSE_MIN;
    while !shared.stopping() {
        let why = match resolve() {
            Err(why) => why,
            Ok(path) => match open(shared, path) {
                Err(error) => error.to_string(),
                Ok(mut connection) => {
                    pause = PAUSE_MIN;
                    let error = serve_nicely(shared, &mut connection);
                    error.map_or_else(String::new, |error| error.to_string())
                }
            },
        };
        if let Some(mut table) = shared.lock() {
            table.lost(why);
        }
        shared.changed.notify_all();
        if !shared.stopping() {
            wait(&mut [PollFd::new(&shared.wake, PollFlags::IN)], pause);
            let _ = rustix::io::read(&shared.wake, &mut [0; 8]);
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }
}

/// Connects and opens the session.
fn open(shared: &Shared, socket: PathBuf) -> Result<Connection, ConnectError> {
    let mut connection = Connection::open(&socket)?;
    let private = shared.lock().is_some_and(|table| table.private);
    let request = Request::Register {
        spec: shared.config.spec.clone(),
        dropped_tokens: shared.config.dropped_tokens,
        private,
    };
    let deadline = Instant::now() + REGISTER_TIMEOUT;
    let reply = connection.ask(&request, deadline, || shared.stopping())?;
    let mut registered = false;
    if let Some(mut table) = shared.lock() {
        match reply {
            Reply::Registered {
                session,
                generation,
                info,
                ..
            } => {
                registered = true;
                let link = Link {
                    socket: socket.clone(),
                    generation,
                    session,
                };
                table.registered(link, private, info);
            }
            Reply::Refused { reason } => table.refused = Some(reason),
            _ => {}
        }
    }
    shared.changed.notify_all();
    if registered {
        Ok(connection)
    } else {
        Err(ConnectError::Closed { path: socket })
    }
}

/// Serves from a thread that lets the scheduler, which wakes it, go on first where cores are few. The
/// thread that opens connections is not that one: an engine that it opens inherits its priority.
fn serve_nicely(shared: &Shared, connection: &mut Connection) -> Option<ConnectError> {
    let thread = std::thread::Builder::new().name("undercroft-client".to_owned());
    std::thread::scope(|scope| {
        let served = thread.spawn_scoped(scope, || {
            let own = rustix::process::getpriority_process(None).unwrap_or(0);
            let _ = rustix::process::setpriority_process(None, own + NICER);
            serve(shared, connection)
        });
        // A panic of the thread has been reported by the panic hook.
        served.ok()?.join().ok()?
    })
}

/// Carries frames both ways until the connection is lost (the error) or the client ends (`None`).
fn serve(shared: &Shared, connection: &mut Connection) -> Option<ConnectError> {
    let mut closing: Option<Instant> = None;
    let mut linger_until = Instant::now();
    loop {
        // Before the frames are taken: what was said before the end is sent.
        let stopping = shared.stopping();
        let left = connection.is_blocked();
        let mut pause = {
            let mut table = shared.lock()?;
            let now = Instant::now();
            let pause = table.tick(now);
            if table.is_overfull() {
                return Some(connection.unread());
            }
            if !table.outbox.is_empty() {
                linger_until = now + LINGER;
            }
            connection.queue(&mut table.outbox);
            // Under the lock: whoever adds a frame from now on says so.
            shared.doze.taken();
            pause
        };
        if let Err(error) = connection.send() {
            return Some(error);
        }
        if left && !connection.is_blocked() {
            // That was what was left from before: the table's frames have not been taken.
            continue;
        }
        if stopping {
            let until = *closing.get_or_insert(Instant::now() + CLOSE_TIMEOUT);
            let left = until.saturating_duration_since(Instant::now());
            if !connection.is_blocked() || left.is_zero() {
                return None;
            }
            pause = pause.min(left);
        }
        if wait_for_frames(shared, connection, linger_until, pause) {
            let mut taken = false;
            let received = connection.receive(|reply| {
                taken = true;
                let now = Instant::now();
                shared
                    .lock()
                    .is_some_and(|mut table| table.reply(reply, now))
            });
            if taken {
                linger_until = Instant::now() + LINGER;
                shared.changed.notify_all();
            }
            if let Err(error) = received {
                return Some(error);
            }
        }
    }
}

/// Waits until there is something to do: awake until `linger_until`, then asleep for at most `pause`.
/// Whether there is something to read.
fn wait_for_frames(
    shared: &Shared,
    connection: &Connection,
    linger_until: Instant,
    pause: Duration,
) -> bool {
    let mut events = PollFlags::IN;
    if connection.is_blocked() {
        events |= PollFlags::OUT;
    }
    let mut fds = [
        PollFd::new(&shared.wake, PollFlags::IN),
        PollFd::new(&connection.stream, events),
    ];
    loop {
        let lingers = Instant::now() < linger_until;
        let is_idle = if lingers {
            shared.doze.is_idle()
        } else {
            shared.doze.fall_asleep()
        };
        if !is_idle {
            return false;
        }
        wait(&mut fds, if lingers { Duration::ZERO } else { pause });
        if lingers && fds.iter().all(|fd| fd.revents().is_empty()) {
            std::thread::yield_now();
            continue;
        }
        if !fds[0].revents().is_empty() {
            let _ = rustix::io::read(&shared.wake, &mut [0; 8]);
        }
        return !fds[1].revents().is_empty();
    }
}
