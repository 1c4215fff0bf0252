//! Connects to a server's socket without long waits, and reads replies from it.

use std::io::{self, ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use undercroft_io::fork::Unshared;

use crate::descriptors;
use crate::frame::{self, FrameError, FrameKind};
use crate::operation::OperatorRequest;
use crate::peer::peer_uid;
use crate::protocol::{ClientMessage, ServerMessage};
use crate::socket_dir::connect_at_once;

/// Why there is no connection to a server.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// No server answers at the socket.
    #[error("{path:?}: {source}; is an engine running there, in a vLLM or in `undercroft serve`?")]
    Os {
        /// The socket.
        path: PathBuf,
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
    /// The server has closed the connection.
    #[error("{path:?}: the server has closed the connection")]
    Closed {
        /// The socket.
        path: PathBuf,
    },
    /// The server does not answer.
    #[error("{path:?}: the server does not answer")]
    Timeout {
        /// The socket.
        path: PathBuf,
    },
    /// The server sent no reply, or an unexpected reply.
    #[error("{path:?}: {source}")]
    Frame {
        /// The socket.
        path: PathBuf,
        /// The error.
        source: FrameError,
    },
}

/// A connection to a server.
#[derive(Debug)]
pub(crate) struct ServerConnection {
    path: PathBuf,
    pub(crate) stream: Unshared<UnixStream>,
    inbox: Vec<u8>,
    outbox: Vec<u8>,
}

impl ServerConnection {
    /// Connects, or fails at once: the queue of a frozen server may be full.
    pub(crate) fn open(path: &Path) -> Result<Self, ConnectError> {
        let os = |errno: Errno| ConnectError::Os {
            path: path.into(),
            source: errno.into(),
        };
        let socket = connect_at_once(path).map_err(os)?;
        descriptors::refuse(&socket);
        let found = peer_uid(&socket).map_err(|source| ConnectError::Os {
            path: path.into(),
            source,
        })?;
        let own = rustix::process::geteuid().as_raw();
        if found != own {
            return Err(ConnectError::Owner {
                path: path.into(),
                found,
                own,
            });
        }
        Ok(Self {
            path: path.into(),
            stream: socket,
            inbox: Vec::new(),
            outbox: Vec::new(),
        })
    }

    /// Takes frames to send, if all earlier frames were sent. `frames` is then the empty buffer of the earlier frames.
    pub(crate) fn queue(&mut self, frames: &mut Vec<u8>) {
        if self.outbox.is_empty() {
            std::mem::swap(&mut self.outbox, frames);
        }
    }

    /// Whether frames are unsent because the server does not read.
    pub(crate) fn is_blocked(&self) -> bool {
        !self.outbox.is_empty()
    }

    /// Sends as many bytes as the socket accepts.
    pub(crate) fn send(&mut self) -> Result<(), ConnectError> {
        let mut sent = 0;
        let result = loop {
            if sent == self.outbox.len() {
                break Ok(());
            }
            match self.stream.write(&self.outbox[sent..]) {
                Ok(bytes) => sent += bytes,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break Ok(()),
                Err(_) => break Err(self.closed()),
            }
        };
        self.outbox.drain(..sent);
        result
    }

    /// Reads all bytes that have arrived, and passes each reply to `take`, which returns whether it was expected.
    pub(crate) fn receive(
        &mut self,
        mut take: impl FnMut(ServerMessage) -> bool,
    ) -> Result<(), ConnectError> {
        let mut scratch = [0; 64 << 10];
        loop {
            let received = match descriptors::receive(&self.stream, &mut scratch) {
                Ok(received) => received,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(_) => return Err(self.closed()),
            };
            let bytes = received.bytes;
            // No reply brings descriptors, and the close of a foreign one may block.
            if received.has_descriptors() {
                descriptors::close_elsewhere(received.descriptors);
                return Err(ConnectError::Frame {
                    path: self.path.clone(),
                    source: FrameError::Malformed,
                });
            }
            if bytes == 0 {
                return Err(self.closed());
            }
            self.inbox.extend_from_slice(&scratch[..bytes]);
            let bad = |source| ConnectError::Frame {
                path: self.path.clone(),
                source,
            };
            let mut at = 0;
            while let Some((header, body, len)) = frame::first(&self.inbox[at..]).map_err(bad)? {
                if header.kind != FrameKind::Reply {
                    return Err(bad(FrameError::Kind(header.kind as u8)));
                }
                if !take(ServerMessage::decode(body).map_err(bad)?) {
                    return Err(bad(FrameError::Malformed));
                }
                at += len;
            }
            self.inbox.drain(..at);
            // A short read has emptied the socket, which saves the call that would say so.
            if bytes < scratch.len() {
                return Ok(());
            }
        }
    }

    /// Sends one message and waits for one reply, at most until `deadline` or until `stop` returns true.
    pub(crate) fn ask(
        &mut self,
        request: &ClientMessage<'_>,
        deadline: Instant,
        stop: impl Fn() -> bool,
    ) -> Result<ServerMessage, ConnectError> {
        request.append_to(&mut self.outbox);
        let mut found = None;
        loop {
            self.send()?;
            self.receive(|reply| found.replace(reply).is_none())?;
            if let Some(reply) = found {
                return Ok(reply);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || stop() {
                return Err(ConnectError::Timeout {
                    path: self.path.clone(),
                });
            }
            let mut events = PollFlags::IN;
            if self.is_blocked() {
                events |= PollFlags::OUT;
            }
            let slice = left.min(Duration::from_millis(50));
            wait(&mut [PollFd::new(&self.stream, events)], slice);
        }
    }

    /// The error of a server that does not read any more.
    pub(crate) fn unread(&self) -> ConnectError {
        ConnectError::Timeout {
            path: self.path.clone(),
        }
    }

    fn closed(&self) -> ConnectError {
        ConnectError::Closed {
            path: self.path.clone(),
        }
    }
}

/// Waits for one of `fds`, at most for `timeout`.
pub(crate) fn wait(fds: &mut [PollFd<'_>], timeout: Duration) {
    let timeout = Timespec::try_from(timeout).expect("a wait takes seconds");
    // An interruption is no error: the caller checks its condition itself.
    let _ = poll(fds, Some(&timeout));
}

/// Whether a server listens at a socket, even if the server is frozen.
pub fn is_served(path: &Path) -> bool {
    ServerConnection::open(path).is_ok()
}

/// The status of a server, as JSON. Waits at most for `timeout`.
///
/// # Errors
/// If no server answers there.
pub fn server_status(path: &Path, timeout: Duration) -> Result<String, ConnectError> {
    let mut connection = ServerConnection::open(path)?;
    match connection.ask(&ClientMessage::Status, Instant::now() + timeout, || false)? {
        ServerMessage::Status { json } => Ok(json),
        _ => Err(ConnectError::Frame {
            path: path.into(),
            source: FrameError::Malformed,
        }),
    }
}

/// Lets the server at `path` carry out an operation. Waits at most `timeout`. Returns the answer as JSON.
///
/// # Errors
/// If no server answers at `path`.
pub fn operate(
    path: &Path,
    operation: OperatorRequest,
    timeout: Duration,
) -> Result<String, ConnectError> {
    let mut connection = ServerConnection::open(path)?;
    let message = ClientMessage::Operate(operation);
    match connection.ask(&message, Instant::now() + timeout, || false)? {
        ServerMessage::Operated { json } => Ok(json),
        _ => Err(ConnectError::Frame {
            path: path.into(),
            source: FrameError::Malformed,
        }),
    }
}
