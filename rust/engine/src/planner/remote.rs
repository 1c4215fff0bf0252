//! The remote store: how long gets take, and which part of the wanted tokens the store has.

use crate::metrics::Gauges;

use super::line::{GETS, Line};

/// Part of the learned values that stays when a flight has ended, or a round of probes.
const KEEP: f64 = 7.0 / 8.0;
/// The store is expected to have at least this part of the tokens.
const PRESENT_MIN: f64 = 1e-3;
/// After this time without a flight, some segments are fetched although the store seems too slow, or to have nothing.
/// No request waits for them.
const MEASURE_AFTER_NS: u64 = 1_000_000_000;
/// Flights that measure take at most one part in this many of the store's time.
const MEASURE_PART: u64 = 8;
/// Segments of every other flight that measures: gets that are in flight together show the rate of the store.
const MEASURED: u32 = 4;

/// The learned values of the remote store.
///
/// Gets that are in flight together share the store, so the time of a single get says little. The last of the gets that
/// are sent together shows when all have arrived. A probe takes as long as a get without its bytes.
#[derive(Debug)]
pub(crate) struct RemoteRates {
    /// Times of the last gets of those that were sent together, less a probe, by the bytes in flight at the send.
    last: Line,
    /// Times of the first gets of flights, less a probe, by the bytes in flight at the end.
    first: Line,
    /// Mean time of a round of probes.
    probe_ns: f64,
    /// The part of the last flights' segments that the store had.
    present: f64,
    /// When a flight began last.
    began_ns: u64,
    /// How long the last get took.
    took_ns: u64,
    /// Number of flights so far that measure.
    measured: u32,
}

/// Segments that a flight waits for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fetch {
    /// Bytes that are in flight, or that are sent before these segments.
    pub(crate) ahead: u64,
    pub(crate) segments: u32,
    /// Bytes of a segment.
    pub(crate) bytes: u64,
    /// Gets of the flight that are in flight at once.
    pub(crate) width: u32,
    /// A round of probes precedes the gets.
    pub(crate) is_probed: bool,
    /// How long the store has had operations of which none has ended.
    pub(crate) silent_ns: u64,
}

impl Default for RemoteRates {
    fn default() -> Self {
        Self {
            last: Line::new(GETS),
            first: Line::new(GETS),
            probe_ns: 0.0,
            present: 1.0,
            began_ns: 0,
            took_ns: 0,
            measured: 0,
        }
    }
}

impl RemoteRates {
    /// A flight begins.
    pub(crate) fn began(&mut self, now_ns: u64) {
        self.began_ns = now_ns;
    }

    /// The last get of a flight has ended. `bytes` were in flight when the get was sent.
    pub(crate) fn last_ended(&mut self, bytes: u64, took_ns: u64, now_ns: u64) {
        let rest_ns = took_ns.saturating_sub(self.probe_ns as u64);
        self.took_ns = took_ns;
        self.last.add(bytes, rest_ns, now_ns);
    }

    /// The first get of a flight has ended. `bytes` are in flight.
    pub(crate) fn first_ended(&mut self, bytes: u64, took_ns: u64, now_ns: u64) {
        let rest_ns = took_ns.saturating_sub(self.probe_ns as u64);
        self.first.add(bytes, rest_ns, now_ns);
    }

    /// A round of probes was answered.
    pub(crate) fn probed(&mut self, took_ns: u64) {
        self.probe_ns = if self.probe_ns > 0.0 {
            self.probe_ns * KEEP + took_ns as f64 * (1.0 - KEEP)
        } else {
            took_ns as f64
        };
    }

    /// A flight has ended. The store had `there` of its segments.
    pub(crate) fn flight_ended(&mut self, there: u32, segments: u32) {
        let part = f64::from(there) / f64::from(segments.max(1));
        self.present = (self.present * KEEP + part * (1.0 - KEEP)).max(PRESENT_MIN);
    }

    /// Whether enough was measured. Where the store has lacked most segments, few gets run, and none need be measured.
    pub(crate) fn is_known(&self) -> bool {
        self.last.is_known() && self.first.is_known() || self.present < KEEP * KEEP
    }

    /// Whether no flight has begun for long.
    pub(crate) fn is_old(&self, now_ns: u64) -> bool {
        let pause_ns = MEASURE_AFTER_NS.max(MEASURE_PART * self.took_ns);
        now_ns >= self.began_ns.saturating_add(pause_ns)
    }

    /// Number of segments of the next flight that measures.
    pub(crate) fn next_measured(&mut self) -> u32 {
        self.measured += 1;
        match self.measured % 2 {
            0 => MEASURED,
            _ => 1,
        }
    }

    /// About the part of the tokens that the store has.
    pub(crate) fn present(&self) -> f64 {
        self.present
    }

    /// Nanoseconds until the store has answered that it has nothing.
    pub(crate) fn absent_ns(&self) -> f64 {
        self.probe_ns
    }

    /// Nanoseconds until the first segment has arrived, and until all segments have arrived.
    pub(crate) fn wait_ns(&self, fetch: &Fetch) -> (f64, f64) {
        let silent_ns = fetch.silent_ns as f64;
        let width = fetch.width.clamp(1, fetch.segments.max(1));
        let together = u64::from(width) * fetch.bytes;
        let ahead_ns = match fetch.ahead {
            0 => 0.0,
            ahead => self.last.of(ahead) - self.last.latency_ns(),
        };
        let probes_ns = if fetch.is_probed { self.probe_ns } else { 0.0 };
        let turns = f64::from(fetch.segments.max(1)) / f64::from(width);
        let turn_ns = self.probe_ns + self.last.of(together);
        let all_ns = (ahead_ns + probes_ns + turns * turn_ns).max(silent_ns);
        // The first segments come before the probes are answered, but then none does until others have come.
        let first_ns = ahead_ns + probes_ns + self.probe_ns + self.first.of(together);
        (first_ns.max(silent_ns).min(all_ns), all_ns)
    }

    /// Writes the learned values into the gauges.
    pub(crate) fn report(&self, gauges: &mut Gauges) {
        if self.last.is_known() {
            gauges.plan_remote_bytes_per_s = self.last.bytes_per_s() as u64;
            gauges.plan_remote_latency_ns = (self.last.latency_ns() + self.probe_ns) as u64;
        }
    }
}
