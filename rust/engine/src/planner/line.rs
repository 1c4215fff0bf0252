//! A line through measured times: a latency, and a time for each byte.

/// Share of the old samples that stays when a new one comes: about the last 64 count.
const KEEP: f64 = 1.0 - 1.0 / 64.0;
/// Weight, in samples, that old measurements keep at least.
const LEFT: f64 = 0.5;
/// Weight that pulls the latency to zero, so that samples of one size give a rate.
const PULL: f64 = 0.02;

/// How samples count.
#[derive(Clone, Copy, Debug)]
pub(super) struct Trust {
    /// Samples after which the line counts as known.
    known: u32,
    /// Time after which earlier samples count half.
    half_life_ns: f64,
    /// A sample counts as at most this multiple of its prediction: one read that hung says little about later reads.
    clip: f64,
    /// Part of the old samples that stays when a sample is several times its prediction, or a fraction of it.
    surprised: f64,
}

/// A sample is a surprise if it and its prediction differ by more than this factor.
const SURPRISE: f64 = 3.0;

/// Reads of a device: many at once, each soon followed by others. A device that has become slow shows it in many
/// samples.
pub(super) const READS: Trust = Trust {
    known: 8,
    half_life_ns: 1e8,
    clip: 8.0,
    surprised: 0.5,
};

/// Copies to a device: few, and always about equally fast, except the copies that another prompt's step delays.
pub(super) const COPIES: Trust = Trust {
    known: 8,
    half_life_ns: 1e10,
    clip: 3.0,
    surprised: 1.0,
};

/// Gets from the remote store: large, and one or two samples a prompt. Their latency and rate are those of a network.
pub(super) const GETS: Trust = Trust {
    known: 2,
    half_life_ns: 5e9,
    clip: 8.0,
    surprised: 0.5,
};

/// `latency + bytes * ns_per_byte`, fitted to samples: the fit weighs each error as a share of the sample's time, and
/// later samples count more.
#[derive(Clone, Copy, Debug)]
pub(super) struct Line {
    trust: Trust,
    /// Sum of the samples' weights, each the inverse square of its bytes; least squares need it and the next fields.
    weight: f64,
    bytes: f64,
    ns: f64,
    bytes_ns: f64,
    /// How many samples count: the sum of squares for the fit.
    count: f64,
    samples: u32,
    /// When the last sample came.
    last_ns: u64,
    latency_ns: f64,
    ns_per_byte: f64,
}

impl Line {
    /// A line without samples.
    pub(super) const fn new(trust: Trust) -> Self {
        Self {
            trust,
            weight: 0.0,
            bytes: 0.0,
            ns: 0.0,
            bytes_ns: 0.0,
            count: 0.0,
            samples: 0,
            last_ns: 0,
            latency_ns: 0.0,
            ns_per_byte: 0.0,
        }
    }

    /// Takes a sample: `bytes` took `took_ns`, up to `now_ns`.
    pub(super) fn add(&mut self, bytes: u64, took_ns: u64, now_ns: u64) {
        let x = bytes.max(1) as f64;
        let mut y = took_ns as f64;
        let mut stays = KEEP;
        if self.is_known() {
            let expected = self.of(bytes).max(1.0);
            if y > expected * SURPRISE || y * SURPRISE < expected {
                stays = self.trust.surprised;
            }
            y = y.min(expected * self.trust.clip);
        }
        let age_ns = now_ns.saturating_sub(self.last_ns) as f64;
        let faded = self.count * stays * 0.5f64.powf(age_ns / self.trust.half_life_ns);
        let kept = faded.max(self.count.min(LEFT)) / self.count.max(f64::MIN_POSITIVE);
        let keep = |sum: &mut f64, new: f64| *sum = *sum * kept + new;
        keep(&mut self.weight, 1.0 / (x * x));
        keep(&mut self.bytes, 1.0 / x);
        keep(&mut self.ns, y / (x * x));
        keep(&mut self.bytes_ns, y / x);
        keep(&mut self.count, 1.0);
        self.samples = self.samples.saturating_add(1);
        self.last_ns = now_ns;
        self.fit();
    }

    /// Least squares, with neither a negative latency nor a negative rate.
    fn fit(&mut self) {
        let pulled = self.weight * (1.0 + PULL);
        let determinant = pulled * self.count - self.bytes * self.bytes;
        let through_zero = self.bytes_ns / self.count;
        let slope = (pulled * self.bytes_ns - self.bytes * self.ns) / determinant;
        let latency = (self.ns - slope * self.bytes) / pulled;
        let makes_sense = slope.is_finite() && slope >= 0.0 && latency >= 0.0;
        (self.latency_ns, self.ns_per_byte) = if makes_sense {
            (latency, slope)
        } else if slope < 0.0 {
            // The larger reads took less time: all sizes are assumed to take the same time.
            (self.ns / self.weight, 0.0)
        } else {
            (0.0, through_zero)
        };
    }

    /// Whether enough was measured.
    pub(super) fn is_known(&self) -> bool {
        self.samples >= self.trust.known
    }

    /// The time that this many bytes take, in nanoseconds.
    pub(super) fn of(&self, bytes: u64) -> f64 {
        self.latency_ns + bytes as f64 * self.ns_per_byte
    }

    pub(super) fn latency_ns(&self) -> f64 {
        self.latency_ns
    }

    /// Bytes a second without the latency; 0 if nothing is known.
    pub(super) fn bytes_per_s(&self) -> f64 {
        if self.ns_per_byte > 0.0 {
            1e9 / self.ns_per_byte
        } else {
            0.0
        }
    }

    /// When the last sample came, in nanoseconds.
    pub(super) fn last_ns(&self) -> u64 {
        self.last_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn line(of: impl Fn(u64) -> u64) -> Line {
        let mut line = Line::new(READS);
        for i in 0..64 {
            let bytes = MIB * (1 + i % 16);
            line.add(bytes, of(bytes), i * 1_000_000);
        }
        line
    }

    #[test]
    fn latency_and_rate_are_found_from_samples_of_several_sizes() {
        let line = line(|bytes| 500_000 + bytes / 2);
        assert!((line.bytes_per_s() / 2e9 - 1.0).abs() < 0.05, "{line:?}");
        assert!((line.of(8 * MIB) / (500_000.0 + 4.0 * MIB as f64) - 1.0).abs() < 0.02);
    }

    #[test]
    fn samples_of_one_size_give_a_rate() {
        let mut line = Line::new(READS);
        (0..32).for_each(|i| line.add(MIB, MIB, i));
        assert!(
            (line.of(10 * MIB) / (10.0 * MIB as f64) - 1.0).abs() < 0.05,
            "{line:?}"
        );
    }

    #[test]
    fn a_read_that_hung_says_little_of_those_to_come() {
        let mut line = line(|bytes| bytes / 2);
        let before = line.of(8 * MIB);
        line.add(8 * MIB, 5_000_000_000, 64_000_000);
        assert!(line.of(8 * MIB) < 1.5 * before, "{line:?}");
    }

    #[test]
    fn one_copy_that_was_held_up_changes_the_next_prediction_little() {
        let mut line = Line::new(COPIES);
        (0..8).for_each(|i| line.add(MIB * (1 + i % 4), MIB * (1 + i % 4), i * 1_000_000_000));
        let before = line.of(4 * MIB);
        line.add(4 * MIB, 400 * MIB, 9_000_000_000);
        assert!(line.of(4 * MIB) < 1.6 * before, "{line:?}");
    }

    #[test]
    fn a_device_that_has_become_slow_or_fast_is_known_by_few_samples_after_a_pause() {
        for (from, to) in [(1, 100), (100, 1)] {
            let mut line = line(|bytes| bytes * from);
            for i in 0..32 {
                line.add(4 * MIB, 4 * MIB * to, 60_000_000_000 + i * 1_000_000);
            }
            let error = line.of(4 * MIB) / (4 * MIB * to) as f64;
            assert!(
                (0.3..3.0).contains(&error),
                "{from} to {to}: {error} of {line:?}"
            );
        }
    }
}
