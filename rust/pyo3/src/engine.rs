//! `_core.Engine`: an engine that sessions can be opened on, in this process or another.

use std::ffi::OsString;
use std::path::PathBuf;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use undercroft_contract::log;
use undercroft_contract::log::Level;
use undercroft_contract::namespace::NamespaceSpec;
use undercroft_contract::session::Tokens;
use undercroft_host::{EngineHost, HostConfig, HostError, open};
use undercroft_io::fork::OfProcess;

use crate::errors::Result;
use crate::json::{object, to_json, to_python};
use crate::session::PySession;
use crate::values::{PyArenaAddress, PyGroup, group_specs, timeout};

/// An engine of this process, of the process that has its directories open, or of a server.
#[pyclass(name = "Engine", module = "undercroft._core", frozen)]
pub(crate) struct PyEngine {
    host: OfProcess<Box<dyn EngineHost>>,
}

impl PyEngine {
    /// The engine; an error in a forked child.
    fn own(&self) -> std::result::Result<&dyn EngineHost, HostError> {
        self.host.get().map(|host| &**host).ok_or(HostError::Forked)
    }
}

#[pymethods]
impl PyEngine {
    /// Open the engine. Raises ConfigError, StoreError.
    #[new]
    fn new(py: Python<'_>, options: &Bound<'_, PyDict>) -> Result<Self> {
        let config = HostConfig::from_json(&to_json(options)?)?;
        let host = OfProcess::new(py.detach(|| open(config))?);
        Ok(Self { host })
    }

    /// Whether another process runs the engine, or did when it was opened.
    #[getter]
    fn is_shared(&self) -> bool {
        self.host.is_shared()
    }

    /// Whether this process has taken over the directories of an engine that ended.
    #[getter]
    fn took_over(&self) -> bool {
        self.host.took_over()
    }

    /// The address from which workers get the arena; empty before the first session with a server.
    #[getter]
    fn arena(&self) -> PyArenaAddress {
        self.host
            .arena()
            .map(PyArenaAddress::from)
            .unwrap_or_default()
    }

    /// A session for one namespace. Raises ConfigError, StoreError, and UndercroftError in a forked child.
    #[pyo3(signature = (description, groups, hash_block_size, alignment_tokens = None, dropped_tokens = 0))]
    fn register(
        &self,
        py: Python<'_>,
        description: String,
        groups: Vec<PyGroup>,
        hash_block_size: u32,
        alignment_tokens: Option<u32>,
        dropped_tokens: u32,
    ) -> Result<PySession> {
        let namespace = NamespaceSpec {
            description,
            hash_block_size,
            alignment_tokens: alignment_tokens.unwrap_or(hash_block_size),
            groups: group_specs(&groups)?,
        };
        let host = self.own()?;
        let session = py.detach(|| host.register(namespace, Tokens(dropped_tokens)))?;
        Ok(PySession::new(session))
    }

    /// Counters and gauges since the start, as one flat dict of numbers.
    fn stats<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyAny>> {
        Ok(object(py, &self.own()?.stats())?)
    }

    /// The configuration and findings.
    fn info<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyAny>> {
        Ok(object(py, &self.own()?.info())?)
    }

    /// The status, for `undercroft status`. Raises ServerError.
    fn status<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyAny>> {
        let host = self.own()?;
        let status = py.detach(|| host.status())?;
        Ok(to_python(py, &status)?)
    }

    /// Whether the engine can be used ("up", "late", "down" or "refused"), and why not.
    fn connection(&self) -> (&'static str, String) {
        let connection = self.host.connection();
        (connection.state, connection.reason)
    }

    /// Wait until nothing is in flight and nothing waits to be written, at most `timeout_s` seconds.
    #[pyo3(signature = (timeout_s = 10.0))]
    fn flush(&self, py: Python<'_>, timeout_s: f64) -> Result<bool> {
        let host = self.own()?;
        Ok(py.detach(|| host.flush(timeout(timeout_s, 1e6))))
    }

    /// For benchmarks: let reads from the disks end at a rate. With 0 they never end. None removes the limit.
    #[pyo3(signature = (bytes_per_s = None))]
    fn limit_reads(&self, bytes_per_s: Option<f64>) -> bool {
        self.host.limit_reads(bytes_per_s)
    }

    /// Finish writes in flight (bounded), stop the threads, release the directories. Idempotent; nothing in a forked
    /// child, which has none of these.
    fn close(&self, py: Python<'_>) {
        if let Some(host) = self.host.get() {
            py.detach(|| host.close());
        }
    }
}

/// The status of the server at a socket. Raises ServerError.
#[pyfunction]
#[pyo3(signature = (socket, timeout_s = 5.0))]
pub(crate) fn server_status(
    py: Python<'_>,
    socket: PathBuf,
    timeout_s: f64,
) -> Result<Bound<'_, PyAny>> {
    let status =
        py.detach(|| undercroft_host::server_status(&socket, timeout(timeout_s, 3600.0)))?;
    Ok(to_python(py, &status)?)
}

/// Let the engine at a socket carry out an operation. Raises ServerError.
#[pyfunction]
#[pyo3(signature = (socket, operation, timeout_s = 5.0))]
pub(crate) fn operate<'py>(
    py: Python<'py>,
    socket: PathBuf,
    operation: &Bound<'py, PyDict>,
    timeout_s: f64,
) -> Result<Bound<'py, PyAny>> {
    let operation = serde_json::from_str(&to_json(operation)?).map_err(HostError::from)?;
    let timeout = timeout(timeout_s, 3600.0);
    let said = py.detach(|| undercroft_host::operate(&socket, operation, timeout))?;
    Ok(to_python(py, &said)?)
}

/// Wait at most `timeout_s` seconds for lines for the log, and leave them for `take_log`.
#[pyfunction]
pub(crate) fn wait_log(py: Python<'_>, timeout_s: f64) {
    py.detach(|| log::wait(timeout(timeout_s, 1e6)));
}

/// The lines for the log since the last call, each with its level ("info" or "warning").
#[pyfunction]
pub(crate) fn take_log() -> Vec<(&'static str, String)> {
    let lines = log::take();
    let named = lines.into_iter().map(|(level, line)| match level {
        Level::Info => ("info", line),
        Level::Warning => ("warning", line),
    });
    named.collect()
}

/// The default socket of `undercroft serve` and `undercroft status`.
#[pyfunction]
pub(crate) fn default_server_socket() -> OsString {
    undercroft_host::default_server_socket().into()
}
