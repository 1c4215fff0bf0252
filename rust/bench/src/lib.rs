//! Measurements of the engine on a real device, against a bare loop on the same device in the same run,
//! and replays of traces.

pub mod checksums;
pub mod disk;
pub mod recover;
pub mod replay;
mod rig;

pub use rig::BenchError;
