//! Retention: payloads on disk that no request has used for the configured time are evicted.
//!
//! A node knows the tick of its last use. [`Ages`](super::ages::Ages) knows which ticks are over.

use super::residency::UnusedCursor;

/// The progress of the search for payloads that have been unused for too long.
#[derive(Debug)]
pub(super) struct Retention {
    /// Time to live in seconds; `None`: payloads stay.
    pub(super) ttl_s: Option<u32>,
    /// When the next search may begin, in seconds since 1970.
    pub(super) next_s: u32,
    /// All payloads whose last use was at this tick or before have been looked for.
    pub(super) swept: Option<u64>,
    pub(super) sweep: Option<UnusedCursor>,
}

impl Retention {
    pub(super) fn new(ttl_s: u64) -> Self {
        Self {
            ttl_s: u32::try_from(ttl_s).ok().filter(|&ttl_s| ttl_s > 0),
            next_s: 0,
            swept: None,
            sweep: None,
        }
    }

    /// Whether payloads without a use for long are evicted.
    pub(super) fn is_on(&self) -> bool {
        self.ttl_s.is_some()
    }

    /// Whether payloads are being looked for.
    pub(super) fn has_rest(&self) -> bool {
        self.sweep.is_some()
    }
}
