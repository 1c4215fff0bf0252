//! Copies between device pages and the arena: by threads where the pages are host memory, or by the CUDA driver.

mod batches;
mod copier;
mod functions;
mod nontemporal;
mod pieces;
mod places;
mod routine;
mod staged;

pub use batches::{BATCH, Batches, IN_FLIGHT};
pub use copier::{Copier, CopyPiece, Direction, Ended};
pub use functions::{DriverFunctions, Refused};
pub use nontemporal::write_once;
pub use pieces::{BlockPage, BlockPages, BlockPieces, Joined};
pub use places::{BlockPlaces, PlacedPieces, PlacesError, SlotRun};
pub use routine::Routine;
pub use staged::Staged;
