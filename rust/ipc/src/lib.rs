//! The Unix socket between undercroft's processes. Clients send lookups, loads and saves. Workers get the arena's
//! descriptor.
//!
//! Only processes of the same user are served: the socket lies in a directory of mode 0700, has mode
//! 0600, and the server checks the peer's uid as the kernel reports it.

mod arena_client;
mod budget;
mod client;
mod client_state;
mod connection;
mod descriptors;
mod dialect;
mod events;
pub mod frame;
mod operation;
mod orders;
mod parker;
mod peer;
pub mod protocol;
mod server;
mod sessions;
mod socket_dir;
mod stats;

/// The atomics of `parker`: std's atomics here, loom's atomics in the test.
mod atomic {
    pub(crate) use std::sync::atomic::{AtomicU8, Ordering};
}

pub use arena_client::{AttachError, Attachment, attach, is_engine_there, let_go};
pub use client::{Client, ClientConfig, ConnectionState, Resolve};
pub use client_state::SessionAddress;
pub use connection::{ConnectError, is_served, operate, server_status};
pub use operation::{OperatorHint, OperatorRequest};
pub use server::{Served, Server, ServerCounters, SocketLocation};
pub use sessions::new_token;
pub use socket_dir::{SOCKET_PATH_MAX, SocketError};
pub use stats::{StatsSource, stats_json};
