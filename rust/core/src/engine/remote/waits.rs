//! Lookups and flights: when a request begins or joins one, and for how long it waits.

use crate::forest::{NONE, NodeId, NsId};
use crate::key::BlockHash;
use crate::session::{LookupRequest, PromotionWait, Tokens};

use super::super::coordinator::Engine;
use super::super::parts::EngineParts;
use super::super::requests::{RequestId, RequestState};
use super::super::residency::Residency;
use super::Remote;
use super::flight::{Flight, FlightId};
use super::plans::Fetches;
use super::recent::fingerprint;
use super::search::{SEGMENTS_MAX, Search};
use super::spaces::Space;

/// Flights that one request waits for, in turn.
const TRIES_MAX: u8 = 4;
/// Flights that go on at once.
const FLIGHTS_MAX: usize = 1024;

/// A request's share in the flights.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::engine) struct RemoteShare {
    /// The flight that it waits for, or whose segments are leased until it has looked.
    pub(in crate::engine) flight: Option<FlightId>,
    /// Flights that it has joined.
    tries: u8,
    /// It has waited for long enough, or shall not wait: it joins no other.
    pub(super) gave_up: bool,
    /// Segments that are probably there were left, since computing takes less time.
    pub(in crate::engine) is_left: bool,
    /// The decision to wait was counted.
    pub(super) is_counted: bool,
    /// It waits against the prediction.
    pub(super) ignores_prediction: bool,
    /// Depths (exclusive, inclusive) that flights brought for it.
    pub(in crate::engine) brought: Option<(u32, u32)>,
}

impl Engine {
    /// Whether a request's answer has to wait for segments from the remote store. Begins to bring those that the tiers
    /// lack.
    pub(in crate::engine) fn awaits_remote(
        &mut self,
        id: RequestId,
        ns: NsId,
        request: &LookupRequest<'_>,
    ) -> bool {
        if self.remote.is_none() {
            return false;
        }
        if let Some(flight) = self.sessions.requests[id].remote.flight {
            let state = &self.sessions.requests[id];
            if self.flight_goes_on(flight, ns) && !self.is_flight_late(state) {
                return true;
            }
            self.note_flight(id, flight, ns);
        }
        let share = &self.sessions.requests[id].remote;
        if share.gave_up || share.tries == TRIES_MAX {
            return false;
        }
        let Some((remote, parts)) = self.remote() else {
            return false;
        };
        let Some((wanted, under_way)) = remote.wanted(ns, request, &parts) else {
            return false;
        };
        let fetches = self.plans_flight(id, request, &wanted, under_way);
        let Some((remote, mut parts)) = self.remote() else {
            return false;
        };
        let (segments, width, predicted_ns) = match fetches {
            Fetches::None => return false,
            Fetches::Some(segments) => (segments.min(wanted.segments), segments, None),
            Fetches::All {
                width,
                predicted_ns,
            } => (wanted.segments, width, predicted_ns),
        };
        let is_measure = matches!(fetches, Fetches::Some(_));
        let flight = match under_way {
            Some(flight) => flight,
            None => {
                let segments = segments.min(SEGMENTS_MAX);
                let begun = remote.begin(ns, request, &wanted, segments, &mut parts);
                let Some(flight) = begun else {
                    return false;
                };
                let of = &mut remote.flights[flight];
                (of.is_measure, of.width, of.predicted_ns) = (is_measure, width, predicted_ns);
                flight
            }
        };
        if is_measure {
            return false;
        }
        remote.flights[flight].waiters.push(id);
        let share = &mut parts.requests[id].remote;
        let before = share.flight.replace(flight);
        share.tries += 1;
        if let Some(before) = before {
            remote.leave(before, id, parts.residency);
        }
        true
    }

    /// A request's flight has ended, or takes too long for it. The blocks that have arrived stay leased until the request is answered.
    fn note_flight(&mut self, id: RequestId, flight: FlightId, ns: NsId) {
        let Some(remote) = self.remote.as_deref() else {
            return;
        };
        let of = &remote.flights[flight];
        let is_of_ns = of.ns == ns;
        let came = (of.found, of.depth_of(of.arrived));
        // A store that is silent costs a request its time limit once.
        let gave_up = is_of_ns && (!of.is_over || of.is_failed);
        let state = &self.sessions.requests[id];
        let stop = match is_of_ns && !of.is_over && !state.remote.gave_up {
            true => self.flight_stop(state, of),
            false => None,
        };
        if let Some((stop, tokens)) = stop {
            stop.count_remote(tokens, &mut self.counters);
        }
        let share = &mut self.sessions.requests[id].remote;
        share.gave_up |= gave_up;
        share.is_left |= stop.is_some();
        if is_of_ns && came.1 > came.0 {
            share.brought = Some(match share.brought {
                None => came,
                Some((after, to)) => (after.min(came.0), to.max(came.1)),
            });
        }
        if !is_of_ns {
            self.leave_flight(id);
        }
    }

    fn flight_goes_on(&self, flight: FlightId, ns: NsId) -> bool {
        let flights = self.remote.as_ref().map(|remote| &remote.flights);
        let flight = flights.and_then(|flights| flights.get(flight));
        flight.is_some_and(|flight| !flight.is_over && flight.ns == ns)
    }

    /// Whether a request waits for a flight, and may go on to do so.
    pub(in crate::engine) fn waits_for_flight(&self, state: &RequestState, ns: NsId) -> bool {
        let Some(flight) = state.remote.flight else {
            return false;
        };
        self.flight_goes_on(flight, ns) && !state.remote.gave_up && !self.is_flight_late(state)
    }

    /// Whether a request that the scheduler has asked for has waited for its flight for long enough.
    fn is_flight_late(&self, state: &RequestState) -> bool {
        let (Some(remote), Some(demanded_ns)) = (&self.remote, state.demanded_ns) else {
            return false;
        };
        let flight = state.remote.flight.and_then(|id| remote.flights.get(id));
        let Some(flight) = flight else {
            return true;
        };
        match state.wait.unwrap_or(self.config.promotion_wait) {
            PromotionWait::Complete => false,
            PromotionWait::Planned => self.flight_stop(state, flight).is_some(),
            PromotionWait::Limit {
                base_ns,
                per_1k_tokens_ns,
            } => {
                let gain = self.gain_of(state, flight.depth_of(flight.goal()));
                let part = u128::from(per_1k_tokens_ns) * u128::from(gain) / 1000;
                u128::from(self.now_ns - demanded_ns) >= u128::from(base_ns) + part
            }
        }
    }

    /// Counts the tokens of a load that flights brought for its request.
    pub(in crate::engine) fn count_remote_tokens(
        &mut self,
        id: RequestId,
        hash_block_size: u32,
        (computed, external): (Tokens, Tokens),
    ) {
        let brought = self.sessions.requests[id].remote.brought;
        if let Some((after, to)) = brought {
            let from = computed.0.max(after * hash_block_size);
            let end = (computed.0 + external.0).min(to * hash_block_size);
            self.counters.remote_hit_tokens += u64::from(end.saturating_sub(from));
        }
    }
}

/// The segments of a prompt that the tiers lack.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted {
    pub(super) space: Space,
    /// The deepest node of the prompt in the tiers, or `NONE`, and its depth.
    deepest: NodeId,
    pub(super) found: u32,
    /// Segments before the first.
    pub(super) skipped: u32,
    pub(super) segments: u32,
}

impl Remote {
    /// The segments that a prompt lacks, and the flight that brings the first. `None` if the store does not help.
    fn wanted(
        &mut self,
        ns: NsId,
        request: &LookupRequest<'_>,
        parts: &EngineParts<'_>,
    ) -> Option<(Wanted, Option<FlightId>)> {
        if !self.breaker.allows(parts.now_ns) {
            return None;
        }
        let space = self.spaces.get(ns, parts.namespaces, parts.residency)?;
        let residency = &*parts.residency;
        let found = residency.deepest(ns, request.hashes, |node| node.is_visible());
        let (deepest, found) = found.unwrap_or((NONE, 0));
        let size = space.hash_blocks;
        let tokens = residency.hash_block_size(ns) * size;
        let skipped = found / size;
        let whole = u32::try_from(request.hashes.len()).ok()? / size;
        // A segment that the hit ends in counts.
        let wanted = whole.min(request.max.0.div_ceil(tokens));
        let segments = wanted.checked_sub(skipped).filter(|&of| of > 0)?;
        if wanted * tokens <= request.computed.0 {
            return None;
        }
        let first = request.hashes.get(((skipped + 1) * size) as usize - 1)?;
        crate::work::index();
        let under_way = self.by_segment.get(&(ns, first)).copied();
        let is_absent = self
            .absent
            .contains(fingerprint(&space.digest, &first), parts.now_ns);
        if under_way.is_none() && (is_absent || self.order.len() >= FLIGHTS_MAX) {
            return None;
        }
        let wanted = Wanted {
            space,
            deepest,
            found,
            skipped,
            segments,
        };
        Some((wanted, under_way))
    }

    /// Begins a flight for the first `segments` of those that a prompt lacks.
    fn begin(
        &mut self,
        ns: NsId,
        request: &LookupRequest<'_>,
        wanted: &Wanted,
        segments: u32,
        parts: &mut EngineParts<'_>,
    ) -> Option<FlightId> {
        let Wanted {
            space,
            deepest,
            found,
            skipped,
            ..
        } = *wanted;
        let size = space.hash_blocks;
        let from = (skipped * size) as usize;
        let (before, hashes) = read_hashes(request, from, segments, size)?;
        let segments = hashes.len() as u32 / size;
        let lease = match found {
            0 => NONE,
            _ => parts.residency.forest().ancestor(deepest, skipped * size),
        };
        let flight = self.flights.insert(Flight {
            ns,
            space,
            found,
            skipped,
            hashes,
            before,
            search: Search::new(segments),
            asked_ns: None,
            here: vec![false; segments as usize],
            arrived: 0,
            next: 0,
            gets: 0,
            ends: Vec::new(),
            lease: NONE,
            bytes: 0,
            is_cut: false,
            is_failed: false,
            is_over: false,
            waiters: Vec::new(),
            is_measure: false,
            width: u32::MAX,
            began_ns: parts.now_ns,
            sent_ns: 0,
            predicted_ns: None,
        });
        self.move_lease(flight, lease, parts.residency);
        self.announce(flight, 0);
        if self.order.is_empty() && self.reads == 0 {
            self.progress_ns = parts.now_ns;
        }
        self.order.push(flight);
        self.has_begun = true;
        parts.counters.remote_lookups += 1;
        parts.rates.remote.began(parts.now_ns);
        Some(flight)
    }

    /// A request no longer waits for a flight.
    pub(super) fn leave(&mut self, id: FlightId, request: RequestId, residency: &mut Residency) {
        let Some(flight) = self.flights.get_mut(id) else {
            return;
        };
        flight.waiters.retain(|&of| of != request);
        if flight.is_unused() {
            self.drop_flight(id, residency);
        }
    }
}

/// The hash before the hash block `from`, and those of the segments behind, as far as they are usable.
fn read_hashes(
    request: &LookupRequest<'_>,
    from: usize,
    segments: u32,
    size: u32,
) -> Option<(Option<BlockHash>, Box<[BlockHash]>)> {
    let before = match from.checked_sub(1) {
        Some(at) => Some(request.hashes.get(at)?),
        None => None,
    };
    let to = from + (segments * size) as usize;
    let read = (from..to).map_while(|at| request.hashes.get(at));
    let mut hashes: Vec<BlockHash> = read.collect();
    let len = before.or(hashes.first().copied())?.as_bytes().len();
    let same = hashes
        .iter()
        .take_while(|hash| hash.as_bytes().len() == len);
    let usable = same.count() / size as usize * size as usize;
    hashes.truncate(usable);
    (usable > 0).then(|| (before, hashes.into_boxed_slice()))
}
