//! An engine over its directories and its arena, with all of its threads except the server's.

use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use serde_json::{Value, json};
use undercroft_driver::{Driver, END_GRACE, EngineAccess};
use undercroft_engine::disk::Health;
use undercroft_engine::{Engine, EngineConfig, Recovery};
use undercroft_io::arena::Arena;
#[cfg(feature = "faults")]
use undercroft_io::fault::{FaultControl, FaultEngine};
use undercroft_io::{
    IoEngineChoice, IoFeatures, join_within, open_encrypting_engine, open_io_engine,
};
use undercroft_ipc::stats_json;

use crate::config::HostConfig;
use crate::directories::{Directories, DirectoryState, latency_json};
use crate::error::HostError;
use crate::remote_tier::RemoteTier;
use crate::retry::{self, SharedDirectories};

/// An engine and its threads. Its directories are locked until it is stopped or dropped and no operation on them is in
/// flight any more.
#[derive(Debug)]
pub struct RunningEngine {
    driver: Arc<Driver>,
    arena: Arc<Arena>,
    io: IoFeatures,
    recovery: Recovery,
    /// Makes the disks slow; `None` if the engine was opened without.
    #[cfg(feature = "faults")]
    faults: Option<FaultControl>,
    directories: Arc<SharedDirectories>,
    /// The remote store, if there is one.
    remote: OnceLock<RemoteTier>,
    /// The thread that tries to open directories again.
    retry: Mutex<Option<JoinHandle<()>>>,
}

impl RunningEngine {
    /// Recovers the contents of the directories, and starts the engine over `arena`.
    ///
    /// # Errors
    /// If the IO engine cannot be used, or its thread cannot be started.
    pub fn start(
        config: EngineConfig,
        directories: Directories,
        io: (IoEngineChoice, usize),
        arena: Arc<Arena>,
    ) -> Result<Self, HostError> {
        Self::start_with(config, directories, io, arena, (None, false))
    }

    /// Like [`RunningEngine::start`]. `pause`: time until directories that are not open are tried again.
    /// `slowed`: whether the disks can be made slow, in a build with the feature `faults`.
    pub(crate) fn start_with(
        config: EngineConfig,
        directories: Directories,
        (choice, depth): (IoEngineChoice, usize),
        arena: Arc<Arena>,
        (pause, slowed): (Option<Duration>, bool),
    ) -> Result<Self, HostError> {
        // Without a disk no ring is needed.
        let choice = if directories.states.is_empty() {
            IoEngineChoice::ThreadPool
        } else {
            choice
        };
        let Directories {
            files,
            images,
            mut states,
            cipher,
        } = directories;
        let of_io = Arc::clone(&arena);
        let opened = match cipher {
            Some(cipher) => open_encrypting_engine(depth, of_io, files, cipher),
            None => open_io_engine(choice, depth, of_io, files),
        };
        let (io, features) = opened.map_err(HostError::Io)?;
        #[cfg(not(feature = "faults"))]
        assert!(!slowed, "this build cannot make disks slow");
        #[cfg(feature = "faults")]
        let (io, faults) = if slowed {
            let (io, faults) = FaultEngine::new(io);
            (Box::new(io) as _, Some(faults))
        } else {
            (io, None)
        };
        let mut engine = Engine::new(config);
        let recovery = engine.attach_disks(images);
        for (state, of) in states.iter_mut().zip(engine.devices()) {
            if let DirectoryState::Open(directory) = state {
                directory.blocks_recovered = of.blocks;
            }
        }
        let driver = Arc::new(Driver::start(engine, io).map_err(HostError::Io)?);
        let directories = Arc::new(SharedDirectories::new(states));
        let retry = retry::start(&directories, &driver, pause).map_err(HostError::Io)?;
        Ok(Self {
            driver,
            arena,
            io: features,
            recovery,
            #[cfg(feature = "faults")]
            faults,
            directories,
            remote: OnceLock::new(),
            retry: Mutex::new(retry),
        })
    }

    /// Attaches the remote store to the engine, if the options name one.
    ///
    /// # Errors
    /// If the options of the store cannot be used.
    pub(crate) fn attach_remote(&self, config: &HostConfig) -> Result<(), HostError> {
        if let Some(remote) = RemoteTier::start(config, &self.driver, &self.arena)? {
            // This is called once for each engine.
            let _ = self.remote.set(remote);
        }
        Ok(())
    }

    /// The remote store, if there is one.
    pub(crate) fn remote(&self) -> Option<&RemoteTier> {
        self.remote.get()
    }

    /// The driver of the engine.
    pub fn driver(&self) -> &Arc<Driver> {
        &self.driver
    }

    /// The arena.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    /// See [`crate::EngineHost::limit_reads`].
    #[cfg(feature = "faults")]
    pub(crate) fn limit_reads(&self, bytes_per_s: Option<f64>) -> bool {
        if let Some(faults) = &self.faults {
            faults.limit_reads(bytes_per_s);
        }
        self.faults.is_some()
    }

    /// How the disks are read and written.
    pub fn io(&self) -> &IoFeatures {
        &self.io
    }

    /// The findings on the disks.
    pub fn recovery(&self) -> Recovery {
        self.recovery
    }

    /// Finishes pending writes, for at most `timeout`, stops the threads, and unlocks the
    /// directories. Like [`Driver::stop`], lets threads go that a disk holds up. Idempotent.
    pub fn stop(&self, timeout: Duration) {
        self.driver.stop(timeout);
        self.directories.close();
        let thread = self.retry.lock();
        let thread = thread.unwrap_or_else(PoisonError::into_inner).take();
        // The thread may be opening a directory that hangs. It closes this directory afterwards.
        thread.map(|thread| join_within(thread, END_GRACE));
    }

    /// Writes the socket at which other processes share the engine into the directories.
    pub(crate) fn publish(&self, socket: &Path) {
        let mut state = self.directories.lock();
        state.socket = Some(socket.to_owned());
        for directory in &state.directories {
            if let DirectoryState::Open(directory) = directory {
                // If this fails, other processes do not find the engine, and report it.
                let _ = directory.lock.publish(socket);
            }
        }
    }

    /// Counters and gauges. A directory counts as degraded if one of its files was deleted. A remote store counts as
    /// degraded if its last operation failed.
    pub(crate) fn stats(&self) -> Value {
        let taken = self
            .driver
            .enter(|engine| (*engine.counters(), engine.gauges(), engine.devices()));
        // Without an engine all numbers are zero, even the capacities.
        let (counters, mut gauges, devices) = taken.unwrap_or_default();
        let state = self.directories.lock();
        let pairs = state.directories.iter().zip(devices);
        let missing =
            pairs.filter(|(directory, of)| of.health == Health::Good && directory.lacks_file());
        gauges.disk_degraded += missing.count() as u64;
        drop(state);
        gauges.remote_degraded = self.remote().is_some_and(RemoteTier::has_failed).into();
        stats_json(&counters, &gauges)
    }

    /// The configuration and findings.
    pub(crate) fn info(&self) -> Value {
        let devices = self.driver.enter(|engine| engine.devices());
        let state = self.directories.lock();
        let pairs = state.directories.iter().zip(devices.unwrap_or_default());
        let disks: Vec<Value> = pairs
            .map(|(directory, of)| {
                let mut info = directory.info(of.health, of.fault);
                info["latency"] = latency_json(&of.latencies);
                info
            })
            .collect();
        drop(state);
        json!({
            "host_memory": self.arena.size(),
            "huge_pages": self.arena.huge_pages(),
            "io_engine": self.io.engine,
            "io_fallback": self.io.fallback,
            "registered_buffers": self.io.registered_buffers,
            "disks": disks,
            "remote": self.remote().map(RemoteTier::info),
            "blocks_recovered": self.recovery.blocks,
            "records_dropped": self.recovery.dropped,
            "records_damaged": self.recovery.damaged,
            "namespaces": self.recovery.namespaces,
        })
    }
}

/// An engine whose start fails after this point leaves its directories unlocked, even if the retry thread runs.
impl Drop for RunningEngine {
    fn drop(&mut self) {
        self.stop(Duration::ZERO);
    }
}
