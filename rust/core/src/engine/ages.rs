//! The times of the ticks. Blocks know the tick of their last use, and operators think in hours.

use std::collections::VecDeque;

use rustc_hash::FxHashMap;

/// Two neighbouring samples are merged if the error is less than this part of their age: one in so many.
const PRECISION: u32 = 256;
/// Old samples that each new sample examines and may remove.
const THINNED: usize = 4;
/// Samples at most; see [`PRECISION`] for the usual number.
const SAMPLES_MAX: usize = 1 << 14;
/// When a store is opened, the times of records are rounded to this many seconds.
const MINUTE: u32 = 60;

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
#[derive(Debug, Default)]
pub(in crate::engine) struct Ages {
    samples: VecDeque<Sample>,
    /// The time of the last call of [`Ages::note`].
    seen_s: u32,
    /// The next sample that may be superfluous.
    cursor: usize,
    /// The last tick of each minute, by the records of a store.
    learned: FxHashMap<u32, u64>,
}

impl Ages {
    /// Notes the time `now_s`: no tick after `tick` has come.
    pub(in crate::engine) fn note(&mut self, tick: u64, now_s: u32) {
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
    pub(in crate::engine) fn learn(&mut self, tick: u64, at_s: u32) {
        let last = self.learned.entry(at_s / MINUTE).or_default();
        *last = tick.max(*last);
    }

    /// All records have been read, at `now_s`.
    pub(in crate::engine) fn finish_learning(&mut self, now_s: u32) {
        let mut minutes: Vec<(u32, u64)> = self.learned.drain().collect();
        minutes.sort_unstable();
        let mut tick = 0;
        for (minute, last) in minutes {
            // The ticks keep their order even if the clock was set back.
            self.push(tick, (minute * MINUTE).saturating_sub(1).min(now_s));
            tick = last.max(tick);
            let end_s = (minute * MINUTE).saturating_add(MINUTE - 1);
            self.push(tick, end_s.min(now_s));
        }
        self.learned = FxHashMap::default();
    }

    fn push(&mut self, tick: u64, at_s: u32) {
        match self.samples.back_mut() {
            Some(last) if at_s <= last.at_s => last.tick = last.tick.max(tick),
            _ => self.samples.push_back(Sample { tick, at_s }),
        }
    }

    /// The last tick that may have come by `at_s`; `None` if there was none. A tick that came a little later may be
    /// returned: up to a second (a minute for ticks of an earlier process), or a part in [`PRECISION`] of the age.
    pub(in crate::engine) fn last_by(&self, at_s: u32) -> Option<u64> {
        let first = self.samples.front()?;
        if at_s < first.at_s {
            return None;
        }
        let at = self.samples.partition_point(|of| of.at_s < at_s);
        let found = self.samples.get(at).or(self.samples.back());
        found.map(|of| of.tick)
    }

    /// When a tick came, or soon after; `now_s` for a tick after the last sample.
    pub(in crate::engine) fn time_of(&self, tick: u64, now_s: u32) -> u32 {
        let at = self.samples.partition_point(|of| of.tick < tick);
        self.samples.get(at).map_or(now_s, |of| of.at_s)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tick_is_found_by_its_time_and_a_time_by_its_tick() {
        let mut ages = Ages::default();
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
        let mut ages = Ages::default();
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
        let mut ages = Ages::default();
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
    fn a_store_tells_the_times_of_its_ticks() {
        let mut ages = Ages::default();
        for (tick, at_s) in [
            (70, 600_010),
            (50, 600_000),
            (900, 1_200_000),
            (40, 660_000),
        ] {
            ages.learn(tick, at_s);
        }
        ages.finish_learning(1_200_030);
        ages.note(900, 1_200_040);
        assert_eq!(ages.last_by(599_000), None);
        assert_eq!(ages.last_by(600_059), Some(70));
        // Between two minutes with requests, nothing was used.
        assert_eq!(ages.last_by(900_000), Some(70));
        assert_eq!(ages.last_by(1_200_030), Some(900));
        let found = ages.time_of(70, 1_300_000);
        assert!((600_010..600_070).contains(&found), "{found}");
    }
}
