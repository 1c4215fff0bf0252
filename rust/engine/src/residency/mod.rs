//! Residency: which payload is in which tier, which payloads a lookup finds, and which may be evicted.
//!
//! Every change of a payload's state happens in these modules:
//!
//! - `state`: the fields, the geometry of each namespace's payloads, and the changes that are noted for others;
//! - `slots`: a slot in the arena or on a directory is reserved, filled, written, freed;
//! - `reach`: the consequences for lookups;
//! - `hits`: the payloads that a hit or a pin needs, and the leases that keep them;
//! - `placement`: whether new namespaces and blocks are taken in, and which payloads are evicted for room;
//! - `tenants`: the shares of the tiers that namespaces keep;
//! - `page_moves` moves pages between size classes, `resizing` follows the sizes that an operator sets;
//! - `removal`: many nodes are removed in steps, by a pass over their ages, too, or evicted by age, and bytes on disk are erased;
//! - `recovery`: the blocks of a store are taken over.

#[cfg(feature = "check")]
mod check;
mod hits;
mod page_moves;
mod placement;
mod progress;
mod reach;
mod recovery;
mod removal;
mod resizing;
mod slots;
mod state;
mod tenants;

#[cfg(feature = "check")]
pub(super) use check::LeaseCounts;
pub(super) use hits::PromotionPlan;
pub(super) use progress::ClearTotals;
pub use progress::Moves;
pub(super) use recovery::{Adoption, FoundRecord};
pub(super) use removal::{Sweep, UnusedCursor};
pub use resizing::TierSize;
pub(super) use slots::DiskRefusal;
pub(super) use state::{Leaving, Region, Residency};
pub use tenants::NamespaceUsage;
pub(super) use tenants::TenantShare;
