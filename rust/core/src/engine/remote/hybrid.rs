//! Flights of prompts whose hits need windows or states: a flight searches one boundary, and brings all objects that a
//! hit there needs.

use crate::forest::{NONE, NodeId, NsId};
use crate::key::BlockHash;
use crate::namespace::{GroupKind, NamespaceSpec};
use crate::session::LookupRequest;

use super::super::ids::{FlightId, RequestId};
use super::super::parts::EngineParts;
use super::Remote;
use super::boundaries::Boundaries;
use super::flight::{Flight, question};
use super::pieces::{Piece, last_of, of_boundary};
use super::plans::{HitEnds, Wanted};
use super::recent::fingerprint;
use super::search::{SEGMENTS_MAX, Search};
use super::spaces::Space;
use super::waits::read_hashes;

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
        let of = (ns, parts.namespaces.instance(ns), space);
        let mut flight = Flight::new(of, above, (skipped, base), (before, hashes));
        let limit = self.before_hole(&flight, limit, parts.now_ns);
        let is_usable = |boundary| {
            let last = flight.key(last_of(spec, &space, boundary));
            !self.absent.contains(fingerprint(&last), parts.now_ns)
        };
        let steps = (step, space.hash_blocks);
        let boundaries = Boundaries::new((above, limit), steps, is_usable);
        if boundaries.is_over() {
            self.absent.insert(asked, parts.now_ns);
            return None;
        }
        flight.boundaries = Some(boundaries);
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
    fn before_hole(&self, flight: &Flight, limit: u32, now_ns: u64) -> u32 {
        let size = flight.space.hash_blocks;
        let is_absent = |&segment: &u32| {
            let key = flight.key(Piece::segment(&flight.space, segment));
            self.absent.contains(fingerprint(&key), now_ns)
        };
        let hole = (flight.skipped..limit / size).find(is_absent);
        // A hit inside the absent segment needs only a part of it.
        hole.map_or(limit, |segment| limit.min((segment + 1) * size - 1))
    }

    /// Takes the answer to a flight's probes for boundaries. When the search is over, all objects of a hit at the
    /// deepest boundary are to be fetched.
    pub(super) fn boundaries_answered(
        &mut self,
        id: FlightId,
        bits: Option<u64>,
        parts: &mut EngineParts<'_>,
    ) {
        let flight = &mut self.flights[id];
        let (deepest, asked) = (flight.boundary(), fingerprint(&flight.question()));
        let boundaries = flight.boundaries.as_mut();
        let boundaries = boundaries.expect("a flight that looks for a boundary");
        boundaries.answer(bits);
        if !boundaries.is_over() {
            return;
        }
        let found = boundaries.found();
        if bits.is_some() && found != Some(deepest) {
            self.absent.insert(asked, parts.now_ns);
        }
        if let Some(boundary) = found {
            self.take_boundary(id, boundary, parts);
        }
    }

    /// Sets the objects of a flight to all objects that a hit at a boundary needs.
    fn take_boundary(&mut self, id: FlightId, boundary: u32, parts: &mut EngineParts<'_>) {
        let residency = &mut *parts.residency;
        let flight = &mut self.flights[id];
        let spec = residency.spec(flight.ns);
        let whole = boundary / flight.space.hash_blocks;
        let segments = flight.skipped..whole;
        let segments = segments.map(|index| Piece::segment(&flight.space, index));
        let of_boundary = of_boundary(spec, &flight.space, boundary).into_iter();
        // The tiers have the required payloads up to `skipped` segments.
        let is_needed = |piece: &Piece| {
            piece.group.is_some() || piece.after / flight.space.hash_blocks >= flight.skipped
        };
        let pieces: Vec<Piece> = segments.chain(of_boundary.filter(is_needed)).collect();
        let bytes: u64 = pieces.iter().map(|piece| piece.bytes(spec)).sum();
        let is_required = pieces.first().is_some_and(|piece| piece.group.is_none());
        flight.here = vec![false; pieces.len()];
        flight.search = Search::known(pieces.len() as u32);
        flight.pieces = pieces;
        if bytes > self.held_max {
            parts.counters.remote_gets_without_memory += 1;
            (flight.is_cut, flight.is_failed) = (true, true);
        } else if !is_required {
            let hash = flight.hash_at(boundary);
            let node = hash.and_then(|hash| residency.forest().find(flight.ns, &hash));
            match node.filter(|&node| !residency.has_left_index(node)) {
                Some(node) => self.move_lease(id, node, residency),
                None => flight.is_cut = true,
            }
        }
    }

    /// The store lacks an object of a flight's boundary: the next search leaves the boundary out.
    pub(super) fn boundary_lost(&mut self, id: FlightId, parts: &EngineParts<'_>) {
        let flight = &self.flights[id];
        let spec = parts.residency.spec(flight.ns);
        let last = flight.key(last_of(spec, &flight.space, flight.boundary()));
        let (last, asked) = (fingerprint(&last), fingerprint(&flight.question()));
        self.absent.insert(last, parts.now_ns);
        self.absent.remove(asked);
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
