//! The core of undercroft, a tiered KV-cache engine: index, tiers, policies and IO, in plain Rust
//! that knows neither Python, CUDA nor the environment.

pub mod arena;
pub mod checksum;
pub mod copy;
pub mod io;
pub mod key;
pub mod memory;
pub mod policy;
