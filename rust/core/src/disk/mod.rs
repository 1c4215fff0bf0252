//! Bookkeeping of one disk directory: slots, records and health. No IO happens here: the engine
//! turns what this module decides into requests.

mod device;
pub mod format;
mod health;
pub mod inspect;
pub mod open;
mod records;

pub use device::DeviceImage;
pub(crate) use device::Disk;
pub use health::Health;
