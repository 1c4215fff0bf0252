//! The engine's side: a thread that hands the arena's descriptor to workers, and keeps their
//! connections, whose end says that a worker is gone.

use std::io::{ErrorKind, IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg, sockopt};
use undercroft_core::arena::Arena;

use crate::frame::{HEADER_BYTES, Header, Kind, arena_answer};
use crate::socket_dir::{self, SocketError};

/// Connections kept at a time; further ones are closed at once.
const CONNECTIONS_MAX: usize = 256;

/// How long the listener is left alone after accepting has failed.
const PAUSE: Timespec = Timespec {
    tv_sec: 1,
    tv_nsec: 0,
};

/// Hands out the arena until it is dropped.
#[derive(Debug)]
pub struct ArenaServer {
    path: PathBuf,
    stop: Arc<OwnedFd>,
    counters: Arc<Counters>,
    thread: Option<JoinHandle<()>>,
}

/// What the server has seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServerCounters {
    /// Workers that have the arena and are connected now.
    pub attached: u64,
    /// Connections closed for a malformed request, another uid, or because there are too many.
    pub refused: u64,
}

#[derive(Debug, Default)]
struct Counters {
    attached: AtomicU64,
    refused: AtomicU64,
}

impl ArenaServer {
    /// Makes a socket in `dir` (made with mode 0700 if missing) and serves it from a thread of its
    /// own. `generation` tells workers whether what they have mapped is still this arena.
    pub fn start(dir: &Path, arena: Arc<Arena>, generation: u64) -> Result<Self, SocketError> {
        socket_dir::prepare(dir)?;
        let (listener, path) = socket_dir::listen(dir)?;
        let os = |step| SocketErrorAt { path: &path, step };
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| os("eventfd").because(errno.into()))?;
        let stop = Arc::new(stop);
        let counters = Arc::new(Counters::default());
        let mut service = Service {
            listener,
            stop: Arc::clone(&stop),
            arena,
            generation,
            counters: Arc::clone(&counters),
            connections: Vec::new(),
            paused: false,
        };
        let thread = std::thread::Builder::new()
            .name("undercroft-arena".into())
            .spawn(move || service.run())
            .map_err(|error| os("starting its thread").because(error))?;
        Ok(Self {
            path,
            stop,
            counters,
            thread: Some(thread),
        })
    }

    /// Where workers connect.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What it has seen so far.
    pub fn counters(&self) -> ServerCounters {
        ServerCounters {
            attached: self.counters.attached.load(Ordering::Relaxed),
            refused: self.counters.refused.load(Ordering::Relaxed),
        }
    }
}

impl Drop for ArenaServer {
    fn drop(&mut self) {
        // Cannot fail: the count is far from its limit.
        let _ = rustix::io::write(&*self.stop, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        let _ = std::fs::remove_file(&self.path);
    }
}

struct SocketErrorAt<'a> {
    path: &'a Path,
    step: &'static str,
}

impl SocketErrorAt<'_> {
    fn because(self, source: std::io::Error) -> SocketError {
        SocketError::Os {
            path: self.path.into(),
            step: self.step,
            source,
        }
    }
}

#[derive(Debug)]
struct Service {
    listener: UnixListener,
    stop: Arc<OwnedFd>,
    arena: Arc<Arena>,
    generation: u64,
    counters: Arc<Counters>,
    connections: Vec<Connection>,
    /// Accepting failed (out of descriptors, say): the listener is left alone for a while, since it
    /// stays readable.
    paused: bool,
}

#[derive(Debug)]
struct Connection {
    stream: UnixStream,
    request: [u8; HEADER_BYTES],
    received: usize,
    attached: bool,
}

/// What becomes of a connection after it was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Keep,
    Close,
    Refuse,
}

impl Service {
    fn run(&mut self) {
        while let Some((accept, readable)) = self.poll() {
            self.paused = false;
            // From the back, so that removal does not move what is still to be visited.
            for index in readable.into_iter().rev() {
                self.read(index);
            }
            if accept {
                self.accept();
            }
        }
    }

    /// Waits for something to do; `None` when it is time to stop.
    fn poll(&self) -> Option<(bool, Vec<usize>)> {
        let (listening, timeout) = if self.paused {
            (PollFlags::empty(), Some(&PAUSE))
        } else {
            (PollFlags::IN, None)
        };
        let fds = [
            (self.stop.as_fd(), PollFlags::IN),
            (self.listener.as_fd(), listening),
        ]
        .into_iter()
        .chain(
            self.connections
                .iter()
                .map(|connection| (connection.stream.as_fd(), PollFlags::IN)),
        );
        let mut fds: Vec<_> = fds
            .map(|(fd, events)| PollFd::from_borrowed_fd(fd, events))
            .collect();
        loop {
            match poll(&mut fds, timeout) {
                Err(Errno::INTR | Errno::AGAIN) => {}
                Err(_) => return None,
                Ok(_) => break,
            }
        }
        let mut ready = fds.iter().map(|fd| !fd.revents().is_empty());
        let stop = ready.next()?;
        let accept = ready.next()?;
        let readable = ready
            .enumerate()
            .filter(|(_, ready)| *ready)
            .map(|(index, _)| index);
        (!stop).then(|| (accept, readable.collect()))
    }

    fn accept(&mut self) {
        let stream = match self.listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) => {
                self.paused = error.kind() != ErrorKind::WouldBlock;
                return;
            }
        };
        let own = rustix::process::geteuid();
        let same_user = sockopt::socket_peercred(&stream).is_ok_and(|peer| peer.uid == own);
        if !same_user
            || self.connections.len() >= CONNECTIONS_MAX
            || stream.set_nonblocking(true).is_err()
        {
            self.counters.refused.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let connection = Connection {
            stream,
            request: [0; HEADER_BYTES],
            received: 0,
            attached: false,
        };
        self.connections.push(connection);
    }

    fn read(&mut self, index: usize) {
        let connection = &mut self.connections[index];
        let was_attached = connection.attached;
        let fate = connection.read(&self.arena, self.generation);
        let is_attached = connection.attached && fate == Fate::Keep;
        match (was_attached, is_attached) {
            (false, true) => drop(self.counters.attached.fetch_add(1, Ordering::Relaxed)),
            (true, false) => drop(self.counters.attached.fetch_sub(1, Ordering::Relaxed)),
            _ => {}
        }
        if fate == Fate::Refuse {
            self.counters.refused.fetch_add(1, Ordering::Relaxed);
        }
        if fate != Fate::Keep {
            self.connections.swap_remove(index);
        }
    }
}

impl Connection {
    fn read(&mut self, arena: &Arena, generation: u64) -> Fate {
        if self.attached {
            // Nothing more is due, so anything but the end is malformed.
            return match self.stream.read(&mut [0]) {
                Ok(0) => Fate::Close,
                Ok(_) => Fate::Refuse,
                Err(error) => fate_of(error.kind()),
            };
        }
        match self.stream.read(&mut self.request[self.received..]) {
            Ok(0) if self.received == 0 => return Fate::Close,
            Ok(0) => return Fate::Refuse,
            Ok(bytes) => self.received += bytes,
            Err(error) => return fate_of(error.kind()),
        }
        if self.received < HEADER_BYTES {
            return Fate::Keep;
        }
        match Header::decode(&self.request) {
            Ok(Header {
                kind: Kind::AttachArena,
                ..
            }) if self.answer(arena, generation) => {
                self.attached = true;
                Fate::Keep
            }
            _ => Fate::Refuse,
        }
    }

    /// Whether the whole answer went out. A new connection has room for it.
    fn answer(&self, arena: &Arena, generation: u64) -> bool {
        let answer = arena_answer(arena.size(), generation);
        let fds = [arena.fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        ancillary.push(SendAncillaryMessage::ScmRights(&fds))
            && sendmsg(
                &self.stream,
                &[IoSlice::new(&answer)],
                &mut ancillary,
                SendFlags::NOSIGNAL,
            ) == Ok(answer.len())
    }
}

fn fate_of(error: ErrorKind) -> Fate {
    match error {
        ErrorKind::WouldBlock | ErrorKind::Interrupted => Fate::Keep,
        _ => Fate::Close,
    }
}
