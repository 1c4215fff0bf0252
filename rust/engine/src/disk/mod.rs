//! Bookkeeping of one disk directory: slots, records and health. No IO happens here: the engine
//! turns this module's decisions into requests.

mod block_set;
mod device;
mod health;
mod latency;
mod ordered;
mod records;

pub(crate) use device::Disk;
pub use device::{DeviceReport, INDEX_BYTES_PER_BLOCK};
pub use health::Health;
pub use latency::{LATENCY_LIMITS_NS, Latency};
