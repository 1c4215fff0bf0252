//! An engine that is open: its directories, arena, threads and socket.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use serde_json::{Value, json};
use undercroft_core::arena::{Arena, ArenaError, Prefault, prefault_in_background};
use undercroft_core::disk::Health;
use undercroft_core::disk::open::{DirectoryLock, open};
use undercroft_core::engine::{Engine, EngineConfig, Recovery};
use undercroft_core::error::StoreError;
use undercroft_core::io::{IoEngineChoice, IoFeatures, open_io_engine};
use undercroft_core::shell::Shell;
use undercroft_wire::{Served, Server, SocketError, SocketPlace, StatsSource, stats_json};

/// How long closing waits for writes under way.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

/// Everything that opening an engine needs to know.
#[derive(Clone, Debug)]
pub(crate) struct EngineOptions {
    pub(crate) config: EngineConfig,
    /// Directories with their capacities in bytes.
    pub(crate) disks: Vec<(PathBuf, u64)>,
    pub(crate) io_engine: IoEngineChoice,
    pub(crate) io_depth: usize,
    /// Where the socket is made.
    pub(crate) runtime_dir: PathBuf,
    /// Exactly where, instead.
    pub(crate) socket: Option<PathBuf>,
}

/// Why an engine could not be opened.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OpenError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Arena(#[from] ArenaError),
    #[error("{0}")]
    Socket(#[from] SocketError),
    #[error("io_engine: {0}")]
    Io(std::io::Error),
}

/// What does not change while an engine is open.
#[derive(Debug)]
struct Facts {
    host_memory: u64,
    huge_pages: bool,
    recovery: Recovery,
    io: IoFeatures,
    devices: Vec<Device>,
}

#[derive(Debug)]
struct Device {
    capacity: u64,
    o_direct: bool,
    recovered: u64,
    lock: DirectoryLock,
}

/// An open engine. Its directories are locked as long as it lives.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) shell: Arc<Shell>,
    pub(crate) socket: PathBuf,
    pub(crate) generation: u64,
    facts: Mutex<Option<Arc<Facts>>>,
    server: Mutex<Option<Server>>,
    /// Without it pages are populated when they are first used.
    _prefault: Option<Prefault>,
}

pub(crate) fn random() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    // The standard library's per-process keys come from the operating system.
    RandomState::new().hash_one(std::process::id())
}

impl Opened {
    /// Opens the directories, recovers what they hold, and starts the engine and its server.
    pub(crate) fn open(options: &EngineOptions) -> Result<Self, OpenError> {
        let mut config = options.config.clone();
        config.seed = random();
        let unix = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        config.unix_at_zero_s = unix.unwrap_or_default().as_secs();
        let (mut files, mut images, mut devices) = (Vec::new(), Vec::new(), Vec::new());
        for (path, capacity) in &options.disks {
            let directory = open(path, *capacity, random())?;
            let o_direct = directory.files.o_direct;
            let (of_device, image, lock) = directory.into_parts();
            devices.push(Device {
                capacity: image.capacity,
                o_direct,
                recovered: 0,
                lock,
            });
            files.push(of_device);
            images.push(image);
        }
        let arena = Arc::new(Arena::create(config.host_bytes)?);
        let choice = if files.is_empty() {
            IoEngineChoice::ThreadPool
        } else {
            options.io_engine
        };
        let (io, features) = open_io_engine(choice, options.io_depth, Arc::clone(&arena), files)
            .map_err(OpenError::Io)?;
        let generation = random();
        let mut engine = Engine::new(config);
        let recovery = engine.attach_disks(images);
        for (device, blocks) in devices.iter_mut().zip(engine.disk_blocks_by_device()) {
            device.recovered = blocks;
        }
        let shell = Arc::new(Shell::start(engine, io).map_err(OpenError::Io)?);
        let facts = Arc::new(Facts {
            host_memory: arena.size(),
            huge_pages: arena.huge_pages(),
            recovery,
            io: features,
            devices,
        });
        let (of_server, of_info) = (Arc::clone(&shell), Arc::downgrade(&facts));
        let (of_info_shell, of_stats) = (Arc::clone(&shell), Weak::clone(&of_info));
        let of_stats_shell = Arc::clone(&shell);
        let place = match &options.socket {
            Some(socket) => SocketPlace::At(socket),
            None => SocketPlace::In(&options.runtime_dir),
        };
        let served = Served {
            shell: of_server,
            arena: Arc::clone(&arena),
            generation,
            info: Box::new(move || {
                let facts = of_info.upgrade();
                facts.map_or(Value::Null, |facts| facts.info(&of_info_shell))
            }),
            stats: StatsSource::new(move || stats(&of_stats_shell, of_stats.upgrade().as_deref())),
        };
        let server = Server::start(place, served)?;
        let socket = server.path().to_owned();
        for device in &facts.devices {
            // If it cannot be written others do not find us, and say so.
            let _ = device.lock.publish(&socket);
        }
        Ok(Self {
            shell,
            socket,
            generation,
            facts: Mutex::new(Some(facts)),
            server: Mutex::new(Some(server)),
            _prefault: prefault_in_background(arena).ok(),
        })
    }

    /// What was configured and found.
    pub(crate) fn info(&self) -> Value {
        let facts = self.facts.lock().ok().and_then(|facts| facts.clone());
        facts.map_or(Value::Null, |facts| facts.info(&self.shell))
    }

    /// Counters and gauges; a directory with a file deleted under it counts as degraded.
    pub(crate) fn stats(&self) -> Value {
        let facts = self.facts.lock().ok().and_then(|facts| facts.clone());
        stats(&self.shell, facts.as_deref())
    }

    /// Finishes writes under way (bounded), stops the threads, releases the directories. Idempotent.
    pub(crate) fn close(&self) {
        if let Ok(mut server) = self.server.lock() {
            drop(server.take());
        }
        self.shell.stop(CLOSE_TIMEOUT);
        if let Ok(mut facts) = self.facts.lock() {
            drop(facts.take());
        }
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        self.close();
    }
}

fn stats(shell: &Shell, facts: Option<&Facts>) -> Value {
    let taken = shell.enter(|engine| (*engine.counters(), engine.gauges(), engine.health()));
    let (counters, mut gauges, health) = taken.unwrap_or_default();
    let devices = facts.iter().flat_map(|facts| &facts.devices);
    gauges.disk_degraded += devices
        .zip(health)
        .filter(|(of, (health, _))| *health == Health::Good && of.lock.missing_file().is_some())
        .count() as u64;
    stats_json(&counters, &gauges)
}

impl Facts {
    fn info(&self, shell: &Shell) -> Value {
        let health = shell.enter(|engine| engine.health()).unwrap_or_default();
        let disks = self
            .devices
            .iter()
            .zip(health)
            .map(|(device, (health, fault))| {
                let missing = device.lock.missing_file();
                let name = match health {
                    Health::Good if missing.is_some() => "file_missing",
                    Health::Good => "good",
                    Health::NoWrites { .. } => "no_writes",
                    Health::Failed { .. } => "failed",
                };
                json!({
                    "path": device.lock.path(),
                    "capacity": device.capacity,
                    "o_direct": device.o_direct,
                    "blocks_recovered": device.recovered,
                    "health": name,
                    "fault": fault.map(|fault| fault.to_string()).or(missing),
                })
            });
        json!({
            "host_memory": self.host_memory,
            "huge_pages": self.huge_pages,
            "io_engine": self.io.engine,
            "io_fallback": self.io.fallback,
            "registered_buffers": self.io.registered_buffers,
            "disks": disks.collect::<Vec<_>>(),
            "blocks_recovered": self.recovery.blocks,
            "records_dropped": self.recovery.dropped,
            "records_damaged": self.recovery.damaged,
            "namespaces": self.recovery.namespaces,
        })
    }
}

/// Where the socket is made by default.
pub(crate) fn runtime_dir(given: Option<PathBuf>, from_env: Option<PathBuf>) -> PathBuf {
    given.unwrap_or_else(|| match from_env {
        Some(dir) => dir.join("undercroft"),
        None => {
            let uid = rustix::process::getuid().as_raw();
            std::env::temp_dir().join(format!("undercroft-{uid}"))
        }
    })
}

/// An engine that this process has opened after all, as long as it is open.
pub(crate) type TakenOver = Arc<OnceLock<Weak<Opened>>>;

/// Finds the engine of the directories: the one that owns them, or one of our own, which is opened when
/// nobody owns them any more.
pub(crate) fn share(options: EngineOptions) -> (undercroft_wire::Resolve, TakenOver) {
    let taken_over = TakenOver::default();
    let told = Arc::clone(&taken_over);
    let mut own: Option<Arc<Opened>> = None;
    let resolve = move || {
        if let Some(own) = &own {
            return Ok(own.socket.clone());
        }
        match Opened::open(&options) {
            Ok(opened) => {
                let opened = own.insert(Arc::new(opened));
                let _ = told.set(Arc::downgrade(opened));
                Ok(opened.socket.clone())
            }
            Err(OpenError::Store(StoreError::InUse {
                socket: Some(socket),
                ..
            })) => Ok(socket),
            Err(error) => Err(error.to_string()),
        }
    };
    (Box::new(resolve), taken_over)
}
