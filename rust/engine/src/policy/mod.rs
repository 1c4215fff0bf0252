//! Eviction: which leaf is evicted when a tier is full, and whether a new block is worth its place.
//!
//! A [`Policy`] serves one tier. It knows leaves, ages and hit classes, but no bytes of keys, payloads
//! or trees: the forest reports evictable nodes and the events of blocks, and asks for a
//! victim. Ages are counted in ticks, one per request or a few.
//!
//! The contract with the forest, for each tier:
//! - *Evictable leaves* are handed in with [`Policy::insert_leaf`] and taken out with
//!   [`Policy::remove_leaf`]. A node that has a child in this tier, is leased, or has I/O in flight
//!   is not in the set. In particular, the blocks of the request being served are not.
//! - To store a block: [`Policy::on_offer`] gives its hit class. If the tier has room, store it;
//!   else ask for a [`Policy::victim`], then [`Policy::admit`]; evict the victim ([`Policy::remove_leaf`],
//!   [`Policy::on_evict`]) and store ([`Policy::on_insert`]), or refuse ([`Policy::on_refuse`]). The blocks
//!   behind a refused one are offered and refused without asking for a victim.
//! - A hit touches its deepest block, at once. The caller that evicts a leaf passes its `last` and its class to the parent,
//!   which keeps the larger of both. A policy that learns wants to know of hits of the blocks above, too: those at the
//!   [`sampled_depths`] go through [`Policy::on_hit`] when the request's first save begins, since a save costs more than
//!   a lookup may.

mod cohorts;
mod density;
mod doorkeeper;
mod eviction;
mod ghost;
mod leaf;
mod leafhd;
mod leaves;
mod sample;
#[cfg(test)]
mod tests;
mod tier;

pub use doorkeeper::Doorkeeper;
pub use eviction::{Policy, PolicyKind};
pub use leaf::{HIT_CLASSES, Leaf};
pub use sample::sampled_depths;
pub(crate) use tier::{TENANTS, Tenant, Tenants, TierPolicies};
