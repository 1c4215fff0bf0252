//! Residency: which payload is in which tier, which payloads a lookup finds, and which may be evicted.
//!
//! Every change of a payload's state happens in these modules. `slots` holds the changes, `reach` the
//! consequences for lookups, `eviction` the consequences for the policies. `page_moves` moves pages between
//! size classes, `unused` evicts by age. `leases` keeps payloads in place, `hits` lists the payloads of a hit,
//! `admission` adds blocks, `recovery` and `adopted` take over the blocks of a store, `disk_slots` chooses
//! directories. `sweep` removes the blocks that an operator clears by age, and `erasures` erases bytes on disk.
//! `resizing` follows the sizes that an operator sets.

mod admission;
mod adopted;
mod announce;
#[cfg(feature = "check")]
mod check;
mod disk_slots;
mod erasures;
mod eviction;
mod fit;
mod geometry;
mod hits;
mod host_checksums;
mod leases;
mod page_moves;
mod pinned;
mod placeholders;
mod reach;
mod recovery;
mod removal;
mod resizing;
mod rest;
mod slots;
mod state;
mod sweep;
mod unused;

#[cfg(feature = "check")]
pub(super) use check::LeaseCounts;
pub(super) use disk_slots::DiskRefusal;
pub(super) use geometry::{Leaving, Region};
pub(super) use hits::PromotionPlan;
pub use page_moves::Moves;
pub(super) use recovery::{Adoption, FoundRecord};
pub use resizing::TierSize;
pub(super) use state::Residency;
pub(super) use sweep::{ClearTotals, Sweep};
pub(super) use unused::UnusedCursor;
