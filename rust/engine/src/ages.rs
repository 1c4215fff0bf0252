//! The times of the ticks. Blocks know the tick of their last use; operators, and `disk_ttl`, count seconds.
//!
//! Ticks rise over all lives of a store. The wall clock of a life may be wrong, though: a host without a battery starts
//! in 1970. A record whose time is before undercroft's, or far before the time of an earlier tick, does not count: its tick
//! is as young as the next tick with a credible time, or as the start of the engine.

use std::collections::VecDeque;

use rustc_hash::FxHashMap;

/// Two neighbouring samples are merged if the error is less than this part of their age: one in so many.
const PRECISION: u32 = 256;
/// Old samples that each new sample examines and may remove.
const THINNED: usize = 4;
/// Samples at most; see [`PRECISION`] for the usual number.
const SAMPLES_MAX: usize = 1 << 14;
/// When a store is opened, the times of records are rounded to this many seconds, or less for a short `disk_ttl`.
const MINUTE: u32 = 60;
/// A clock that was set back by more than this was wrong.
const SET_BACK_MAX: u32 = 86_400;
/// The beginning of 2026. There was no undercroft before: a clock that shows an earlier time is wrong.
const CLOCK_MIN: u32 = 1_767_225_600;

/// All ticks up to `tick` had come by `at_s`, and no later tick had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Sample {
    tick: u64,
    /// In seconds since 1970.
    at_s: u32,
}

/// Samples of the tick and the time.
///
/// Invariant: ticks and times ascend, times strictly.
#[derive(Debug)]
pub(crate) struct Ages {
    samples: VecDeque<Sample>,
    /// The time of the last call of [`Ages::note`].
    seen_s: u32,
    /// The next sample that may be superfluous.
    cursor: usize,
    /// The last tick of each period of [`Ages::rounding_s`], by the records of a store.
    learned: FxHashMap<u32, u64>,
    rounding_s: u32,
    /// The last tick of all records: no use from now on has this tick.
    learned_to: u64,
}

impl Ages {
    /// The times of no ticks. `disk_ttl_s` is the time to live of payloads; 0 if there is none.
    pub(crate) fn new(disk_ttl_s: u64) -> Self {
        let rounding_s = match u32::try_from(disk_ttl_s) {
            Ok(0) | Err(_) => MINUTE,
            Ok(ttl_s) => (ttl_s / MINUTE).clamp(1, MINUTE),
        };
        Self {
            samples: VecDeque::new(),
            seen_s: 0,
            cursor: 0,
            learned: FxHashMap::default(),
            rounding_s,
            learned_to: 0,
        }
    }

    /// Notes the time `now_s`: no tick after `tick` has come.
    pub(crate) fn note(&mut self, tick: u64, now_s: u32) {
        // Nearly all calls: a sample of this second, or of a later one, is there.
        if now_s == self.seen_s && !self.samples.is_empty() {
            return;
        }
        let seen_s = std::mem::replace(&mut self.seen_s, now_s);
        let back = self.samples.back().copied();
        if back.is_some_and(|of| now_s <= of.at_s) {
            return;
        }
        if let Some(back) = back.filter(|of| of.tick < tick && seen_s + 1 < now_s) {
            // No sample was asked for since.
            let at_s = (seen_s + 1).max(back.at_s + 1);
            self.samples.push_back(Sample { tick, at_s });
        }
        let last = self.samples.len();
        // A period without requests keeps a sample of its beginning and one of its end.
        if last >= 2 && self.samples[last - 1].tick == tick && self.samples[last - 2].tick == tick {
            self.samples[last - 1].at_s = now_s;
            return;
        }
        self.samples.push_back(Sample { tick, at_s: now_s });
        for _ in 0..THINNED {
            self.thin(now_s);
        }
    }

    fn thin(&mut self, now_s: u32) {
        if self.cursor + 2 >= self.samples.len() {
            self.cursor = 0;
            return;
        }
        let (before, after) = (self.samples[self.cursor], self.samples[self.cursor + 2]);
        let is_close = (after.at_s - before.at_s) <= now_s.saturating_sub(after.at_s) / PRECISION;
        if is_close || self.samples.len() > SAMPLES_MAX {
            self.samples.remove(self.cursor + 1);
        } else {
            self.cursor += 1;
        }
    }

    /// Notes that `tick` came at `at_s`, by a record.
    pub(crate) fn learn(&mut self, tick: u64, at_s: u32) {
        let last = self.learned.entry(at_s / self.rounding_s).or_default();
        *last = tick.max(*last);
        self.learned_to = tick.max(self.learned_to);
    }

    /// All records have been read, at `now_s`.
    pub(crate) fn finish_learning(&mut self, now_s: u32) {
        let learned = std::mem::take(&mut self.learned);
        let mut ticks: Vec<(u64, u32)> = learned.into_iter().map(|(at, tick)| (tick, at)).collect();
        ticks.sort_unstable();
        let is_right = now_s >= CLOCK_MIN;
        // A wrong clock corrects no time.
        let most_s = if is_right { now_s } else { u32::MAX };
        let (mut before, mut latest_s) = (0, 0);
        for (tick, period) in ticks {
            let start_s = period * self.rounding_s;
            let end_s = start_s.saturating_add(self.rounding_s - 1).min(most_s);
            if end_s < CLOCK_MIN || end_s.saturating_add(SET_BACK_MAX) < latest_s {
                continue;
            }
            // The ticks keep their order even if the clock was set back a little.
            self.push(before, start_s.saturating_sub(1).min(most_s));
            self.push(tick, end_s);
            (before, latest_s) = (tick, latest_s.max(end_s));
        }
        if is_right {
            self.push(self.learned_to, now_s);
        }
    }

    fn push(&mut self, tick: u64, at_s: u32) {
        match self.samples.back_mut() {
            Some(last) if at_s <= last.at_s => last.tick = last.tick.max(tick),
            _ => self.samples.push_back(Sample { tick, at_s }),
        }
    }

    /// The last tick that may have come by `at_s`; `None` if there was none. A tick that came a little later may be
    /// returned: up to a second (a minute for ticks of an earlier process), or a part in [`PRECISION`] of the age.
    pub(crate) fn last_by(&self, at_s: u32) -> Option<u64> {
        let first = self.samples.front()?;
        if at_s < first.at_s {
            return None;
        }
        let at = self.samples.partition_point(|of| of.at_s < at_s);
        let found = self.samples.get(at).or(self.samples.back());
        found.map(|of| of.tick)
    }

    /// The last tick that was over by `at_s`: a later use has a later tick.
    pub(crate) fn over_by(&self, at_s: u32) -> Option<u64> {
        let later = self.samples.partition_point(|of| of.at_s <= at_s);
        let Sample { tick, .. } = self.samples.get(later.checked_sub(1)?)?;
        // The tick of a sample of this life may have gone on.
        Some(*tick.min(&self.learned_to).max(&tick.saturating_sub(1)))
    }

    /// When a tick came, or soon after; `now_s` for a tick after the last sample.
    pub(crate) fn time_of(&self, tick: u64, now_s: u32) -> u32 {
        let at = self.samples.partition_point(|of| of.tick < tick);
        self.samples.get(at).map_or(now_s, |of| of.at_s)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tick_is_found_by_its_time_and_a_time_by_its_tick() {
        let mut ages = Ages::new(0);
        assert_eq!((ages.last_by(50), ages.time_of(3, 60)), (None, 60));
        for second in 0..100 {
            ages.note(u64::from(second) * 10, 1000 + second);
        }
        assert_eq!(ages.last_by(999), None);
        assert_eq!(ages.last_by(1000), Some(0));
        assert_eq!(ages.last_by(1050), Some(500));
        assert_eq!(ages.last_by(5000), Some(990));
        assert_eq!(ages.time_of(500, 2000), 1050);
        assert_eq!(ages.time_of(501, 2000), 1051);
        assert_eq!(ages.time_of(991, 2000), 2000, "it came just now");
    }

    #[test]
    fn a_long_pause_makes_nothing_older_or_younger() {
        let mut ages = Ages::new(0);
        ages.note(10, 1000);
        for second in 1001..5000 {
            ages.note(10, second);
        }
        ages.note(10, 9000);
        ages.note(11, 9001);
        assert_eq!(ages.last_by(8000), Some(10));
        assert_eq!(ages.time_of(11, 9002), 9001);
        // An idle engine gets no times.
        ages.note(15, 20_000);
        assert_eq!(ages.time_of(15, 20_001), 9002);
        assert!(ages.samples.len() < 10, "{ages:?}");
    }

    #[test]
    fn old_samples_are_thinned_and_stay_precise() {
        let mut ages = Ages::new(0);
        let now = 40_000_000;
        // Ten requests a second for more than a year, noted every half a minute.
        for at_s in (0..=now).step_by(30) {
            ages.note(u64::from(at_s) * 10, at_s);
        }
        assert!(ages.samples.len() < 6000, "{}", ages.samples.len());
        for age in [60, 3600, 86_400, 2_600_000, 30_000_000] {
            let tick = ages.last_by(now - age).unwrap();
            let late = tick / 10 - u64::from(now - age);
            assert!(late <= u64::from(30 + age / 100), "age {age}: {late}");
        }
    }

    #[test]
    fn ages_from_a_store_map_times_to_ticks_and_back() {
        // The beginning of a minute.
        const THEN: u32 = CLOCK_MIN + 600_000;
        let mut ages = Ages::new(0);
        for (tick, after_s) in [(70, 10), (50, 0), (900, 600_000)] {
            ages.learn(tick, THEN + after_s);
        }
        ages.finish_learning(THEN + 600_030);
        ages.note(900, THEN + 600_040);
        assert_eq!(ages.last_by(THEN - 1000), None);
        assert_eq!(ages.last_by(THEN + 59), Some(70));
        // Between two minutes with requests, nothing was used.
        assert_eq!(ages.last_by(THEN + 300_000), Some(70));
        assert_eq!(ages.last_by(THEN + 600_030), Some(900));
        let found = ages.time_of(70, THEN + 700_000) - THEN;
        assert!((10..70).contains(&found), "{found}");
        let by = |after_s| ages.over_by(THEN + after_s);
        assert_eq!([59, 300_000, 600_029].map(by), [Some(70); 3]);
        assert_eq!(ages.over_by(THEN - 1000), None);
    }

    #[test]
    fn a_short_time_to_live_has_exact_times() {
        for (disk_ttl_s, rounding_s) in [(0, 60), (1, 1), (100, 1), (600, 10), (604_800, 60)] {
            let mut ages = Ages::new(disk_ttl_s);
            let at_s = CLOCK_MIN + 6000;
            ages.learn(5, at_s);
            ages.finish_learning(at_s + 1000);
            let over_s = (0..100).find(|after| ages.over_by(at_s + after) == Some(5));
            assert_eq!(over_s, Some(rounding_s - 1), "{disk_ttl_s}");
        }
    }

    #[test]
    fn a_tick_is_over_when_a_later_one_has_come() {
        let mut ages = Ages::new(0);
        ages.note(10, 1000);
        ages.note(10, 1100);
        ages.note(11, 1101);
        let over = [999, 1000, 1100, 1101, 2000].map(|at_s| ages.over_by(at_s));
        assert_eq!(over, [None, Some(9), Some(9), Some(10), Some(10)]);
    }

    #[test]
    fn a_life_with_a_wrong_clock_makes_no_tick_older() {
        const NOW: u32 = 1_790_000_000;
        const DAY: u32 = 86_400;
        let learned = |records: &[(u64, u32)]| {
            let mut ages = Ages::new(0);
            for &(tick, at_s) in records {
                ages.learn(tick, at_s);
            }
            ages.finish_learning(NOW);
            ages
        };
        // Ticks 600 to 700 came in 1970.
        let ages = learned(&[
            (500, NOW - 9 * DAY),
            (600, 1000),
            (700, 5000),
            (800, NOW - DAY),
        ]);
        let over = [8, 2, 0].map(|days| ages.over_by(NOW - days * DAY));
        assert_eq!(over, [Some(500), Some(500), Some(800)]);
        assert_eq!(ages.last_by(NOW - 2 * DAY), Some(500));
        // No life had a right clock.
        let ages = learned(&[(600, 1000), (700, 5000)]);
        assert_eq!(
            (ages.over_by(NOW - 1), ages.over_by(NOW)),
            (None, Some(700))
        );
        // A clock that was years ahead, and one that was set back by an hour.
        let ages = learned(&[(500, NOW + 999 * DAY), (600, NOW - 9 * DAY)]);
        assert_eq!(ages.over_by(NOW - DAY), None);
        let ages = learned(&[(500, NOW - DAY), (600, NOW - DAY - 3600)]);
        assert_eq!(ages.over_by(NOW - DAY + 60), Some(600));
    }
}
