//! The planner's decisions, as functions of times alone.

/// A load must gain this part of the time that it saves: predictions are no more exact.
const SLACK: f64 = 0.1;
/// Two ways whose times differ by no more than this part are near-even.
const NEAR_EVEN: f64 = 0.25;
/// One of this many near-even decisions goes the other way, so that both ways stay measured.
const OTHER_WAY: u64 = 100;

/// The reason for a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reason {
    /// The chosen way takes less time by the prediction.
    Faster,
    /// Too little was measured for a prediction.
    Unknown,
    /// The load takes more time by the prediction. But nothing was read for long: reads for which no request waits show
    /// how fast the device is now.
    Measure,
    /// A near-even decision that went the other way.
    OtherWay,
}

/// One way to get a prompt's tokens, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Way {
    /// Computing time that this way saves.
    pub(crate) saved_ns: f64,
    /// Time that this way takes instead.
    pub(crate) cost_ns: f64,
}

impl Way {
    /// The way that loads nothing.
    pub(crate) const NONE: Self = Self {
        saved_ns: 0.0,
        cost_ns: 0.0,
    };

    fn gain_ns(self) -> f64 {
        self.saved_ns - self.cost_ns
    }
}

/// Whether to take the way `more` instead of `less`: the gain of `more` must exceed the gain of `less` by a part of the
/// time that `more` saves. `is_safe`: the guarantee would not end a wait that takes a little longer than predicted.
/// `near_even` counts near-even decisions.
pub(crate) fn start(more: Way, less: Way, is_safe: bool, near_even: &mut u64) -> (bool, Reason) {
    let gain = more.gain_ns() - less.gain_ns().max(0.0);
    let pays = is_safe && gain > SLACK * more.saved_ns;
    if gain.abs() > NEAR_EVEN * more.saved_ns {
        return (pays, Reason::Faster);
    }
    *near_even += 1;
    if near_even.is_multiple_of(OTHER_WAY) {
        (!pays, Reason::OtherWay)
    } else {
        (pays, Reason::Faster)
    }
}

/// Why a wait ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// The tokens that have not arrived take longer than they save.
    Rest,
    /// The wait has lost the part of the computing time that it may lose. Or it has lasted that long, and the tokens
    /// arrive more slowly than computing would produce them.
    Guarantee,
}

/// The state of a wait.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wait {
    pub(crate) waited_ns: f64,
    /// The least time that computing would take instead of the wait, from the start: for the awaited tokens, and for
    /// the tokens that vLLM would compute before them.
    pub(crate) compute_ns: f64,
    /// The part of the tokens that has arrived, 0 to 1.
    pub(crate) arrived: f64,
    /// The part of the tokens that lies in one block: the tokens of a block arrive together.
    pub(crate) block: f64,
    /// The way that loads all awaited payloads.
    pub(crate) all: Way,
    /// The way that loads the payloads that have arrived.
    pub(crate) here: Way,
    /// Time until all payloads have arrived; `None` if there is no prediction, or if the prediction shall not count.
    pub(crate) rest_ns: Option<f64>,
}

/// Whether a wait ends before all payloads have arrived. `margin` is the part of the computing time that every wait may
/// take.
pub(crate) fn stop(wait: &Wait, margin: f64) -> Option<Stop> {
    let most_ns = margin * wait.compute_ns;
    // The payloads that have arrived are still to be copied.
    let lost_ns = wait.waited_ns + wait.here.cost_ns - wait.arrived * wait.compute_ns;
    let is_late = wait.waited_ns >= most_ns;
    let lags = (wait.arrived + wait.block) * wait.compute_ns < wait.waited_ns;
    if lost_ns >= most_ns || is_late && lags {
        return Some(Stop::Guarantee);
    }
    let rest_ns = wait.rest_ns?;
    let pays = wait.all.gain_ns() - rest_ns >= wait.here.gain_ns().max(0.0);
    (!pays).then_some(Stop::Rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn way(saved_ns: f64, cost_ns: f64) -> Way {
        Way { saved_ns, cost_ns }
    }

    #[test]
    fn the_way_that_takes_less_time_is_taken() {
        let mut count = 0;
        assert_eq!(
            start(way(100.0, 20.0), Way::NONE, true, &mut count),
            (true, Reason::Faster)
        );
        assert_eq!(
            start(way(100.0, 200.0), Way::NONE, true, &mut count),
            (false, Reason::Faster)
        );
        // The tokens in host memory count already.
        assert_eq!(
            start(way(100.0, 60.0), way(80.0, 5.0), true, &mut count),
            (false, Reason::Faster)
        );
        assert_eq!(
            start(way(100.0, 20.0), Way::NONE, false, &mut count),
            (false, Reason::Faster),
            "the guarantee would end the wait"
        );
        assert_eq!(count, 0);
    }

    #[test]
    fn one_in_a_hundred_near_even_decisions_takes_the_other_way() {
        let mut count = 0;
        let mut other_ways = 0;
        for _ in 0..1000 {
            let (load, reason) = start(way(100.0, 80.0), Way::NONE, true, &mut count);
            other_ways += u32::from(reason == Reason::OtherWay);
            assert_eq!(load, reason == Reason::Faster);
        }
        assert_eq!(other_ways, 10);
    }

    fn wait(waited_ns: f64, arrived: f64, rest_ns: Option<f64>) -> Wait {
        Wait {
            waited_ns,
            compute_ns: 100.0,
            arrived,
            block: 0.1,
            all: way(100.0, 5.0),
            here: way(100.0 * arrived, 5.0 * arrived),
            rest_ns,
        }
    }

    #[test]
    fn a_wait_continues_while_the_rest_takes_less_than_it_saves() {
        assert_eq!(stop(&wait(10.0, 0.0, Some(50.0)), 0.25), None);
        assert_eq!(stop(&wait(10.0, 0.0, Some(150.0)), 0.25), Some(Stop::Rest));
        assert_eq!(stop(&wait(60.0, 0.7, Some(20.0)), 0.25), None);
        assert_eq!(stop(&wait(60.0, 0.7, Some(40.0)), 0.25), Some(Stop::Rest));
    }

    #[test]
    fn a_wait_ends_after_a_quarter_for_any_prediction_unless_a_part_has_come() {
        assert_eq!(stop(&wait(24.0, 0.0, None), 0.25), None);
        assert_eq!(
            stop(&wait(25.0, 0.0, Some(1.0)), 0.25),
            Some(Stop::Guarantee)
        );
        assert_eq!(stop(&wait(25.0, 0.3, Some(1.0)), 0.25), None);
        // A block that is being read is no delay.
        assert_eq!(stop(&wait(79.0, 0.7, Some(1.0)), 0.25), None);
        assert_eq!(
            stop(&wait(81.0, 0.7, Some(1.0)), 0.25),
            Some(Stop::Guarantee)
        );
    }

    #[test]
    fn a_request_loses_at_most_a_quarter_with_blocks_of_any_length() {
        let one_block = |waited_ns| Wait {
            block: 1.0,
            ..wait(waited_ns, 0.0, None)
        };
        assert_eq!(stop(&one_block(24.0), 0.25), None);
        assert_eq!(stop(&one_block(25.0), 0.25), Some(Stop::Guarantee));
    }
}
