//! Whether requests may be sent to the store: a store that fails gets no request for a while, then one as a trial.

/// Failures in a row that open the breaker.
const FAILURES_MAX: u32 = 3;
/// The first pause, and the longest, in nanoseconds.
const PAUSE_NS: u64 = 1_000_000_000;
const PAUSE_MAX_NS: u64 = 60 * PAUSE_NS;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BreakerState {
    /// The store answers; the last `failures` requests in a row have failed.
    Closed { failures: u32 },
    /// Nothing is sent before `until_ns`.
    Open { until_ns: u64, pause_ns: u64 },
    /// One request is in flight, as a trial.
    Trial { since_ns: u64, pause_ns: u64 },
}

/// Three failures in a row open the breaker. Then one request is tried after 1, 2, 4, ... 60 s; the first that succeeds
/// closes the breaker.
#[derive(Debug)]
pub(super) struct Breaker {
    state: BreakerState,
    /// A trial that takes longer has failed.
    limit_ns: u64,
}

impl Breaker {
    pub(super) fn new(limit_ns: u64) -> Self {
        Self {
            state: BreakerState::Closed { failures: 0 },
            limit_ns,
        }
    }

    /// Whether the breaker is closed: the store answers, as far as is known.
    pub(super) fn is_closed(&self) -> bool {
        matches!(self.state, BreakerState::Closed { .. })
    }

    /// Whether a request may be sent now.
    pub(super) fn allows(&self, now_ns: u64) -> bool {
        match self.state {
            BreakerState::Closed { .. } => true,
            BreakerState::Open { until_ns, .. } => now_ns >= until_ns,
            BreakerState::Trial { .. } => false,
        }
    }

    /// A request is sent.
    pub(super) fn sent(&mut self, now_ns: u64) {
        if let BreakerState::Open { pause_ns, .. } = self.state {
            self.state = BreakerState::Trial {
                since_ns: now_ns,
                pause_ns,
            };
        }
    }

    /// Ends a trial that takes too long: a trial that never ends must not keep the breaker open for ever.
    pub(super) fn look(&mut self, now_ns: u64) {
        if let BreakerState::Trial { since_ns, .. } = self.state
            && now_ns >= since_ns.saturating_add(self.limit_ns)
        {
            self.failed(now_ns);
        }
    }

    /// The store has answered a request.
    pub(super) fn succeeded(&mut self) {
        self.state = BreakerState::Closed { failures: 0 };
    }

    /// A request has failed, or takes too long. Returns whether the breaker opens.
    pub(super) fn failed(&mut self, now_ns: u64) -> bool {
        let pause_ns = match self.state {
            BreakerState::Closed { failures } if failures + 1 < FAILURES_MAX => {
                self.state = BreakerState::Closed {
                    failures: failures + 1,
                };
                return false;
            }
            BreakerState::Closed { .. } => PAUSE_NS,
            BreakerState::Trial { pause_ns, .. } => (2 * pause_ns).min(PAUSE_MAX_NS),
            // The request was sent before the breaker opened.
            BreakerState::Open { .. } => return false,
        };
        let until_ns = now_ns.saturating_add(pause_ns);
        self.state = BreakerState::Open { until_ns, pause_ns };
        true
    }
}

/// Bytes that may be in flight. Throttling halves the window, and each transfer that succeeds widens it by an eighth of
/// its bytes.
#[derive(Debug)]
pub(super) struct Window {
    most: u64,
    now: u64,
    in_flight: u64,
}

impl Window {
    pub(super) fn new(most: u64) -> Self {
        Self {
            most,
            now: most,
            in_flight: 0,
        }
    }

    /// Whether a transfer may start. If none is in flight, a transfer of any size may start.
    pub(super) fn allows(&self, bytes: u64) -> bool {
        self.in_flight == 0 || self.in_flight + bytes <= self.now
    }

    /// Bytes in flight.
    pub(super) fn in_flight(&self) -> u64 {
        self.in_flight
    }

    pub(super) fn bytes(&self) -> u64 {
        self.now
    }

    /// Sets the most that may be in flight.
    pub(super) fn set_most(&mut self, most: u64) {
        (self.most, self.now) = (most, most);
    }

    pub(super) fn started(&mut self, bytes: u64) {
        self.in_flight += bytes;
    }

    pub(super) fn ended(&mut self, bytes: u64, ok: bool) {
        let left = self.in_flight.checked_sub(bytes);
        self.in_flight = left.expect("a transfer that ends was started");
        if ok {
            self.now = self.now.saturating_add(bytes / 8).min(self.most);
        }
    }

    pub(super) fn throttled(&mut self) {
        self.now /= 2;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn open(breaker: &mut Breaker) {
        for _ in 0..FAILURES_MAX {
            breaker.failed(0);
        }
    }

    #[test]
    fn three_failures_in_a_row_open_the_breaker() {
        let mut breaker = Breaker::new(SECOND);
        assert!(!breaker.failed(0));
        assert!(!breaker.failed(0));
        breaker.succeeded();
        assert!(!breaker.failed(0));
        assert!(!breaker.failed(0));
        assert!(breaker.allows(0));
        assert!(breaker.failed(0));
        assert!(!breaker.is_closed());
        assert!(!breaker.allows(SECOND - 1));
        assert!(breaker.allows(SECOND));
    }

    #[test]
    fn one_request_is_tried_after_pauses_that_double_up_to_a_minute() {
        let mut breaker = Breaker::new(SECOND);
        open(&mut breaker);
        let mut now_ns = 0;
        for pause_s in [1, 2, 4, 8, 16, 32, 60, 60] {
            assert!(!breaker.allows(now_ns + pause_s * SECOND - 1), "{pause_s}");
            now_ns += pause_s * SECOND;
            assert!(breaker.allows(now_ns));
            breaker.sent(now_ns);
            assert!(!breaker.allows(now_ns + SECOND), "one at a time");
            assert!(breaker.failed(now_ns));
        }
        breaker.sent(now_ns + 60 * SECOND);
        breaker.succeeded();
        assert!(breaker.is_closed() && breaker.allows(now_ns));
    }

    #[test]
    fn a_trial_that_never_ends_is_followed_by_another() {
        let mut breaker = Breaker::new(SECOND);
        open(&mut breaker);
        breaker.sent(SECOND);
        breaker.look(2 * SECOND - 1);
        assert!(!breaker.allows(2 * SECOND - 1));
        breaker.look(2 * SECOND);
        assert!(breaker.allows(4 * SECOND));
    }

    #[test]
    fn throttling_halves_the_window() {
        let mut window = Window::new(1024);
        window.started(512);
        assert!(window.allows(512) && !window.allows(513));
        window.throttled();
        assert!(!window.allows(1));
        window.ended(512, false);
        assert!(window.allows(4096), "one transfer at a time always may");
        window.started(512);
        window.ended(512, true);
        assert_eq!(window.bytes(), 512 + 64);
    }
}
