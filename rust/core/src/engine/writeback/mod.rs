//! Write-back: arena to disk, payload first, then record. Nothing waits for it, and it never goes
//! before a read.

mod budget;
mod orphans;
mod queue;
mod refusals;
mod requeue;
mod start;
mod table;

pub(super) use budget::WriteBudget;
pub(super) use queue::WriteBack;
pub(super) use table::table_write_ended;
