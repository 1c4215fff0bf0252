//! The host arena: its mapping, and how its pages are populated.

mod numa;
mod populate;
mod region;
mod release;

pub use populate::{Prefault, prefault_in_background};
pub use region::{ARENA_ALIGN, Arena, ArenaError, OutOfBounds};
