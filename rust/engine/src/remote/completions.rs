//! The ends of the store's operations, and operations that take too long.

use std::ops::Range;

use undercroft_contract::remote::{RemoteCompletion, RemoteDone, RemoteError};

use crate::forest::NodeId;
use crate::work;

use super::super::ids::FlightId;
use super::super::parts::EngineParts;
use super::super::planner::RemoteRates;
use super::gets::give_up_payloads;
use super::pieces::{Piece, last_of, of_boundary};
use super::recent::fingerprint;
use super::search::{BoundarySearch, Search};
use super::{InFlight, ObjectGet, ObjectPut, Operation, Remote, count_get, count_put};

/// Time between two looks for operations that take too long, in nanoseconds.
const LOOK_NS: u64 = 5_000_000;
/// Blocks that one answer to a probe makes the engine forget, beside the rest of the last object.
const ENTRY_BLOCKS: usize = 256;
/// Segments that one answer makes the engine forget although the answer is not about them.
const KNOWN_FORGOTTEN: u32 = 512;
/// A put may take this many times as long as a get.
const PUT_STALLS: u64 = 10;

/// Learns from a get that has succeeded. `beside`: the bytes in flight at its end.
fn learn(
    (took_ns, now_ns): (u64, u64),
    (is_first, among): (bool, Option<u64>),
    beside: u64,
    rates: &mut RemoteRates,
) {
    if is_first {
        rates.first_ended(beside, took_ns, now_ns);
    }
    // Gets that were sent later slow this get down, too.
    if let Some(bytes) = among.filter(|&bytes| beside <= bytes) {
        rates.last_ended(bytes, took_ns, now_ns);
    }
}

impl Remote {
    /// Takes the end of an operation. An unknown token is ignored. Returns the payloads that have arrived with it, and
    /// their checksums.
    pub(crate) fn complete(
        &mut self,
        completion: RemoteCompletion,
        parts: &mut EngineParts<'_>,
    ) -> (Vec<(NodeId, u8)>, Vec<u64>) {
        let RemoteCompletion { token, result } = completion;
        let Some(InFlight {
            operation,
            sent_ns,
            is_late,
        }) = self.operations.remove(Remote::id_of(token))
        else {
            return Default::default();
        };
        if !is_late {
            let is_read = !matches!(operation, Operation::Put(_));
            self.reads -= usize::from(is_read);
            self.judge(&result, !is_read, parts);
        }
        let took_ns = parts.now_ns - sent_ns;
        match operation {
            Operation::Probe { .. } if is_late => {}
            Operation::Probe { flight } => {
                if result.is_ok() {
                    parts.rates.remote.probed(took_ns);
                }
                self.probe_ended(flight, &result, parts);
            }
            Operation::Put(put) => self.take_put(put, result, took_ns, parts),
            Operation::Get(get) => return self.take_get((token, get), result, took_ns, parts),
        }
        Default::default()
    }

    /// Takes the end of a put.
    fn take_put(
        &mut self,
        put: ObjectPut,
        result: Result<RemoteDone, RemoteError>,
        took_ns: u64,
        parts: &mut EngineParts<'_>,
    ) {
        self.writes -= 1;
        self.put_window.ended(put.bytes, result.is_ok());
        self.put_ended(put.fingerprint, &result, parts.now_ns);
        if result.is_ok() {
            self.told.add(&put.payloads, parts);
        }
        match result {
            Ok(RemoteDone::AlreadyThere) => parts.counters.remote_puts_known += 1,
            Ok(_) => count_put(put.payload_bytes, took_ns, parts.counters),
            Err(_) => parts.counters.remote_puts_failed += 1,
        }
        for node in put.nodes.into_iter().rev() {
            parts.residency.unpin(node);
        }
    }

    /// Takes the end of a get. Returns its payloads, and their checksums if they have arrived.
    fn take_get(
        &mut self,
        (token, get): (u64, ObjectGet),
        result: Result<RemoteDone, RemoteError>,
        took_ns: u64,
        parts: &mut EngineParts<'_>,
    ) -> (Vec<(NodeId, u8)>, Vec<u64>) {
        let ObjectGet {
            takers,
            object,
            fingerprint,
            blocks,
            payloads,
            bytes,
            is_first,
            among,
        } = get;
        // A later get of the object, for other payloads, may have taken the place in the map.
        if self.fetching.get(&object) == Some(&Self::id_of(token)) {
            self.fetching.remove(&object);
        }
        // A store that answers without all checksums has not brought the object.
        let is_whole = |sums: &Vec<u64>| sums.len() == payloads.len();
        let (sums, why) = match result {
            Ok(RemoteDone::Got(sums)) if is_whole(&sums) => (Some(sums), None),
            result => (None, result.err()),
        };
        let beside = self.get_window.in_flight();
        self.get_window.ended(bytes, sums.is_some());
        if sums.is_some() {
            let lens = payloads.iter();
            let lens = lens.map(|&(node, group)| parts.residency.payload_bytes(node, group));
            count_get(lens.map(u64::from).sum(), took_ns, parts.counters);
            let times = (took_ns, parts.now_ns);
            learn(times, (is_first, among), beside, &mut parts.rates.remote);
            self.known.insert(fingerprint, parts.now_ns);
            self.told.add(&payloads, parts);
        } else {
            if why.is_some_and(RemoteError::is_of_object) {
                self.told.remove(object.1.namespace, &blocks, parts);
            }
            if why == Some(RemoteError::NotFound) {
                // The answer took no longer than that of a probe, and the planner learns that the store lacks objects.
                parts.rates.remote.probed(took_ns);
                if is_first {
                    parts.rates.remote.flight_ended(0, 1);
                }
            }
            give_up_payloads(&payloads, parts.residency);
        }
        let was_known = self.note_object(fingerprint, why, parts.now_ns);
        let mut left = KNOWN_FORGOTTEN;
        for taker in takers {
            if was_known && why == Some(RemoteError::NotFound) {
                self.forget_known(taker.0, taker.1 + 1..u32::MAX, &mut left);
            }
            self.get_ended(taker, sums.is_some(), why, parts);
        }
        (payloads, sums.unwrap_or_default())
    }

    /// Learns from a result whether the store works.
    fn judge(
        &mut self,
        result: &Result<RemoteDone, RemoteError>,
        is_put: bool,
        parts: &mut EngineParts<'_>,
    ) {
        let now_ns = parts.now_ns;
        if !is_put {
            self.progress_ns = now_ns;
        }
        match result {
            Ok(_) | Err(RemoteError::NotFound) => self.breaker.succeeded(),
            Err(RemoteError::Corrupt) => {
                self.breaker.succeeded();
                parts.counters.remote_corrupt += 1;
            }
            Err(RemoteError::Cipher) => {
                self.breaker.succeeded();
                parts.counters.decryption_failures += 1;
            }
            Err(RemoteError::Throttled) => {
                parts.counters.remote_throttled += 1;
                let window = match is_put {
                    true => &mut self.put_window,
                    false => &mut self.get_window,
                };
                window.throttled();
                // The store answers: a throttled trial has not failed.
                self.breaker.succeeded();
            }
            Err(RemoteError::Full) => self.puts.pause(now_ns),
            // A host that may only read continues to read.
            Err(RemoteError::Denied) if is_put => {
                parts.counters.remote_failures += 1;
                self.puts.pause(now_ns);
            }
            Err(RemoteError::Denied | RemoteError::Late | RemoteError::Unreachable) => {
                self.note_failure(parts);
            }
            Err(RemoteError::Stopped) => {}
        }
    }

    /// Counts a failure of the store. If the breaker opens, all flights end.
    fn note_failure(&mut self, parts: &mut EngineParts<'_>) {
        parts.counters.remote_failures += 1;
        if self.breaker.failed(parts.now_ns) {
            self.end_all(parts);
        }
    }

    /// Ends all flights.
    fn end_all(&mut self, parts: &mut EngineParts<'_>) {
        for id in self.order.clone() {
            work::queued();
            let flight = &mut self.flights[id];
            (flight.fate.is_cut, flight.fate.is_failed) = (true, true);
            self.end_flight(id, parts.residency);
        }
    }

    fn probe_ended(
        &mut self,
        id: FlightId,
        result: &Result<RemoteDone, RemoteError>,
        parts: &mut EngineParts<'_>,
    ) {
        let bits = match result {
            Ok(RemoteDone::Present(bits)) => Some(*bits),
            _ => None,
        };
        if let Some(bits) = bits {
            self.forget_absent(id, bits, parts);
            self.forget_lost(id, bits, parts);
        }
        let Some(flight) = self.flights.get_mut(id).filter(|of| of.is_asking()) else {
            return;
        };
        flight.objects.asked_ns = None;
        let Search::Segments(search) = &mut flight.objects.search else {
            return self.boundaries_answered(id, bits, parts);
        };
        search.answer(bits);
        let (end, is_over) = (search.present(), search.is_over());
        if bits.is_some() && is_over && end < flight.objects.count() {
            let missing = fingerprint(&flight.chain.key(flight.piece(end)));
            self.absent.insert(missing, parts.now_ns);
        }
    }

    /// Forgets the blocks of objects that the store lacks by the answer to a probe. The blocks of an object become known
    /// together, and the last ones are forgotten last. An answer may be about more blocks than an entry handles. The
    /// others are forgotten after the next probe.
    fn forget_absent(&mut self, id: FlightId, bits: u64, parts: &mut EngineParts<'_>) {
        let flight = self.flights.get(id).filter(|of| !of.fate.is_over);
        let Some(flight) = flight.filter(|_| !self.told.is_empty()) else {
            return;
        };
        let (digest, spec) = (flight.chain.digest(), parts.residency.spec(flight.chain.ns));
        let mut left = ENTRY_BLOCKS;
        let mut gone = Vec::new();
        for piece in flight.absent(bits, spec) {
            let blocks = flight.chain.blocks_of(piece, spec);
            let is_known = blocks.last().is_some_and(|&of| self.told.knows(digest, of));
            if is_known && left > 0 {
                left = left.saturating_sub(blocks.len());
                gone.extend(blocks);
            }
        }
        self.told.remove(digest, &gone, parts);
    }

    /// Forgets that the store has the objects that it lacks by the answer to a probe: they are written again when they
    /// have been computed again. The segments between such a segment and the next one of the probe are forgotten, too.
    fn forget_lost(&mut self, id: FlightId, bits: u64, parts: &EngineParts<'_>) {
        let Some(flight) = self.flights.get(id) else {
            return;
        };
        let absent = flight.absent(bits, parts.residency.spec(flight.chain.ns));
        let asked = flight.objects.search.asked().to_vec();
        let lost: Vec<bool> = (absent.into_iter())
            .map(|piece| self.known.remove(fingerprint(&flight.chain.key(piece))))
            .collect();
        if flight.objects.search.is_for_boundary() {
            return;
        }
        let mut left = KNOWN_FORGOTTEN;
        let absent = (0..asked.len()).filter(|bit| bits >> bit & 1 == 0);
        for (at, _) in absent.zip(lost).filter(|(_, was_known)| *was_known) {
            let next = asked.get(at + 1).copied().unwrap_or(u32::MAX);
            self.forget_known(id, asked[at] + 1..next, &mut left);
        }
    }

    /// Forgets that the store has these segments of a flight, `left` at most. The store has lost the segment before
    /// them, and has probably lost them, too.
    fn forget_known(&mut self, id: FlightId, segments: Range<u32>, left: &mut u32) {
        let Some(flight) = self
            .flights
            .get(id)
            .filter(|of| !of.objects.search.is_for_boundary())
        else {
            return;
        };
        let end = segments.end.min(flight.objects.count());
        for segment in (segments.start..end).take(*left as usize) {
            *left -= 1;
            self.known
                .remove(fingerprint(&flight.chain.key(flight.piece(segment))));
        }
    }

    /// Remembers the result of a get of an object. Returns whether the store was known to have an object that it lacks.
    fn note_object(&mut self, segment: u64, why: Option<RemoteError>, now_ns: u64) -> bool {
        let mut was_known = false;
        if why.is_some_and(RemoteError::is_of_object) {
            was_known = self.known.remove(segment);
            self.absent.insert(segment, now_ns);
        }
        if matches!(why, Some(RemoteError::Corrupt | RemoteError::Cipher)) {
            self.broken.insert(segment, now_ns);
        }
        was_known
    }

    /// A get that a flight waits for has ended.
    fn get_ended(
        &mut self,
        (id, object): (FlightId, u32),
        ok: bool,
        why: Option<RemoteError>,
        parts: &EngineParts<'_>,
    ) {
        let Some(flight) = self.flights.get_mut(id) else {
            return;
        };
        let left = flight.objects.gets.checked_sub(1);
        flight.objects.gets = left.expect("a flight counts its gets");
        if ok {
            return self.arrived(id, object);
        }
        flight.ends_at(object);
        if !flight.objects.search.is_for_boundary() {
            self.unannounce(id, object);
        } else if why.is_some_and(RemoteError::is_of_object) {
            self.boundary_lost(id, parts);
        }
    }

    /// Notices operations that take too long. Their waiters wait no longer; the operations keep their memory until they
    /// end.
    pub(super) fn look_for_late(&mut self, parts: &mut EngineParts<'_>) {
        let now_ns = parts.now_ns;
        if now_ns < self.next_look_ns || !self.is_active() {
            return;
        }
        self.next_look_ns = now_ns + LOOK_NS;
        self.breaker.look(now_ns);
        let is_silent = now_ns >= self.progress_ns.saturating_add(self.config.stall_ns);
        // Flights may also wait for a store that takes no requests.
        let mut is_stalled = is_silent && self.reads == 0 && !self.order.is_empty();
        let (mut probes, mut failures) = (Vec::new(), 0);
        for of in self.operations.values_mut().filter(|of| !of.is_late) {
            work::queued();
            let age_ns = now_ns - of.sent_ns;
            let is_get = matches!(of.operation, Operation::Get { .. });
            of.is_late = match of.operation {
                Operation::Probe { .. } => age_ns >= self.config.probe_ns,
                Operation::Put { .. } => age_ns >= PUT_STALLS.saturating_mul(self.config.stall_ns),
                Operation::Get { .. } => is_silent,
            };
            if !of.is_late {
                continue;
            }
            match of.operation {
                Operation::Probe { flight } => probes.push(flight),
                Operation::Get { .. } | Operation::Put { .. } => {}
            }
            is_stalled |= is_get;
            failures += u32::from(!is_get);
            self.reads -= usize::from(!matches!(of.operation, Operation::Put { .. }));
        }
        for id in probes {
            self.probe_ended(id, &Err(RemoteError::Late), parts);
        }
        // All gets of a silent store together count as one failure.
        for _ in 0..failures + u32::from(is_stalled) {
            self.note_failure(parts);
        }
        if is_stalled {
            self.progress_ns = now_ns;
            self.end_all(parts);
        }
    }
}

impl Remote {
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
        let Search::Boundary(BoundarySearch { boundaries, .. }) = &mut flight.objects.search else {
            return;
        };
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
        let spec = residency.spec(flight.chain.ns);
        let whole = boundary / flight.chain.space.hash_blocks;
        let segments = flight.chain.skipped..whole;
        let segments = segments.map(|index| Piece::segment(&flight.chain.space, index));
        let of_boundary = of_boundary(spec, &flight.chain.space, boundary).into_iter();
        // The tiers have the required payloads up to `skipped` segments.
        let is_needed = |piece: &Piece| {
            piece.group.is_some()
                || piece.after / flight.chain.space.hash_blocks >= flight.chain.skipped
        };
        let pieces: Vec<Piece> = segments.chain(of_boundary.filter(is_needed)).collect();
        let bytes: u64 = pieces.iter().map(|piece| piece.bytes(spec)).sum();
        let is_required = pieces.first().is_some_and(|piece| piece.group.is_none());
        flight.objects.here = vec![false; pieces.len()];
        if let Search::Boundary(search) = &mut flight.objects.search {
            search.set_pieces(pieces);
        }
        if bytes > self.held_max {
            parts.counters.remote_gets_without_memory += 1;
            (flight.fate.is_cut, flight.fate.is_failed) = (true, true);
        } else if !is_required {
            let hash = flight.chain.hash_at(boundary);
            let node = hash.and_then(|hash| residency.forest().find(flight.chain.ns, &hash));
            match node.filter(|&node| !residency.has_left_index(node)) {
                Some(node) => self.move_lease(id, node, residency),
                None => flight.fate.is_cut = true,
            }
        }
    }

    /// The store lacks an object of a flight's boundary: the next search leaves the boundary out.
    pub(super) fn boundary_lost(&mut self, id: FlightId, parts: &EngineParts<'_>) {
        let flight = &self.flights[id];
        let spec = parts.residency.spec(flight.chain.ns);
        let last = flight
            .chain
            .key(last_of(spec, &flight.chain.space, flight.boundary()));
        let (last, asked) = (fingerprint(&last), fingerprint(&flight.question()));
        self.absent.insert(last, parts.now_ns);
        self.absent.remove(asked);
    }
}
