//! An engine for a process: its options, directories, memory, threads and server, or the connection to the engine of
//! another process.
//!
//! [`open`] gives an [`EngineHost`]. Its engine runs in this process ([`EmbeddedHost`]), in the process that
//! has the directories open ([`SharedHost`]), or in `undercroft serve` ([`RemoteHost`]).

mod arena_memory;
mod config;
mod directories;
mod embedded;
mod error;
mod export;
mod import;
pub mod inspect;
mod namespace;
mod portable;
mod random;
mod remote;
mod remote_tier;
pub mod replay;
mod retry;
mod running;
mod shared;
mod socket_path;

use std::fmt::Debug;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use undercroft_contract::namespace::NamespaceSpec;
use undercroft_contract::session::{Session, Tokens};
use undercroft_ipc::{OperatorRequest, SessionAddress};

pub use config::{DiskAdmission, DiskCapacity, DiskConfig, HostConfig, OnDiskError};
pub use directories::Directories;
pub use embedded::EmbeddedHost;
pub use error::{ErrorClass, HostError};
pub use export::{Exported, export};
pub use import::{Imported, import};
pub use namespace::group_spec;
pub use portable::PortableError;
pub use remote::RemoteHost;
pub use running::RunningEngine;
pub use shared::SharedHost;
pub use socket_path::{default_server_socket, default_socket_dir};

/// Longest wait of [`EngineHost::status`] for an answer.
const STATUS_TIMEOUT: Duration = Duration::from_secs(5);

/// Whether an engine can be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Connection {
    /// "up", "late" (it does not answer in time), "down" or "refused".
    pub state: &'static str,
    /// The reason why the engine is not up.
    pub reason: String,
}

impl Connection {
    pub(crate) fn up() -> Self {
        let (state, reason) = ("up", String::new());
        Self { state, reason }
    }
}

/// An engine in this process or another, which opens sessions.
///
/// ```
/// use std::time::Duration;
///
/// use undercroft_contract::namespace::{GroupKind, NamespaceSpec};
/// use undercroft_contract::session::Tokens;
/// use undercroft_host::{HostConfig, open};
///
/// let directory = tempfile::tempdir()?;
/// let host_memory = 8 << 20;
/// let config = HostConfig { host_memory, socket_dir: directory.path().join("sockets"), ..HostConfig::default() };
/// let engine = open(config)?;
/// let model = NamespaceSpec::uniform("model", 16, &[(GroupKind::Full, 4096)]);
/// let session = engine.register(model.clone(), Tokens(0))?;
/// assert_eq!(session.namespace(), model.digest().to_hex());
/// // Workers and `undercroft status` reach an engine of this process through its socket, too.
/// assert!(engine.arena().is_some() && engine.status()?.is_object());
/// // Nothing was saved, so there is nothing to wait for.
/// assert!(engine.flush(Duration::from_secs(5)));
/// engine.close();
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait EngineHost: Debug + Send + Sync {
    /// Opens a session. Each of its hits ends `dropped_tokens` before the end of the cached prefix. An engine of
    /// another process accepts one session, which is opened when the engine's server answers.
    ///
    /// # Errors
    /// If the namespace does not fit the engine, or the engine refuses it.
    fn register(
        &self,
        namespace: NamespaceSpec,
        dropped_tokens: Tokens,
    ) -> Result<Arc<dyn Session>, HostError>;

    /// The address from which workers get the arena now; `None` before the first session with a server.
    fn arena(&self) -> Option<SessionAddress>;

    /// Counters and gauges as one flat object, which is empty before the first session with a server. The numbers of a
    /// server are about a second old.
    fn stats(&self) -> Value;

    /// The configuration and findings; an empty object before the first session with a server.
    fn info(&self) -> Value;

    /// Whether the engine can be used.
    fn connection(&self) -> Connection;

    /// The status, for `undercroft status`.
    ///
    /// # Errors
    /// If the engine's server does not answer.
    fn status(&self) -> Result<Value, HostError> {
        match self.arena() {
            Some(address) => server_status(&address.socket, STATUS_TIMEOUT),
            None => Err(HostError::NotConnected(self.connection().reason)),
        }
    }

    /// For benchmarks: from now on, reads from the disks end at this rate in bytes a second. With 0 they never end.
    /// `None` removes the limit. False unless the engine is in this process and was opened
    /// with `inject_faults`, an option of builds with the feature `faults`.
    fn limit_reads(&self, _bytes_per_s: Option<f64>) -> bool {
        false
    }

    /// Waits at most `timeout` until no block is in flight or waits to be written. Returns whether this state is
    /// reached. Does not wait for the engine of another process.
    fn flush(&self, timeout: Duration) -> bool;

    /// Ends the session with a server. For an engine of this process: finishes writes in flight (bounded), stops the
    /// threads and releases the directories. Idempotent.
    fn close(&self);

    /// Whether another process runs the engine, or did when it was opened.
    fn is_shared(&self) -> bool;

    /// Whether this process has taken over the directories of an engine that ended.
    fn took_over(&self) -> bool;
}

/// Opens the engine of `config`.
///
/// # Errors
/// If an option is not possible, or a directory, the memory or the socket cannot be used.
pub fn open(config: HostConfig) -> Result<Box<dyn EngineHost>, HostError> {
    match config.server_socket()? {
        Some(socket) => Ok(Box::new(RemoteHost::of_server(&config, socket))),
        None if config.share => shared::open(config),
        None => Ok(Box::new(EmbeddedHost::open(&config)?)),
    }
}

/// Lets the engine at `socket` carry out an operation. Waits at most `timeout` for the answer, and returns it.
///
/// # Errors
/// If `operation` is not a known operation, or no server answers at `socket`.
pub fn operate(socket: &Path, operation: Value, timeout: Duration) -> Result<Value, HostError> {
    let operation: OperatorRequest = serde_json::from_value(operation)?;
    let json = undercroft_ipc::operate(socket, operation, timeout)?;
    Ok(serde_json::from_str(&json)?)
}

/// The status of the server at `socket`. Waits at most `timeout` for it.
///
/// # Errors
/// If no server answers at `socket`.
pub fn server_status(socket: &Path, timeout: Duration) -> Result<Value, HostError> {
    let json = undercroft_ipc::server_status(socket, timeout)?;
    Ok(serde_json::from_str(&json)?)
}
