//! Lookups and flights: when a request begins or joins one, and for how long it waits.

use crate::forest::{NONE, NodeId, NsId};
use crate::key::BlockHash;
use crate::namespace::{GroupKind, NamespaceSpec};
use crate::session::{LookupRequest, Tokens};

use super::super::coordinator::Engine;
use super::super::fetch::Share;
use super::super::ids::{FlightId, RequestId};
use super::super::parts::EngineParts;
use super::super::planner::FetchSource;
use super::super::requests::RequestState;
use super::super::residency::Residency;
use super::Remote;
use super::flight::{Flight, FlightChain, FlightObjects, question};
use super::pieces::{Piece, last_of};
use super::plans::{Fetches, HitEnds, Wanted};
use super::recent::fingerprint;
use super::search::{Boundaries, BoundarySearch, SEGMENTS_MAX, Search, Segments};
use super::spaces::Space;

/// Flights that one request waits for, in turn.
const TRIES_MAX: u8 = 4;
/// Flights that go on at once.
pub(super) const FLIGHTS_MAX: usize = 1024;

impl Engine {
    /// Whether a request's answer has to wait for segments from the remote store. Begins to fetch the segments that the
    /// tiers lack. `found`: the deepest node of the prompt in the tiers, or `NONE`, and its depth.
    pub(in crate::engine) fn awaits_remote(
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
            if self.flight_goes_on(flight, ns) && !is_late() {
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
        let segments = match fetches {
            Fetches::None => return None,
            Fetches::Some(segments) => segments.min(wanted.segments),
            Fetches::All { .. } => wanted.segments,
        };
        let wanted = Wanted { segments, ..wanted };
        let flight = remote.join(id, ns, request, (wanted, ends.align), &mut parts)?;
        let of = &mut remote.flights[flight];
        let is_new = of.waiters == [id] && of.sent_ns == 0 && of.began_ns == parts.now_ns;
        match fetches {
            Fetches::All {
                width,
                predicted_ns,
            } if is_new => (of.objects.width, of.predicted_ns) = (width, predicted_ns),
            Fetches::All { .. } => {}
            Fetches::Some(_) | Fetches::None => {
                of.fate.is_measure = true;
                remote.leave(flight, id, parts.residency);
                return None;
            }
        }
        Some(flight)
    }

    /// Whether a request has waited for earlier flights for so long that it leaves this flight without a wait.
    fn is_over_before(&mut self, id: RequestId, flight: FlightId, computed: Tokens) -> bool {
        let flights = self.remote.as_ref().map(|remote| &remote.flights);
        let flight_of = flights.and_then(|flights| flights.get(flight));
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
        let of = &remote.flights[flight];
        let is_of_ns = of.chain.ns == ns && of.chain.instance == self.namespaces.instance(ns);
        let came = (of.chain.found, of.reach(of.objects.arrived));
        // A silent store costs a request its time limit only once.
        let gave_up = is_of_ns && (!of.fate.is_over || of.fate.is_failed);
        let (state, share) = (&self.sessions.requests[id], &self.shares[id]);
        let stop = match is_of_ns && !of.fate.is_over && !share.waits.gave_up {
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

    fn flight_goes_on(&self, flight: FlightId, ns: NsId) -> bool {
        let flights = self.remote.as_ref().map(|remote| &remote.flights);
        let flight = flights.and_then(|flights| flights.get(flight));
        flight.is_some_and(|flight| !flight.fate.is_over && flight.chain.ns == ns)
    }

    /// Whether a request with `computed` tokens waits for a flight, and may continue to wait.
    pub(in crate::engine) fn waits_for_flight(
        &self,
        (state, share): (&RequestState, &Share),
        ns: NsId,
        computed: Tokens,
    ) -> bool {
        let Some(flight) = share.waits.remote else {
            return false;
        };
        self.flight_goes_on(flight, ns)
            && !share.waits.gave_up
            && !self.is_flight_late((state, share), computed)
    }

    /// Whether a request with a demanded lookup has waited for its flight for long enough.
    fn is_flight_late(&self, of_request: (&RequestState, &Share), computed: Tokens) -> bool {
        let flights = self.remote.as_ref().map(|remote| &remote.flights);
        let flight = flights.zip(of_request.1.waits.remote);
        let flight = flight.and_then(|(flights, id)| flights.get(id));
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
    pub(in crate::engine) fn count_remote_tokens(
        &mut self,
        id: RequestId,
        hash_block_size: u32,
        (computed, external): (Tokens, Tokens),
    ) {
        let brought = self.shares[id].from_remote;
        if let Some((after, to)) = brought {
            let from = computed.0.max(after * hash_block_size);
            let end = (computed.0 + external.0).min(to * hash_block_size);
            self.counters.remote_hit_tokens += u64::from(end.saturating_sub(from));
        }
    }
}

impl Remote {
    /// The hash blocks that a prompt lacks, and the flight that brings the first of them. `None` if the store does not
    /// help.
    fn wanted(
        &mut self,
        ns: NsId,
        (request, ends): (&LookupRequest<'_>, HitEnds),
        found: (NodeId, u32),
        parts: &EngineParts<'_>,
    ) -> Option<(Wanted, Option<FlightId>)> {
        if !self.breaker.allows(parts.now_ns) {
            return None;
        }
        let space = self.spaces.get(ns, parts.namespaces, parts.residency)?;
        let of_request = (request, ends);
        let (wanted, end) = match space.is_hybrid {
            true => self.wanted_boundary((ns, space), of_request, found, parts)?,
            false => wanted_segments((ns, space), of_request, found, parts)?,
        };
        crate::work::index();
        let under_way = self.by_segment.get(&(ns, end)).copied();
        let absent = match space.is_hybrid {
            true => question(space.digest, end),
            false => Piece::segment(&space, wanted.skipped).key(&space, end),
        };
        let is_absent = self.absent.contains(fingerprint(&absent), parts.now_ns);
        if under_way.is_none() && (is_absent || self.order.len() >= FLIGHTS_MAX) {
            return None;
        }
        Some((wanted, under_way))
    }

    /// Joins the flight that brings the first missing part of a prompt, or begins a flight. `None` if the store does
    /// not help.
    fn join(
        &mut self,
        id: RequestId,
        ns: NsId,
        request: &LookupRequest<'_>,
        (wanted, align): (Wanted, u32),
        parts: &mut EngineParts<'_>,
    ) -> Option<FlightId> {
        let Wanted {
            space,
            deepest,
            found,
            skipped,
            segments,
            ..
        } = wanted;
        if space.is_hybrid {
            return self.join_for_boundary(id, ns, (request, align), &wanted, parts);
        }
        let size = space.hash_blocks;
        let first = request.hashes.get(((skipped + 1) * size) as usize - 1)?;
        if let Some(flight) = self.board(id, (ns, first)) {
            return Some(flight);
        }
        let from = (skipped * size) as usize;
        let to = from + (segments.min(SEGMENTS_MAX) * size) as usize;
        let (before, mut hashes) = read_hashes(request, from, to)?;
        hashes.truncate(hashes.len() / size as usize * size as usize);
        let segments = hashes.len() as u32 / size;
        let lease = match found {
            0 => NONE,
            _ => parts.residency.forest().ancestor(deepest, skipped * size),
        };
        let chain = FlightChain {
            ns,
            instance: parts.namespaces.instance(ns),
            space,
            found,
            skipped,
            base: skipped * size,
            hashes: hashes.into_boxed_slice(),
            before,
        };
        let flight = Flight::new(
            chain,
            FlightObjects::new(Search::Segments(Segments::new(segments)), segments),
        );
        (segments > 0).then(|| self.begin(flight, id, lease, parts))
    }

    /// Makes a request wait for the flight that is found by a block hash.
    pub(super) fn board(&mut self, id: RequestId, by: (NsId, BlockHash)) -> Option<FlightId> {
        crate::work::index();
        let flight = *self.by_segment.get(&by)?;
        self.flights[flight].waiters.push(id);
        Some(flight)
    }

    /// Begins a flight for a request, which leases a node.
    pub(super) fn begin(
        &mut self,
        flight: Flight,
        waiter: RequestId,
        lease: NodeId,
        parts: &mut EngineParts<'_>,
    ) -> FlightId {
        let flight = self.flights.insert(flight);
        self.flights[flight].waiters.push(waiter);
        self.flights[flight].began_ns = parts.now_ns;
        parts.rates.remote.began(parts.now_ns);
        self.move_lease(flight, lease, parts.residency);
        self.announce(flight, 0);
        if self.order.is_empty() && self.reads == 0 {
            self.progress_ns = parts.now_ns;
        }
        self.order.push(flight);
        self.has_begun = true;
        parts.counters.remote_lookups += 1;
        flight
    }

    /// Ends a request's wait for a flight.
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

/// The segments that a prompt lacks, and the block hash at the end of the first. `None` if the tiers have the whole
/// prompt, or if no whole segment is left.
fn wanted_segments(
    (ns, space): (NsId, Space),
    (request, ends): (&LookupRequest<'_>, HitEnds),
    (deepest, found): (NodeId, u32),
    parts: &EngineParts<'_>,
) -> Option<(Wanted, BlockHash)> {
    let tokens = parts.residency.hash_block_size(ns);
    let blocks = u32::try_from(request.hashes.len()).ok()?;
    let limit =
        blocks.min((request.max.0 / tokens).saturating_add(ends.dropped)) / ends.align * ends.align;
    if limit <= found || limit * tokens <= request.computed.0 {
        return None;
    }
    let size = space.hash_blocks;
    let skipped = found / size;
    // A segment inside which the hit ends counts, too.
    let whole = (blocks / size).min(limit.div_ceil(size));
    let segments = whole
        .checked_sub(skipped)
        .filter(|&segments| segments > 0)?;
    let to = whole * size;
    if to * tokens <= request.computed.0 {
        return None;
    }
    let end = request.hashes.get(((skipped + 1) * size) as usize - 1)?;
    let wanted = Wanted {
        space,
        deepest,
        found,
        skipped,
        segments,
        from: found,
        to,
    };
    Some((wanted, end))
}

/// The block hash before the hash block `from`, and the hashes from there to `to`, as far as they are usable.
pub(super) fn read_hashes(
    request: &LookupRequest<'_>,
    from: usize,
    to: usize,
) -> Option<(Option<BlockHash>, Vec<BlockHash>)> {
    let before = match from.checked_sub(1) {
        Some(at) => Some(request.hashes.get(at)?),
        None => None,
    };
    let read = (from..to).map_while(|at| request.hashes.get(at));
    let mut hashes: Vec<BlockHash> = read.collect();
    let len = before.or(hashes.first().copied())?.as_bytes().len();
    let same = hashes
        .iter()
        .take_while(|hash| hash.as_bytes().len() == len);
    let usable = same.count();
    hashes.truncate(usable);
    Some((before, hashes))
}

/// Nodes that are looked at for the end of the hit that the tiers alone allow.
const LOCAL_NODES: u32 = 250;

impl Remote {
    /// The boundaries of a prompt that the tiers lack, and the block hash at the last boundary. `None` if the tiers
    /// have the last boundary. `found` is the deepest node of the prompt with all required payloads, and its depth;
    /// hits end where `ends` says.
    pub(super) fn wanted_boundary(
        &self,
        (ns, space): (NsId, Space),
        (request, ends): (&LookupRequest<'_>, HitEnds),
        found: (NodeId, u32),
        parts: &EngineParts<'_>,
    ) -> Option<(Wanted, BlockHash)> {
        // With a draft model, hits need blocks behind their ends, which no object of the boundary has.
        if ends.dropped > 0 {
            return None;
        }
        let spec = parts.residency.spec(ns);
        let tokens = spec.hash_block_size;
        let step = step_of(spec, &space, ends.align)?;
        let limit = u32::try_from(request.hashes.len()).ok()?;
        let limit = limit.min(request.max.0 / tokens) / step * step;
        let local = request.computed.0 / tokens;
        if limit <= local {
            return None;
        }
        let above = Self::tiers_reach(found, (local, ends.align, limit), parts);
        let least = request.min.0.div_ceil(tokens).saturating_sub(1);
        let above = above.max(local).max(least);
        if above >= limit {
            return None;
        }
        let whole = limit / space.hash_blocks;
        let skipped = (found.1 / space.hash_blocks).min(whole);
        if whole - skipped > SEGMENTS_MAX {
            return None;
        }
        let wanted = Wanted {
            space,
            deepest: found.0,
            found: found.1,
            skipped,
            segments: (whole - skipped).max(1),
            from: above,
            to: limit,
        };
        Some((wanted, request.hashes.get(limit as usize - 1)?))
    }

    /// Joins the flight that searches the deepest of the boundaries that a prompt lacks, or begins one.
    pub(super) fn join_for_boundary(
        &mut self,
        id: RequestId,
        ns: NsId,
        (request, align): (&LookupRequest<'_>, u32),
        wanted: &Wanted,
        parts: &mut EngineParts<'_>,
    ) -> Option<FlightId> {
        let (space, skipped, limit) = (wanted.space, wanted.skipped, wanted.to);
        let end = request.hashes.get(limit as usize - 1)?;
        if let Some(flight) = self.board(id, (ns, end)) {
            return Some(flight);
        }
        let residency = &*parts.residency;
        let spec = residency.spec(ns);
        let step = step_of(spec, &space, align)?;
        let (above, asked) = (wanted.from, fingerprint(&question(space.digest, end)));
        let base = lowest_need(spec, above + 1).min(skipped * space.hash_blocks);
        let (before, hashes) = read_hashes(request, base as usize, limit as usize)?;
        if hashes.len() as u32 != limit - base {
            return None;
        }
        let chain = FlightChain {
            ns,
            instance: parts.namespaces.instance(ns),
            space,
            found: above,
            skipped,
            base,
            hashes: hashes.into_boxed_slice(),
            before,
        };
        let limit = self.before_hole(&chain, limit, parts.now_ns);
        let is_usable = |boundary| {
            let last = chain.key(last_of(spec, &space, boundary));
            !self.absent.contains(fingerprint(&last), parts.now_ns)
        };
        let steps = (step, space.hash_blocks);
        let boundaries = Boundaries::new((above, limit), steps, is_usable);
        if boundaries.is_over() {
            self.absent.insert(asked, parts.now_ns);
            return None;
        }
        let search = Search::Boundary(BoundarySearch::new(boundaries));
        let flight = Flight::new(chain, FlightObjects::new(search, 0));
        let lease = match wanted.found {
            0 => NONE,
            _ => {
                let forest = residency.forest();
                forest.ancestor(wanted.deepest, skipped * space.hash_blocks)
            }
        };
        Some(self.begin(flight, id, lease, parts))
    }

    /// Where the deepest hit ends that the tiers alone allow. If the search is cut off, a boundary below which none
    /// ends.
    fn tiers_reach(
        (deepest, depth): (NodeId, u32),
        (local, align, limit): (u32, u32, u32),
        parts: &EngineParts<'_>,
    ) -> u32 {
        let residency = &*parts.residency;
        if deepest == NONE {
            return 0;
        }
        let top = residency.forest().ancestor(deepest, depth.min(limit));
        match residency.boundary_within(top, (local, align), false, LOCAL_NODES) {
            Ok(boundary) => boundary,
            Err(node) => residency.node(node).depth,
        }
    }

    /// The deepest possible end of the chain: it ends before the end of the first segment that is remembered as absent.
    fn before_hole(&self, chain: &FlightChain, limit: u32, now_ns: u64) -> u32 {
        let size = chain.space.hash_blocks;
        let is_absent = |&segment: &u32| {
            let key = chain.key(Piece::segment(&chain.space, segment));
            self.absent.contains(fingerprint(&key), now_ns)
        };
        let hole = (chain.skipped..limit / size).find(is_absent);
        // A hit inside the absent segment needs only a part of it.
        hole.map_or(limit, |segment| limit.min((segment + 1) * size - 1))
    }
}

/// The number of hash blocks at whose multiples hits end, a multiple of `align`. `None` if it exceeds a segment's.
fn step_of(spec: &NamespaceSpec, space: &Space, align: u32) -> Option<u32> {
    let mut times = 1..=space.hash_blocks;
    times
        .find(|&times| spec.may_end(times * align))
        .map(|times| times * align)
}

/// The depth after which windows and states of hits at `boundary`, or deeper, are needed.
fn lowest_need(spec: &NamespaceSpec, boundary: u32) -> u32 {
    let groups = 0..spec.groups.len();
    let optional = groups.filter(|&group| {
        let kind = spec.groups[group].kind;
        !matches!(kind, GroupKind::Full | GroupKind::Ignored)
    });
    let needed = optional.map(|group| spec.needed_after(group, boundary));
    needed.min().unwrap_or(boundary).min(boundary - 1)
}
