//! Everything that asks the operating system: the arena, files and IO engines, disk directories, copies, the memory of
//! this process.
//!
//! An IO engine moves bytes between the arena and files. It knows files and buffers, but no keys of blocks.
//!
//! The engine produces [`IoRequest`](undercroft_contract::io::IoRequest)s and consumes completions; an [`IoEngine`] carries them
//! out. Two implementations: io_uring ([`uring`]) and a thread pool ([`pool`]). With the feature `faults`, a fault injector
//! wraps either.
//!
//! Checksums are computed here, outside the engine's lock, over the first `payload_len` bytes: of
//! the source of a write whose checksum is not given, and of the destination after a read has completed.
//!
//! Payloads that are encrypted on disk go through the thread pool, whose threads encrypt and decrypt (`sealed.rs`).

pub mod arena;
mod batch;
mod checksums;
pub mod copy;
pub mod disk;
mod engine;
#[cfg(feature = "faults")]
pub mod fault;
pub mod fault_hook;
mod features;
mod files;
pub mod fork;
mod in_flight;
pub mod memory;
mod operation;
pub mod pool;
#[cfg(feature = "bare-loop")]
pub mod raw;
mod ring;
mod sealed;
pub mod secret;
mod threads;
pub mod uring;
mod waker;

pub use checksums::ChecksumQueue;
pub use engine::IoEngine;
pub use features::{
    IoEngineChoice, IoFeatures, open_encrypting_engine, open_io_engine, probe_io_uring,
};
pub use files::{DeviceFiles, check_own_file, open_file};
pub use threads::{join_within, within};
pub use waker::{Wake, Waker};

use engine::SPLIT;
