//! How long the operations of a directory take: counts by fixed limits.

/// The limits, in nanoseconds.
pub const LATENCY_LIMITS_NS: [u64; 10] = [
    100_000,
    300_000,
    1_000_000,
    3_000_000,
    10_000_000,
    30_000_000,
    100_000_000,
    300_000_000,
    1_000_000_000,
    3_000_000_000,
];

/// The operations of one kind that have succeeded since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Latency {
    /// Operations up to each of [`LATENCY_LIMITS_NS`] and above the limit before; the last element: operations above
    /// all limits.
    counts: [u64; LATENCY_LIMITS_NS.len() + 1],
    total_ns: u64,
}

impl Latency {
    /// Notes the time of an operation, from its submission to its completion.
    pub(crate) fn note(&mut self, ns: u64) {
        let at = LATENCY_LIMITS_NS.partition_point(|&limit| limit < ns);
        self.counts[at] += 1;
        self.total_ns += ns;
    }

    /// Operations that took no longer than each of [`LATENCY_LIMITS_NS`]; the last element counts all operations.
    pub fn at_most(&self) -> [u64; LATENCY_LIMITS_NS.len() + 1] {
        let mut sum = 0;
        self.counts.map(|count| {
            sum += count;
            sum
        })
    }

    /// Sum of the operations' times, in nanoseconds.
    pub fn total_ns(&self) -> u64 {
        self.total_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_operation_counts_for_its_limit_and_all_above() {
        let mut latency = Latency::default();
        for ns in [0, 100_000, 100_001, 5_000_000_000] {
            latency.note(ns);
        }
        assert_eq!(latency.at_most(), [2, 3, 3, 3, 3, 3, 3, 3, 3, 3, 4]);
        assert_eq!(latency.total_ns(), 5_000_200_001);
    }
}
