//! The remote store below the disk tier: which segments are probed, fetched and written.
//!
//! A chain of hash blocks is cut into segments of a fixed number of hash blocks (`spaces`). Each segment is an object
//! of its own, named by the block hash at its end, which fixes the whole prefix: no manifest could be out of date.
//!
//! - A lookup whose chain ends before the prompt begins a *flight* (`flight`): probes find the end of the chain in the
//!   store (`search`), and gets fill slots of the arena front to back, below nodes that are made like those of a save
//!   (`gets`). A segment that has arrived is in host memory like any other. Requests for the same segments share a
//!   flight.
//! - Where a hit needs windows or states, the flight searches a boundary (`search`), and brings all objects of a
//!   hit there (`pieces`).
//! - Segments that have become visible are written (`puts`), at a limited rate and with a limited part of the
//!   arena. Segments that do not fit are dropped.
//! - A store that fails gets no requests for a while (`breaker`).
//!
//! Only the requests of a flight wait for the store, and no longer than for a promotion (`waits`).

mod breaker;
#[cfg(feature = "check")]
mod check;
mod completions;
mod flight;
mod gets;
mod pieces;
mod puts;
mod recent;
mod search;
mod spaces;
mod told;
mod waits;

use rustc_hash::FxHashMap;
use slotmap::{Key, KeyData, SlotMap};
use undercroft_contract::key::BlockHash;
use undercroft_contract::remote::{ObjectKey, RemoteConfig, RemoteRequest};
use undercroft_contract::session::BlockEvent;

use crate::forest::{NONE, NodeId, NsId};
use crate::metrics::{Counters, Gauges};
use crate::work;

use super::ids::FlightId;
use super::namespaces::Namespaces;
use super::parts::EngineParts;
use super::residency::Residency;
use breaker::{Breaker, Window};
pub(crate) use flight::Flight;
use puts::PutQueue;
use recent::Recent;
use spaces::Spaces;
use told::Told;
pub(super) use waits::{Fetches, HitEnds, Wanted};

/// Segments that are remembered as being in the store, and for how long, in nanoseconds: the store may evict.
const KNOWN_MAX: usize = 1 << 17;
const KNOWN_NS: u64 = 3_600_000_000_000;
/// First segments that are remembered as missing.
const ABSENT_MAX: usize = 1 << 14;
/// Flights whose bytes count as sent before the bytes of a new flight.
const AHEAD_MAX: usize = 64;
/// The part of the arena that writes may hold.
const PUT_PART: u64 = 4;
/// Hash blocks that one entry fetches at most. It writes at most the same number.
const ENTRY_HASH_BLOCKS: u32 = 64;

slotmap::new_key_type! {
    struct RemoteId;
}

/// An object, in a namespace of this engine.
type Place = (NsId, ObjectKey);

/// An operation of the store. It holds its slots until its completion, even if no request needs it any more.
#[derive(Debug)]
enum Operation {
    Probe { flight: FlightId },
    Get(ObjectGet),
    Put(ObjectPut),
}

#[derive(Debug)]
struct ObjectGet {
    /// The flights that wait for the object, and its index in each.
    takers: Vec<(FlightId, u32)>,
    object: Place,
    fingerprint: u64,
    /// All blocks of the object, each with its group.
    blocks: Vec<(BlockHash, u8)>,
    /// Payloads being filled, in the order of the request's parts.
    payloads: Vec<(NodeId, u8)>,
    /// Bytes that the get window counts.
    bytes: u64,
    /// The get is the first of its flight.
    is_first: bool,
    /// For the last get that an entry sends: the bytes in flight after the send.
    among: Option<u64>,
}

#[derive(Debug)]
struct ObjectPut {
    /// The leased nodes.
    nodes: Vec<NodeId>,
    fingerprint: u64,
    payloads: Vec<(NodeId, u8)>,
    /// Bytes that the put window counts.
    bytes: u64,
    payload_bytes: u64,
}

#[derive(Debug)]
struct InFlight {
    operation: Operation,
    sent_ns: u64,
    /// The operation has taken too long, and was counted as late.
    is_late: bool,
}

/// The remote store, as the engine uses it.
///
/// Invariants:
/// - a payload that an operation fills has a slot and is being filled; the nodes that a put reads are leased, and so
///   are the nodes of each flight;
/// - the windows count the bytes of the operations in flight, `held` counts the bytes of the flights;
/// - a flight that goes on belongs to the present life of its namespace;
/// - a flight that waits for a segment next is found by the end of this segment;
/// - a flight measures the store, or has waiters, each of which knows the flight.
#[derive(Debug)]
pub(super) struct Remote {
    config: RemoteConfig,
    spaces: Spaces,
    operations: SlotMap<RemoteId, InFlight>,
    /// Probes and gets among the operations that do not take too long.
    reads: usize,
    /// Puts among the operations.
    writes: usize,
    flights: SlotMap<FlightId, Flight>,
    /// Flights that go on, in the order of their begin.
    order: Vec<FlightId>,
    /// Flights by the ends of their segments in flight, and of their next segment; with windows or states, by the end
    /// of the part of the prompt that they search.
    by_segment: FxHashMap<(NsId, BlockHash), FlightId>,
    /// Objects that are being fetched.
    fetching: FxHashMap<Place, RemoteId>,
    held: u64,
    held_max: u64,
    known: Recent,
    absent: Recent,
    /// Objects that did not match their names: they are to be replaced.
    broken: Recent,
    puts: PutQueue,
    /// Blocks that the store is known to have.
    told: Told,
    breaker: Breaker,
    get_window: Window,
    put_window: Window,
    /// When a get or probe ended last, or the first of the gets and probes in flight was sent.
    progress_ns: u64,
    /// When to look again for operations that take too long.
    next_look_ns: u64,
    /// A flight has begun since the last look.
    has_begun: bool,
    /// A flight has ended since the last call of [`Remote::take_ended`].
    has_ended: bool,
    /// The last entry has left work to later entries.
    has_rest: bool,
}

impl Remote {
    pub(super) fn new(config: RemoteConfig, host_bytes: u64, promotion_bytes: u64) -> Self {
        Self {
            spaces: Spaces::new(config.object_bytes),
            operations: SlotMap::default(),
            reads: 0,
            writes: 0,
            flights: SlotMap::default(),
            order: Vec::new(),
            by_segment: FxHashMap::default(),
            fetching: FxHashMap::default(),
            held: 0,
            held_max: promotion_bytes,
            known: Recent::new(KNOWN_MAX, KNOWN_NS),
            absent: Recent::new(ABSENT_MAX, config.absent_ns),
            broken: Recent::new(ABSENT_MAX, KNOWN_NS),
            puts: PutQueue::new(config.write_rate),
            told: Told::default(),
            breaker: Breaker::new(config.stall_ns),
            get_window: Window::new(config.window_bytes),
            put_window: Window::new(host_bytes / PUT_PART),
            progress_ns: 0,
            next_look_ns: 0,
            has_begun: false,
            has_ended: false,
            has_rest: false,
            config,
        }
    }

    /// Sets the budgets after the size of the arena has changed.
    pub(super) fn set_budgets(&mut self, host_bytes: u64, promotion_bytes: u64) {
        self.held_max = promotion_bytes;
        self.put_window.set_most(host_bytes / PUT_PART);
    }

    /// Whether a flight has ended since the last call.
    pub(super) fn take_ended(&mut self) -> bool {
        std::mem::take(&mut self.has_ended)
    }

    /// Whether there is something to send, or to look at, at once.
    pub(super) fn has_work(&self) -> bool {
        self.has_begun || self.puts.has_walks()
    }

    /// Whether [`Remote::next`] stopped for the length of its work only.
    pub(super) fn has_rest(&self) -> bool {
        self.has_rest
    }

    /// Whether anything is in flight or waits.
    pub(super) fn is_active(&self) -> bool {
        !self.operations.is_empty() || !self.order.is_empty() || self.puts.has_work()
    }

    /// Objects that wait to be written, or are being written.
    pub(super) fn unwritten(&self) -> u64 {
        (self.puts.len() + self.puts.walks.len() + self.writes) as u64
    }

    /// Whether reads of the store are in flight, or flights go on. Reads that take too long do not count: they may
    /// never end.
    pub(super) fn is_reading(&self) -> bool {
        self.reads > 0 || !self.order.is_empty()
    }

    /// Adds events for blocks in the store from a number on. Returns the number that comes next.
    pub(super) fn replay_told(
        &self,
        ns: NsId,
        from: u64,
        namespaces: &Namespaces,
        events: &mut Vec<BlockEvent>,
    ) -> u64 {
        self.told.step_replay(ns, from, namespaces, events)
    }

    /// A flight, until its last request has left it.
    pub(super) fn flight(&self, id: FlightId) -> Option<&Flight> {
        self.flights.get(id)
    }

    /// Whether flights go on or wait.
    pub(super) fn has_flights(&self) -> bool {
        !self.order.is_empty()
    }

    /// Whether no get is in flight, abandoned ones included.
    pub(super) fn is_idle(&self) -> bool {
        self.get_window.in_flight() == 0
    }

    /// Appends at most `room` requests to send now: probes and gets, then puts.
    pub(super) fn next(
        &mut self,
        room: usize,
        parts: &mut EngineParts<'_>,
        out: &mut Vec<RemoteRequest>,
    ) {
        (self.has_begun, self.has_rest) = (false, false);
        self.look_for_late(parts);
        let most = out.len() + room;
        // A store that is busy with writes would delay lookups.
        let writes_max = ((room + self.operations.len()) / 2).max(1);
        self.send_for_flights(most, parts, out);
        let most = most.min(out.len() + writes_max.saturating_sub(self.writes));
        self.send_puts(most, parts, out);
    }

    /// Notes an operation that is sent. Returns the token that its completion carries.
    fn send(&mut self, operation: Operation, now_ns: u64) -> u64 {
        self.breaker.sent(now_ns);
        if matches!(operation, Operation::Put(_)) {
            self.writes += 1;
        } else {
            if self.reads == 0 {
                self.progress_ns = now_ns;
            }
            self.reads += 1;
        }
        let id = self.operations.insert(InFlight {
            operation,
            sent_ns: now_ns,
            is_late: false,
        });
        id.data().as_ffi()
    }

    fn id_of(token: u64) -> RemoteId {
        KeyData::from_ffi(token).into()
    }

    /// Ends a flight: its waiters look up again. The blocks that have arrived are leased until then.
    fn end_flight(&mut self, id: FlightId, residency: &mut Residency) {
        let flight = &mut self.flights[id];
        flight.fate.is_over = true;
        // Deeper nodes, which the store did not fill, are removed, among them the leased node.
        let kept = match flight.objects.arrived.checked_sub(1) {
            Some(last) => flight.held.ends[last as usize],
            None if flight.held.ends.is_empty() => flight.held.lease,
            None => NONE,
        };
        self.order.retain(|&of| of != id);
        self.has_ended = true;
        self.forget_segments(id);
        let flight = &self.flights[id];
        // A part of a hit with windows or states is of no use.
        let is_part = flight.objects.search.is_for_boundary()
            && flight.objects.arrived < flight.objects.count();
        let is_there = kept != NONE && !is_part && !residency.has_left_index(kept);
        self.move_lease(id, if is_there { kept } else { NONE }, residency);
        if !is_there {
            self.let_go(id, residency);
        }
        if self.flights[id].is_unused() {
            self.drop_flight(id, residency);
        }
    }

    /// Ends the flights of namespaces whose lives have ended. Their indices may belong to other namespaces now, and what
    /// a flight brings would be taken for blocks of these.
    pub(super) fn end_outlived(&mut self, parts: &mut EngineParts<'_>) {
        for id in self.order.clone() {
            work::queued();
            let flight = &self.flights[id];
            if flight.chain.instance != parts.namespaces.instance(flight.chain.ns) {
                self.end_flight(id, parts.residency);
            }
        }
    }

    /// Ends the leases of the nodes with windows or states that a flight brings.
    fn let_go(&mut self, id: FlightId, residency: &mut Residency) {
        for node in std::mem::take(&mut self.flights[id].held.kept) {
            residency.unpin(node);
        }
    }

    /// Moves a flight's lease to `node` (`NONE`: to nothing).
    fn move_lease(&mut self, id: FlightId, node: NodeId, residency: &mut Residency) {
        let old = std::mem::replace(&mut self.flights[id].held.lease, node);
        if old == node {
            return;
        }
        if node != NONE {
            residency.pin(node);
        }
        if old != NONE {
            residency.unpin(old);
        }
    }

    /// Forgets a flight. Its gets that are in flight go on, and serve the next request for their segments.
    fn drop_flight(&mut self, id: FlightId, residency: &mut Residency) {
        self.move_lease(id, NONE, residency);
        self.let_go(id, residency);
        self.forget_segments(id);
        self.order.retain(|&of| of != id);
        if let Some(flight) = self.flights.remove(id) {
            let left = self.held.checked_sub(flight.held.bytes);
            self.held = left.expect("`held` counts every flight");
        }
    }

    /// Removes a flight from the index of segments: no request finds it any more.
    fn forget_segments(&mut self, id: FlightId) {
        let flight = &self.flights[id];
        if flight.objects.search.is_for_boundary() {
            return self.unannounce(id, 0);
        }
        let last = flight.objects.count().min(flight.objects.next + 1);
        for segment in flight.objects.arrived.min(last)..last {
            self.unannounce(id, segment);
        }
    }

    /// Lets requests find a flight by a segment, unless they find another flight that brings the segment.
    fn announce(&mut self, id: FlightId, segment: u32) {
        let flight = &self.flights[id];
        if segment < flight.objects.count() || flight.objects.search.is_for_boundary() {
            work::index();
            let key = (flight.chain.ns, flight.announced_by(segment));
            self.by_segment.entry(key).or_insert(id);
        }
    }

    /// Requests no longer find a flight by a segment: the segment has arrived, or its get has ended.
    fn unannounce(&mut self, id: FlightId, segment: u32) {
        work::index();
        let flight = &self.flights[id];
        let key = (flight.chain.ns, flight.announced_by(segment));
        if self.by_segment.get(&key) == Some(&id) {
            self.by_segment.remove(&key);
        }
    }

    /// Bytes that are fetched before the bytes of a new flight (`None`), or of a flight under way.
    fn ahead_of(&self, flight: Option<FlightId>) -> u64 {
        let before = self.order.iter().take(AHEAD_MAX);
        let before = before.take_while(|&&id| Some(id) != flight);
        let unsent = before.map(|&id| {
            crate::work::queued();
            u64::from(self.flights[id].unsent()) * self.flights[id].chain.space.bytes
        });
        self.get_window.in_flight() + unsent.sum::<u64>()
    }

    /// How long the store has had reads of which none has ended.
    fn silent_ns(&self, now_ns: u64) -> u64 {
        match self.reads {
            0 => 0,
            _ => now_ns.saturating_sub(self.progress_ns),
        }
    }

    /// Lets the planner learn from a flight that ends by itself: which part the store had, and how long the flight
    /// took.
    pub(super) fn note_flight_ended(&self, id: FlightId, parts: &mut EngineParts<'_>) {
        let flight = &self.flights[id];
        if flight.fate.is_failed || !flight.is_searched() {
            return;
        }
        let (there, segments) = (flight.objects.arrived, flight.objects.count());
        if there == 0 && segments > 0 {
            // The planner has learned this from the end of the first get.
            return;
        }
        parts.rates.remote.flight_ended(there, segments);
        if let Some(predicted_ns) = flight.predicted_ns.filter(|_| there == segments) {
            let took_ns = parts.now_ns - flight.began_ns;
            parts.counters.plan_predicted_remote_ns += predicted_ns;
            parts.counters.plan_actual_remote_ns += took_ns;
            parts.counters.plan_error_remote_ns += predicted_ns.abs_diff(took_ns);
        }
    }

    /// Writes the state into the gauges.
    pub(super) fn report(&self, gauges: &mut Gauges) {
        gauges.remote_breaker_open = u64::from(!self.breaker.is_closed());
        gauges.remote_window_bytes = self.get_window.bytes();
        gauges.remote_get_bytes_in_flight = self.get_window.in_flight();
        gauges.remote_put_queue_segments = self.unwritten();
    }
}

/// A counter of operations, their bytes and their time.
fn count(sums: [&mut u64; 3], bytes: u64, took_ns: u64) {
    let [operations, of_bytes, of_ns] = sums;
    *operations += 1;
    *of_bytes += bytes;
    *of_ns += took_ns;
}

/// Counts a get that succeeded.
fn count_get(bytes: u64, took_ns: u64, of: &mut Counters) {
    let sums = [
        &mut of.remote_gets,
        &mut of.remote_get_bytes,
        &mut of.remote_get_ns,
    ];
    count(sums, bytes, took_ns);
}

/// Counts a put that succeeded.
fn count_put(bytes: u64, took_ns: u64, of: &mut Counters) {
    let sums = [
        &mut of.remote_puts,
        &mut of.remote_put_bytes,
        &mut of.remote_put_ns,
    ];
    count(sums, bytes, took_ns);
}
