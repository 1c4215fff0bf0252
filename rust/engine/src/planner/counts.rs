//! Counters of decisions.

use crate::metrics::Counters;

use super::plan::{Reason, Stop};

/// Where tokens are fetched from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FetchSource {
    Disk,
    Remote,
}

impl Reason {
    /// Counts the decision whether to fetch this many tokens.
    pub(crate) fn count(self, source: FetchSource, fetches: bool, tokens: u32, of: &mut Counters) {
        use FetchSource::{Disk, Remote};
        let counter = match (source, fetches, self) {
            (Disk, true, Self::Faster | Self::Measure) => &mut of.plans_load_faster,
            (Disk, true, Self::Unknown) => &mut of.plans_load_unknown,
            (Disk, true, Self::OtherWay) => &mut of.plans_load_other_way,
            (Disk, false, Self::OtherWay) => &mut of.plans_compute_other_way,
            (Disk, false, Self::Measure) => &mut of.plans_compute_measure,
            (Disk, false, _) => &mut of.plans_compute_faster,
            (Remote, true, Self::Faster | Self::Measure) => &mut of.remote_plans_load_faster,
            (Remote, true, Self::Unknown) => &mut of.remote_plans_load_unknown,
            (Remote, true, Self::OtherWay) => &mut of.remote_plans_load_other_way,
            (Remote, false, Self::OtherWay) => &mut of.remote_plans_compute_other_way,
            (Remote, false, Self::Measure) => &mut of.remote_plans_compute_measure,
            (Remote, false, _) => &mut of.remote_plans_compute_faster,
        };
        *counter += 1;
        if !fetches {
            let tokens_of = match (source, self) {
                (Disk, Self::OtherWay) => &mut of.tokens_not_loaded_other_way,
                (Disk, _) => &mut of.tokens_not_loaded_disk,
                (Remote, _) => &mut of.tokens_not_loaded_remote,
            };
            *tokens_of += u64::from(tokens);
        }
    }
}

impl Stop {
    /// Counts the end of a wait, and the tokens that have not come.
    pub(crate) fn count(self, source: FetchSource, tokens: u32, of: &mut Counters) {
        let (plans, tokens_of) = match (source, self) {
            (FetchSource::Disk, Self::Rest) => {
                (&mut of.plans_stopped_rest, &mut of.tokens_not_loaded_rest)
            }
            (FetchSource::Disk, Self::Guarantee) => (
                &mut of.plans_stopped_guarantee,
                &mut of.tokens_not_loaded_guarantee,
            ),
            (FetchSource::Remote, Self::Rest) => (
                &mut of.remote_plans_stopped_rest,
                &mut of.tokens_not_loaded_remote,
            ),
            (FetchSource::Remote, Self::Guarantee) => (
                &mut of.remote_plans_stopped_guarantee,
                &mut of.tokens_not_loaded_remote,
            ),
        };
        *plans += 1;
        *tokens_of += u64::from(tokens);
    }
}
