//! Write-back: arena to disk, payload first, then record. No request waits for a write, and reads start
//! before writes.

mod budget;
mod orphans;
mod queue;
mod refusals;
mod requeue;
mod start;
mod table;

pub(super) use budget::WriteBudget;
pub(super) use queue::{WRITES_LOOKED_AT, WriteBack};
pub(super) use table::table_write_ended;
