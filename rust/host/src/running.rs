//! An engine over its directories and its arena, with its threads: all but the server.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};
use undercroft_core::arena::Arena;
use undercroft_core::disk::open::{DirectoryLock, open};
use undercroft_core::disk::{DeviceImage, Health};
use undercroft_core::driver::{Driver, EngineAccess};
use undercroft_core::engine::{Engine, EngineConfig, Recovery};
use undercroft_core::io::{DeviceFiles, IoEngineChoice, IoFault, IoFeatures, open_io_engine};
use undercroft_wire::stats_json;

use crate::config::DiskConfig;
use crate::error::HostError;

/// What is told of a directory, and what keeps it locked.
#[derive(Debug)]
struct OpenDirectory {
    capacity: u64,
    o_direct: bool,
    blocks_recovered: u64,
    lock: DirectoryLock,
}

/// The directories of the disk tier, open and locked.
#[derive(Debug, Default)]
pub struct Directories {
    files: Vec<DeviceFiles>,
    images: Vec<DeviceImage>,
    open: Vec<OpenDirectory>,
}

impl Directories {
    /// Opens all of them.
    ///
    /// # Errors
    /// If one of them cannot be used.
    pub fn open(disks: &[DiskConfig]) -> Result<Self, HostError> {
        let mut all = Self::default();
        for disk in disks {
            let directory = open(&disk.path, disk.capacity, random())?;
            let o_direct = directory.files.o_direct;
            let (files, image, lock) = directory.into_parts();
            all.open.push(OpenDirectory {
                capacity: image.capacity,
                o_direct,
                blocks_recovered: 0,
                lock,
            });
            all.files.push(files);
            all.images.push(image);
        }
        Ok(all)
    }
}

/// An engine and its threads. Its directories are locked until it is stopped or dropped.
#[derive(Debug)]
pub struct RunningEngine {
    driver: Arc<Driver>,
    arena: Arc<Arena>,
    io: IoFeatures,
    recovery: Recovery,
    /// Empty once it is stopped.
    directories: Mutex<Vec<OpenDirectory>>,
}

/// A number that differs from process to process and from call to call.
pub(crate) fn random() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    // The standard library's keys come from the operating system.
    RandomState::new().hash_one(std::process::id())
}

impl RunningEngine {
    /// Recovers what the directories hold, and starts the engine over `arena`.
    ///
    /// # Errors
    /// If the IO engine cannot be used, or its thread cannot be started.
    pub fn start(
        config: EngineConfig,
        directories: Directories,
        (choice, depth): (IoEngineChoice, usize),
        arena: Arc<Arena>,
    ) -> Result<Self, HostError> {
        let Directories {
            files,
            images,
            mut open,
        } = directories;
        // Without a disk there is nothing for a ring to do.
        let choice = if files.is_empty() {
            IoEngineChoice::ThreadPool
        } else {
            choice
        };
        let (io, features) =
            open_io_engine(choice, depth, Arc::clone(&arena), files).map_err(HostError::Io)?;
        let mut engine = Engine::new(config);
        let recovery = engine.attach_disks(images);
        for (directory, blocks) in open.iter_mut().zip(engine.disk_blocks_by_device()) {
            directory.blocks_recovered = blocks;
        }
        Ok(Self {
            driver: Arc::new(Driver::start(engine, io).map_err(HostError::Io)?),
            arena,
            io: features,
            recovery,
            directories: Mutex::new(open),
        })
    }

    /// The way into the engine.
    pub fn driver(&self) -> &Arc<Driver> {
        &self.driver
    }

    /// The arena.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    /// How the disks are read and written.
    pub fn io(&self) -> &IoFeatures {
        &self.io
    }

    /// What was found on the disks.
    pub fn recovery(&self) -> Recovery {
        self.recovery
    }

    /// Finishes what waits to be written, for at most `timeout`, stops the threads, and unlocks the
    /// directories. Idempotent.
    pub fn stop(&self, timeout: Duration) {
        self.driver.stop(timeout);
        self.with_directories(Vec::clear);
    }

    /// Writes into the directories at which socket the engine is shared.
    pub(crate) fn publish(&self, socket: &Path) {
        self.with_directories(|directories| {
            for directory in directories {
                // Where that fails, others do not find the engine, and say so.
                let _ = directory.lock.publish(socket);
            }
        });
    }

    /// Counters and gauges. A directory of which a file was deleted counts as degraded.
    pub(crate) fn stats(&self) -> Value {
        let taken = self
            .driver
            .enter(|engine| (*engine.counters(), engine.gauges(), engine.health()));
        // Without an engine everything is zero: its capacity, too.
        let (counters, mut gauges, health) = taken.unwrap_or_default();
        gauges.disk_degraded += self.with_directories(|directories| {
            let pairs = directories.iter().zip(health);
            let missing = pairs.filter(|(directory, (health, _))| {
                *health == Health::Good && directory.lock.missing_file().is_some()
            });
            missing.count() as u64
        });
        stats_json(&counters, &gauges)
    }

    /// What was configured and found.
    pub(crate) fn info(&self) -> Value {
        let health = self.driver.enter(|engine| engine.health());
        let disks: Vec<Value> = self.with_directories(|directories| {
            let pairs = directories.iter().zip(health.unwrap_or_default());
            pairs
                .map(|(directory, (health, fault))| directory.info(health, fault))
                .collect()
        });
        json!({
            "host_memory": self.arena.size(),
            "huge_pages": self.arena.huge_pages(),
            "io_engine": self.io.engine,
            "io_fallback": self.io.fallback,
            "registered_buffers": self.io.registered_buffers,
            "disks": disks,
            "blocks_recovered": self.recovery.blocks,
            "records_dropped": self.recovery.dropped,
            "records_damaged": self.recovery.damaged,
            "namespaces": self.recovery.namespaces,
        })
    }

    fn with_directories<R>(&self, work: impl FnOnce(&mut Vec<OpenDirectory>) -> R) -> R {
        // Nothing is left half done under the lock.
        let directories = self.directories.lock();
        work(&mut directories.unwrap_or_else(PoisonError::into_inner))
    }
}

impl OpenDirectory {
    fn info(&self, health: Health, fault: Option<IoFault>) -> Value {
        let missing = self.lock.missing_file();
        let name = match health {
            Health::Good if missing.is_some() => "file_missing",
            Health::Good => "good",
            Health::NoWrites { .. } => "no_writes",
            Health::Stalled => "stalled",
            Health::Failed { .. } => "failed",
        };
        let stalled = (health == Health::Stalled)
            .then(|| "operations on it have not ended for a second".to_owned());
        json!({
            "path": self.lock.path().to_string_lossy(),
            "capacity": self.capacity,
            "o_direct": self.o_direct,
            "blocks_recovered": self.blocks_recovered,
            "health": name,
            "fault": fault.map(|fault| fault.to_string()).or(stalled).or(missing),
        })
    }
}
