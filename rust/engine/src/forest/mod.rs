//! The prefix forest: one node per block hash; a child's prefix extends the parent's prefix.
//!
//! Invariant: **a node is in the index only while its parent is.** So presence along a chain of
//! hashes is monotone, and the deepest present node is found by galloping and bisection.
//!
//! This module keeps the tree and its counters. `residency` decides which payload is in which
//! tier, and which node may be evicted.

mod counts;
mod hash_index;
mod index;
mod node;
mod payloads;
mod segment;
mod slab;
mod view;

pub use index::Forest;
pub(crate) use index::FoundNode;
pub use node::{
    DeviceIndex, DiskState, Evictability, HostState, NONE, Node, NodeId, NsId, Payload, Reach,
    Touch, Uses,
};
pub use payloads::Payloads;
pub(crate) use segment::Tag;
pub use view::{NodeMut, NodeRef};
