//! `_core.Engine`: an engine in this process, or the one of the process that owns its directories.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use pyo3::types::PyDict;
use undercroft_core::engine::EngineConfig;
use undercroft_core::error::StoreError as CoreStoreError;
use undercroft_core::io::IoEngineChoice;
use undercroft_core::namespace::{GroupKind, GroupSpec, NamespaceSpec};
use undercroft_core::policy::PolicyKind;
use undercroft_wire::{is_served, server_status};

use crate::errors::{ConfigError, StoreError, UndercroftError};
use crate::json::to_python;
use crate::opened::{EngineOptions, OpenError, Opened, TakenOver, runtime_dir, share};
use crate::remote::{OWNER_TIMEOUT, Remote};
use crate::session::PySession;

/// How long `status` waits for the engine's own server.
const STATUS_TIMEOUT: Duration = Duration::from_secs(5);

enum Mode {
    Own(Opened),
    /// Another process's engine, and that of this process once it has taken its directories over.
    Shared(Remote, TakenOver),
}

/// The engine: index, host arena, job table, disk tier, and the IO thread.
#[pyclass(name = "Engine", module = "undercroft._core", frozen)]
pub(crate) struct PyEngine {
    mode: Mode,
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

/// A namespace as Python describes it; by default hits are aligned to block hashes.
pub(crate) fn namespace(
    description: String,
    groups: Vec<PyGroup>,
    hash_block_tokens: u32,
    alignment_tokens: Option<u32>,
) -> PyResult<NamespaceSpec> {
    Ok(NamespaceSpec {
        description,
        hash_block_tokens,
        alignment_tokens: alignment_tokens.unwrap_or(hash_block_tokens),
        groups: group_specs(groups)?,
    })
}

/// A KV cache group as Python describes it: kind, tokens per block, payload bytes, window in tokens or 0.
pub(crate) type PyGroup = (String, u32, u32, u32);

/// Groups of a namespace.
pub(crate) fn group_specs(groups: Vec<PyGroup>) -> PyResult<Vec<GroupSpec>> {
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
        socket = None, promotion_memory = None, min_load_tokens = 1,
        eviction_policy = "lru", disk_admission = "all", disk_write_rate = 0, share = false,
        server_timeout_ms = 5.0, lookup_spin_us = 200.0,
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
        socket: Option<PathBuf>,
        promotion_memory: Option<u64>,
        min_load_tokens: u32,
        eviction_policy: &str,
        disk_admission: &str,
        disk_write_rate: u64,
        share: bool,
        server_timeout_ms: f64,
        lookup_spin_us: f64,
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
        let environment = py
            .import("os")?
            .getattr("environ")?
            .call_method1("get", ("XDG_RUNTIME_DIR",))?
            .extract::<Option<PathBuf>>()?;
        let options = EngineOptions {
            config: EngineConfig {
                policy,
                promotion_bytes: promotion_memory.unwrap_or(host_memory / 2),
                min_load_tokens,
                second_touch,
                write_rate: disk_write_rate,
                ..EngineConfig::new(host_memory)
            },
            disks,
            io_engine: choice,
            io_depth,
            runtime_dir: self::runtime_dir(runtime_dir, environment),
            socket,
        };
        let mode = match py.detach(|| open(&options, share)) {
            Ok(opened) => Mode::Own(opened),
            Err(OpenError::Store(in_use @ CoreStoreError::InUse { .. })) if share => {
                let (resolve, taken_over) = self::share(options);
                let in_use = Some(in_use.to_string());
                let remote = Remote::new(resolve, server_timeout_ms, lookup_spin_us, in_use);
                Mode::Shared(remote, taken_over)
            }
            Err(error @ OpenError::Store(_)) => {
                return Err(StoreError::new_err(error.to_string()));
            }
            Err(OpenError::Socket(error)) => {
                return Err(ConfigError::new_err(format!("socket_dir: {error}")));
            }
            Err(error) => return Err(ConfigError::new_err(error.to_string())),
        };
        Ok(Self { mode })
    }

    /// Whether another process owns the directories, and this one uses its engine.
    #[getter]
    fn is_shared(&self) -> bool {
        matches!(self.mode, Mode::Shared(..))
    }

    /// Where workers get the arena: (socket, generation of the arena, token of the session).
    #[getter]
    fn arena(&self) -> (PathBuf, u64, u128) {
        match &self.mode {
            Mode::Own(opened) => (opened.socket.clone(), opened.generation, 0),
            Mode::Shared(remote, _) => arena_of(remote),
        }
    }

    /// A session for one namespace. Raises ConfigError.
    #[pyo3(signature = (
        description, groups, hash_block_tokens, alignment_tokens = None, dropped_tokens = 0,
    ))]
    fn register(
        &self,
        py: Python<'_>,
        description: String,
        groups: Vec<PyGroup>,
        hash_block_tokens: u32,
        alignment_tokens: Option<u32>,
        dropped_tokens: u32,
    ) -> PyResult<PySession> {
        let spec = namespace(description, groups, hash_block_tokens, alignment_tokens)?;
        let opened = match &self.mode {
            Mode::Own(opened) => opened,
            Mode::Shared(remote, _) => {
                let client = remote.register(py, spec, dropped_tokens)?;
                return Ok(PySession::served(client));
            }
        };
        let session = opened.shell.enter(|engine| {
            let session = engine.open_session(spec)?;
            engine.set_dropped_tokens(session, dropped_tokens);
            Ok((session, engine.namespace_of(session)))
        });
        match session {
            Some(Ok((id, namespace))) => Ok(PySession::embedded(
                Arc::clone(&opened.shell),
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
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        match &self.mode {
            Mode::Own(opened) => to_python(py, &opened.stats()),
            Mode::Shared(remote, taken_over) => match own(taken_over) {
                Some(opened) => to_python(py, &opened.stats()),
                None => report(py, remote.client().map(|of| of.reports().1)),
            },
        }
    }

    /// What was configured and found.
    fn info<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        match &self.mode {
            Mode::Own(opened) => to_python(py, &opened.info()),
            Mode::Shared(remote, taken_over) => match own(taken_over) {
                Some(opened) => to_python(py, &opened.info()),
                None => report(py, remote.client().map(|of| of.reports().0)),
            },
        }
    }

    /// Whether the engine can be used ("up", "late", "down" or "refused"), and why not.
    fn link(&self) -> (&'static str, String) {
        match &self.mode {
            Mode::Own(_) => ("up", String::new()),
            Mode::Shared(remote, _) => remote.state(),
        }
    }

    /// Whether this process has taken over the directories of an engine that ended.
    #[getter]
    fn took_over(&self) -> bool {
        match &self.mode {
            Mode::Own(_) => false,
            Mode::Shared(_, taken_over) => taken_over.get().is_some(),
        }
    }

    /// What `undercroft status --json` shows.
    fn status<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let (socket, _, _) = self.arena();
        status(py, socket, STATUS_TIMEOUT.as_secs_f64())
    }

    /// Wait until nothing is in flight and nothing waits to be written, at most `timeout_s` seconds.
    #[pyo3(signature = (timeout_s = 10.0))]
    fn flush(&self, py: Python<'_>, timeout_s: f64) -> bool {
        let timeout = Duration::from_secs_f64(timeout_s.clamp(0.0, 1e6));
        let quiet = |opened: &Opened| {
            py.detach(|| opened.shell.wait_until(timeout, |engine| engine.is_quiet()))
        };
        match &self.mode {
            Mode::Own(opened) => quiet(opened),
            Mode::Shared(_, taken_over) => own(taken_over).is_none_or(|opened| quiet(&opened)),
        }
    }

    /// Finish writes under way (bounded), stop the threads, release the directories. Idempotent.
    fn close(&self, py: Python<'_>) {
        py.detach(|| match &self.mode {
            Mode::Own(opened) => opened.close(),
            Mode::Shared(remote, _) => remote.close(),
        });
    }
}

fn own(taken_over: &TakenOver) -> Option<Arc<Opened>> {
    taken_over.get()?.upgrade()
}

/// Opens the engine. Where its directories may be shared, an owner that is just ending, or that does not serve yet,
/// is waited for.
fn open(options: &EngineOptions, share: bool) -> Result<Opened, OpenError> {
    let end = Instant::now() + OWNER_TIMEOUT;
    loop {
        let opened = Opened::open(options);
        let Err(OpenError::Store(CoreStoreError::InUse { socket, .. })) = &opened else {
            return opened;
        };
        if !share || socket.as_deref().is_some_and(is_served) || Instant::now() >= end {
            return opened;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Base and part for every 1,000 tokens, from milliseconds to nanoseconds.
pub(crate) fn wait_ns((base, part): (f64, f64)) -> (u64, u64) {
    let nanoseconds =
        |ms: f64| Duration::from_secs_f64((ms / 1e3).clamp(0.0, 1e6)).as_nanos() as u64;
    (nanoseconds(base), nanoseconds(part))
}

/// Where workers get a server's arena; nowhere before there was a session.
pub(crate) fn arena_of(remote: &Remote) -> (PathBuf, u64, u128) {
    let link = remote.link();
    link.map_or_else(Default::default, |link| {
        (link.socket, link.generation, link.session)
    })
}

/// A server's report as a dict, empty if there is none yet.
pub(crate) fn report<'py>(py: Python<'py>, json: Option<String>) -> PyResult<Bound<'py, PyAny>> {
    let value = json.and_then(|json| serde_json::from_str(&json).ok());
    match value {
        Some(value) => to_python(py, &value),
        None => Ok(PyDict::new(py).into_any()),
    }
}

/// What goes on in the server at a socket. Raises UndercroftError.
#[pyfunction]
#[pyo3(name = "server_status", signature = (socket, timeout_s = 5.0))]
pub(crate) fn status(
    py: Python<'_>,
    socket: PathBuf,
    timeout_s: f64,
) -> PyResult<Bound<'_, PyAny>> {
    let timeout = Duration::from_secs_f64(timeout_s.clamp(0.0, 3600.0));
    let json = py
        .detach(|| server_status(&socket, timeout))
        .map_err(|error| UndercroftError::new_err(error.to_string()))?;
    report(py, Some(json))
}
