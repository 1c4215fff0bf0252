//! `_core.Client`: a shared server's engine.

use std::path::PathBuf;

use pyo3::prelude::*;

use crate::engine::{PyGroup, arena_of, namespace, report};
use crate::remote::Remote;
use crate::session::PySession;

/// An engine in `undercroft serve`.
#[pyclass(name = "Client", module = "undercroft._core", frozen)]
pub(crate) struct PyClient {
    remote: Remote,
}

#[pymethods]
impl PyClient {
    #[new]
    #[pyo3(signature = (socket, *, server_timeout_ms = 5.0, lookup_spin_us = 200.0))]
    fn new(socket: PathBuf, server_timeout_ms: f64, lookup_spin_us: f64) -> Self {
        let resolve = Box::new(move || Ok(socket.clone()));
        Self {
            remote: Remote::new(resolve, server_timeout_ms, lookup_spin_us, None),
        }
    }

    /// Where workers get the arena: (socket, generation of the arena, token of the session).
    #[getter]
    fn arena(&self) -> (PathBuf, u64, u128) {
        arena_of(&self.remote)
    }

    /// The session, for one namespace: there is one for a client. Raises ConfigError.
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
        let client = self.remote.register(py, spec, dropped_tokens)?;
        Ok(PySession::served(client))
    }

    /// The server's counters and gauges, as of about a second ago; empty before there was a session.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        report(py, self.remote.client().map(|of| of.reports().1))
    }

    /// What the server has configured and found; empty before there was a session.
    fn info<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        report(py, self.remote.client().map(|of| of.reports().0))
    }

    /// Another process owns the engine: always true.
    #[getter]
    fn is_shared(&self) -> bool {
        true
    }

    /// A client of a server never takes anything over: always false.
    #[getter]
    fn took_over(&self) -> bool {
        false
    }

    /// Whether there is a session ("up", "late", "down" or "refused"), and why not.
    fn link(&self) -> (&'static str, String) {
        self.remote.state()
    }

    /// End the session. Idempotent.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.remote.close());
    }
}
