//! Moving bytes between the arena and files. This layer knows files and buffers, but no keys of blocks.
//!
//! The engine produces [`IoRequest`]s and consumes [`IoCompletion`]s; an [`IoEngine`] carries them
//! out. Two implementations: io_uring ([`uring`]) and a thread pool ([`pool`]). With the feature `faults`, a fault injector
//! wraps either.
//!
//! Checksums are computed here, outside the engine's lock, over the first `payload_len` bytes: of
//! the source of a write, and of the destination after a read has completed.
//!
//! Payloads that are encrypted on disk go through the thread pool, whose threads encrypt and decrypt (`sealed.rs`).

mod batch;
mod checksums;
mod contract;
#[cfg(feature = "faults")]
pub mod fault;
pub mod fault_hook;
mod features;
mod files;
mod in_flight;
mod operation;
pub mod pool;
#[cfg(feature = "bare-loop")]
pub mod raw;
mod ring;
mod sealed;
pub mod uring;
mod waker;

pub use checksums::ChecksumQueue;
pub(crate) use contract::device_depth;
pub use contract::{
    ChecksumRequest, FileKind, IO_ALIGN, IoCompletion, IoEngine, IoFault, IoRequest, IoRoom,
    SealedTransfer,
};
pub use features::{
    IoEngineChoice, IoFeatures, open_encrypting_engine, open_io_engine, probe_io_uring,
};
pub use files::{DeviceFiles, check_own_file, open_file};
pub use waker::{Wake, Waker};

use contract::{DRAIN_LIMIT, SPLIT, engine_depth};
