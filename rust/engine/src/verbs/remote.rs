//! The remote store behind lookups and saves: which flights requests join, and how long they wait for them.

use undercroft_contract::remote::{RemoteCompletion, RemoteRequest};
use undercroft_contract::session::{LookupRequest, Priority, Sources, Tokens};

use crate::forest::{NodeId, NsId};
use crate::work;

use super::super::fetch::{Pace, Share};
use super::super::ids::{FlightId, RequestId};
use super::super::planner::{FetchSource, Reading, Reason, Start, Stop};
use super::super::remote::{Fetches, Flight, HitEnds, Remote, Wanted};
use super::super::requests::RequestState;
use super::engine::Engine;

/// Flights that one request waits for, in turn.
const TRIES_MAX: u8 = 4;
/// Segments that are not fetched are noted as left if the store is expected to have at least this part of them.
const LIKELY: f64 = 0.5;

impl Engine {
    /// Attaches the store: from now on, turns may start operations of the store. Without
    /// [`EngineConfig::remote`](super::super::EngineConfig::remote) there are never any.
    pub fn attach_remote(&mut self) {
        let config = &self.config;
        if let Some(of) = config.remote.clone().filter(|_| self.remote.is_none()) {
            let remote = Remote::new(of, config.host_bytes, config.promotion_bytes);
            self.remote = Some(Box::new(remote));
        }
    }

    /// Whether there is a store.
    pub fn has_remote(&self) -> bool {
        self.remote.is_some()
    }

    /// Appends requests for the store to send now, at most `room`.
    pub(super) fn next_remote(&mut self, room: usize, out: &mut Vec<RemoteRequest>) {
        self.residency.allow_rest(self.config.tells);
        if let Some((remote, mut parts)) = self.remote() {
            remote.next(room, &mut parts, out);
        }
    }

    /// Offers the segments that end at nodes that have become visible.
    pub(super) fn offer_remote(&mut self, visible: &[NodeId]) {
        if let Some((remote, mut parts)) = self.remote() {
            remote.offer_new(visible, &mut parts);
        }
    }

    /// Offers the windows and states among payloads that have been saved.
    pub(super) fn offer_remote_saved(&mut self, payloads: &[(NodeId, u8)]) {
        if let Some((remote, mut parts)) = self.remote() {
            remote.offer_saved(payloads, &mut parts);
        }
    }

    /// Offers the segments above a node at which a hit ends.
    pub(super) fn offer_remote_hit(&mut self, node: NodeId) {
        if let Some((remote, mut parts)) = self.remote() {
            remote.offer_hit(node, &mut parts);
        }
    }

    /// Ends the flights of namespaces whose lives have ended.
    pub(super) fn end_outlived_flights(&mut self) {
        if let Some((remote, mut parts)) = self.remote() {
            remote.end_outlived(&mut parts);
        }
    }

    /// Removes a request from its flight: the request neither waits for it nor needs its blocks any more.
    pub(super) fn leave_flight(&mut self, id: RequestId) {
        let Some(remote) = self.remote.as_deref_mut() else {
            return;
        };
        let flight = self.shares[id].waits.remote.take();
        if let Some(flight) = flight {
            remote.leave(flight, id, &mut self.residency);
        }
    }

    /// Takes the end of an operation of the store. An unknown token is ignored.
    pub fn complete_remote(&mut self, completion: RemoteCompletion) {
        self.residency.allow_rest(self.config.tells);
        let Some((remote, mut parts)) = self.remote() else {
            return;
        };
        let (payloads, sums) = remote.complete(completion, &mut parts);
        self.fetched(&payloads, &sums);
    }

    /// Payloads have arrived from the store, with these checksums: from now on they are like saved payloads.
    fn fetched(&mut self, payloads: &[(NodeId, u8)], sums: &[u64]) {
        let mut visible = Vec::new();
        for (&(node, group), &sum) in payloads.iter().zip(sums) {
            work::queued();
            let is_first = self.residency.is_unchanged(node, group, sum);
            assert!(is_first, "a slot that is being filled has no checksum yet");
            self.payload_arrived(node, group, &mut visible);
        }
    }

    /// Whether a request's answer has to wait for segments from the remote store. Begins to fetch the segments that the
    /// tiers lack. `found`: the deepest node of the prompt in the tiers, or `NONE`, and its depth.
    pub(super) fn awaits_remote(
        &mut self,
        id: RequestId,
        ns: NsId,
        request: &LookupRequest<'_>,
        found: (NodeId, u32),
    ) -> bool {
        // A tail has a chain of its own, which is looked up beside the chain of its prompt.
        let is_tail = || request.request.find('\0').is_some_and(|at| at > 0);
        if self.remote.is_none() || is_tail() {
            return false;
        }
        let (state, share) = (&self.sessions.requests[id], &self.shares[id]);
        if let Some(flight) = share.waits.remote {
            let is_late = || self.is_flight_late((state, share), request.computed);
            if self.flight_continues(flight, ns) && !is_late() {
                return true;
            }
            self.note_flight(id, (flight, ns), request.computed);
        }
        let waits = &self.shares[id].waits;
        if self.draining || waits.gave_up || waits.flights == TRIES_MAX {
            return false;
        }
        let Some(flight) = self.join_flight(id, ns, request, found) else {
            return false;
        };
        if self.is_over_before(id, flight, request.computed) {
            return false;
        }
        let Some((remote, parts)) = self.remote() else {
            return false;
        };
        let waits = &mut parts.shares[id].waits;
        let before = waits.remote.replace(flight);
        waits.flights += 1;
        if let Some(before) = before {
            remote.leave(before, id, parts.residency);
        }
        true
    }

    /// The flight that brings the first of the segments that a prompt lacks, which the request has joined. `None` if the
    /// request shall not wait for any.
    fn join_flight(
        &mut self,
        id: RequestId,
        ns: NsId,
        request: &LookupRequest<'_>,
        found: (NodeId, u32),
    ) -> Option<FlightId> {
        let tokens = self.residency.hash_block_size(ns);
        let state = &self.sessions.requests[id];
        let ends = HitEnds {
            align: state.alignment_tokens / tokens,
            dropped: state.dropped_tokens.div_ceil(tokens),
        };
        let (remote, parts) = self.remote()?;
        let (wanted, under_way) = remote.wanted(ns, (request, ends), found, &parts)?;
        let fetches = self.plans_flight(id, request, &wanted, under_way);
        let (remote, mut parts) = self.remote()?;
        remote.fetch(id, ns, request, (wanted, ends), fetches, &mut parts)
    }

    /// Whether a request has waited for earlier flights for so long that it leaves this flight without a wait.
    fn is_over_before(&mut self, id: RequestId, flight: FlightId, computed: Tokens) -> bool {
        let flight_of = self
            .remote
            .as_ref()
            .and_then(|remote| remote.flight(flight));
        let of_request = (&self.sessions.requests[id], &self.shares[id]);
        if flight_of.is_some_and(|of| !self.is_late_for(of_request, of, computed)) {
            return false;
        }
        if let Some(remote) = self.remote.as_deref_mut() {
            remote.leave(flight, id, &mut self.residency);
        }
        self.shares[id].waits.gave_up = true;
        true
    }

    /// A request's flight has ended, or takes too long for it. The blocks that have arrived stay leased until the
    /// request is answered.
    fn note_flight(&mut self, id: RequestId, (flight, ns): (FlightId, NsId), computed: Tokens) {
        let Some(remote) = self.remote.as_deref() else {
            return;
        };
        let of = remote.flight(flight).expect("its request has not left it");
        let is_of_ns = of.is_of(ns, self.namespaces.instance(ns));
        let came = of.brought();
        // A silent store costs a request its time limit only once.
        let gave_up = is_of_ns && of.is_given_up();
        let (state, share) = (&self.sessions.requests[id], &self.shares[id]);
        let stop = match is_of_ns && of.continues() && !share.waits.gave_up {
            true => self.flight_stop((state, share), of, computed),
            false => None,
        };
        if let Some((stop, tokens)) = stop {
            stop.count(FetchSource::Remote, tokens, &mut self.counters);
        }
        let share = &mut self.shares[id];
        share.waits.gave_up |= gave_up;
        share.is_left |= stop.is_some();
        if is_of_ns && came.1 > came.0 {
            share.from_remote = Some(match share.from_remote {
                None => came,
                Some((after, to)) => (after.min(came.0), to.max(came.1)),
            });
        }
        if !is_of_ns {
            self.leave_flight(id);
        }
    }

    fn flight_continues(&self, flight: FlightId, ns: NsId) -> bool {
        let flight = self
            .remote
            .as_ref()
            .and_then(|remote| remote.flight(flight));
        flight.is_some_and(|flight| flight.continues_in(ns))
    }

    /// Whether a request with `computed` tokens waits for a flight, and may continue to wait.
    pub(super) fn waits_for_flight(
        &self,
        (state, share): (&RequestState, &Share),
        ns: NsId,
        computed: Tokens,
    ) -> bool {
        let Some(flight) = share.waits.remote else {
            return false;
        };
        self.flight_continues(flight, ns)
            && !share.waits.gave_up
            && !self.is_flight_late((state, share), computed)
    }

    /// Whether a request with a demanded lookup has waited for its flight for long enough.
    fn is_flight_late(&self, of_request: (&RequestState, &Share), computed: Tokens) -> bool {
        let flight = self.remote.as_ref().zip(of_request.1.waits.remote);
        let flight = flight.and_then(|(remote, id)| remote.flight(id));
        flight.is_none_or(|flight| self.is_late_for(of_request, flight, computed))
    }

    /// Whether a request with a demanded lookup has waited for long enough, if it waits for this flight.
    fn is_late_for(
        &self,
        (state, share): (&RequestState, &Share),
        flight: &Flight,
        computed: Tokens,
    ) -> bool {
        let Some(since_ns) = share.waits.since_ns else {
            return false;
        };
        let gain = || {
            // A segment may end behind the prompt.
            let reach = flight.progress().1 * self.hash_block_size_of(state);
            let reach = reach.min(state.planned.end);
            reach.saturating_sub(computed.0)
        };
        let stops = || self.flight_stop((state, share), flight, computed).is_some();
        self.is_wait_over(&share.waits, since_ns, gain, stops)
    }

    /// Counts the tokens of a load that flights brought for its request.
    pub(super) fn count_remote_tokens(
        &mut self,
        id: RequestId,
        hash_block_size: u32,
        (computed, external): (Tokens, Tokens),
    ) {
        let brought = self.shares[id].brought(hash_block_size);
        self.counters.remote_hit_tokens +=
            u64::from(Sources::of(computed, external, brought).remote.0);
    }

    /// Whether to fetch the segments that a prompt lacks, by a new flight or by the flight `under_way`.
    fn plans_flight(
        &mut self,
        id: RequestId,
        request: &LookupRequest<'_>,
        wanted: &Wanted,
        under_way: Option<FlightId>,
    ) -> Fetches {
        let state = &mut self.sessions.requests[id];
        let blocks = u32::try_from(request.hashes.len()).unwrap_or(u32::MAX);
        state.planned.note(request.computed.0, request.max.0);
        let Some(remote) = &self.remote else {
            return Fetches::None;
        };
        let state = &self.sessions.requests[id];
        if !self.is_planned(&self.shares[id].waits) {
            return Fetches::All {
                width: u32::MAX,
                predicted_ns: None,
            };
        }
        let size = self.hash_block_size_of(state);
        let mut prompt = self.prompt(state);
        prompt.end = prompt.end.min(blocks.saturating_mul(size));
        let ends = wanted.tokens(size, prompt.computed, prompt.end);
        let is_prefetch = request.priority == Priority::Prefetch;
        let rates = &self.planner.rates.remote;
        let asked = ((wanted, under_way), (size, ends));
        let readings = remote
            .readings(asked.0, asked.1, rates, self.now_ns)
            .map(|(width, of)| (width, Reading { is_prefetch, ..of }));
        let mut safe = readings.iter();
        let safe = safe.find(|(_, of)| self.planner.is_safe(&prompt, ends, of));
        let &(width, ref reading) = safe.unwrap_or(&readings[0]);
        let start = if reading.is_known || remote.is_idle() || remote.has_flights() {
            self.planner.start(&prompt, ends, reading)
        } else {
            // Abandoned gets still occupy the store, so new gets would arrive as late.
            Start {
                promotes: false,
                reason: match reading.is_old {
                    true => Reason::Measure,
                    false => Reason::Faster,
                },
            }
        };
        let tokens = ends.1.saturating_sub(ends.0);
        self.note_start(id, FetchSource::Remote, (&start, is_prefetch), tokens);
        if start.promotes {
            let is_known = start.reason != Reason::Unknown;
            return Fetches::All {
                width: if is_known { width } else { readings[2].0 },
                predicted_ns: is_known.then_some(reading.all_ns as u64),
            };
        }
        let share = &mut self.shares[id];
        // A prefetch is decided again when the scheduler asks.
        share.waits.gave_up |= !is_prefetch;
        share.is_left |= reading.present >= LIKELY;
        match start.reason {
            Reason::Measure => Fetches::Some(self.planner.rates.remote.next_measured()),
            _ => Fetches::None,
        }
    }

    /// Why a request's planned wait for a flight is over, with the tokens that have not arrived; `None` if the wait
    /// goes on.
    fn flight_stop(
        &self,
        (state, share): (&RequestState, &Share),
        flight: &Flight,
        computed: Tokens,
    ) -> Option<(Stop, u32)> {
        let remote = self.remote.as_deref()?;
        self.plan_stop((state, share), computed, |prompt| {
            let size = self.hash_block_size_of(state);
            let (arrived, end) = flight.progress();
            let plan = &share.plans.remote;
            let predicts = !plan.ignores_prediction && self.planner.rates.remote.is_known();
            Pace {
                arrived: arrived * size,
                end: (end * size).min(prompt.end),
                together: flight.together() * size,
                rest_ns: predicts
                    .then(|| remote.rest_ns(flight, &self.planner.rates.remote, self.now_ns)),
            }
        })
    }
}
