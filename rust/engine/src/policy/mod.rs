//! Eviction: which leaf is evicted when a tier is full, and whether a new block is worth its place.
//!
//! A [`Policy`] serves one tier. It knows leaves, ages and hit classes, but no bytes of keys, payloads
//! or trees: the forest reports evictable nodes and the events of blocks, and asks for a
//! victim. Ages are counted in ticks, one per request.
//!
//! The contract with the forest, for each tier:
//! - *Evictable leaves* are handed in with [`Policy::insert_leaf`] and taken out with
//!   [`Policy::remove_leaf`]. A node that has a child in this tier, is leased, or has I/O in flight
//!   is not in the set. In particular, the blocks of the request being served are not.
//! - To store a block: [`Policy::on_offer`] gives its hit class. If the tier has room, store it;
//!   else ask for a [`Policy::victim`], then [`Policy::admit`]; evict the victim ([`Policy::remove_leaf`],
//!   [`Policy::on_evict`]) and store ([`Policy::on_insert`]), or refuse ([`Policy::on_refuse`]). The blocks
//!   behind a refused one are offered and refused without asking for a victim.
//! - Under least-recently-used only the deepest block of a request need be touched; the caller that
//!   evicts a leaf passes its `last` to the parent (the later of the two counts). When
//!   [`Policy::touches_every_block`] is true, every block of a hit goes through [`Policy::on_hit`].

mod cohorts;
mod density;
mod doorkeeper;
mod eviction;
mod ghost;
mod leaf;
mod leafhd;
mod lru;
#[cfg(test)]
mod tests;
mod tier;

pub use doorkeeper::Doorkeeper;
pub use eviction::{Policy, PolicyKind};
pub use leaf::{HIT_CLASSES, Leaf};
pub(crate) use tier::{TENANTS, Tenant, Tenants, TierPolicies};
