//! Servers, clients and workers over real sockets.

#![expect(clippy::unwrap_used, reason = "a failed step of a test fails the test")]

mod arena;
mod excess;
mod lifetimes;
mod misuse;
mod raw;
mod rig;
mod sharing;
