//! Probes and gets for the objects of flights, front to back.

use undercroft_contract::remote::{Expected, RemotePart, RemoteRequest, SegmentPayload};
use undercroft_contract::tier::Tier;

use crate::forest::{HostState, NONE, NodeId};
use crate::slots::slot_offset;
use crate::work;

use super::super::ids::{FlightId, RequestId};
use super::super::parts::EngineParts;
use super::super::residency::Residency;
use super::flight::Flight;
use super::pieces::Piece;
use super::recent::fingerprint;
use super::{ENTRY_HASH_BLOCKS, ObjectGet, Operation, Place, Remote};

/// Flights that an entry looks at.
const FLIGHTS_MAX: usize = 64;

/// An object whose missing payloads have slots.
struct Reserved {
    /// The node at the object's end.
    end: NodeId,
    /// The payloads to be filled, and the index of each among the object's.
    payloads: Vec<(NodeId, u8)>,
    indices: Vec<u32>,
    expected: Expected,
    /// Nodes with a window's block or a state that the object has.
    optional: Vec<NodeId>,
}

impl Remote {
    /// Sends probes and gets of the flights, in the order of their begin.
    pub(super) fn send_for_flights(
        &mut self,
        most: usize,
        parts: &mut EngineParts<'_>,
        out: &mut Vec<RemoteRequest>,
    ) {
        let mut hash_blocks = ENTRY_HASH_BLOCKS;
        let mut last = None;
        for at in 0..self.order.len().min(FLIGHTS_MAX) {
            let Some(&id) = self.order.get(at) else {
                break;
            };
            work::queued();
            self.send_probe(id, most, parts, out);
            while self.flights[id].has_gets() {
                let bytes = self.next_bytes(id, parts.residency);
                let may_send = out.len() < most
                    && self.breaker.allows(parts.now_ns)
                    && self.get_window.allows(bytes);
                if !may_send {
                    break;
                }
                // The work of an entry is bounded: the next one sends the others.
                if hash_blocks == 0 {
                    self.has_rest = true;
                    break;
                }
                let flight = &self.flights[id];
                let piece = flight.piece(flight.objects.next);
                hash_blocks = hash_blocks.saturating_sub(piece.hash_blocks());
                if let Some(request) = self.start_get(id, parts) {
                    last = Some(Self::id_of(request.token()));
                    out.push(request);
                }
            }
        }
        let in_flight = self.get_window.in_flight();
        let last = last.and_then(|id| self.operations.get_mut(id));
        if let Some(Operation::Get(get)) = last.map(|of| &mut of.operation) {
            // All bytes in flight arrive before the last get ends, so its time tells the store's rate.
            get.among = Some(in_flight);
        }
        let looked_at = self.order.iter().take(FLIGHTS_MAX);
        let done = looked_at.filter(|&&id| self.flights[id].is_done());
        let done: Vec<FlightId> = done.copied().collect();
        for id in done {
            self.note_flight_ended(id, parts);
            self.end_flight(id, parts.residency);
        }
    }

    fn send_probe(
        &mut self,
        id: FlightId,
        most: usize,
        parts: &mut EngineParts<'_>,
        out: &mut Vec<RemoteRequest>,
    ) {
        let may_send = out.len() < most && self.breaker.allows(parts.now_ns);
        let flight = &mut self.flights[id];
        if !flight.has_probes() || !may_send {
            return;
        }
        let keys = flight.next_probe(parts.residency.spec(flight.chain.ns));
        if keys.is_empty() {
            return;
        }
        flight.objects.asked_ns = Some(parts.now_ns);
        parts.counters.remote_probes += keys.len() as u64;
        let token = self.send(Operation::Probe { flight: id }, parts.now_ns);
        out.push(RemoteRequest::Probe { token, keys });
    }

    /// Bytes of the next object of a flight.
    fn next_bytes(&self, id: FlightId, residency: &Residency) -> u64 {
        let flight = &self.flights[id];
        match flight.objects.search.is_for_boundary() {
            false => flight.chain.space.bytes,
            true => flight
                .piece(flight.objects.next)
                .bytes(residency.spec(flight.chain.ns)),
        }
    }

    /// Makes the nodes of a flight's next object, with slots for the missing payloads. `None` if no get is to be sent:
    /// all payloads are in the tiers or in flight, or the flight ends there.
    fn start_get(&mut self, id: FlightId, parts: &mut EngineParts<'_>) -> Option<RemoteRequest> {
        let object = self.flights[id].objects.next;
        let piece = self.flights[id].piece(object);
        let bytes = self.next_bytes(id, parts.residency);
        // Memory that ended flights hold for requests that do not ask now goes first, before this flight is cut off.
        if self.held + bytes > self.held_max {
            self.release_idle(id, parts);
        }
        let fits = self.held + bytes <= self.held_max;
        let reserved = fits.then(|| reserve(&self.flights[id], piece, parts));
        let Some(reserved) = reserved.flatten() else {
            parts.counters.remote_gets_without_memory += 1;
            let flight = &mut self.flights[id];
            flight.fate.is_cut = true;
            // Another flight would bring the same objects again, in vain.
            flight.fate.is_failed |= flight.objects.search.is_for_boundary();
            return None;
        };
        self.keep(id, piece, &reserved, parts.residency);
        let flight = &mut self.flights[id];
        flight.objects.next += 1;
        flight.held.ends.push(flight.held.lease);
        let next = flight.objects.next;
        flight.held.bytes += bytes;
        self.held += bytes;
        if !self.flights[id].objects.search.is_for_boundary() {
            self.announce(id, next);
        }
        let key = self.flights[id].chain.key(piece);
        let place = (self.flights[id].chain.ns, key);
        if reserved.payloads.is_empty() {
            self.take_along(id, object, &place);
            return None;
        }
        let flight = &mut self.flights[id];
        let is_first = flight.sent_ns == 0;
        flight.sent_ns = parts.now_ns.max(1);
        flight.objects.gets += 1;
        self.get_window.started(bytes);
        let parts_of = |(&(node, group), &payload): (&(NodeId, u8), &u32)| RemotePart {
            payload,
            arena_offset: slot_offset(parts.residency.node(node).payload(group).host_slot),
            len: parts.residency.payload_bytes(node, group),
        };
        let of_request = reserved.payloads.iter().zip(&reserved.indices);
        let of_request: Vec<RemotePart> = of_request.map(parts_of).collect();
        let blocks = self.flights[id]
            .chain
            .blocks_of(piece, parts.residency.spec(place.0));
        let operation = Operation::Get(ObjectGet {
            takers: vec![(id, object)],
            object: place,
            blocks,
            fingerprint: fingerprint(&key),
            payloads: reserved.payloads,
            bytes,
            is_first,
            among: None,
        });
        let token = self.send(operation, parts.now_ns);
        self.fetching.insert(place, Self::id_of(token));
        Some(RemoteRequest::Get {
            token,
            key,
            expect: Box::new(reserved.expected),
            parts: of_request,
        })
    }

    /// Leases the nodes of an object that a flight brings: the deepest of the chain, and each with a window or state.
    fn keep(&mut self, id: FlightId, piece: Piece, of: &Reserved, residency: &mut Residency) {
        if piece.group.is_none() {
            return self.move_lease(id, of.end, residency);
        }
        for &node in &of.optional {
            residency.pin(node);
        }
        self.flights[id].held.kept.extend(&of.optional);
    }

    /// A flight's object is in the tiers, or is being filled by a save or by another flight's get. The flight waits for
    /// such a get, too.
    fn take_along(&mut self, id: FlightId, object: u32, place: &Place) {
        let get = self.fetching.get(place);
        let get = get.and_then(|&get| self.operations.get_mut(get));
        match get {
            // The get may never end.
            Some(get) if get.is_late => self.flights[id].ends_at(object),
            Some(get) => {
                if let Operation::Get(get) = &mut get.operation {
                    get.takers.push((id, object));
                    self.flights[id].objects.gets += 1;
                }
            }
            None => self.arrived(id, object),
        }
    }

    /// An object of a flight has arrived.
    pub(super) fn arrived(&mut self, id: FlightId, object: u32) {
        let flight = &mut self.flights[id];
        flight.came(object);
        if !flight.objects.search.is_for_boundary() {
            self.unannounce(id, object);
        }
    }

    /// Frees the leases of ended flights whose requests have no demanded lookup.
    fn release_idle(&mut self, but: FlightId, parts: &mut EngineParts<'_>) {
        let shares = &*parts.shares;
        let is_demanded = |&id: &RequestId| shares[id].demanded;
        let is_idle = |&(id, flight): &(FlightId, &Flight)| {
            work::queued();
            id != but && flight.fate.is_over && !flight.waiters.iter().any(is_demanded)
        };
        let idle = self.flights.iter().filter(is_idle);
        let idle: Vec<FlightId> = idle.map(|(id, _)| id).collect();
        for id in idle {
            self.move_lease(id, NONE, parts.residency);
            self.let_go(id, parts.residency);
            self.held -= std::mem::take(&mut self.flights[id].held.bytes);
        }
    }
}

/// Makes the missing nodes of an object, below the nodes of the objects before, and reserves slots for the missing
/// payloads. Windows and states need existing nodes. `None`, and all is undone, if the chain above has left the index
/// or there is no memory.
fn reserve(flight: &Flight, piece: Piece, parts: &mut EngineParts<'_>) -> Option<Reserved> {
    let residency = &mut *parts.residency;
    let above = match flight.chain.parent_of(piece) {
        Some(hash) => residency.forest().find(flight.chain.ns, &hash)?,
        None => NONE,
    };
    let is_above = |id| residency.node(id).depth == piece.after && !residency.has_left_index(id);
    if above != NONE && !is_above(above) {
        return None;
    }
    let mut reserved = Reserved {
        end: above,
        payloads: Vec::new(),
        indices: Vec::new(),
        expected: Expected {
            namespace: flight.chain.digest(),
            parent: flight.chain.parent_of(piece),
            hashes: flight.chain.hashes_of(piece).to_vec(),
            payloads: piece.payloads(residency.spec(flight.chain.ns)),
        },
        optional: Vec::new(),
    };
    let (mut at, hashes) = (0, flight.chain.hashes_of(piece));
    for (index, &hash) in (0..).zip(hashes) {
        let found = residency.forest().find(flight.chain.ns, &hash);
        let node = match found {
            Some(node) if residency.node(node).parent() == reserved.end => node,
            // The block hashes are no chain.
            Some(_) => return undo(&reserved, residency),
            None if piece.group.is_some() => return undo(&reserved, residency),
            None => residency.insert(flight.chain.ns, reserved.end, hash, 0),
        };
        reserved.end = node;
        while let Some(&SegmentPayload { group, .. }) =
            (reserved.expected.payloads.get(at)).filter(|of| of.hash_block == index)
        {
            if piece.group.is_some() {
                reserved.optional.push(node);
            }
            let payload = residency.node(node).payload(group);
            if payload.host == HostState::Empty && !payload.has_slot(Tier::Disk) {
                if !residency.reserve_host(node, group, HostState::Filling, parts.counters) {
                    return undo(&reserved, residency);
                }
                reserved.payloads.push((node, group));
                reserved.indices.push(at as u32);
            }
            at += 1;
        }
    }
    Some(reserved)
}

/// Frees the slots of an object that could not be reserved in full, and the nodes that were made for it.
fn undo(reserved: &Reserved, residency: &mut Residency) -> Option<Reserved> {
    // The nodes of a long chain are removed in later entries. Until then a save may find them and continue below.
    if reserved.end != NONE {
        residency.reconcile(reserved.end);
    }
    give_up_payloads(&reserved.payloads, residency);
    None
}

/// Gives up payloads that were to be filled: the deepest first, so that each node without payloads is removed alone.
pub(super) fn give_up_payloads(payloads: &[(NodeId, u8)], residency: &mut Residency) {
    for &(node, group) in payloads.iter().rev() {
        residency.host_failed(node, group);
        residency.reconcile(node);
    }
}
