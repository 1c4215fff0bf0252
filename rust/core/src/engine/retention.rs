//! Retention: payloads on disk that no request has used for the configured time are evicted.
//!
//! A node knows the tick of its last use, not the time. This module knows a second by which each tick was over.

use std::collections::{BTreeMap, VecDeque};

use super::coordinator::Engine;
use super::residency::UnusedCursor;

/// Resolution of the times, as a part of the time to live.
const STEPS: u64 = 64;

/// The times of the ticks, and the progress of the search for payloads that have been unused for too long.
#[derive(Debug)]
pub(super) struct Retention {
    /// Time to live in seconds; 0: payloads stay.
    ttl_s: u64,
    /// Ticks, each with a second by which it had passed. Both numbers rise.
    times: VecDeque<(u64, u64)>,
    /// While the tables are read: the last tick that was over by each second.
    found: BTreeMap<u64, u64>,
    /// All payloads whose last use was at this tick or before have been looked for.
    swept: Option<u64>,
    sweep: Option<UnusedCursor>,
}

impl Retention {
    pub(super) fn new(ttl_s: u64) -> Self {
        Self {
            ttl_s,
            times: VecDeque::new(),
            found: BTreeMap::new(),
            swept: None,
            sweep: None,
        }
    }

    /// Whether payloads without a use for long are evicted.
    pub(super) fn is_on(&self) -> bool {
        self.ttl_s > 0
    }

    /// Whether payloads are being looked for.
    pub(super) fn has_rest(&self) -> bool {
        self.sweep.is_some()
    }

    /// Resolution in seconds.
    fn step_s(&self) -> u64 {
        (self.ttl_s / STEPS).max(1)
    }

    /// Whether a use is older than the time to live.
    fn is_over(&self, used_s: u64, now_s: u64) -> bool {
        used_s.saturating_add(self.ttl_s) <= now_s
    }

    /// Notes the time `now_s`: all uses so far were at `tick` or before. Returns whether the time was kept: uses from
    /// now on then need a later tick.
    fn note(&mut self, tick: u64, now_s: u64) -> bool {
        let last = self.times.back();
        let is_new = last.is_none_or(|&(_, then_s)| now_s >= then_s + self.step_s());
        let is_noted = self.is_on() && is_new;
        if is_noted {
            self.times.push_back((tick, now_s));
        }
        is_noted
    }

    /// Notes a record by which a payload was used last at `tick`, no later than the second `used_s`.
    pub(super) fn note_found(&mut self, tick: u64, used_s: u64, now_s: u64) {
        if !self.is_on() {
            return;
        }
        // The ages of payloads that are too old make no difference.
        let oldest_s = now_s.saturating_sub(self.ttl_s);
        let step_s = self.step_s();
        let by_s = used_s.max(oldest_s + 1).div_ceil(step_s) * step_s;
        let by_s = if used_s <= oldest_s {
            oldest_s
        } else {
            by_s.min(now_s)
        };
        let last = self.found.entry(by_s).or_default();
        *last = tick.max(*last);
    }

    /// All records have been read.
    fn end_found(&mut self) {
        for (used_s, tick) in std::mem::take(&mut self.found) {
            let before = self.times.back().map(|&(tick, _)| tick);
            if before.is_none_or(|before| before < tick) {
                self.times.push_back((tick, used_s));
            }
        }
    }

    /// The last tick whose payloads have reached the time to live.
    fn last_over(&mut self, now_s: u64) -> Option<u64> {
        while let Some(&(_, next_s)) = self.times.get(1)
            && self.is_over(next_s, now_s)
        {
            self.times.pop_front();
        }
        let &(tick, used_s) = self.times.front()?;
        self.is_over(used_s, now_s).then_some(tick)
    }

    /// The search under way, or a new one if some payloads have become too old.
    fn begin(&mut self, now_s: u64) -> Option<UnusedCursor> {
        if self.sweep.is_none() {
            let over = self
                .last_over(now_s)
                .filter(|&tick| self.swept < Some(tick))?;
            self.sweep = Some(UnusedCursor::new(over));
        }
        self.sweep.take()
    }
}

impl Engine {
    /// Evicts from disk some of the payloads that have been unused for too long.
    pub(super) fn evict_unused(&mut self) {
        if !self.retention.is_on() {
            return;
        }
        let now_s = u64::from(self.unix_s());
        if self.retention.note(self.residency.tick(), now_s) {
            self.residency.next_tick();
        }
        let Some(mut cursor) = self.retention.begin(now_s) else {
            return;
        };
        let (steps, counters) = (self.config.removals, &mut self.counters);
        match self.residency.evict_unused(&mut cursor, steps, counters) {
            true => self.retention.sweep = Some(cursor),
            false => self.retention.swept = Some(cursor.last()),
        }
    }

    /// The tables have been read: payloads that were unused for too long are gone before the first lookup.
    pub(super) fn end_retention_found(&mut self) {
        self.retention.end_found();
        self.evict_unused();
        while self.retention.has_rest() {
            self.evict_unused();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tick_is_as_old_as_the_first_second_by_which_it_was_over() {
        let mut retention = Retention::new(64);
        for second in 0..10 {
            assert!(retention.note(second * 10, 100 + second));
        }
        assert!(!retention.note(95, 109), "less than a second later");
        let over = [163, 164, 170, 400].map(|now_s| retention.last_over(now_s));
        assert_eq!(over, [None, Some(0), Some(60), Some(90)]);
    }

    #[test]
    fn records_tell_when_the_ticks_before_them_were_over() {
        let mut retention = Retention::new(640);
        // The record of tick 7 was written again with its neighbour.
        for (tick, used_s) in [(7, 995), (3, 100), (9, 500), (5, 400), (20, 2000)] {
            retention.note_found(tick, used_s, 1000);
        }
        retention.end_found();
        let times = [(3, 360), (5, 400), (9, 500), (20, 1000)];
        assert_eq!(retention.times, times);
        assert_eq!(retention.last_over(1000), Some(3));
    }
}
