//! Plans of requests: the questions that lookups and loads have for the planner.

use crate::forest::NsId;
use crate::session::{Step, Tokens};

use super::super::coordinator::Engine;
use super::super::ids::{RequestId, SessionId};
use super::super::planner::{FetchSource, MEASURE_AFTER_NS, Prompt, Reading, Reason, Stop};
use super::super::promotions::front;
use super::super::requests::RequestState;
use super::super::sessions::LoadPromise;
use super::pace::Pace;
use super::shares::{Promotion, Share};

/// The planner's inputs for a request, and its decisions. Tokens count from the start of the prompt.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::engine) struct Planned {
    /// Tokens that the device holds.
    pub(in crate::engine) computed: u32,
    /// Tokens of the prompt.
    pub(in crate::engine) end: u32,
    /// Tokens that vLLM computes before this request.
    pub(in crate::engine) queued: u32,
    /// A hit of fewer tokens, with those on the device, does not serve the request.
    pub(in crate::engine) min: u32,
    /// Whether the request needed a hit to be served at the last lookup.
    pub(in crate::engine) needs_hit: bool,
    /// How long its last answer took.
    pub(in crate::engine) waited_ns: u64,
}

/// The payloads to read, of those that a hit needs from disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine) enum Reads {
    All,
    /// A few payloads, for which no request waits, to measure the device.
    Some,
    None,
}

impl Planned {
    /// Notes that a lookup asks for the tokens after `computed`, up to `end`.
    pub(in crate::engine) fn note(&mut self, computed: u32, end: u32) {
        (self.computed, self.end) = (computed, end);
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
    pub(in crate::engine) fn least(&self, state: &RequestState) -> u32 {
        let least = self.config.min_load_tokens;
        least
            .unwrap_or_else(|| self.planner.least(state.session))
            .max(1)
    }

    pub(in crate::engine) fn prompt(&self, state: &RequestState) -> Prompt {
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
    pub(in crate::engine) fn is_copy_worth(&mut self, id: RequestId, to: u32) -> bool {
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

    pub(in crate::engine) fn hash_block_size_of(&self, state: &RequestState) -> u32 {
        self.residency.hash_block_size(self.ns_of(state))
    }

    /// Whether to read the payloads that a hit up to `disk` hash blocks needs and a hit up to
    /// `host` does not.
    pub(in crate::engine) fn plans_promotion(
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
    pub(in crate::engine) fn promotion_stop(
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
    pub(in crate::engine) fn promise(
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
    pub(in crate::engine) fn load_ended(
        &mut self,
        session: SessionId,
        bytes: u64,
        promise: &LoadPromise,
    ) {
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
