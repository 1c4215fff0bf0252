//! `_core.Arena`: an engine's arena, mapped into a worker.

use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use rustix::io::Errno;
use undercroft_contract::session::SessionToken;
use undercroft_host::HostError;
use undercroft_io::fork::Unshared;

use crate::errors::Result;

/// An engine's arena, mapped into this process (a worker's).
#[pyclass(name = "Arena", module = "undercroft._core", frozen)]
#[derive(Debug)]
pub(crate) struct PyArena {
    arena: Arc<undercroft_io::arena::Arena>,
    arena_id: u64,
    /// While it is open, the engine knows that this process runs; `None` without an engine and after `let_go`.
    connection: Mutex<Option<Unshared<UnixStream>>>,
}

impl PyArena {
    pub(crate) fn arena(&self) -> &Arc<undercroft_io::arena::Arena> {
        &self.arena
    }
}

#[pymethods]
impl PyArena {
    /// Get the descriptor from the engine's socket (same uid only) and map it, for the session with this
    /// token. Waits at most five seconds. Raises ServerError.
    #[staticmethod]
    fn attach(py: Python<'_>, socket_path: PathBuf, session: u128) -> Result<Self> {
        let session = SessionToken(session);
        let attached = py.detach(|| undercroft_ipc::attach(&socket_path, session));
        let attached = attached.map_err(HostError::from)?;
        Ok(Self {
            arena: Arc::new(attached.arena),
            arena_id: attached.arena_id,
            connection: Mutex::new(Some(attached.connection)),
        })
    }

    /// An arena of this process alone, for benchmarks and tests of the copiers. Raises ConfigError.
    #[staticmethod]
    fn create(size: u64) -> Result<Self> {
        let arena = undercroft_io::arena::Arena::create(size).map_err(HostError::from)?;
        Ok(Self {
            arena: Arc::new(arena),
            arena_id: 0,
            connection: Mutex::new(None),
        })
    }

    /// Put memory behind a range and into this process's page tables, in huge pages where the kernel has them. Where
    /// the kernel cannot be asked (before Linux 5.14), nothing happens. Raises OSError when the memory is not there,
    /// or the range lies outside.
    fn prefault(&self, py: Python<'_>, offset: u64, length: u64) -> PyResult<()> {
        self.arena
            .check(offset, length)
            .map_err(|error| PyOSError::new_err(error.to_string()))?;
        loop {
            match py.detach(|| self.arena.prefault(offset, length)) {
                Ok(()) | Err(Errno::INVAL) => return Ok(()),
                Err(Errno::INTR | Errno::AGAIN) => {}
                Err(error) => return Err(std::io::Error::from(error).into()),
            }
        }
    }

    /// The descriptor of the memory, which belongs to the arena. All processes that map the arena share one open file
    /// description: to lock it against the others, open it anew.
    fn fileno(&self) -> i32 {
        self.arena.fd().as_raw_fd()
    }

    /// NUMA nodes over which the memory is interleaved; empty where the kernel chooses.
    #[getter]
    fn nodes(&self) -> Vec<u32> {
        self.arena.nodes().to_vec()
    }

    /// Address of the first byte in this process.
    #[getter]
    fn address(&self) -> usize {
        self.arena.address()
    }

    /// Size in bytes.
    #[getter]
    fn size(&self) -> u64 {
        self.arena.size()
    }

    /// Whether the arena's engine still runs, as far as the socket shows it; true without an engine (`create`).
    #[getter]
    fn is_served(&self) -> bool {
        let connection = self.connection.lock();
        let connection = connection.unwrap_or_else(PoisonError::into_inner);
        connection
            .as_ref()
            .is_none_or(|connection| undercroft_ipc::is_engine_there(connection))
    }

    /// Tell the engine that this process will not copy from or to the arena any more. Without this call the engine
    /// keeps the slots of pending copies until the process ends.
    fn let_go(&self) {
        let connection = self.connection.lock();
        let mut connection = connection.unwrap_or_else(PoisonError::into_inner);
        if let Some(connection) = connection.take() {
            undercroft_ipc::let_go(connection);
        }
    }

    /// The engine's id of this arena. Each arena has another id.
    #[getter]
    fn arena_id(&self) -> u64 {
        self.arena_id
    }
}
