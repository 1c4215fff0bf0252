//! Copies between device pages that are host memory and the arena.

mod copier;
mod nontemporal;

pub use copier::{Copier, Direction, Ended, Piece};
