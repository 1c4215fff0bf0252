//! The event loop of a server, and its connections.

use std::io::{ErrorKind, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde_json::{Value, json};
use slotmap::SlotMap;
use undercroft_core::arena::Arena;
use undercroft_core::session::{SessionSpec, SessionToken};

use super::leaving::{LeavingWorkers, process_of};
use super::{Served, ServerControl};
use crate::frame::{self, ATTACH_BODY_BYTES, FrameKind, HEADER_BYTES, arena_answer};
use crate::peer::peer_uid;
use crate::protocol::{ClientMessage, ServerMessage};
use crate::sessions::{ServedSessions, Violation};

/// Connections kept at a time; further ones are closed at once.
const CONNECTIONS_MAX: usize = 1024;

/// Bytes read from one connection before the next connection is read.
const READ_MAX: usize = 1 << 20;

/// A client that leaves this much unread is cut off.
const UNREAD_MAX: usize = 64 << 20;

/// How long the listener is left alone after accepting has failed.
const PAUSE: Timespec = Timespec {
    tv_sec: 1,
    tv_nsec: 0,
};

/// How often the deadlines of pending lookups are checked.
const TICK: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 5_000_000,
};

/// With more pending lookups than this, the engine is asked about them every [`CROWD_INTERVAL`] at most.
const CROWD: usize = 64;
const CROWD_INTERVAL: Duration = Duration::from_millis(2);
const CROWD_TIMEOUT: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 2_000_000,
};

slotmap::new_key_type! {
    struct ConnectionId;
}

pub(super) struct Service {
    sessions: ServedSessions,
    listener: UnixListener,
    path: PathBuf,
    started: Instant,
    served: Served,
    control: Arc<ServerControl>,
    connections: SlotMap<ConnectionId, Peer>,
    leaving: LeavingWorkers,
    scratch: Vec<u8>,
    /// Accepting failed (out of descriptors, say): the listener is left alone for a while, since it
    /// stays readable.
    paused: bool,
    /// When the engine was last asked for the answers of pending lookups.
    answered_at: Instant,
    /// The engine is to be asked again soon.
    answers_due: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// No frame has come yet.
    New,
    /// Has the arena, for the session with this token.
    Worker(SessionToken),
    /// Has a session.
    Client(SessionToken),
}

#[derive(Debug)]
struct Peer {
    stream: UnixStream,
    role: Role,
    /// The process of a worker, see [`process_of`].
    process: Option<OwnedFd>,
    inbox: Vec<u8>,
    outbox: Vec<u8>,
}

/// Why a connection is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Closed,
    /// A worker copies no more.
    LetGo,
    Refused,
    Malformed,
}

impl From<Violation> for End {
    fn from(_: Violation) -> Self {
        Self::Malformed
    }
}

impl Service {
    pub(super) fn new(
        listener: UnixListener,
        path: PathBuf,
        served: Served,
        control: Arc<ServerControl>,
    ) -> Self {
        Self {
            sessions: ServedSessions::new(
                Arc::clone(&served.driver),
                served.arena_id,
                served.stats.clone(),
            ),
            listener,
            path,
            started: Instant::now(),
            served,
            control,
            connections: SlotMap::with_key(),
            leaving: LeavingWorkers::default(),
            scratch: vec![0; 256 << 10],
            paused: false,
            answered_at: Instant::now(),
            answers_due: false,
        }
    }

    pub(super) fn run(&mut self) {
        while let Some((accept, ready)) = self.poll() {
            self.paused = false;
            for id in ready {
                if let Err(end) = self.read(id) {
                    self.close(id, end);
                }
            }
            for session in self.leaving.take_gone() {
                self.sessions.worker_went(session);
            }
            self.answer_in_time();
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
            _ if self.answers_due => Some(&CROWD_TIMEOUT),
            (true, _) => Some(&TICK),
            (false, true) => Some(&PAUSE),
            (false, false) => self.leaving.timeout(),
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
        fds.extend(self.leaving.fds());
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
            // The flag first: progress from now on wakes the thread again.
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
        self.connections.insert(Peer {
            stream,
            role: Role::New,
            process: None,
            inbox: Vec::new(),
            outbox: Vec::new(),
        });
    }

    /// Reads the frames of a connection, and carries them out.
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
            connection.inbox.extend_from_slice(&self.scratch[..bytes]);
            let is_worker = matches!(connection.role, Role::Worker(_));
            if is_worker && connection.inbox.len() > HEADER_BYTES {
                // After its first frame a worker says no more than that it lets go.
                return Err(End::Malformed);
            }
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

    fn frame(&mut self, id: ConnectionId, kind: FrameKind, body: &[u8]) -> Result<(), End> {
        let peer = self.connections.get_mut(id).ok_or(End::Closed)?;
        match (kind, peer.role) {
            (FrameKind::Attach, Role::New) => {
                let token = <[u8; ATTACH_BODY_BYTES]>::try_from(body);
                let token = token.map_err(|_| End::Malformed)?;
                self.attach(id, SessionToken(u128::from_le_bytes(token)))
            }
            (FrameKind::LetGo, Role::Worker(_)) => Err(End::LetGo),
            (FrameKind::Request, Role::New) => {
                let message = ClientMessage::decode(body).map_err(|_| End::Malformed)?;
                self.first_message(id, message)
            }
            (FrameKind::Request, Role::Client(token)) => {
                let message = ClientMessage::decode(body).map_err(|_| End::Malformed)?;
                Ok(self.sessions.handle(token, message, &mut peer.outbox)?)
            }
            _ => Err(End::Malformed),
        }
    }

    /// Hands the arena to a worker of the session with this token.
    fn attach(&mut self, id: ConnectionId, token: SessionToken) -> Result<(), End> {
        let own_process = token == self.served.own_token;
        if !own_process && !self.sessions.worker_came(token) {
            return Err(End::Refused);
        }
        let peer = self.connections.get_mut(id).ok_or(End::Closed)?;
        peer.role = Role::Worker(token);
        peer.process = process_of(&peer.stream);
        self.control.attached.fetch_add(1, Ordering::Relaxed);
        if hand_over(&peer.stream, &self.served.arena, self.served.arena_id) {
            Ok(())
        } else {
            Err(End::Closed)
        }
    }

    /// Carries out a message of a connection without a session.
    fn first_message(&mut self, id: ConnectionId, message: ClientMessage<'_>) -> Result<(), End> {
        let (role, reply) = match message {
            ClientMessage::Register {
                namespace,
                dropped_tokens,
                private,
            } => {
                let spec = SessionSpec {
                    namespace,
                    dropped_tokens,
                    private,
                    // A client begins the load of a prefetch's hit without asking again.
                    leases_prefetches: true,
                };
                let (token, reply) = self.sessions.register(spec, &(self.served.info)());
                (token.map_or(Role::New, Role::Client), reply)
            }
            ClientMessage::Status => {
                let json = self.status().to_string();
                (Role::New, ServerMessage::Status { json })
            }
            _ => return Err(End::Malformed),
        };
        let peer = self.connections.get_mut(id).ok_or(End::Closed)?;
        peer.role = role;
        reply.append_to(&mut peer.outbox);
        Ok(())
    }

    /// Sends the answers of pending lookups that have come. With many lookups this asks the engine about
    /// each of them, so it does not happen at every frame.
    fn answer_in_time(&mut self) {
        let crowded = self.sessions.pending() > CROWD;
        self.answers_due = crowded && self.answered_at.elapsed() < CROWD_INTERVAL;
        if !self.answers_due {
            self.answer_pending();
            self.answered_at = Instant::now();
        }
    }

    fn answer_pending(&mut self) {
        for token in self.sessions.with_pending() {
            let of_token = Role::Client(token);
            let mut peers = self.connections.values_mut();
            if let Some(peer) = peers.find(|peer| peer.role == of_token) {
                self.sessions.answer_pending(token, &mut peer.outbox);
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
            End::Closed | End::LetGo => {}
            End::Refused => drop(self.control.refused.fetch_add(1, Ordering::Relaxed)),
            End::Malformed => drop(self.control.malformed.fetch_add(1, Ordering::Relaxed)),
        }
        match connection.role {
            Role::New => {}
            Role::Worker(token) => {
                self.control.attached.fetch_sub(1, Ordering::Relaxed);
                if end == End::LetGo {
                    self.sessions.worker_went(token);
                } else if token != self.served.own_token {
                    self.leaving.add(token, connection.process);
                }
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

impl Peer {
    /// Sends as much as the socket takes. False if the peer is gone.
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

/// Sends the arena's descriptor. Whether the whole answer was sent: a new connection has room for it.
fn hand_over(stream: &UnixStream, arena: &Arena, arena_id: u64) -> bool {
    let answer = arena_answer(arena.size(), arena_id);
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
