//! Copies between device pages that are host memory and the arena.

mod copier;
mod nontemporal;
mod routine;

pub use copier::{Copier, Direction, Ended, Piece};
pub use nontemporal::write_once;
pub use routine::Routine;
