//! The report of a run.

use undercroft_contract::checksum::RunningChecksum;

use crate::Stats;

/// Counts, and the steps: as text for somebody who looks for a fault, as a sum for a comparison of two engines.
#[derive(Debug, Default)]
pub(crate) struct Log {
    pub(crate) stats: Stats,
    pub(crate) trace: Vec<String>,
    traced: bool,
    sum: Option<RunningChecksum>,
}

impl Log {
    pub(crate) fn new(traced: bool) -> Self {
        Self {
            traced,
            ..Self::default()
        }
    }

    /// The same, with a sum of the steps.
    pub(crate) fn summed() -> Self {
        Self {
            sum: Some(RunningChecksum::default()),
            ..Self::default()
        }
    }

    pub(crate) fn is_traced(&self) -> bool {
        self.traced
    }

    /// A step at a time.
    pub(crate) fn note(&mut self, now_ns: u64, line: impl FnOnce() -> String) {
        if !self.traced && self.sum.is_none() {
            return;
        }
        let line = format!("{now_ns:>12} {}", line());
        self.add_to_sum(&line);
        if self.traced {
            self.trace.push(line);
        }
    }

    pub(crate) fn add_to_sum(&mut self, line: &str) {
        if let Some(sum) = &mut self.sum {
            sum.update_cached(line.as_bytes());
        }
    }

    /// The sum of all lines, if there is one.
    pub(crate) fn sum(&self) -> Option<u64> {
        self.sum.map(RunningChecksum::finish)
    }
}
