//! How many bytes may be written to disk, or to the remote store, now.

/// The write budget may be saved up for this long, in nanoseconds.
const BURST_NS: u64 = 250_000_000;

/// A bucket of bytes that fills at the configured rate.
#[derive(Debug)]
pub(crate) struct WriteBudget {
    /// Bytes a second; 0 is unlimited.
    rate: u64,
    bytes: u64,
    refilled_ns: u64,
}

impl WriteBudget {
    pub(crate) fn new(rate: u64) -> Self {
        Self {
            rate,
            bytes: 0,
            refilled_ns: 0,
        }
    }

    /// Adds the bytes that have accrued since the last call. A payload larger than the burst is written
    /// when the bucket is full.
    pub(crate) fn refill(&mut self, next_bytes: u64, now_ns: u64) {
        if self.rate == 0 {
            return;
        }
        let in_ns = |ns: u64| u128::from(self.rate) * u128::from(ns) / 1_000_000_000;
        let accrued = in_ns(now_ns - self.refilled_ns);
        // A fraction of a byte is not lost: its time counts at the next call.
        if accrued == 0 {
            return;
        }
        let most = in_ns(BURST_NS).max(u128::from(next_bytes));
        let bytes = (u128::from(self.bytes) + accrued).min(most);
        self.refilled_ns = now_ns;
        self.bytes = u64::try_from(bytes).expect("a quarter of a second's bytes fit 64 bits");
    }

    /// Whether a write of this many bytes may start.
    pub(crate) fn allows(&self, bytes: u64) -> bool {
        self.rate == 0 || self.bytes >= bytes
    }

    /// A write of this many bytes starts.
    pub(crate) fn spend(&mut self, bytes: u64) {
        if self.rate > 0 {
            let left = self.bytes.checked_sub(bytes);
            self.bytes = left.expect("a write starts only if the budget allows it");
        }
    }
}
