//! `_core.Arena`: an engine's arena, mapped into a worker.

use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;

use pyo3::prelude::*;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::errors::UndercroftError;

/// An engine's arena, mapped into this process (a worker's).
#[pyclass(name = "Arena", module = "undercroft._core", frozen)]
#[derive(Debug)]
pub(crate) struct PyArena {
    arena: Arc<undercroft_core::arena::Arena>,
    generation: u64,
    /// Its end tells the engine that this process no longer copies.
    connection: Option<UnixStream>,
}

impl PyArena {
    pub(crate) fn arena(&self) -> &Arc<undercroft_core::arena::Arena> {
        &self.arena
    }
}

#[pymethods]
impl PyArena {
    /// Get the descriptor from the engine's socket (same uid only) and map it, for the session with this
    /// token. Waits at most five seconds. Raises UndercroftError.
    #[staticmethod]
    #[pyo3(signature = (socket_path, session = 0))]
    fn attach(py: Python<'_>, socket_path: PathBuf, session: u128) -> PyResult<Self> {
        let attached = py
            .detach(|| undercroft_wire::attach(&socket_path, session))
            .map_err(|error| UndercroftError::new_err(error.to_string()))?;
        Ok(Self {
            arena: Arc::new(attached.arena),
            generation: attached.generation,
            connection: Some(attached.connection),
        })
    }

    /// An arena of this process alone, for benchmarks and tests of the copiers.
    #[staticmethod]
    fn create(size: u64) -> PyResult<Self> {
        let arena = undercroft_core::arena::Arena::create(size)
            .map_err(|error| UndercroftError::new_err(error.to_string()))?;
        Ok(Self {
            arena: Arc::new(arena),
            generation: 0,
            connection: None,
        })
    }

    /// Address of the first byte in this process.
    #[getter]
    fn address(&self) -> usize {
        self.arena.address()
    }

    /// Bytes.
    #[getter]
    fn size(&self) -> u64 {
        self.arena.size()
    }

    /// Whether its engine still runs, as far as the socket tells; true without one (`create`).
    #[getter]
    fn is_served(&self) -> bool {
        self.connection.as_ref().is_none_or(|connection| {
            let mut fds = [PollFd::new(connection, PollFlags::IN)];
            // The engine says nothing more on it: what comes is its end.
            let nothing = Timespec::default();
            poll(&mut fds, Some(&nothing)) == Ok(0)
        })
    }

    /// The engine's number of this arena; another arena has another number.
    #[getter]
    fn generation(&self) -> u64 {
        self.generation
    }
}
