//! Copies between device pages that are host memory and the arena.

mod copier;
mod nontemporal;
mod routine;

pub use copier::{Copier, CopyPiece, Direction, Ended};
pub use nontemporal::write_once;
pub use routine::Routine;
