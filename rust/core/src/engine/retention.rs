//! Retention: payloads on disk that no request has used for the configured time are evicted.
//!
//! A node knows the tick of its last use. [`Ages`](super::ages::Ages) knows which ticks are over.

use super::coordinator::Engine;
use super::residency::UnusedCursor;

/// Resolution of the times, as a part of the time to live.
const STEPS: u32 = 64;

/// The progress of the search for payloads that have been unused for too long.
#[derive(Debug)]
pub(super) struct Retention {
    /// Time to live in seconds; `None`: payloads stay.
    ttl_s: Option<u32>,
    /// When the next search may begin, in seconds since 1970.
    next_s: u32,
    /// All payloads whose last use was at this tick or before have been looked for.
    swept: Option<u64>,
    sweep: Option<UnusedCursor>,
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

impl Engine {
    /// Evicts from disk some of the payloads that have been unused for too long. Looks at `steps` nodes.
    pub(super) fn evict_unused(&mut self, steps: usize) {
        let (retention, now_s) = (&self.retention, self.unix_s());
        let Some(ttl_s) = retention.ttl_s else {
            return;
        };
        if now_s >= retention.next_s && !retention.has_rest() {
            self.begin_search(now_s, ttl_s);
        }
        let Some(mut cursor) = self.retention.sweep.take() else {
            return;
        };
        let counters = &mut self.counters;
        match self.residency.evict_unused(&mut cursor, steps, counters) {
            true => self.retention.sweep = Some(cursor),
            false => self.retention.swept = Some(cursor.last()),
        }
    }

    /// Begins to look for payloads, if some ticks have become too old.
    fn begin_search(&mut self, now_s: u32, ttl_s: u32) {
        // Uses from now on have a later tick.
        self.residency.next_tick();
        let retention = &mut self.retention;
        retention.next_s = now_s.saturating_add((ttl_s / STEPS).max(1));
        let by_s = now_s.checked_sub(ttl_s);
        let over = by_s.and_then(|by_s| self.ages.over_by(by_s));
        let over = over.filter(|&tick| retention.swept < Some(tick));
        retention.sweep = over.map(UnusedCursor::new);
    }

    /// The tables have been read: payloads that were unused for too long are gone before the first lookup.
    pub(super) fn end_retention_found(&mut self) {
        let steps = self.config.removals;
        self.evict_unused(steps);
        while self.retention.has_rest() {
            self.evict_unused(steps);
            self.tell_listeners();
        }
    }
}
