//! Counters of decisions.

use crate::metrics::Counters;

use super::plan::{Reason, Stop};

impl Reason {
    /// Counts a decision about a promotion of this many tokens.
    pub(in crate::engine) fn count(self, promotes: bool, tokens: u32, counters: &mut Counters) {
        let counter = match (promotes, self) {
            (true, Self::Faster | Self::Measure) => &mut counters.plans_load_faster,
            (true, Self::Unknown) => &mut counters.plans_load_unknown,
            (true, Self::OtherWay) => &mut counters.plans_load_other_way,
            (false, Self::OtherWay) => &mut counters.plans_compute_other_way,
            (false, Self::Measure) => &mut counters.plans_compute_measure,
            (false, _) => &mut counters.plans_compute_faster,
        };
        *counter += 1;
        if !promotes {
            let tokens_of = match self {
                Self::OtherWay => &mut counters.tokens_not_loaded_other_way,
                _ => &mut counters.tokens_not_loaded_disk,
            };
            *tokens_of += u64::from(tokens);
        }
    }
}

impl Reason {
    /// Counts a decision about a flight of this many tokens from the remote store.
    pub(in crate::engine) fn count_remote(
        self,
        fetches: bool,
        tokens: u32,
        counters: &mut Counters,
    ) {
        let counter = match (fetches, self) {
            (true, Self::Faster | Self::Measure) => &mut counters.remote_plans_load_faster,
            (true, Self::Unknown) => &mut counters.remote_plans_load_unknown,
            (true, Self::OtherWay) => &mut counters.remote_plans_load_other_way,
            (false, Self::OtherWay) => &mut counters.remote_plans_compute_other_way,
            (false, Self::Measure) => &mut counters.remote_plans_compute_measure,
            (false, _) => &mut counters.remote_plans_compute_faster,
        };
        *counter += 1;
        if !fetches {
            counters.tokens_not_loaded_remote += u64::from(tokens);
        }
    }
}

impl Stop {
    /// Counts the end of a wait, and the tokens that have not come.
    pub(in crate::engine) fn count(self, tokens: u32, counters: &mut Counters) {
        let (plans, tokens_of) = match self {
            Self::Rest => (
                &mut counters.plans_stopped_rest,
                &mut counters.tokens_not_loaded_rest,
            ),
            Self::Guarantee => (
                &mut counters.plans_stopped_guarantee,
                &mut counters.tokens_not_loaded_guarantee,
            ),
        };
        *plans += 1;
        *tokens_of += u64::from(tokens);
    }

    /// Counts the end of a wait for the remote store, and the tokens that have not come.
    pub(in crate::engine) fn count_remote(self, tokens: u32, counters: &mut Counters) {
        let plans = match self {
            Self::Rest => &mut counters.remote_plans_stopped_rest,
            Self::Guarantee => &mut counters.remote_plans_stopped_guarantee,
        };
        *plans += 1;
        counters.tokens_not_loaded_remote += u64::from(tokens);
    }
}
