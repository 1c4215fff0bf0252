//! Why an engine cannot be opened or used.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use undercroft_cipher::KeyFileError;
use undercroft_contract::error::RegisterError;
use undercroft_io::arena::ArenaError;
use undercroft_io::disk::StoreError;
use undercroft_ipc::{AttachError, ConnectError, SocketError};

use crate::portable::PortableError;

/// Classes of errors, by their remedy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorClass {
    /// The operator must change an option.
    Config,
    /// The operator must look at a directory of the disk tier.
    Store,
    /// A server does not answer, or is another user's.
    Server,
    /// Anything else.
    Engine,
}

/// Longest wait of a server for memory.
pub(crate) const MEMORY_WAIT: Duration = Duration::from_secs(30);

/// Why an engine cannot be opened or used. Messages have the option's name.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HostError {
    /// An option is unknown, or its value is not possible.
    #[error("{0}")]
    Option(String),
    /// The arena cannot be made.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// The memory for a server's arena was not returned in time.
    #[error(
        "{0}, or end the processes that hold the memory: the workers of running vLLMs may still hold the memory of an \
         earlier server (waited {wait} seconds)",
        wait = MEMORY_WAIT.as_secs()
    )]
    MemoryHeld(ArenaError),
    /// The key file cannot be used.
    #[error(transparent)]
    KeyFile(#[from] KeyFileError),
    /// The disks cannot be read and written as configured.
    #[error("io_engine: {0}")]
    Io(io::Error),
    /// The engine's socket cannot be made.
    #[error("{option}: {source}")]
    Socket {
        /// The option that determines the socket's place.
        option: &'static str,
        /// The reason.
        source: SocketError,
    },
    /// A directory cannot be used.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A directory is in use, and the engine that uses it cannot be shared.
    #[error("{in_use}. It could be shared, but its engine does not answer: {reason}")]
    Owner {
        /// The message that names the directory and the process that uses it.
        in_use: String,
        /// The failure of the attempt to share it.
        reason: String,
    },
    /// The namespace cannot be registered.
    #[error(transparent)]
    Register(#[from] RegisterError),
    /// The server refuses the session.
    #[error("{0}")]
    Refused(String),
    /// A second session on one client.
    #[error("an engine of another process takes one session; open another engine for another")]
    SecondSession,
    /// The client's thread cannot be started.
    #[error("starting the client's thread: {0}")]
    Thread(io::Error),
    /// A forked child uses the engine of its parent.
    #[error(
        "this process was forked by the one that opened the engine, and has none of its threads; open another engine here"
    )]
    Forked,
    /// There was no session yet, and so the server's socket is unknown.
    #[error("the engine's server cannot be asked: {0}")]
    NotConnected(String),
    /// No server answers at a socket.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// A worker cannot get the arena.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// The file of an exported namespace cannot be written or read.
    #[error("{path:?}: {source}")]
    Portable {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: PortableError,
    },
    /// A server's report cannot be read.
    #[error("the server's report is damaged: {0}")]
    Report(#[from] serde_json::Error),
}

impl HostError {
    /// The class of the error.
    pub fn class(&self) -> ErrorClass {
        match self {
            Self::Register(RegisterError::Broken)
            | Self::SecondSession
            | Self::Thread(_)
            | Self::Forked => ErrorClass::Engine,
            Self::Portable { source, .. } => match source {
                PortableError::NotOurs | PortableError::Version(_) => ErrorClass::Config,
                PortableError::Io(_) | PortableError::Damaged { .. } => ErrorClass::Engine,
            },
            Self::Option(_)
            | Self::Arena(_)
            | Self::MemoryHeld(_)
            | Self::KeyFile(_)
            | Self::Io(_)
            | Self::Socket { .. }
            | Self::Register(_)
            | Self::Refused(_) => ErrorClass::Config,
            Self::Store(_) | Self::Owner { .. } => ErrorClass::Store,
            Self::NotConnected(_) | Self::Connect(_) | Self::Attach(_) | Self::Report(_) => {
                ErrorClass::Server
            }
        }
    }
}
