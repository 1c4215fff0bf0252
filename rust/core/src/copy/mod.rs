//! Copies between device pages and the arena: by threads where the pages are host memory, or by the CUDA driver.

mod batches;
mod copier;
mod nontemporal;
mod pieces;
mod places;
mod routine;

pub use batches::{BATCH, Batches, DriverFunctions, IN_FLIGHT, Refused};
pub use copier::{Copier, CopyPiece, Direction, Ended};
pub use nontemporal::write_once;
pub use pieces::{BlockPage, BlockPages, BlockPieces, Joined};
pub use places::{BlockPlaces, PlacedPieces, PlacesError, SlotRun};
pub use routine::Routine;
