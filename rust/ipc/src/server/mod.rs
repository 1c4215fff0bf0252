//! The engine's side of the socket: one thread with one event loop serves clients (lookups, loads, saves)
//! and sends the arena's descriptor to workers. A worker counts until it releases the arena or its process has ended.
//!
//! The thread never waits for the disk: a pending lookup is answered when its promotion has ended. A
//! malformed or misplaced frame ends its own connection and no other.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, eventfd};
use serde_json::Value;
use undercroft_contract::session::SessionToken;
use undercroft_driver::{Driver, END_GRACE};
use undercroft_io::arena::Arena;
use undercroft_io::fork::Unshared;
use undercroft_io::join_within;

use crate::descriptors::{self, Closer};
use crate::socket_dir::{self, SocketError};
use crate::stats::StatsSource;
use service::{Service, Terms};

mod admission;
mod answers;
mod connection;
mod leaving;
mod peer;
mod queue;
mod service;
#[cfg(test)]
mod tests;

/// The path at which a server listens.
#[derive(Clone, Copy, Debug)]
pub enum SocketLocation<'a> {
    /// At a new path in this directory.
    In(&'a Path),
    /// At this path.
    At(&'a Path),
}

/// The engine that a server serves.
pub struct Served {
    /// The engine.
    pub driver: Arc<Driver>,
    /// The engine's arena.
    pub arena: Arc<Arena>,
    /// Id of the arena. Each start of an engine has another id. Workers compare it with the id of the arena that they
    /// have mapped.
    pub arena_id: u64,
    /// The token for the workers of vLLM in the engine's own process. Other workers attach with their session's token.
    pub own_token: SessionToken,
    /// The engine's configuration and the machine's features, for clients and for `undercroft status`.
    pub info: Box<dyn Fn() -> Value + Send>,
    /// Counters and gauges, for clients and for `undercroft status`.
    pub stats: StatsSource,
}

impl std::fmt::Debug for Served {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Served")
            .field("arena_id", &self.arena_id)
            .finish_non_exhaustive()
    }
}

/// A running server. Dropping it stops the server.
#[derive(Debug)]
pub struct Server {
    path: PathBuf,
    control: Arc<ServerControl>,
    thread: Option<JoinHandle<()>>,
}

/// Counters of a server since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServerCounters {
    /// Workers that have the arena and are connected now.
    pub attached: u64,
    /// Connections closed because of another uid, an unknown session, or too many connections.
    pub refused: u64,
    /// Connections closed because of a malformed or misplaced frame.
    pub malformed: u64,
}

#[derive(Debug)]
struct ServerControl {
    wake: Unshared<OwnedFd>,
    /// Whether a wake-up is pending.
    woken: AtomicBool,
    stop: AtomicBool,
    alive: AtomicBool,
    attached: AtomicU64,
    refused: AtomicU64,
    malformed: AtomicU64,
}

/// Notes the end of the server's thread.
struct Alive(Arc<ServerControl>);

impl Drop for Alive {
    fn drop(&mut self) {
        self.0.alive.store(false, Ordering::Release);
    }
}

impl ServerControl {
    fn new(wake: OwnedFd) -> Self {
        Self {
            wake: wake.into(),
            woken: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            alive: AtomicBool::new(true),
            attached: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            malformed: AtomicU64::new(0),
        }
    }

    fn wake(&self) {
        if !self.woken.swap(true, Ordering::AcqRel) {
            // Cannot fail: the count is far below its limit.
            let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        }
    }
}

impl Server {
    /// Makes the socket (mode 0600, in a directory of mode 0700) and serves it from a thread of its own.
    ///
    /// # Errors
    /// If the socket cannot be made, or another server listens there.
    pub fn start(place: SocketLocation<'_>, served: Served) -> Result<Self, SocketError> {
        Self::start_on(place, served, Terms::USUAL)
    }

    fn start_on(
        place: SocketLocation<'_>,
        served: Served,
        terms: Terms,
    ) -> Result<Self, SocketError> {
        let (listener, path) = match place {
            SocketLocation::In(dir) => {
                socket_dir::prepare(dir)?;
                socket_dir::listen(dir)?
            }
            SocketLocation::At(path) => {
                socket_dir::prepare(path.parent().unwrap_or(Path::new("/")))?;
                socket_dir::listen_alone(path.to_owned())?
            }
        };
        let os = |step, source| SocketError::Os {
            path: path.clone(),
            step,
            source,
        };
        if terms.refuses_descriptors {
            descriptors::refuse(&listener);
        }
        let closer = Closer::start().map_err(|error| os("starting a thread", error))?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| os("eventfd", errno.into()))?;
        let control = Arc::new(ServerControl::new(wake));
        let of_hook = Arc::clone(&control);
        served.driver.on_progress(move || of_hook.wake());
        let of_service = Arc::clone(&control);
        let mut service = Service::new(listener, path.clone(), served, of_service, terms, closer);
        let of_thread = Arc::clone(&control);
        let thread = std::thread::Builder::new()
            .name("undercroft-server".into())
            .spawn(move || {
                // Dropped when the thread ends, even by a panic.
                let _alive = Alive(of_thread);
                service.run();
            })
            .map_err(|error| os("starting its thread", error))?;
        Ok(Self {
            path,
            control,
            thread: Some(thread),
        })
    }

    /// Whether the server serves: false once its thread has ended by a panic, which the panic hook has reported.
    pub fn is_alive(&self) -> bool {
        self.control.alive.load(Ordering::Acquire)
    }

    /// The path of the socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Counters since the start.
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
        // Removed before the listener is closed: after that, another server may have made the socket anew.
        let _ = std::fs::remove_file(&self.path);
        // A report on directories may wait for a network filesystem.
        self.thread
            .take()
            .map(|thread| join_within(thread, END_GRACE));
    }
}
