//! The event loop of a server.
//!
//! Each turn has a limit of time. The connections with work get slices of the turn, first those of the processes that
//! have had the least processor time. Work that is longer than a slice is carried out in steps.

use std::collections::HashMap;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use slotmap::SlotMap;
use undercroft_contract::session::{SessionSpec, SessionToken};
use undercroft_driver::EngineAccess;
use undercroft_io::fork::Unshared;
use undercroft_io::memory;

use super::answers::{describe, hand_over};
use super::connection::{ConnectionId, End, PAUSE};
use super::leaving::{LeavingWorkers, process_of};
use super::peer::{Filled, Peer, READ_BYTES, Role};
use super::queue::{FairQueue, processor_time};
use super::{Served, ServerControl};
use crate::budget::Budget;
use crate::descriptors::Closer;
use crate::dialect::{self, Dialect};
use crate::frame::{self, ATTACH_BODY_BYTES, FrameKind, HEADER_BYTES};
use crate::orders::Caller;
use crate::protocol::{ClientMessage, ServerMessage};
use crate::sessions::{ANSWERS_MAX, ServedSessions};
use crate::stats::Report;

/// Most connections, if the process may have enough descriptors. Further connections are closed at once.
const CONNECTIONS_MAX: usize = 1024;

/// Connections that sessions cannot use, for `undercroft status` and workers.
const RESERVED: usize = 256;

/// Longest work for all connections before the sockets are polled again.
const TURN: Duration = Duration::from_micros(200);

/// Longest work for one connection before the other connections' turn.
const SLICE: Duration = Duration::from_micros(100);

/// A longer frame is carried out in steps.
const LONG_FRAME: usize = 32 << 10;

/// See [`Terms::silence_max`].
const SILENCE_MAX: Duration = Duration::from_secs(10);

/// Most bytes of all connections' inboxes, and of each inbox.
const INBOX_LIMIT: u64 = 64 << 20;
const INBOX_FLOOR: u64 = 768 << 10;

/// How often the deadlines of pending lookups are checked.
const TICK: Duration = Duration::from_millis(5);

/// With more pending lookups than this, the engine is asked about them at most once in [`CROWD_INTERVAL`].
const CROWD: usize = 64;
const CROWD_INTERVAL: Duration = Duration::from_millis(2);

/// The terms on which connections are served.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms {
    /// Older versions of the protocol that the server supports.
    pub(super) dialects: &'static [Dialect],
    /// Longest silence of a connection without a session, and longest wait for the rest of a frame.
    pub(super) silence_max: Duration,
    /// Whether the kernel refuses descriptors, if it can.
    pub(super) refuses_descriptors: bool,
}

impl Terms {
    pub(super) const USUAL: Self = Self {
        dialects: dialect::OLDER,
        silence_max: SILENCE_MAX,
        refuses_descriptors: true,
    };
}

pub(super) struct Service {
    sessions: ServedSessions,
    pub(super) listener: Unshared<UnixListener>,
    path: PathBuf,
    started: Instant,
    served: Served,
    pub(super) control: Arc<ServerControl>,
    pub(super) connections: SlotMap<ConnectionId, Peer>,
    pub(super) connections_max: usize,
    pub(super) leaving: LeavingWorkers,
    /// The connections of sessions.
    clients: HashMap<SessionToken, ConnectionId>,
    pub(super) queue: FairQueue,
    terms: Terms,
    inboxes: Budget,
    scratch: Vec<u8>,
    pub(super) closer: Closer,
    status: Report,
    /// End of a pause after accepting has failed (for example without free descriptors). The listener is not polled in
    /// this pause, since it stays readable.
    pub(super) paused_until: Option<Instant>,
    /// Time of the next search for silent connections.
    sweep_at: Instant,
    /// When the engine was last asked for the answers of pending lookups.
    answered_at: Instant,
    /// Whether the engine must be asked again soon.
    answers_due: bool,
}

impl Service {
    pub(super) fn new(
        listener: Unshared<UnixListener>,
        path: PathBuf,
        served: Served,
        control: Arc<ServerControl>,
        terms: Terms,
        closer: Closer,
    ) -> Self {
        let now = Instant::now();
        let files = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        let half = files.map_or(usize::MAX, |files| files as usize / 2);
        Self {
            sessions: ServedSessions::new(
                Arc::clone(&served.driver),
                served.arena_id,
                served.stats.clone(),
            ),
            listener,
            path,
            started: now,
            served,
            control,
            connections: SlotMap::with_key(),
            connections_max: CONNECTIONS_MAX.min(half),
            leaving: LeavingWorkers::default(),
            clients: HashMap::new(),
            queue: FairQueue::default(),
            terms,
            inboxes: Budget::new(INBOX_LIMIT, INBOX_FLOOR),
            scratch: vec![0; READ_BYTES],
            closer,
            status: Report::default(),
            paused_until: None,
            sweep_at: now + PAUSE,
            answered_at: now,
            answers_due: false,
        }
    }

    pub(super) fn run(&mut self) {
        while let Some(accept) = self.poll() {
            let until = Instant::now() + TURN;
            self.answer_in_time();
            while let Some(id) = self.queue.pop(&mut self.connections) {
                match self.serve(id) {
                    Ok(true) => self.queue.push(id, &mut self.connections[id]),
                    Ok(false) => {}
                    Err(end) => self.close(id, end),
                }
                if Instant::now() >= until {
                    break;
                }
            }
            self.sessions.step_end();
            if accept {
                self.accept();
            }
            self.sweep();
        }
        for (_, peer) in self.connections.drain() {
            self.closer.end(peer.stream.into_inner());
        }
    }

    /// Longest sleep of the loop; `None` without a limit.
    fn timeout(&self) -> Option<Duration> {
        let lacks_room = |peer: &Peer| peer.lacks_room;
        if !self.queue.is_empty() || self.sessions.is_ending() {
            Some(Duration::ZERO)
        } else if self.answers_due {
            Some(CROWD_INTERVAL)
        } else if self.sessions.pending() > 0 || self.connections.values().any(lacks_room) {
            Some(TICK)
        } else if self.paused_until.is_some() || self.descriptors() > 0 {
            Some(PAUSE)
        } else {
            None
        }
    }

    /// Waits for work. Returns whether there are connections to accept; `None` when the server must stop.
    fn poll(&mut self) -> Option<bool> {
        let listening = if self.paused_until.is_some() {
            PollFlags::empty()
        } else {
            PollFlags::IN
        };
        let timeout = self.timeout();
        let timeout = timeout.map(|wait| Timespec::try_from(wait).expect("a wait takes seconds"));
        let mut ids = Vec::with_capacity(self.connections.len());
        let mut fds = Vec::with_capacity(self.connections.len() + self.leaving.len() + 2);
        fds.push(PollFd::new(&self.control.wake, PollFlags::IN));
        fds.push(PollFd::new(&self.listener, listening));
        for (id, peer) in &self.connections {
            let mut events = PollFlags::empty();
            if peer.unread() > 0 {
                events |= PollFlags::OUT;
            }
            // The server does not read from a peer that does not read its answers.
            if !peer.lacks_room && peer.unread() <= ANSWERS_MAX {
                events |= PollFlags::IN;
            }
            if !peer.is_queued {
                ids.push(id);
                fds.push(PollFd::new(&peer.stream, events));
            }
        }
        fds.extend(self.leaving.fds());
        if poll(&mut fds, timeout.as_ref()).is_err() {
            // Interrupted, or out of memory or descriptors, which may pass: nothing has been seen.
            std::thread::sleep(Duration::from_millis(1));
            return (!self.control.stop.load(Ordering::Acquire)).then_some(false);
        }
        let woken = !fds[0].revents().is_empty();
        let accept = !fds[1].revents().is_empty();
        let of_workers = &fds[2 + ids.len()..];
        let worker_gone = of_workers.iter().any(|fd| !fd.revents().is_empty());
        let flags = fds[2..].iter().map(PollFd::revents);
        let ready: Vec<(ConnectionId, PollFlags)> = ids.into_iter().zip(flags).collect();
        if woken {
            // The flag is cleared first: progress from now on wakes the thread again.
            self.control.woken.store(false, Ordering::Release);
            let _ = rustix::io::read(&self.control.wake, &mut [0; 8]);
        }
        if worker_gone {
            self.end_workers();
        }
        for (id, flags) in ready {
            let peer = &mut self.connections[id];
            if flags.intersects(PollFlags::HUP | PollFlags::ERR) && peer.lacks_room {
                self.close(id, End::Closed);
            } else if !flags.is_empty() || peer.lacks_room {
                self.queue.push(id, peer);
            }
        }
        (!self.control.stop.load(Ordering::Acquire)).then_some(accept)
    }

    /// Serves the requests of a connection for one slice of time. Returns whether there is more to do.
    fn serve(&mut self, id: ConnectionId) -> Result<bool, End> {
        let (start, before) = (Instant::now(), processor_time());
        let account = self.connections[id].account;
        let served = self.serve_slice(id, start);
        // Even if the connection ends: its process may have others.
        self.queue.charge(account, processor_time() - before);
        served
    }

    fn serve_slice(&mut self, id: ConnectionId, start: Instant) -> Result<bool, End> {
        self.connections[id].send();
        let mut is_read = false;
        let more = loop {
            let peer = &mut self.connections[id];
            if peer.unread() > ANSWERS_MAX {
                peer.send();
                if peer.unread() > ANSWERS_MAX {
                    peer.pardon();
                    break false;
                }
            }
            match peer.role {
                Role::Client(token) if self.sessions.is_busy(token) => {
                    self.sessions.step(token, &mut peer.outbox)?;
                    self.served.driver.give_way();
                }
                _ => match peer.frame(self.terms.dialects)? {
                    Some(len) => self.frame(id, len)?,
                    None if is_read => {
                        peer.shrink(&mut self.inboxes);
                        break false;
                    }
                    None => match peer.fill(&mut self.inboxes, &mut self.scratch, &self.closer)? {
                        Filled::NoRoom => break false,
                        filled => is_read = filled == Filled::All,
                    },
                },
            }
            if start.elapsed() >= SLICE {
                break true;
            }
        };
        let peer = &mut self.connections[id];
        peer.send();
        // A client may end right after its last messages: they are read before the connection is closed.
        Ok(more || peer.is_deaf && !peer.lacks_room)
    }

    /// Carries out the first frame of a connection, of length `len`.
    fn frame(&mut self, id: ConnectionId, len: usize) -> Result<(), End> {
        let peer = &mut self.connections[id];
        match peer.role {
            Role::Worker(_) => {
                let frame = peer.take_frame(len);
                let first = frame::first_as(peer.version(), &frame).map_err(End::from)?;
                match first {
                    Some((header, _, _)) if header.kind == FrameKind::LetGo => Err(End::LetGo),
                    _ => Err(End::Malformed),
                }
            }
            Role::Client(token) => {
                if let Some(dialect) = peer.dialect {
                    let frame = peer.take_frame(len);
                    let frame = dialect.request_frame(&frame).map_err(End::from)?;
                    is_request(&frame)?;
                    return Ok(self.sessions.handle_long(token, frame, &mut peer.outbox)?);
                }
                if len > LONG_FRAME {
                    let frame = peer.take_frame(len);
                    is_request(&frame)?;
                    return Ok(self.sessions.handle_long(token, frame, &mut peer.outbox)?);
                }
                let (frame, outbox) = peer.first(len);
                is_request(frame)?;
                let body = &frame[HEADER_BYTES..];
                let message = ClientMessage::decode(body).map_err(End::from)?;
                Ok(self.sessions.handle(token, message, outbox)?)
            }
            Role::New => {
                let mut frame = peer.take_frame(len);
                if let Some(dialect) = peer.dialect {
                    frame = dialect.request_frame(&frame).map_err(End::from)?;
                }
                self.first_frame(id, &frame)
            }
        }
    }

    fn first_frame(&mut self, id: ConnectionId, bytes: &[u8]) -> Result<(), End> {
        let frame = frame::first(bytes).map_err(End::from)?;
        let (header, body, _) = frame.ok_or(End::Malformed)?;
        match header.kind {
            FrameKind::Attach => {
                let token = <[u8; ATTACH_BODY_BYTES]>::try_from(body);
                let token = token.map_err(|_| End::Malformed)?;
                self.attach(id, SessionToken(u128::from_le_bytes(token)))
            }
            FrameKind::Request => {
                let message = ClientMessage::decode(body).map_err(End::from)?;
                self.first_message(id, message)
            }
            FrameKind::Arena | FrameKind::Reply | FrameKind::LetGo => Err(End::Malformed),
        }
    }

    /// Sends the arena to a worker of the session with this token.
    fn attach(&mut self, id: ConnectionId, token: SessionToken) -> Result<(), End> {
        // The worker's process also needs a descriptor.
        if self.descriptors() >= self.connections_max {
            return Err(End::Refused);
        }
        let own_process = token == self.served.own_token;
        if !own_process && !self.sessions.worker_came(token) {
            return Err(End::Refused);
        }
        let peer = self.connections.get_mut(id).ok_or(End::Closed)?;
        peer.role = Role::Worker(token);
        peer.process = process_of(&peer.stream);
        self.control.attached.fetch_add(1, Ordering::Relaxed);
        let version = peer.version();
        hand_over(&peer.stream, &self.served, version)
    }

    /// Carries out a message of a connection without a session.
    fn first_message(&mut self, id: ConnectionId, message: ClientMessage<'_>) -> Result<(), End> {
        let caller = Caller::at(&self.connections[id].stream);
        let (role, reply) = match message {
            ClientMessage::Register {
                namespace,
                dropped_tokens,
                private,
                tenant_share,
            } => {
                if self.clients.len() + RESERVED >= self.connections_max.max(2 * RESERVED) {
                    return Err(End::Refused);
                }
                let spec = SessionSpec {
                    namespace,
                    dropped_tokens,
                    private,
                    // A client begins the load of a prefetch's hit without asking again.
                    leases_prefetches: true,
                    tenant_share,
                };
                let (token, reply) = self.sessions.register(spec, caller, &(self.served.info)());
                if let Some(token) = token {
                    self.clients.insert(token, id);
                }
                (token.map_or(Role::New, Role::Client), reply)
            }
            ClientMessage::Status => {
                let json = self.status();
                (Role::New, ServerMessage::Status { json })
            }
            ClientMessage::Operate(operation) => {
                let done = operation.carry_out(&*self.served.driver, caller, memory::available);
                let json = done.to_string();
                (Role::New, ServerMessage::Operated { json })
            }
            _ => return Err(End::Malformed),
        };
        let peer = self.connections.get_mut(id).ok_or(End::Closed)?;
        peer.role = role;
        peer.since = Instant::now();
        reply.append_to(&mut peer.outbox);
        Ok(())
    }

    /// Appends the answers of lookups that are no longer pending. This asks the engine about each pending lookup, so
    /// with many lookups it does not happen at every frame.
    fn answer_in_time(&mut self) {
        let crowded = self.sessions.pending() > CROWD;
        self.answers_due = crowded && self.answered_at.elapsed() < CROWD_INTERVAL;
        if !self.answers_due {
            self.answer_pending();
            self.answered_at = Instant::now();
        }
    }

    fn answer_pending(&mut self) {
        let start = Instant::now();
        for token in self.sessions.with_pending() {
            let id = self.clients.get(&token);
            let Some((&id, peer)) = id.and_then(|id| Some((id, self.connections.get_mut(*id)?)))
            else {
                continue;
            };
            let before = peer.outbox.len();
            self.sessions.answer_pending(token, &mut peer.outbox);
            if peer.outbox.len() > before || self.sessions.is_busy(token) {
                self.queue.push(id, peer);
            }
            if start.elapsed() > TURN {
                break;
            }
        }
    }

    /// Ends the sessions' workers whose processes have ended.
    fn end_workers(&mut self) {
        for session in self.leaving.take_gone() {
            self.sessions.worker_went(session);
        }
    }

    /// Closes silent connections, and ends workers whose processes cannot be watched.
    fn sweep(&mut self) {
        let now = Instant::now();
        if now < self.sweep_at {
            return;
        }
        self.sweep_at = now + PAUSE;
        self.end_workers();
        self.paused_until = self.paused_until.filter(|&until| now < until);
        let mut ended = Vec::new();
        let silence_max = self.terms.silence_max;
        for (id, peer) in &self.connections {
            let is_silent = now.saturating_duration_since(peer.since) > silence_max;
            if peer.role == Role::New && is_silent || peer.is_stuck(now, silence_max) {
                ended.push(id);
            }
        }
        for id in ended {
            self.close(id, End::Malformed);
        }
    }

    pub(super) fn close(&mut self, id: ConnectionId, end: End) {
        let Some(mut peer) = self.connections.remove(id) else {
            return;
        };
        peer.release(&mut self.inboxes);
        self.queue.close(peer.account);
        match end {
            End::Closed | End::LetGo => {}
            End::Refused => self.refuse(),
            End::Malformed => drop(self.control.malformed.fetch_add(1, Ordering::Relaxed)),
            End::Version(_) => {
                self.control.malformed.fetch_add(1, Ordering::Relaxed);
                // The peer finds this version in the header, and names it in its error.
                let reason = "run the same undercroft version in all processes".to_owned();
                peer.outbox.clear();
                ServerMessage::Refused { reason }.append_to(&mut peer.outbox);
                let _ = rustix::io::write(&peer.stream, &peer.outbox);
            }
        }
        self.closer.end(peer.stream.into_inner());
        match peer.role {
            Role::New => {}
            Role::Worker(token) => {
                self.control.attached.fetch_sub(1, Ordering::Relaxed);
                if end == End::LetGo {
                    self.sessions.worker_went(token);
                } else if token != self.served.own_token {
                    self.leaving.add(token, peer.pid, peer.process);
                }
            }
            Role::Client(token) => {
                self.clients.remove(&token);
                self.sessions.client_went(token);
            }
        }
    }

    fn status(&mut self) -> String {
        let Self {
            status,
            served,
            sessions,
            control,
            connections,
            ..
        } = self;
        let (path, started) = (&self.path, self.started);
        status.take(|| describe(path, started, served, sessions, control, connections.len()))
    }
}

/// Whether a frame is a client's message.
fn is_request(frame: &[u8]) -> Result<(), End> {
    let (header, _, _) = frame::first(frame)
        .map_err(End::from)?
        .ok_or(End::Malformed)?;
    if header.kind == FrameKind::Request {
        Ok(())
    } else {
        Err(End::Malformed)
    }
}
