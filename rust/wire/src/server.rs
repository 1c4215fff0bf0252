//! The engine's side of the socket: one thread with one event loop serves clients (lookups, loads, saves)
//! and hands the arena's descriptor to workers, whose connections' end says that they are gone.
//!
//! Nothing here waits for a job: what the disk owes is answered when the engine has it. A malformed frame,
//! or one that does not belong where it comes, ends its connection alone.

use std::io::{ErrorKind, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde_json::{Value, json};
use slotmap::SlotMap;
use undercroft_core::arena::Arena;
use undercroft_core::shell::Shell;

use crate::frame::{self, ATTACH_BODY_BYTES, Kind, arena_answer};
use crate::peer::peer_uid;
use crate::protocol::{Reply, Request};
use crate::sessions::{Sessions, Violation};
use crate::socket_dir::{self, SocketError};
use crate::stats::StatsSource;

/// Connections kept at a time; further ones are closed at once.
const CONNECTIONS_MAX: usize = 1024;

/// Bytes read from one connection before it is the others' turn.
const READ_MAX: usize = 1 << 20;

/// A client that leaves this much unread is cut off.
const UNREAD_MAX: usize = 64 << 20;

/// How long the listener is left alone after accepting has failed.
const PAUSE: Timespec = Timespec {
    tv_sec: 1,
    tv_nsec: 0,
};

/// How often deadlines of waiting requests are looked at.
const TICK: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 5_000_000,
};

/// With more requests waiting than this, the engine is asked about them every [`SETTLE`] at most.
const CROWD: usize = 64;
const SETTLE: Duration = Duration::from_millis(2);
const SOON: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 2_000_000,
};

slotmap::new_key_type! {
    struct ConnectionId;
}

/// Where a server listens.
#[derive(Clone, Copy, Debug)]
pub enum SocketPlace<'a> {
    /// At a path of its own making in this directory.
    In(&'a Path),
    /// At this path.
    At(&'a Path),
}

/// What the server serves.
pub struct Served {
    /// The engine.
    pub shell: Arc<Shell>,
    /// Its arena.
    pub arena: Arc<Arena>,
    /// Tells workers whether what they have mapped is still this arena.
    pub generation: u64,
    /// What was configured and found, for clients and for `undercroft status`.
    pub info: Box<dyn Fn() -> Value + Send>,
    /// Counters and gauges, for the same.
    pub stats: StatsSource,
}

impl std::fmt::Debug for Served {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Served")
            .field("generation", &self.generation)
            .finish_non_exhaustive()
    }
}

/// Serves until it is dropped.
#[derive(Debug)]
pub struct Server {
    path: PathBuf,
    control: Arc<Control>,
    thread: Option<JoinHandle<()>>,
}

/// What the server has seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServerCounters {
    /// Workers that have the arena and are connected now.
    pub attached: u64,
    /// Connections closed for another uid, an unknown session, or because there are too many.
    pub refused: u64,
    /// Connections closed for a malformed or misplaced frame.
    pub malformed: u64,
}

#[derive(Debug)]
struct Control {
    wake: OwnedFd,
    /// A wake-up is on its way.
    woken: AtomicBool,
    stop: AtomicBool,
    attached: AtomicU64,
    refused: AtomicU64,
    malformed: AtomicU64,
}

impl Control {
    fn wake(&self) {
        if !self.woken.swap(true, Ordering::AcqRel) {
            // Cannot fail: the count is far from its limit.
            let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        }
    }
}

impl Server {
    /// Makes the socket (mode 0600, in a directory of mode 0700) and serves it from a thread of its own.
    ///
    /// # Errors
    /// If the socket cannot be made, or another server listens there.
    pub fn start(place: SocketPlace<'_>, served: Served) -> Result<Self, SocketError> {
        let (listener, path) = match place {
            SocketPlace::In(dir) => {
                socket_dir::prepare(dir)?;
                socket_dir::listen(dir)?
            }
            SocketPlace::At(path) => {
                socket_dir::prepare(path.parent().unwrap_or(Path::new("/")))?;
                socket_dir::listen_alone(path.to_owned())?
            }
        };
        let os = |step, source| SocketError::Os {
            path: path.clone(),
            step,
            source,
        };
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| os("eventfd", errno.into()))?;
        let control = Arc::new(Control {
            wake,
            woken: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            attached: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            malformed: AtomicU64::new(0),
        });
        let of_hook = Arc::clone(&control);
        served.shell.on_progress(move || of_hook.wake());
        let mut service = Service {
            sessions: Sessions::new(
                Arc::clone(&served.shell),
                served.generation,
                served.stats.clone(),
            ),
            listener,
            path: path.clone(),
            started: Instant::now(),
            served,
            control: Arc::clone(&control),
            connections: SlotMap::with_key(),
            scratch: vec![0; 256 << 10],
            paused: false,
            settled: Instant::now(),
            unsettled: false,
        };
        let thread = std::thread::Builder::new()
            .name("undercroft-server".into())
            .spawn(move || service.run())
            .map_err(|error| os("starting its thread", error))?;
        Ok(Self {
            path,
            control,
            thread: Some(thread),
        })
    }

    /// Where clients and workers connect.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What it has seen so far.
    pub fn counters(&self) -> ServerCounters {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ServerCounters {
            attached: read(&self.control.attached),
            refused: read(&self.control.refused),
            malformed: read(&self.control.malformed),
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.control.stop.store(true, Ordering::Release);
        self.control.woken.store(false, Ordering::Release);
        self.control.wake();
        // Before the listener goes: after that, another server may have made it anew.
        let _ = std::fs::remove_file(&self.path);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Service {
    sessions: Sessions,
    listener: UnixListener,
    path: PathBuf,
    started: Instant,
    served: Served,
    control: Arc<Control>,
    connections: SlotMap<ConnectionId, Connection>,
    scratch: Vec<u8>,
    /// Accepting failed (out of descriptors, say): the listener is left alone for a while, since it
    /// stays readable.
    paused: bool,
    /// When the engine was last asked for answers, and whether it is to be asked again soon.
    settled: Instant,
    unsettled: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// Has not said anything yet.
    New,
    /// Has the arena, for the session with this token (0: the server's own process).
    Worker(u128),
    /// Has a session.
    Client(u128),
}

#[derive(Debug)]
struct Connection {
    stream: UnixStream,
    role: Role,
    inbox: Vec<u8>,
    outbox: Vec<u8>,
}

/// Why a connection is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Closed,
    Refused,
    Malformed,
}

impl From<Violation> for End {
    fn from(_: Violation) -> Self {
        Self::Malformed
    }
}

impl Service {
    fn run(&mut self) {
        while let Some((accept, ready)) = self.poll() {
            self.paused = false;
            for id in ready {
                if let Err(end) = self.read(id) {
                    self.close(id, end);
                }
            }
            self.settle_in_time();
            self.flush();
            if accept {
                self.accept();
            }
        }
    }

    /// Waits for something to do; `None` when it is time to stop.
    fn poll(&mut self) -> Option<(bool, Vec<ConnectionId>)> {
        let listening = if self.paused {
            PollFlags::empty()
        } else {
            PollFlags::IN
        };
        let timeout = match (self.sessions.pending() > 0, self.paused) {
            _ if self.unsettled => Some(&SOON),
            (true, _) => Some(&TICK),
            (false, true) => Some(&PAUSE),
            (false, false) => None,
        };
        let mut ids = Vec::with_capacity(self.connections.len());
        let mut fds = Vec::with_capacity(self.connections.len() + 2);
        fds.push(PollFd::new(&self.control.wake, PollFlags::IN));
        fds.push(PollFd::new(&self.listener, listening));
        for (id, connection) in &self.connections {
            let mut events = PollFlags::IN;
            if !connection.outbox.is_empty() {
                events |= PollFlags::OUT;
            }
            ids.push(id);
            fds.push(PollFd::new(&connection.stream, events));
        }
        loop {
            match poll(&mut fds, timeout) {
                Err(Errno::INTR | Errno::AGAIN) => {}
                Err(_) => return None,
                Ok(_) => break,
            }
        }
        let woken = !fds[0].revents().is_empty();
        let accept = !fds[1].revents().is_empty();
        let readable = |fd: &PollFd<'_>| !(fd.revents() - PollFlags::OUT).is_empty();
        let ready = ids
            .into_iter()
            .zip(&fds[2..])
            .filter(|(_, fd)| readable(fd));
        let ready = ready.map(|(id, _)| id).collect();
        if woken {
            // First the flag: what comes from now on wakes again.
            self.control.woken.store(false, Ordering::Release);
            let _ = rustix::io::read(&self.control.wake, &mut [0; 8]);
        }
        (!self.control.stop.load(Ordering::Acquire)).then_some((accept, ready))
    }

    fn accept(&mut self) {
        let stream = match self.listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) => {
                self.paused = error.kind() != ErrorKind::WouldBlock;
                return;
            }
        };
        let own = rustix::process::geteuid().as_raw();
        let same_user = peer_uid(&stream).is_ok_and(|uid| uid == own);
        if !same_user
            || self.connections.len() >= CONNECTIONS_MAX
            || stream.set_nonblocking(true).is_err()
        {
            self.control.refused.fetch_add(1, Ordering::Relaxed);
            return;
        }
        self.connections.insert(Connection {
            stream,
            role: Role::New,
            inbox: Vec::new(),
            outbox: Vec::new(),
        });
    }

    /// Reads what a connection has sent, and does it.
    fn read(&mut self, id: ConnectionId) -> Result<(), End> {
        let mut taken = 0;
        while taken < READ_MAX {
            let Some(connection) = self.connections.get_mut(id) else {
                return Ok(());
            };
            let bytes = match connection.stream.read(&mut self.scratch) {
                Ok(0) if connection.inbox.is_empty() => return Err(End::Closed),
                Ok(0) => return Err(End::Malformed),
                Ok(bytes) => bytes,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(_) => return Err(End::Closed),
            };
            taken += bytes;
            if matches!(connection.role, Role::Worker(_)) {
                // Nothing is due from it but its end.
                return Err(End::Malformed);
            }
            connection.inbox.extend_from_slice(&self.scratch[..bytes]);
            let mut inbox = std::mem::take(&mut connection.inbox);
            let mut at = 0;
            while let Some((header, body, len)) =
                frame::first(&inbox[at..]).map_err(|_| End::Malformed)?
            {
                self.frame(id, header.kind, body)?;
                at += len;
            }
            inbox.drain(..at);
            if let Some(connection) = self.connections.get_mut(id) {
                connection.inbox = inbox;
            }
            if bytes < self.scratch.len() {
                break;
            }
        }
        Ok(())
    }

    fn frame(&mut self, id: ConnectionId, kind: Kind, body: &[u8]) -> Result<(), End> {
        let connection = self.connections.get_mut(id).ok_or(End::Closed)?;
        match (kind, connection.role) {
            (Kind::Attach, Role::New) => {
                let token =
                    <[u8; ATTACH_BODY_BYTES]>::try_from(body).map_err(|_| End::Malformed)?;
                let token = u128::from_le_bytes(token);
                if token != 0 && !self.sessions.worker_came(token) {
                    return Err(End::Refused);
                }
                connection.role = Role::Worker(token);
                self.control.attached.fetch_add(1, Ordering::Relaxed);
                let (arena, generation) = (&self.served.arena, self.served.generation);
                if hand_over(&connection.stream, arena, generation) {
                    Ok(())
                } else {
                    Err(End::Closed)
                }
            }
            (Kind::Request, Role::New) => match Request::decode(body) {
                Ok(Request::Register {
                    spec,
                    dropped_tokens,
                    private,
                }) => {
                    let info = (self.served.info)();
                    let (token, reply) =
                        self.sessions.register(spec, dropped_tokens, private, &info);
                    if let Some(token) = token {
                        connection.role = Role::Client(token);
                    }
                    reply.append_to(&mut connection.outbox);
                    Ok(())
                }
                Ok(Request::Status) => {
                    let json = self.status().to_string();
                    if let Some(connection) = self.connections.get_mut(id) {
                        Reply::Status { json }.append_to(&mut connection.outbox);
                    }
                    Ok(())
                }
                _ => Err(End::Malformed),
            },
            (Kind::Request, Role::Client(token)) => {
                let request = Request::decode(body).map_err(|_| End::Malformed)?;
                Ok(self
                    .sessions
                    .handle(token, request, &mut connection.outbox)?)
            }
            _ => Err(End::Malformed),
        }
    }

    /// Answers what the engine has by now; where many wait, which is a look at each of them, not at every frame.
    fn settle_in_time(&mut self) {
        let crowded = self.sessions.pending() > CROWD;
        self.unsettled = crowded && self.settled.elapsed() < SETTLE;
        if !self.unsettled {
            self.settle();
            self.settled = Instant::now();
        }
    }

    fn settle(&mut self) {
        for token in self.sessions.owed() {
            let of_token = Role::Client(token);
            let mut connections = self.connections.values_mut();
            if let Some(connection) = connections.find(|one| one.role == of_token) {
                self.sessions.settle(token, &mut connection.outbox);
            }
        }
    }

    fn flush(&mut self) {
        let mut ended = Vec::new();
        for (id, connection) in &mut self.connections {
            let gone = !connection.outbox.is_empty() && !connection.send();
            if gone || connection.outbox.len() > UNREAD_MAX {
                ended.push(id);
            }
        }
        for id in ended {
            self.close(id, End::Closed);
        }
    }

    fn close(&mut self, id: ConnectionId, end: End) {
        let Some(connection) = self.connections.remove(id) else {
            return;
        };
        match end {
            End::Closed => {}
            End::Refused => drop(self.control.refused.fetch_add(1, Ordering::Relaxed)),
            End::Malformed => drop(self.control.malformed.fetch_add(1, Ordering::Relaxed)),
        }
        match connection.role {
            Role::New => {}
            Role::Worker(token) => {
                self.control.attached.fetch_sub(1, Ordering::Relaxed);
                self.sessions.worker_went(token);
            }
            Role::Client(token) => self.sessions.client_went(token),
        }
    }

    fn status(&self) -> Value {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let descriptors = std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "pid": std::process::id(),
            "uptime_s": self.started.elapsed().as_secs_f64(),
            "socket": self.path,
            "stats": self.served.stats.take(),
            "info": (self.served.info)(),
            "sessions": self.sessions.describe(),
            "server": {
                "connections": self.connections.len(),
                "workers": read(&self.control.attached),
                "refused": read(&self.control.refused),
                "malformed": read(&self.control.malformed),
                "lookups": self.sessions.lookups(),
                "descriptors": descriptors,
            },
        })
    }
}

impl Connection {
    /// Sends what fits. False if the peer is gone.
    fn send(&mut self) -> bool {
        let mut sent = 0;
        let alive = loop {
            if sent == self.outbox.len() {
                break true;
            }
            match self.stream.write(&self.outbox[sent..]) {
                Ok(bytes) => sent += bytes,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => break error.kind() == ErrorKind::WouldBlock,
            }
        };
        self.outbox.drain(..sent);
        alive
    }
}

/// Sends the arena's descriptor. Whether the whole answer went out: a new connection has room for it.
fn hand_over(stream: &UnixStream, arena: &Arena, generation: u64) -> bool {
    let answer = arena_answer(arena.size(), generation);
    let fds = [arena.fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ancillary.push(SendAncillaryMessage::ScmRights(&fds))
        && sendmsg(
            stream.as_fd(),
            &[IoSlice::new(&answer)],
            &mut ancillary,
            SendFlags::NOSIGNAL,
        ) == Ok(answer.len())
}
