//! For how long a request waits: the same rules for reads from disk and for flights from the remote store. Whether a
//! lookup is still pending is read without entering the engine.

use crate::forest::NsId;
use crate::session::{Lookup, Priority, PromotionWait, Tokens};

use super::super::coordinator::Engine;
use super::super::ids::{RequestId, SessionId};
use super::super::planner::{FetchSource, Prompt, Reason, Start, Stop};
use super::super::promotions::QueuePlace;
use super::super::requests::RequestState;
use super::shares::{LastAnswer, Promotion, Share, Waits};

/// A device that was not polled for this many times the limit counts as stalled.
const NO_POLL_STALLS: u64 = 5;

/// How a fetch under way comes along. Tokens count from the start of the prompt.
#[derive(Clone, Copy, Debug)]
pub(in crate::engine) struct Pace {
    /// Tokens of the hit if the fetch ended now, and if all arrives.
    pub(in crate::engine) arrived: u32,
    pub(in crate::engine) end: u32,
    /// Tokens that arrive together.
    pub(in crate::engine) together: u32,
    /// Nanoseconds until all has arrived; `None` without a prediction.
    pub(in crate::engine) rest_ns: Option<f64>,
}

impl Engine {
    /// How long a request waits.
    fn wait_of(&self, waits: &Waits) -> PromotionWait {
        waits.limit.unwrap_or(self.config.promotion_wait)
    }

    /// Whether the planner decides how long a request waits.
    pub(in crate::engine) fn is_planned(&self, waits: &Waits) -> bool {
        self.wait_of(waits) == PromotionWait::Planned
    }

    /// Whether a request has waited since `since_ns` for long enough: for `gain` tokens, or because its planned wait
    /// `stops`.
    pub(in crate::engine) fn is_wait_over(
        &self,
        waits: &Waits,
        since_ns: u64,
        gain: impl FnOnce() -> u32,
        stops: impl FnOnce() -> bool,
    ) -> bool {
        match self.wait_of(waits) {
            PromotionWait::Complete => false,
            PromotionWait::Planned => stops(),
            PromotionWait::Limit {
                base_ns,
                per_1k_tokens_ns,
            } => {
                let part = u128::from(per_1k_tokens_ns) * u128::from(gain()) / 1000;
                u128::from(self.now_ns - since_ns) >= u128::from(base_ns) + part
            }
        }
    }

    /// Why a request's planned wait for a fetch is over, with the tokens that have not arrived; `None` if the wait goes
    /// on, or there is no such wait. The device has `computed` tokens.
    pub(in crate::engine) fn plan_stop(
        &self,
        (state, share): (&RequestState, &Share),
        computed: Tokens,
        pace: impl FnOnce(&Prompt) -> Pace,
    ) -> Option<(Stop, u32)> {
        let since_ns = share.waits.since_ns?;
        if !self.is_planned(&share.waits) {
            return None;
        }
        let prompt = Prompt {
            computed: computed.0,
            ..self.prompt(state)
        };
        let Pace {
            arrived,
            end,
            together,
            rest_ns,
        } = pace(&prompt);
        let waited_ns = self.now_ns - since_ns;
        let ends = (arrived, end, together);
        let stop = self.planner.stop(&prompt, ends, waited_ns, rest_ns)?;
        Some((stop, end - arrived.clamp(prompt.computed.min(end), end)))
    }

    /// Notes the planner's decision whether to begin a fetch of `tokens` tokens, and counts it once for each request.
    pub(in crate::engine) fn note_start(
        &mut self,
        id: RequestId,
        source: FetchSource,
        (start, is_prefetch): (&Start, bool),
        tokens: u32,
    ) {
        let plan = self.shares[id].plans.of(source);
        plan.ignores_prediction = start.reason == Reason::OtherWay;
        // If a prefetch is not made, the demanded lookup decides again. A start that measures is counted now: the later
        // decision uses its results.
        let is_final = !is_prefetch || start.promotes || start.reason == Reason::Measure;
        if is_final && !std::mem::replace(&mut plan.is_counted, true) {
            start
                .reason
                .count(source, start.promotes, tokens, &mut self.counters);
        }
    }

    /// Whether a request that may gain `gain` tokens has waited for its promotion for long enough, or waits for a
    /// device that does not answer.
    pub(in crate::engine) fn is_late(
        &self,
        (state, share): (&RequestState, &Share),
        gain: u32,
    ) -> bool {
        let waits = &share.waits;
        let since_ns = waits.since_ns.unwrap_or(self.now_ns);
        let stops = || self.promotion_stop(state, share).is_some();
        let promotion = waits.disk.as_ref();
        self.is_wait_over(waits, since_ns, || gain, stops)
            || promotion.is_some_and(|promotion| self.is_stalled(promotion))
    }

    /// Whether a promotion waits for a device that does not answer. A promotion that waits for its turn is not stalled,
    /// however long it waits.
    pub(in crate::engine) fn is_stalled(&self, promotion: &Promotion) -> bool {
        // If the process was delayed, its reads may have ended meanwhile. But a device may block the polling thread for
        // ever.
        let polled_ns = self.last_poll_ns.max(promotion.started_ns);
        let stall_ns = self.config.stall_ns;
        let after =
            |since_ns: u64, stalls: u64| since_ns.saturating_add(stall_ns.saturating_mul(stalls));
        if self.now_ns >= after(polled_ns, NO_POLL_STALLS) {
            return true;
        }
        // Reads in flight end, or their device is known not to answer. A read that finds no memory waits while other
        // reads of its device end. If none ends, the requests that hold the memory may be waiting for this request.
        let device = promotion.place.and_then(QueuePlace::device);
        let (Some(device), Some(short_ns)) = (device, promotion.short_ns) else {
            return false;
        };
        let since_ns = self.operations.read_progress_ns(device).max(short_ns);
        self.last_poll_ns >= after(since_ns, 1)
    }
}

impl Engine {
    /// The answer [`Lookup::Pending`], if [`Engine::lookup`] would return it again. Changes nothing, so that
    /// many pending requests cost little.
    pub fn still_pending(
        &self,
        session: SessionId,
        request: &str,
        computed: Tokens,
        priority: Priority,
    ) -> Option<Lookup> {
        let of_session = self.sessions.get(session)?;
        let (ns, id) = (of_session.ns, *of_session.requests.get(request)?);
        let (state, share) = (&self.sessions.requests[id], &self.shares[id]);
        let of_request = (state, share);
        let is_pending = match priority {
            Priority::Prefetch => {
                share.waits.disk.is_some() || self.waits_for_flight(of_request, ns, computed)
            }
            Priority::Demand => {
                // With more computed tokens, computing may serve the request, too: the wait is then weighed against it.
                let needs_hit = state.planned.min > computed.0;
                let is_same = needs_hit == state.planned.needs_hit;
                let has_failed = share.answer == LastAnswer::Failed;
                let waits = share.waits.since_ns.is_some() && !has_failed && is_same;
                waits
                    && match share.waits.disk.is_some() {
                        true => {
                            let gain = self.promised(share, ns, 0).saturating_sub(computed.0);
                            gain > 0 && !self.is_late(of_request, gain)
                        }
                        false => self.waits_for_flight(of_request, ns, computed),
                    }
            }
        };
        let shared = state.shared;
        is_pending.then_some(Lookup::Pending { shared })
    }

    /// Where a request's promotion ends if all reads succeed, in tokens; `otherwise` without a promotion.
    pub(in crate::engine) fn promised(&self, share: &Share, ns: NsId, otherwise: u32) -> u32 {
        let promotion = share.waits.disk.as_ref();
        promotion.map_or(otherwise, |promotion| {
            promotion.boundary() * self.residency.hash_block_size(ns)
        })
    }

    /// Whether a demanded lookup would be pending: the request waits for a promotion or a flight.
    pub fn is_promoting(&self, session: SessionId, request: &str) -> bool {
        let ns = self.sessions.get(session).map(|session| session.ns);
        let id = self.sessions.request_id(session, request);
        ns.zip(id).is_some_and(|(ns, id)| {
            let (state, share) = (&self.sessions.requests[id], &self.shares[id]);
            let of_request = (state, share);
            let gain = self.promised(share, ns, 0);
            let is_promoting = share.waits.disk.is_some() && !self.is_late(of_request, gain);
            let computed = Tokens(state.planned.computed);
            share.answer != LastAnswer::Failed
                && (is_promoting || self.waits_for_flight(of_request, ns, computed))
        })
    }
}
