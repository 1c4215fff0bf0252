//! What a request waits for, and for how long: the same rules for reads from disk and for flights from the remote store.

use undercroft_contract::session::{Lookup, Priority, PromotionWait, Step, Tokens};

use crate::forest::NsId;

use super::super::fetch::{LastAnswer, Pace, Promotion, Reads, Share, Waits};
use super::super::ids::{RequestId, SessionId};
use super::super::planner::{FetchSource, MEASURE_AFTER_NS, Prompt, Reading, Reason, Start, Stop};
use super::super::promotions::{QueuePlace, front};
use super::super::requests::RequestState;
use super::super::sessions::LoadPromise;
use super::engine::Engine;

/// A device that was not polled for this many times the limit counts as stalled.
const NO_POLL_STALLS: u64 = 5;

impl Engine {
    /// How long a request waits.
    fn wait_of(&self, waits: &Waits) -> PromotionWait {
        waits.limit.unwrap_or(self.config.promotion_wait)
    }

    /// Whether the planner decides how long a request waits.
    pub(super) fn is_planned(&self, waits: &Waits) -> bool {
        self.wait_of(waits) == PromotionWait::Planned
    }

    /// Whether a request has waited since `since_ns` for long enough: for `gain` tokens, or because its planned wait
    /// `stops`.
    pub(super) fn is_wait_over(
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
    pub(super) fn plan_stop(
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
    pub(super) fn note_start(
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
    pub(super) fn is_late(&self, (state, share): (&RequestState, &Share), gain: u32) -> bool {
        let waits = &share.waits;
        let since_ns = waits.since_ns.unwrap_or(self.now_ns);
        let stops = || self.promotion_stop(state, share).is_some();
        let promotion = waits.disk.as_ref();
        self.is_wait_over(waits, since_ns, || gain, stops)
            || promotion.is_some_and(|promotion| self.is_stalled(promotion))
    }

    /// Whether a promotion waits for a device that does not answer. A promotion that waits for its turn is not stalled,
    /// however long it waits.
    pub(super) fn is_stalled(&self, promotion: &Promotion) -> bool {
        // If the process was delayed, its reads may have ended meanwhile. But a device may block the polling thread for
        // ever.
        let polled_ns = self.operations.polled_ns.max(promotion.started_ns);
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
        self.operations.polled_ns >= after(since_ns, 1)
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
    pub(super) fn promised(&self, share: &Share, ns: NsId, otherwise: u32) -> u32 {
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

impl Engine {
    /// Takes the steps that the vLLM of a session has run, for the model of its times.
    pub fn report_steps(&mut self, session: SessionId, steps: &[Step]) {
        if self.sessions.get(session).is_some() {
            self.planner.add_steps(session, steps);
        }
    }

    /// The fewest tokens that a load of a request may gain.
    pub(super) fn least(&self, state: &RequestState) -> u32 {
        let least = self.config.min_load_tokens;
        least
            .unwrap_or_else(|| self.planner.least(state.session))
            .max(1)
    }

    pub(super) fn prompt(&self, state: &RequestState) -> Prompt {
        let ns = self.ns_of(state);
        Prompt {
            session: state.session,
            computed: state.planned.computed,
            end: state.planned.end,
            queued: state.planned.queued,
            bytes_per_token: self.residency.spec(ns).bytes_per_token(),
        }
    }

    /// Whether a load of the blocks in host memory, up to `to` tokens, is worth its copy.
    pub(super) fn is_copy_worth(&mut self, id: RequestId, to: u32) -> bool {
        let prompt = self.prompt(&self.sessions.requests[id]);
        let is_worth = self.planner.is_copy_worth(&prompt, to, self.now_ns);
        let share = &mut self.shares[id];
        let is_first = share.demanded && !share.plans.disk.is_counted;
        if !is_worth && is_first {
            share.plans.disk.is_counted = true;
            self.counters.plans_compute_small += 1;
            self.counters.tokens_not_loaded_small += u64::from(to - prompt.computed);
        }
        is_worth
    }

    /// The namespace of a request.
    fn ns_of(&self, state: &RequestState) -> NsId {
        let session = self.sessions.get(state.session);
        session.expect("a request belongs to a session").ns
    }

    pub(super) fn hash_block_size_of(&self, state: &RequestState) -> u32 {
        self.residency.hash_block_size(self.ns_of(state))
    }

    /// Whether to read the payloads that a hit up to `disk` hash blocks needs and a hit up to
    /// `host` does not.
    pub(super) fn plans_promotion(
        &mut self,
        id: RequestId,
        (host, disk): (u32, u32),
        is_prefetch: bool,
    ) -> Reads {
        let (state, share) = (&self.sessions.requests[id], &self.shares[id]);
        // Payloads in the arena are only compared with their checksums.
        if !self.is_planned(&share.waits) || host == disk {
            return Reads::All;
        }
        let (prompt, ns) = (self.prompt(state), self.ns_of(state));
        let size = self.residency.hash_block_size(ns);
        let (host, disk) = ((host * size).max(prompt.computed), disk * size);
        let bytes = f64::from(disk - host) * prompt.bytes_per_token;
        let priority = share.priority();
        let disks = self.residency.disks();
        let answering = || {
            let devices = self.residency.devices();
            devices.filter(|device| disks[device.index()].health.answers_reads())
        };
        let wait_ns = |bytes: f64| {
            let silent = |device| self.operations.silent_ns(device, self.now_ns);
            let rates = &self.planner.rates;
            rates.wait_ns(bytes as u64, priority, answering, silent)
        };
        let all_ns = wait_ns(bytes);
        let is_full = self.residency.spec(ns).has_full_only();
        // A part of a window or state is of no use.
        let block = if is_full { size } else { disk - host };
        let is_old = || {
            let since_ns = self.now_ns.checked_sub(MEASURE_AFTER_NS);
            since_ns.is_some_and(|since_ns| self.planner.rates.are_old(since_ns))
        };
        let reading = Reading {
            first_ns: match is_full {
                true => wait_ns(f64::from(size) * prompt.bytes_per_token),
                false => all_ns,
            },
            all_ns,
            block,
            together: block,
            is_prefetch,
            present: 1.0,
            absent_ns: 0.0,
            is_known: self.planner.rates.are_known(),
            is_old: !self.promotions.has_probes() && is_old(),
        };
        let start = self.planner.start(&prompt, (host, disk), &reading);
        let is_known = start.reason != Reason::Unknown;
        self.shares[id].plans.disk.predicted_ns = is_known.then_some(all_ns as u64);
        self.note_start(id, FetchSource::Disk, (&start, is_prefetch), disk - host);
        match (start.promotes, start.reason) {
            (true, _) => Reads::All,
            (false, Reason::Measure) => Reads::Some,
            (false, _) => Reads::None,
        }
    }

    /// Why a request's planned wait for its promotion is over, with the tokens that have not arrived; `None` if the
    /// wait goes on, or there is no such wait.
    pub(super) fn promotion_stop(
        &self,
        state: &RequestState,
        share: &Share,
    ) -> Option<(Stop, u32)> {
        let promotion = share.waits.disk.as_ref()?;
        let computed = Tokens(state.planned.computed);
        self.plan_stop((state, share), computed, |_| {
            let size = self.hash_block_size_of(state);
            let rates = &self.planner.rates;
            let predicts = !share.plans.disk.ignores_prediction && rates.are_known();
            let silent = |device| self.operations.silent_ns(device, self.now_ns);
            Pace {
                arrived: self.arrived(promotion) * size,
                end: promotion.boundary() * size,
                together: size,
                rest_ns: predicts
                    .then(|| rates.rest_ns(&promotion.shares, promotion.is_issued(), silent)),
            }
        })
    }

    /// Hash blocks of the hit, if the promotion ended now.
    fn arrived(&self, promotion: &Promotion) -> u32 {
        let missing = promotion.payloads.get(front(promotion, &self.residency));
        let Some(&(node, _)) = missing else {
            return promotion.boundary();
        };
        // A window or a state is needed where the hit ends, so a part is of no use.
        if self.residency.spec_of(node).has_full_only() {
            self.residency.node(node).depth - 1
        } else {
            0
        }
    }

    /// The predicted times that a load takes and saves.
    pub(super) fn promise(
        &self,
        state: &RequestState,
        computed: Tokens,
        external: Tokens,
    ) -> LoadPromise {
        let to = computed.0.saturating_add(external.0);
        let prompt = Prompt {
            computed: computed.0,
            ..self.prompt(state)
        };
        let (saved_ns, copy_ns) = self.planner.load_ns(&prompt, to);
        LoadPromise {
            began_ns: self.now_ns,
            copy_ns,
            saved_ns: saved_ns - state.planned.waited_ns as f64,
        }
    }

    /// Learns from a load that the workers have copied.
    pub(super) fn load_ended(&mut self, session: SessionId, bytes: u64, promise: &LoadPromise) {
        let took_ns = self.now_ns - promise.began_ns;
        let counters = &mut self.counters;
        if promise.copy_ns > 0.0 {
            let predicted_ns = promise.copy_ns as u64;
            counters.plan_predicted_host_ns += predicted_ns;
            counters.plan_actual_host_ns += took_ns;
            counters.plan_error_host_ns += predicted_ns.abs_diff(took_ns);
        }
        counters.plan_saved_ns += (promise.saved_ns - took_ns as f64).max(0.0) as u64;
        self.planner.add_copy(session, bytes, took_ns, self.now_ns);
    }
}
