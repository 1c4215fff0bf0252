//! `_core.Engine`: the engine, embedded.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use undercroft_core::arena::{Arena, Prefault, prefault_in_background};
use undercroft_core::disk::Health;
use undercroft_core::disk::open::{DirectoryLock, open};
use undercroft_core::engine::{Engine, EngineConfig, Recovery};
use undercroft_core::io::{IoEngineChoice, IoFeatures, open_io_engine};
use undercroft_core::metrics::{Counters, Gauges};
use undercroft_core::namespace::{GroupKind, GroupSpec, NamespaceSpec};
use undercroft_core::policy::PolicyKind;
use undercroft_core::shell::Shell;
use undercroft_wire::ArenaServer;

use crate::errors::{ConfigError, StoreError, UndercroftError};
use crate::session::PySession;

/// How long `close` waits for writes under way.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

struct Device {
    path: PathBuf,
    capacity: u64,
    o_direct: bool,
    recovered: u64,
}

/// What exists while the engine runs, in the order in which it ends.
struct Running {
    _server: ArenaServer,
    _prefault: Option<Prefault>,
    locks: Vec<DirectoryLock>,
}

/// The engine, embedded: index, host arena, job table, disk tier, and the IO thread.
#[pyclass(name = "Engine", module = "undercroft._core", frozen)]
pub(crate) struct PyEngine {
    shell: Arc<Shell>,
    running: Mutex<Option<Running>>,
    socket_path: PathBuf,
    generation: u64,
    arena: Arc<Arena>,
    devices: Vec<Device>,
    recovery: Recovery,
    io: IoFeatures,
}

fn random() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    // The standard library's per-process keys come from the operating system.
    RandomState::new().hash_one(std::process::id())
}

fn runtime_dir(given: Option<PathBuf>, from_env: Option<PathBuf>) -> PathBuf {
    given.unwrap_or_else(|| match from_env {
        Some(dir) => dir.join("undercroft"),
        None => {
            let uid = rustix::process::getuid().as_raw();
            std::env::temp_dir().join(format!("undercroft-{uid}"))
        }
    })
}

pub(crate) fn choice(name: &str) -> PyResult<IoEngineChoice> {
    match name {
        "auto" => Ok(IoEngineChoice::Auto),
        "io_uring" => Ok(IoEngineChoice::IoUring),
        "thread_pool" => Ok(IoEngineChoice::ThreadPool),
        _ => Err(ConfigError::new_err(format!(
            "io_engine is {name:?}; allowed: \"auto\", \"io_uring\", \"thread_pool\""
        ))),
    }
}

/// Groups as Python describes them: (kind, tokens per block, payload bytes, window in tokens or 0).
pub(crate) fn group_specs(groups: Vec<(String, u32, u32, u32)>) -> PyResult<Vec<GroupSpec>> {
    groups
        .into_iter()
        .map(|(kind, block_tokens, payload_bytes, tokens)| {
            let kind = match kind.as_str() {
                "full" => GroupKind::Full,
                "sliding_window" => GroupKind::SlidingWindow { tokens },
                "chunked_local" => GroupKind::ChunkedLocal { tokens },
                "state" => GroupKind::State,
                "ignored" => GroupKind::Ignored,
                _ => {
                    return Err(ConfigError::new_err(format!(
                        "KV cache group of kind {kind:?}; allowed: \"full\", \"sliding_window\", \
                             \"chunked_local\", \"state\", \"ignored\""
                    )));
                }
            };
            Ok(GroupSpec {
                kind,
                block_tokens,
                payload_bytes,
            })
        })
        .collect()
}

#[pymethods]
impl PyEngine {
    /// Open the engine. Raises ConfigError, StoreError.
    #[new]
    #[pyo3(signature = (
        *, host_memory, disks = Vec::new(), io_engine = "auto", io_depth = 32, runtime_dir = None,
        promotion_memory = None, promotion_wait_ms = None, min_load_tokens = 1,
        eviction_policy = "lru", disk_admission = "all", disk_write_rate = 0,
    ))]
    #[expect(
        clippy::too_many_arguments,
        reason = "keyword arguments of the Python class"
    )]
    fn new(
        py: Python<'_>,
        host_memory: u64,
        disks: Vec<(PathBuf, u64)>,
        io_engine: &str,
        io_depth: usize,
        runtime_dir: Option<PathBuf>,
        promotion_memory: Option<u64>,
        promotion_wait_ms: Option<(f64, f64)>,
        min_load_tokens: u32,
        eviction_policy: &str,
        disk_admission: &str,
        disk_write_rate: u64,
    ) -> PyResult<Self> {
        let choice = choice(io_engine)?;
        let policy = PolicyKind::from_name(eviction_policy).ok_or_else(|| {
            ConfigError::new_err(format!(
                "eviction_policy is {eviction_policy:?}; allowed: \"lru\", \"leafhd\""
            ))
        })?;
        let second_touch = match disk_admission {
            "all" => false,
            "second_touch" => true,
            _ => {
                return Err(ConfigError::new_err(format!(
                    "disk_admission is {disk_admission:?}; allowed: \"all\", \"second_touch\""
                )));
            }
        };
        let unix = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        let nanoseconds =
            |ms: f64| Duration::from_secs_f64((ms / 1e3).clamp(0.0, 1e6)).as_nanos() as u64;
        let config = EngineConfig {
            policy,
            promotion_bytes: promotion_memory.unwrap_or(host_memory / 2),
            promotion_wait_ns: promotion_wait_ms
                .map(|(base, part)| (nanoseconds(base), nanoseconds(part))),
            min_load_tokens,
            second_touch,
            write_rate: disk_write_rate,
            seed: random(),
            unix_at_zero_s: unix.as_secs(),
            ..EngineConfig::new(host_memory)
        };
        let environment = py
            .import("os")?
            .getattr("environ")?
            .call_method1("get", ("XDG_RUNTIME_DIR",))?
            .extract::<Option<PathBuf>>()?;
        let dir = self::runtime_dir(runtime_dir, environment);
        py.detach(|| Self::open(config, disks, choice, io_depth, &dir))
    }

    /// Where workers get the arena's descriptor.
    #[getter]
    fn socket_path(&self) -> &Path {
        &self.socket_path
    }

    /// Changes when the arena is another one.
    #[getter]
    fn arena_generation(&self) -> u64 {
        self.generation
    }

    /// A session for one namespace. Raises ConfigError.
    #[pyo3(signature = (
        description, groups, hash_block_tokens, alignment_tokens = None, dropped_tokens = 0,
    ))]
    fn register(
        &self,
        description: String,
        groups: Vec<(String, u32, u32, u32)>,
        hash_block_tokens: u32,
        alignment_tokens: Option<u32>,
        dropped_tokens: u32,
    ) -> PyResult<PySession> {
        let spec = NamespaceSpec {
            description,
            hash_block_tokens,
            alignment_tokens: alignment_tokens.unwrap_or(hash_block_tokens),
            groups: group_specs(groups)?,
        };
        let opened = self.shell.enter(|engine| {
            let session = engine.open_session(spec)?;
            engine.set_dropped_tokens(session, dropped_tokens);
            Ok((session, engine.namespace_of(session)))
        });
        match opened {
            Some(Ok((id, namespace))) => Ok(PySession::new(
                Arc::clone(&self.shell),
                id,
                namespace.unwrap_or_default(),
            )),
            Some(Err(error)) => {
                let error: undercroft_core::error::RegisterError = error;
                Err(ConfigError::new_err(error.to_string()))
            }
            None => Err(UndercroftError::new_err(
                "the engine has failed; see the log for its panic",
            )),
        }
    }

    /// Counters and gauges since the start, as one flat dict of numbers.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let taken = self
            .shell
            .enter(|engine| (*engine.counters(), engine.gauges(), engine.health()));
        let (counters, mut gauges, health) = taken.unwrap_or_default();
        gauges.disk_degraded += health
            .iter()
            .zip(self.missing_files())
            .filter(|((health, _), missing)| *health == Health::Good && missing.is_some())
            .count() as u64;
        stats_dict(py, &counters, &gauges)
    }

    /// What was configured and found.
    fn info<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let info = PyDict::new(py);
        info.set_item("host_memory", self.arena.size())?;
        info.set_item("huge_pages", self.arena.huge_pages())?;
        info.set_item("io_engine", self.io.engine)?;
        info.set_item("io_fallback", self.io.fallback.as_deref())?;
        info.set_item("registered_buffers", self.io.registered_buffers)?;
        let health = self
            .shell
            .enter(|engine| engine.health())
            .unwrap_or_default();
        let disks = PyList::empty(py);
        let missing = self.missing_files();
        for ((device, (health, fault)), missing) in self.devices.iter().zip(health).zip(missing) {
            let disk = PyDict::new(py);
            disk.set_item("path", device.path.display().to_string())?;
            disk.set_item("capacity", device.capacity)?;
            disk.set_item("o_direct", device.o_direct)?;
            disk.set_item("blocks_recovered", device.recovered)?;
            let name = match health {
                Health::Good if missing.is_some() => "file_missing",
                Health::Good => "good",
                Health::NoWrites { .. } => "no_writes",
                Health::Failed { .. } => "failed",
            };
            disk.set_item("health", name)?;
            disk.set_item("fault", fault.map(|fault| fault.to_string()).or(missing))?;
            disks.append(disk)?;
        }
        info.set_item("disks", disks)?;
        info.set_item("blocks_recovered", self.recovery.blocks)?;
        info.set_item("records_dropped", self.recovery.dropped)?;
        info.set_item("records_damaged", self.recovery.damaged)?;
        info.set_item("namespaces", self.recovery.namespaces)?;
        Ok(info)
    }

    /// Wait until nothing is in flight and nothing waits to be written, at most `timeout_s` seconds.
    #[pyo3(signature = (timeout_s = 10.0))]
    fn flush(&self, py: Python<'_>, timeout_s: f64) -> bool {
        let timeout = Duration::from_secs_f64(timeout_s.clamp(0.0, 1e6));
        py.detach(|| self.shell.wait_until(timeout, |engine| engine.is_quiet()))
    }

    /// Finish writes under way (bounded), stop the IO thread, release the directories. Idempotent.
    fn close(&self, py: Python<'_>) {
        py.detach(|| {
            self.shell.stop(CLOSE_TIMEOUT);
            if let Ok(mut running) = self.running.lock() {
                drop(running.take());
            }
        });
    }
}

impl PyEngine {
    /// Per directory, which of its files was deleted under the engine.
    fn missing_files(&self) -> Vec<Option<String>> {
        let missing = |running: &Running| {
            let files = running.locks.iter().map(DirectoryLock::missing_file);
            files.collect()
        };
        let ended = || vec![None; self.devices.len()];
        // Closing holds it for long: then it does not matter any more.
        match self.running.try_lock().as_deref() {
            Ok(Some(running)) => missing(running),
            _ => ended(),
        }
    }

    fn open(
        config: EngineConfig,
        disks: Vec<(PathBuf, u64)>,
        choice: IoEngineChoice,
        io_depth: usize,
        dir: &Path,
    ) -> PyResult<Self> {
        let host_bytes = config.host_bytes;
        let (mut files, mut images, mut locks, mut devices) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for (path, capacity) in disks {
            let directory = open(&path, capacity, random())
                .map_err(|error| StoreError::new_err(error.to_string()))?;
            let o_direct = directory.files.o_direct;
            let (of_device, image, lock) = directory.into_parts();
            devices.push(Device {
                path,
                capacity: image.capacity,
                o_direct,
                recovered: 0,
            });
            files.push(of_device);
            images.push(image);
            locks.push(lock);
        }
        let arena =
            Arena::create(host_bytes).map_err(|error| ConfigError::new_err(error.to_string()))?;
        let arena = Arc::new(arena);
        let choice = if files.is_empty() {
            IoEngineChoice::ThreadPool
        } else {
            choice
        };
        let (io, features) = open_io_engine(choice, io_depth, Arc::clone(&arena), files)
            .map_err(|error| ConfigError::new_err(format!("io_engine: {error}")))?;
        let generation = random();
        let server = ArenaServer::start(dir, Arc::clone(&arena), generation)
            .map_err(|error| ConfigError::new_err(format!("socket_dir: {error}")))?;
        let mut engine = Engine::new(config);
        let recovery = engine.attach_disks(images);
        for (device, blocks) in devices.iter_mut().zip(engine.disk_blocks_by_device()) {
            device.recovered = blocks;
        }
        let shell = Shell::start(engine, io)?;
        Ok(Self {
            shell: Arc::new(shell),
            socket_path: server.path().to_owned(),
            running: Mutex::new(Some(Running {
                _server: server,
                // Without it pages are populated when they are first used.
                _prefault: prefault_in_background(Arc::clone(&arena)).ok(),
                locks,
            })),
            generation,
            arena,
            devices,
            recovery,
            io: features,
        })
    }
}

fn stats_dict<'py>(
    py: Python<'py>,
    counters: &Counters,
    gauges: &Gauges,
) -> PyResult<Bound<'py, PyDict>> {
    let stats = PyDict::new(py);
    let seconds = |ns: u64| Duration::from_nanos(ns).as_secs_f64();
    macro_rules! set {
        ($from:ident: $($name:ident),* $(,)?) => {
            $(stats.set_item(stringify!($name), $from.$name)?;)*
        };
    }
    set!(gauges: host_capacity_bytes, host_used_bytes, host_pinned_bytes, host_blocks,
        disk_capacity_bytes, disk_used_bytes, disk_blocks, disk_degraded, nodes, namespaces,
        sessions, jobs, loads, saves, promotion_queue_bytes);
    set!(counters: promotions, promotions_cancelled, disk_reads, disk_read_bytes, disk_writes,
        disk_write_bytes, saved_blocks, deduplicated_blocks, refused_host_full, refused_disk_full,
        refused_write_rate, refused_admission, refused_disk_degraded, host_evictions,
        disk_evictions, checksum_failures, read_failures, write_failures, load_failures,
        save_failures);
    stats.set_item("promotion_seconds", seconds(counters.promotion_ns))?;
    stats.set_item("disk_read_seconds", seconds(counters.disk_read_ns))?;
    stats.set_item("disk_write_seconds", seconds(counters.disk_write_ns))?;
    Ok(stats)
}
