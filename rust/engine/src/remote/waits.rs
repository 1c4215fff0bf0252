//! Lookups and flights: when a request begins or joins one, and for how long it waits.

use undercroft_contract::key::BlockHash;
use undercroft_contract::namespace::{GroupKind, NamespaceSpec};
use undercroft_contract::session::LookupRequest;

use crate::forest::{NONE, NodeId, NsId};

use super::super::ids::{FlightId, RequestId};
use super::super::parts::EngineParts;
use super::super::planner::{Fetch, Reading, RemoteRates};
use super::super::residency::Residency;
use super::Remote;
use super::flight::{Flight, FlightChain, FlightObjects, question};
use super::pieces::{Piece, last_of};
use super::recent::fingerprint;
use super::search::{Boundaries, BoundarySearch, FETCHED, SEGMENTS_MAX, Search, Segments};
use super::spaces::Space;

/// Flights that go on at once.
pub(super) const FLIGHTS_MAX: usize = 1024;

/// Where the hits of a request end, in hash blocks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HitEnds {
    /// Hits end at multiples of this number.
    pub(crate) align: u32,
    /// This many of the last hash blocks that are cached cannot be used.
    pub(crate) dropped: u32,
}

/// The hash blocks of a prompt that the tiers lack.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    pub(super) space: Space,
    /// The deepest node of the prompt in the tiers, or `NONE`, and its depth.
    pub(super) deepest: NodeId,
    pub(super) found: u32,
    /// Segments before the first segment that is lacking.
    pub(super) skipped: u32,
    /// Number of segments that are lacking; about, with windows or states.
    pub(super) segments: u32,
    /// The end of the hit that the tiers alone allow, and the end of the last segment or the last boundary.
    pub(super) from: u32,
    pub(super) to: u32,
}

/// The segments to fetch, of those that a prompt lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fetches {
    All {
        /// Gets in flight at once.
        width: u32,
        /// The predicted time of the gets, in nanoseconds; `None` without a prediction.
        predicted_ns: Option<u64>,
    },
    /// This many of the first segments, for which no request waits, to measure the store.
    Some(u32),
    None,
}

impl Wanted {
    /// The tokens between which the blocks lie that the tiers lack, of those after `computed` and before `end`. `size`:
    /// tokens of a hash block.
    pub(crate) fn tokens(&self, size: u32, computed: u32, end: u32) -> (u32, u32) {
        let to = (self.to * size).min(end);
        // The blocks that a draft model drops lie behind the end.
        ((self.from * size).max(computed).min(to), to)
    }
}

impl Remote {
    /// The hash blocks that a prompt lacks, and the flight that brings the first of them. `None` if the store does not
    /// help.
    pub(crate) fn wanted(
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

    /// Joins or begins the flight that brings the first of the segments that a prompt lacks. `None` if the request shall
    /// not wait for any.
    pub(crate) fn fetch(
        &mut self,
        id: RequestId,
        ns: NsId,
        request: &LookupRequest<'_>,
        (wanted, ends): (Wanted, HitEnds),
        fetches: Fetches,
        parts: &mut EngineParts<'_>,
    ) -> Option<FlightId> {
        let segments = match fetches {
            Fetches::None => return None,
            Fetches::Some(segments) => segments.min(wanted.segments),
            Fetches::All { .. } => wanted.segments,
        };
        let wanted = Wanted { segments, ..wanted };
        let flight = self.join(id, ns, request, (wanted, ends.align), parts)?;
        let of = &mut self.flights[flight];
        let is_new = of.waiters == [id] && of.sent_ns == 0 && of.began_ns == parts.now_ns;
        match fetches {
            Fetches::All {
                width,
                predicted_ns,
            } if is_new => (of.objects.width, of.predicted_ns) = (width, predicted_ns),
            Fetches::All { .. } => {}
            Fetches::Some(_) | Fetches::None => {
                of.fate.is_measure = true;
                self.leave(flight, id, parts.residency);
                return None;
            }
        }
        Some(flight)
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
        // A hash that cannot be used ends the prompt, inside a segment too: the store has whole segments only.
        hashes.truncate(hashes.len() / size as usize * size as usize);
        let segments = hashes.len() as u32 / size;
        // The nodes that arrive hang below this one, which must not be evicted meanwhile.
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
    pub(crate) fn leave(&mut self, id: FlightId, request: RequestId, residency: &mut Residency) {
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
        // A boundary below the hit that the request asks for at least would be fetched in vain.
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
            // The next request with this prompt need not search all boundaries to learn the same.
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

/// How long flights take.
impl Remote {
    /// How long a flight takes, by the gets in flight at once, the most first. With more of them a flight is faster, but
    /// each get ends later. `(from, to)`: [`Wanted::tokens`].
    pub(crate) fn readings(
        &self,
        (wanted, under_way): (&Wanted, Option<FlightId>),
        (size, (from, to)): (u32, (u32, u32)),
        rates: &RemoteRates,
        now_ns: u64,
    ) -> [(u32, Reading); 4] {
        let segment = wanted.space.hash_blocks * size;
        // A part of a window or state is of no use.
        let block = if wanted.space.is_hybrid {
            to - from
        } else {
            segment
        };
        let at_once = (self.get_window.bytes() / wanted.space.bytes) as u32;
        let most = wanted.segments.min(at_once).max(1);
        [1, 2, 4, 8].map(|part| {
            let width = (most / part).max(1);
            let reading = Reading {
                block,
                together: block.saturating_mul(width),
                ..self.reading(wanted, under_way, width, rates, now_ns)
            };
            (width, reading)
        })
    }

    fn reading(
        &self,
        wanted: &Wanted,
        under_way: Option<FlightId>,
        width: u32,
        rates: &RemoteRates,
        now_ns: u64,
    ) -> Reading {
        let is_hybrid = wanted.space.is_hybrid;
        let (first_ns, all_ns) = rates.wait_ns(&Fetch {
            ahead: self.ahead_of(under_way),
            segments: wanted.segments,
            bytes: wanted.space.bytes,
            width,
            is_probed: is_hybrid || wanted.segments > FETCHED,
            silent_ns: self.silent_ns(now_ns),
        });
        Reading {
            first_ns: if is_hybrid { all_ns } else { first_ns },
            all_ns,
            block: 0,
            together: 0,
            is_prefetch: false,
            present: rates.present(),
            absent_ns: rates.absent_ns(),
            is_known: rates.is_known(),
            is_old: under_way.is_none() && self.reads == 0 && rates.is_old(now_ns),
        }
    }

    /// Nanoseconds until all segments of a flight have arrived.
    pub(crate) fn rest_ns(&self, flight: &Flight, rates: &RemoteRates, now_ns: u64) -> f64 {
        let unsent = flight.unsent();
        let (_, all_ns) = rates.wait_ns(&Fetch {
            ahead: 0,
            segments: unsent + flight.objects.gets,
            bytes: flight.chain.space.bytes,
            width: flight.objects.width,
            is_probed: !flight.is_searched(),
            silent_ns: self.silent_ns(now_ns),
        });
        if unsent > 0 || flight.sent_ns == 0 {
            return all_ns;
        }
        // A get that takes longer than predicted is expected to take as long again.
        let since_ns = (now_ns - flight.sent_ns.min(now_ns)) as f64;
        if since_ns < all_ns {
            all_ns - since_ns
        } else {
            since_ns
        }
    }
}
