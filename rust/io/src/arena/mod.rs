//! The host arena: its mapping, and how its pages are populated.

mod numa;
mod populate;
mod region;
mod release;

pub use populate::{Prefault, prefault_in_background};
pub use region::{Arena, ArenaError, OutOfBounds};

/// The size of an arena is a multiple of this, in bytes.
pub const ARENA_ALIGN: u64 = 4096;

/// The size of a transparent huge page, in bytes. A mapping has to be aligned to this size to have huge pages.
const HUGE_PAGE: u64 = 2 << 20;
