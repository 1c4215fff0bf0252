//! The health of a directory, by the results of its operations.

use undercroft_contract::io::IoFault;

/// Failed writes in a row after which a directory takes no writes for a while.
const WRITE_FAILURES_MAX: u32 = 3;
/// Pause before writes are tried again, in nanoseconds.
const WRITE_PAUSE_NS: u64 = 30_000_000_000;
/// Pause before a directory that was given up is tried again, in nanoseconds. Doubled each time, up to
/// [`FAILED_DOUBLINGS_MAX`] times (about an hour).
const FAILED_PAUSE_NS: u64 = 60_000_000_000;
const FAILED_DOUBLINGS_MAX: u32 = 6;

/// Whether a directory is usable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Health {
    /// The directory reads and writes.
    Good,
    /// The directory only reads until the given time in nanoseconds; then writes are tried again.
    NoWrites {
        /// When to try again.
        until_ns: u64,
    },
    /// The directory neither reads nor writes: operations in flight do not end. The directory is used
    /// again when one of them ends.
    Stalled,
    /// The directory neither reads nor writes, and is empty: too many reads failed. The directory is used again from
    /// the given time in nanoseconds, if a write succeeds then.
    Failed {
        /// When to try again.
        until_ns: u64,
    },
}

/// Counts a directory's failures, and knows whether it answers.
///
/// Invariant: a fault is known exactly while writes are paused or the directory is given up; `health` is
/// never [`Health::Stalled`].
#[derive(Debug)]
pub(crate) struct HealthMonitor {
    /// The health by the results of operations.
    health: Health,
    fault: Option<IoFault>,
    write_failures: u32,
    read_failures: u32,
    /// How often the directory was given up since the last read that succeeded.
    given_up: u32,
    stalled_reads: bool,
    stalled_writes: bool,
}

impl HealthMonitor {
    pub(super) fn new() -> Self {
        Self {
            health: Health::Good,
            fault: None,
            write_failures: 0,
            read_failures: 0,
            given_up: 0,
            stalled_reads: false,
            stalled_writes: false,
        }
    }

    /// The health of a directory that could not be opened: no operation is tried until the directory is opened.
    pub(super) fn absent() -> Self {
        Self {
            health: Health::Failed { until_ns: u64::MAX },
            fault: Some(IoFault::NO_DEVICE),
            ..Self::new()
        }
    }

    /// The health, and the fault that caused it.
    pub(crate) fn report(&self) -> (Health, Option<IoFault>) {
        if self.is_alive() && !self.answers() {
            return (Health::Stalled, None);
        }
        (self.health, self.fault)
    }

    /// Notes whether operations in flight hang. Returns whether that changed the state.
    pub(crate) fn set_stalled(&mut self, reads: bool, writes: bool) -> bool {
        let before = (self.stalled_reads, self.stalled_writes);
        (self.stalled_reads, self.stalled_writes) = (reads, writes);
        before != (reads, writes)
    }

    /// An operation has ended; `reads` and `writes` say which kinds still hang. The other kind is no longer stalled.
    /// Returns whether that changed the state.
    pub(crate) fn answered(&mut self, reads: bool, writes: bool) -> bool {
        self.set_stalled(self.stalled_reads && reads, self.stalled_writes && writes)
    }

    /// Whether reads end. A device whose writes stall may still read.
    pub(crate) fn answers_reads(&self) -> bool {
        !self.stalled_reads
    }

    /// Whether reads and writes end.
    pub(crate) fn answers(&self) -> bool {
        !self.stalled_reads && !self.stalled_writes
    }

    /// Whether a write may be tried at `now_ns`.
    pub(crate) fn takes_writes(&self, now_ns: u64) -> bool {
        self.answers() && !self.is_paused(now_ns)
    }

    /// Whether failures forbid writes at `now_ns`.
    fn is_paused(&self, now_ns: u64) -> bool {
        match self.health {
            Health::NoWrites { until_ns } | Health::Failed { until_ns } => now_ns < until_ns,
            Health::Good | Health::Stalled => false,
        }
    }

    /// Whether the directory is in use at all.
    pub(crate) fn is_alive(&self) -> bool {
        !matches!(self.health, Health::Failed { .. })
    }

    /// Whether the directory was given up, and is not to be tried again yet.
    pub(crate) fn is_given_up(&self, now_ns: u64) -> bool {
        !self.is_alive() && self.is_paused(now_ns)
    }

    /// Counts a write that succeeded. A write that was in flight when writes were paused proves nothing.
    pub(crate) fn write_succeeded(&mut self, now_ns: u64) {
        if !self.is_paused(now_ns) {
            self.write_failures = 0;
            self.health = Health::Good;
            self.fault = None;
        }
    }

    /// Counts a failed write. A full or read-only medium pauses writes at once.
    pub(crate) fn write_failed(&mut self, fault: IoFault, now_ns: u64) {
        assert_ne!(fault, IoFault::Stopped, "a stopped write is no failure");
        self.write_failures += 1;
        let full = fault.is_full_medium();
        match &mut self.health {
            Health::Failed { until_ns } => {
                *until_ns = now_ns.saturating_add(FAILED_PAUSE_NS).max(*until_ns);
            }
            _ if full || self.write_failures >= WRITE_FAILURES_MAX => {
                let until_ns = now_ns.saturating_add(WRITE_PAUSE_NS);
                self.health = Health::NoWrites { until_ns };
                self.fault = Some(fault);
            }
            _ => {}
        }
    }

    /// Counts a failed sync. Writes pause at once: those before the sync will be repeated, although they succeeded.
    pub(crate) fn sync_failed(&mut self, fault: IoFault, now_ns: u64) {
        self.write_failures = WRITE_FAILURES_MAX;
        self.write_failed(fault, now_ns);
    }

    pub(crate) fn read_succeeded(&mut self) {
        self.read_failures = 0;
        self.given_up = 0;
    }

    /// Counts a read that failed at the device. Returns whether the directory is now given up: `most` reads in a row
    /// have failed.
    pub(crate) fn read_failed(&mut self, fault: IoFault, now_ns: u64, most: u32) -> bool {
        self.read_failures += 1;
        if self.read_failures < most || !self.is_alive() {
            return false;
        }
        let pause = FAILED_PAUSE_NS << self.given_up.min(FAILED_DOUBLINGS_MAX);
        self.health = Health::Failed {
            until_ns: now_ns.saturating_add(pause),
        };
        self.fault = Some(fault);
        self.given_up += 1;
        self.read_failures = 0;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Linux has one number for each, on all processors.
    const EIO: i32 = 5;
    const ENOSPC: i32 = 28;
    const EROFS: i32 = 30;

    #[test]
    fn a_write_that_ends_during_a_pause_ends_it_not() {
        for errno in [ENOSPC, EROFS] {
            let mut health = HealthMonitor::new();
            let fault = IoFault::Os(errno);
            health.write_failed(fault, 0);
            health.write_succeeded(1);
            assert!(!health.takes_writes(WRITE_PAUSE_NS - 1));
            assert!(health.takes_writes(WRITE_PAUSE_NS));
            health.write_succeeded(WRITE_PAUSE_NS);
            assert_eq!(health.report(), (Health::Good, None));
        }
    }

    #[test]
    fn writes_pause_after_three_failures_in_a_row() {
        let fault = IoFault::Os(EIO);
        let mut health = HealthMonitor::new();
        for ends_well in [false, false, true, false, false] {
            match ends_well {
                true => health.write_succeeded(0),
                false => health.write_failed(fault, 0),
            }
            assert!(health.takes_writes(0));
        }
        health.write_failed(fault, 0);
        assert!(!health.takes_writes(0));
    }

    #[test]
    fn a_failed_sync_pauses_writes_although_they_succeed() {
        let mut health = HealthMonitor::new();
        health.write_succeeded(0);
        health.sync_failed(IoFault::Os(EIO), 0);
        assert!(!health.takes_writes(1));
    }

    #[test]
    fn a_directory_that_fails_again_and_again_is_tried_ever_later_and_at_least_once_in_about_an_hour()
     {
        let fault = IoFault::Os(EIO);
        let mut health = HealthMonitor::new();
        let mut now_ns = 0;
        let mut pause_of = |health: &mut HealthMonitor| {
            assert!(health.read_failed(fault, now_ns, 1));
            let (Health::Failed { until_ns }, Some(_)) = health.report() else {
                panic!("{health:?}");
            };
            let pause_ns = until_ns - now_ns;
            now_ns = until_ns;
            // A write succeeds, and the next read fails.
            health.write_succeeded(now_ns);
            assert_eq!(health.report(), (Health::Good, None));
            pause_ns / 60_000_000_000
        };
        let pauses = [(); 8].map(|()| pause_of(&mut health));
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 64, 64]);
        health.read_succeeded();
        assert_eq!(pause_of(&mut health), 1, "the directory was good meanwhile");
    }
}
