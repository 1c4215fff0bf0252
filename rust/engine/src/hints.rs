//! Hints: prefetches, pins, demotions and releases that clients ask for.
//!
//! Hints never take resources that a running request needs: prefetches have a part of the promotion budget, pins a
//! budget of their own, and blocks that are leased, in flight or shared stay.

use std::collections::VecDeque;

use crate::forest::NodeId;

use super::ids::{RequestId, SessionId};
use super::lookup_cursor::LookupCursor;

/// The remaining work for hints.
#[derive(Debug, Default)]
pub(super) struct Hints {
    /// Lookups of prefetches, which end when their payloads have come.
    pub(super) prefetches: Vec<(SessionId, RequestId)>,
    /// The next node of each chain that is being demoted, and the node's epoch.
    pub(super) demoted: VecDeque<(NodeId, u32)>,
    /// Chains whose next node is being written or saved.
    pub(super) unsettled: Vec<(NodeId, u32)>,
    /// Number of prefetches since the start. The names of their lookups contain it.
    pub(super) count: u64,
}

/// The progress of a hint that takes several entries.
#[derive(Debug, Default)]
pub struct HintCursor {
    /// Name of the lookup of a prefetch.
    pub(super) name: String,
    pub(super) lookup: LookupCursor,
}
