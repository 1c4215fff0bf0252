//! A worker's side: gets the arena and maps it.

use std::io::{self, ErrorKind, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::event::PollFlags;
use undercroft_contract::session::SessionToken;
use undercroft_io::arena::{Arena, ArenaError};
use undercroft_io::fork::Unshared;

use crate::descriptors;
use crate::frame::{
    self, ARENA_BODY_BYTES, FrameError, FrameKind, HEADER_BYTES, Header, attach_request,
    decode_arena_body,
};
use crate::peer::{is_quiet, peer_uid};
use crate::socket_dir::connect_at_once;

/// Longest wait for the server's answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Why a worker did not get the arena.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AttachError {
    /// No server answers at the socket.
    #[error(
        "{path:?}: {step} failed: {source}; is the engine that made this socket still running?"
    )]
    Os {
        /// The socket.
        path: PathBuf,
        /// The step that failed.
        step: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The server runs as another user.
    #[error("{path:?}: the server runs as uid {found}, this process as uid {own}")]
    Owner {
        /// The socket.
        path: PathBuf,
        /// The server's uid.
        found: u32,
        /// This process's effective uid.
        own: u32,
    },
    /// The answer is no frame, or an unexpected frame.
    #[error("{path:?}: {source}")]
    Frame {
        /// The socket.
        path: PathBuf,
        /// The error.
        source: FrameError,
    },
    /// The connection was closed before the answer was complete, or the descriptor is missing.
    #[error("{path:?}: the server closed the connection without handing over the arena")]
    Incomplete {
        /// The socket.
        path: PathBuf,
    },
    /// The descriptor is no arena, or cannot be mapped.
    #[error(transparent)]
    Arena(#[from] ArenaError),
}

/// The engine's arena, mapped in this process. The server counts the process as a worker that may copy, until
/// [`let_go`] or the end of the process.
#[derive(Debug)]
pub struct Attachment {
    /// The mapping.
    pub arena: Arena,
    /// Id of the arena. Each start of an engine has another id.
    pub arena_id: u64,
    /// While it is open, the server knows that the process runs.
    pub connection: Unshared<UnixStream>,
}

/// Tells the server that this process will not copy from or to the arena any more. The server then reuses the slots
/// that the session keeps for this worker.
pub fn let_go(mut connection: Unshared<UnixStream>) {
    // A server that does not get this message waits until the process has ended.
    if connection.set_nonblocking(true).is_ok() {
        let _ = connection.write_all(&frame::let_go());
    }
}

/// Whether the engine of an [`Attachment`] still runs, as far as its connection shows this.
pub fn is_engine_there(connection: &UnixStream) -> bool {
    // The engine sends nothing more on the connection: an event on it is its end.
    is_quiet(connection, PollFlags::IN)
}

/// Gets the arena from the engine's socket, for the session with this token. Waits at most five seconds for the answer.
pub fn attach(path: &Path, session: SessionToken) -> Result<Attachment, AttachError> {
    let os = |step| {
        move |source| AttachError::Os {
            path: path.into(),
            step,
            source,
        }
    };
    // Connecting must not wait: the queue of a frozen server may be full.
    let mut connection = connect_at_once(path).map_err(|errno| os("connecting")(errno.into()))?;
    connection
        .set_nonblocking(false)
        .map_err(os("making it wait"))?;
    connection
        .set_read_timeout(Some(ANSWER_TIMEOUT))
        .map_err(os("setting a timeout"))?;
    connection
        .set_write_timeout(Some(ANSWER_TIMEOUT))
        .map_err(os("setting a timeout"))?;
    // Whoever owns the arena can change the KV in it at any time.
    let found = peer_uid(&connection).map_err(os("asking for the peer"))?;
    let own = rustix::process::geteuid().as_raw();
    if found != own {
        return Err(AttachError::Owner {
            path: path.into(),
            found,
            own,
        });
    }
    connection
        .write_all(&attach_request(session))
        .map_err(os("asking for the arena"))?;
    let (answer, fd) = receive(&connection)
        .map_err(os("waiting for the arena"))?
        .ok_or_else(|| AttachError::Incomplete { path: path.into() })?;
    let (size, arena_id) = decode(&answer).map_err(|source| AttachError::Frame {
        path: path.into(),
        source,
    })?;
    let fd = fd.ok_or_else(|| AttachError::Incomplete { path: path.into() })?;
    Ok(Attachment {
        arena: Arena::from_fd(fd, size)?,
        arena_id,
        connection,
    })
}

type ArenaAnswer = [u8; HEADER_BYTES + ARENA_BODY_BYTES];

fn decode(answer: &ArenaAnswer) -> Result<(u64, u64), FrameError> {
    let mut header = [0; HEADER_BYTES];
    let mut body = [0; ARENA_BODY_BYTES];
    header.copy_from_slice(&answer[..HEADER_BYTES]);
    body.copy_from_slice(&answer[HEADER_BYTES..]);
    match Header::decode(&header)?.kind {
        FrameKind::Arena => Ok(decode_arena_body(&body)),
        other => Err(FrameError::Kind(other as u8)),
    }
}

/// A whole answer and its descriptor; `None` if the connection ended before.
fn receive(connection: &UnixStream) -> io::Result<Option<(ArenaAnswer, Option<OwnedFd>)>> {
    let mut answer: ArenaAnswer = [0; HEADER_BYTES + ARENA_BODY_BYTES];
    let mut fd = None;
    let mut received = 0;
    while received < answer.len() {
        let mut message = match descriptors::receive(connection, &mut answer[received..]) {
            Ok(message) => message,
            // Closed before the request was read.
            Err(error) if error.kind() == ErrorKind::ConnectionReset => return Ok(None),
            Err(error) => return Err(error),
        };
        fd = fd.or_else(|| message.descriptors.pop());
        if message.bytes == 0 || message.has_descriptors() {
            // The engine sends one descriptor.
            descriptors::close_elsewhere(message.descriptors);
            return Ok(None);
        }
        received += message.bytes;
    }
    Ok(Some((answer, fd)))
}
