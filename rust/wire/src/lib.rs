//! The Unix socket between undercroft's processes: clients ask for lookups, loads and saves, workers get
//! the arena's descriptor.
//!
//! Only processes of the same user are served: the socket lies in a directory of mode 0700, has mode
//! 0600, and the server checks the peer's uid as the kernel reports it.

mod arena_client;
mod client;
mod connection;
mod doze;
pub mod frame;
mod peer;
pub mod protocol;
mod server;
mod sessions;
mod socket_dir;
mod stats;
mod table;

/// What `doze` is built on: loom's in its test.
mod atomic {
    pub(crate) use std::sync::atomic::{AtomicU8, Ordering};
}

pub use arena_client::{AttachError, Attachment, attach};
pub use client::{Client, ClientConfig, LinkState, Resolve};
pub use connection::{ConnectError, is_served, server_status};
pub use server::{Served, Server, ServerCounters, SocketPlace};
pub use socket_dir::{SOCKET_PATH_MAX, SocketError};
pub use stats::{StatsSource, stats_json};
pub use table::{Grant, Link};
