//! Bookkeeping of one disk directory: slots, records and health. No IO happens here: the engine
//! turns this module's decisions into requests.

pub mod binding;
mod block_set;
mod device;
mod files;
mod fit_table;
pub mod format;
mod health;
mod holder;
mod holes;
pub mod inspect;
mod latency;
mod names;
pub mod open;
mod ordered;
pub mod portable;
mod records;
mod space;
mod table;
mod way;

pub(crate) use device::Disk;
pub use device::{DeviceImage, INDEX_BYTES_PER_BLOCK};
pub use health::Health;
pub use latency::{LATENCY_LIMITS_NS, Latency};
pub(crate) use space::{capacity_for, capacity_for_payload, data_of};
pub use table::Table;
