//! The Unix socket between undercroft's processes: frames, and the hand-over of the arena's
//! descriptor to the workers.
//!
//! Only processes of the same user are served: the socket lies in a directory of mode 0700, has mode
//! 0600, and the server checks the peer's uid as the kernel reports it.

mod arena_client;
mod arena_server;
pub mod frame;
mod socket_dir;

pub use arena_client::{AttachError, Attachment, attach};
pub use arena_server::{ArenaServer, ServerCounters};
pub use socket_dir::{SOCKET_PATH_MAX, SocketError};
