//! The core of undercroft, a tiered KV-cache engine: index, tiers, policies and IO, in plain Rust
//! that knows neither Python, CUDA nor the environment.

pub mod arena;
mod buddy;
pub mod checksum;
pub mod cipher;
pub mod copy;
pub mod disk;
pub mod driver;
pub mod embedded;
pub mod engine;
pub mod error;
pub mod explain;
pub mod forest;
pub mod fork;
pub mod hint;
pub mod io;
pub mod key;
mod little_endian;
pub mod log;
pub mod memory;
pub mod metrics;
pub mod namespace;
pub mod panics;
pub mod policy;
mod pool;
mod prefetch;
pub mod remote;
pub mod resolve;
pub mod secret;
pub mod session;
pub mod size;
pub mod slots;
mod tokens;
pub mod work;
