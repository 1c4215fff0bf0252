//! A session on a server. A background thread owns the socket; callers only read and change the client's
//! state, under a lock that is held for microseconds.
//!
//! The thread connects and registers again whenever the connection is lost: a server that is killed, frozen or
//! restarted costs misses, never an error.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd};
use undercroft_contract::explain::Rest;
use undercroft_contract::hint::{HintAnswer, HintRefusal, HintRequest};
use undercroft_contract::namespace::NamespaceSpec;
use undercroft_contract::panics::contained;
use undercroft_contract::pending::PendingLookups;
use undercroft_contract::session::{
    BlockEvents, Finished, GiveUp, Load, Lookup, LookupRequest, Save, SaveGrant, SaveRequest,
    Session, Step, Tokens, TransferId,
};
use undercroft_io::fork::Unshared;
use undercroft_io::join_within;

use crate::client_state::{ClientState, Polled, SessionAddress};
use crate::connection::{ConnectError, ServerConnection, wait};
use crate::parker::Parker;
use crate::protocol::{ClientMessage, ServerMessage};

/// Pauses between attempts to connect: the first, and the longest.
const PAUSE_MIN: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_secs(2);

/// Longest wait for a server to open the session, before the client tries another connection.
const REGISTER_TIMEOUT: Duration = Duration::from_secs(30);

/// Longest wait until the last frames of a client that ends are sent.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(200);

/// Longest wait for the thread of a client that ends. The thread also closes the engine that it may have opened in the
/// place of the server, or may be opening.
const END_LIMIT: Duration = Duration::from_secs(30);

/// Time for which the thread stays awake after it has sent or received frames: the next lookups of a step and the
/// replies then need no wake-up. A wake-up of a sleeping core costs the scheduler 10 us and more.
const LINGER: Duration = Duration::from_micros(100);

/// Niceness added to the thread that serves a connection.
const NICENESS: i32 = 5;

/// Finds the socket of the server. The error is the reason why there is none.
pub type Resolve = Box<dyn FnMut() -> Result<PathBuf, String> + Send>;

/// The session that a client opens, and its timeouts.
#[derive(Clone, Debug)]
pub struct ClientConfig {
    /// The namespace.
    pub namespace: NamespaceSpec,
    /// See [`SessionSpec::dropped_tokens`](undercroft_contract::session::SessionSpec::dropped_tokens).
    pub dropped_tokens: Tokens,
    /// See [`SessionSpec::tenant_share`](undercroft_contract::session::SessionSpec::tenant_share).
    pub tenant_share: u16,
    /// While a reply is due for longer than this, lookups are misses and no slots for saves are requested.
    pub deadline: Duration,
    /// Longest wait of a lookup for a due reply.
    pub spin: Duration,
}

/// Whether the session is open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConnectionState {
    /// The session is open.
    Up,
    /// The session is open, but the server does not reply in time.
    Late,
    /// The session is not open, with the reason.
    Down(String),
    /// The server refuses this client, with the reason.
    Refused(String),
}

#[derive(Debug)]
struct ClientShared {
    state: Mutex<ClientState>,
    changed: Condvar,
    wake: Unshared<OwnedFd>,
    parker: Parker,
    stop: AtomicBool,
    config: ClientConfig,
}

impl ClientShared {
    fn lock(&self) -> Option<MutexGuard<'_, ClientState>> {
        self.state.lock().ok()
    }

    /// Changes the state, and lets the thread send the frames that the change has queued.
    fn with<R>(&self, work: impl FnOnce(&mut ClientState) -> R) -> Option<R> {
        contained(|| {
            let mut state = self.lock()?;
            let result = work(&mut state);
            let queued = !state.outbox.is_empty();
            drop(state);
            if queued && self.parker.queued() {
                self.wake();
            }
            Some(result)
        })
    }

    fn wake(&self) {
        // Cannot fail: the count is far below its limit.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    fn stopping(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }
}

/// A session on a server. Dropping it ends the session.
#[derive(Debug)]
pub struct Client {
    shared: Arc<ClientShared>,
    thread: Mutex<Option<JoinHandle<()>>>,
    waits: PendingLookups,
}

impl Client {
    /// Starts the thread, which connects in the background.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn start(config: ClientConfig, resolve: Resolve) -> std::io::Result<Self> {
        let shared = Arc::new(ClientShared {
            state: Mutex::new(ClientState::new(config.namespace.clone(), config.deadline)),
            changed: Condvar::new(),
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?.into(),
            parker: Parker::new(),
            stop: AtomicBool::new(false),
            config,
        });
        let of_thread = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("undercroft-conn".to_owned())
            .spawn(move || run(&of_thread, resolve))?;
        Ok(Self {
            shared,
            thread: Mutex::new(Some(thread)),
            waits: PendingLookups::default(),
        })
    }

    /// Waits until the session is open or refused, at most for `timeout`.
    pub fn wait_for_connection(&self, timeout: Duration) -> ConnectionState {
        self.wait_until(Instant::now() + timeout, |state| {
            state.open.is_some() || state.refused.is_some()
        });
        self.connection()
    }

    /// Whether the session is open now.
    pub fn connection(&self) -> ConnectionState {
        let Some(state) = self.shared.lock() else {
            return ConnectionState::Down("the client has failed".to_owned());
        };
        match (&state.open, &state.refused) {
            (Some(_), _) if state.is_late(Instant::now()) => ConnectionState::Late,
            (Some(_), _) => ConnectionState::Up,
            (None, Some(reason)) => ConnectionState::Refused(reason.clone()),
            (None, None) => ConnectionState::Down(state.down.clone()),
        }
    }

    /// The address from which workers get the arena, of the open session or of the last session.
    pub fn address(&self) -> Option<SessionAddress> {
        self.shared.lock()?.last.clone()
    }

    /// `Engine.info()` at the opening of the session, and the latest `Engine.stats()`, both as JSON.
    pub fn reports(&self) -> (String, String) {
        self.read(|state| (state.info.clone(), state.stats.clone()))
    }

    fn read<R: Default>(&self, work: impl FnOnce(&ClientState) -> R) -> R {
        contained(|| self.shared.lock().map(|state| work(&state))).unwrap_or_default()
    }

    fn wait_until(
        &self,
        deadline: Instant,
        mut done: impl FnMut(&mut ClientState) -> bool,
    ) -> bool {
        let waited = contained(|| {
            let mut state = self.shared.lock()?;
            loop {
                let is_done = done(&mut state);
                let left = deadline.saturating_duration_since(Instant::now());
                if is_done || left.is_zero() || self.shared.stopping() {
                    return Some(is_done);
                }
                (state, _) = self.shared.changed.wait_timeout(state, left).ok()?;
            }
        });
        waited.unwrap_or(false)
    }
}

impl Session for Client {
    fn namespace(&self) -> String {
        self.read(|state| state.namespace.clone())
    }

    fn lookup(&self, request: &LookupRequest<'_>) -> Lookup {
        let look = |state: &mut ClientState| state.lookup(request, Instant::now());
        let mut polled = self.shared.with(look).unwrap_or(Polled::NOTHING);
        if let Polled::Soon { .. } = polled {
            let until = Instant::now() + self.shared.config.spin;
            let name = request.request;
            self.wait_until(until, |state| !state.is_sent(name));
            let look_again = |state: &mut ClientState| {
                state.waited(name);
                look(state)
            };
            polled = self.shared.with(look_again).unwrap_or(Polled::NOTHING);
        }
        let answer = match polled {
            Polled::Answer(answer) => answer,
            Polled::Soon { shared } => Lookup::Pending { shared },
        };
        self.waits.answered(request, answer);
        answer
    }

    fn wait(&self, request: &str, timeout: Duration) -> bool {
        self.wait_until(Instant::now() + timeout, |state| state.is_answered(request))
    }

    fn ended_waits(&self) -> Vec<Box<str>> {
        let now = Instant::now();
        self.waits.take_ended(|part| {
            self.shared.with(|state| {
                let still = |&(name, _): &(&str, _)| state.still_pending(name, now);
                part.iter().map(still).collect()
            })
        })
    }

    fn rest(&self, request: &str) -> Option<Rest> {
        self.read(|state| state.rest(request, Instant::now()))
    }

    fn end_lookup(&self, request: &str) {
        self.waits.forget(request);
        self.shared.with(|state| state.end_lookup(request));
    }

    fn begin_load(&self, request: &str, computed: Tokens, external: Tokens) -> Option<Load> {
        self.shared
            .with(|state| state.begin_load(request, computed, external))
            .flatten()
    }

    fn begin_save(&self, request: &SaveRequest<'_>) -> Save {
        self.shared
            .with(|state| state.begin_save(request, Instant::now()))
            .unwrap_or(Save::Unavailable)
    }

    fn poll_saves(&self) -> Vec<SaveGrant> {
        self.shared
            .with(ClientState::take_grants)
            .unwrap_or_default()
    }

    fn end_transfer(&self, id: TransferId, ok: bool) {
        self.shared.with(|state| state.end_transfer(id, ok));
    }

    fn give_up(&self, id: TransferId, reason: GiveUp) {
        self.shared.with(|state| state.give_up(id, reason));
    }

    fn finish_request(&self, finished: Finished<'_>) {
        self.waits.forget(finished.request);
        self.shared.with(|state| state.finish_request(finished));
    }

    fn hint(&self, request: &HintRequest<'_>) -> HintAnswer {
        let sent = self.shared.with(|state| state.send_hint(request));
        let Some(number) = sent.flatten() else {
            return HintAnswer::Rejected(HintRefusal::Unavailable);
        };
        let until = Instant::now() + self.shared.config.spin;
        self.wait_until(until, |state| state.is_hinted(number));
        let answer = self.shared.with(|state| state.end_hint(number));
        answer.unwrap_or(HintAnswer::Rejected(HintRefusal::Unavailable))
    }

    fn take_events(&self, restart: bool) -> BlockEvents {
        let take = |state: &mut ClientState| state.take_events(restart, Instant::now());
        self.shared.with(take).unwrap_or_default()
    }

    fn report_steps(&self, steps: &[Step]) {
        self.shared.with(|state| state.report_steps(steps));
    }

    fn reset(&self, timeout: Duration) -> bool {
        let Some(reset) = self.shared.with(ClientState::begin_reset).flatten() else {
            return false;
        };
        let ended = |state: &mut ClientState| state.has_reset_ended(reset);
        self.wait_until(Instant::now() + timeout, ended);
        self.shared
            .with(|state| state.end_reset(reset))
            .unwrap_or(false)
    }

    fn change_weights(&self, description: Option<&str>) {
        self.shared.with(|state| state.change_weights(description));
    }

    /// Sends the messages that are queued, for at most 200 ms, and ends the session. Idempotent.
    fn close(&self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.wake();
        let thread = self.thread.lock().ok().and_then(|mut thread| thread.take());
        thread.map(|thread| join_within(thread, END_LIMIT));
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        Session::close(self);
    }
}

fn run(shared: &ClientShared, mut resolve: Resolve) {
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
        if let Some(mut state) = shared.lock() {
            state.lost(why);
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
fn open(shared: &ClientShared, socket: PathBuf) -> Result<ServerConnection, ConnectError> {
    let mut connection = ServerConnection::open(&socket)?;
    let (namespace, private) = match shared.lock() {
        Some(state) => (state.spec.clone(), state.private),
        None => (shared.config.namespace.clone(), true),
    };
    let description = namespace.description.clone();
    let register = ClientMessage::Register {
        namespace,
        dropped_tokens: shared.config.dropped_tokens,
        private,
        tenant_share: shared.config.tenant_share,
    };
    let deadline = Instant::now() + REGISTER_TIMEOUT;
    let reply = connection.ask(&register, deadline, || shared.stopping())?;
    let mut registered = false;
    if let Some(mut state) = shared.lock() {
        match reply {
            ServerMessage::Registered {
                session,
                arena_id,
                info,
            } => {
                registered = true;
                let address = SessionAddress {
                    socket: socket.clone(),
                    arena_id,
                    session,
                };
                state.registered(address, (&description, private), info);
            }
            ServerMessage::Refused { reason } => state.refused = Some(reason),
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

/// Serves the connection from a thread of lower priority. On a machine with few cores, the scheduler, which wakes this
/// thread, then runs first. The thread that opens connections keeps its priority: an engine that it opens inherits it.
fn serve_nicely(shared: &ClientShared, connection: &mut ServerConnection) -> Option<ConnectError> {
    let thread = std::thread::Builder::new().name("undercroft-client".to_owned());
    std::thread::scope(|scope| {
        let served = thread.spawn_scoped(scope, || {
            let own = rustix::process::getpriority_process(None).unwrap_or(0);
            let _ = rustix::process::setpriority_process(None, own + NICENESS);
            serve(shared, connection)
        });
        // A panic of the thread has been reported by the panic hook.
        served.ok()?.join().ok()?
    })
}

/// Sends and receives frames until the connection is lost (the error) or the client ends (`None`).
fn serve(shared: &ClientShared, connection: &mut ServerConnection) -> Option<ConnectError> {
    let mut closing: Option<Instant> = None;
    let mut linger_until = Instant::now();
    loop {
        // This is read before the frames are taken, so that all frames from before the end are sent.
        let stopping = shared.stopping();
        let left = connection.is_blocked();
        let mut pause = {
            let mut state = shared.lock()?;
            let now = Instant::now();
            let pause = state.tick(now);
            if state.is_overfull() {
                return Some(connection.unread());
            }
            if !state.outbox.is_empty() {
                linger_until = now + LINGER;
            }
            connection.queue(&mut state.outbox);
            // This runs under the lock: a caller that queues a frame from now on wakes the thread.
            shared.parker.taken();
            pause
        };
        if let Err(error) = connection.send() {
            return Some(error);
        }
        if left && !connection.is_blocked() {
            // All taken frames were sent. More frames are queued that have not been taken.
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
                    .is_some_and(|mut state| state.take(reply, now))
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

/// Waits until there is something to do: awake until `linger_until`, then asleep for at most `pause`. Returns whether
/// there is something to read.
fn wait_for_frames(
    shared: &ClientShared,
    connection: &ServerConnection,
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
            shared.parker.is_idle()
        } else {
            shared.parker.park()
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
