//! Measurements of the engine on a real device, against a bare loop on the same device in the same run,
//! replays of traces, and chats of two models.

pub mod chats;
pub mod checksums;
pub mod disk;
pub mod recover;
pub mod replay;
mod rig;

pub use rig::BenchError;
