//! What the engine does for its callers: each verb puts rooms together and owns nothing.
//!
//! [`Engine`] is known here alone. A room cannot name it, so a room's function says in its signature what it may change.

#[cfg(feature = "check")]
mod check;
mod clear;
mod engine;
mod explain;
mod hint;
mod hits;
mod io;
mod jobs;
mod load;
mod lookup;
mod orders;
mod recover;
mod remote;
mod reset;
mod save;
mod served;
mod waits;

#[cfg(feature = "check")]
pub use check::{EngineView, Held};
pub use engine::Engine;
pub use io::OperationCount;
pub use jobs::{Due, Room, Started};
pub use orders::{Drained, ResizeOrder, ResizeRefusal, Resized};
pub use recover::Recovery;
pub use served::{ChainBytes, HitExtents, SessionUsage};
