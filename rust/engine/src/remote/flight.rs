//! A flight: objects of one chain on their way from the store, for the requests that wait for them.

use undercroft_contract::key::{BlockHash, NamespaceDigest};
use undercroft_contract::namespace::NamespaceSpec;
use undercroft_contract::remote::ObjectKey;

use crate::forest::{NONE, NodeId, NsId};

use super::super::ids::RequestId;
use super::pieces::{Piece, last_of};
use super::search::Search;
use super::spaces::Space;

/// Objects of one chain, in the order of their gets. With full attention alone they are whole segments, from the first
/// that the tiers lack; each is usable with the segments before. Where a hit needs windows or states, they are all
/// objects of a hit at one boundary, which are usable only together.
#[derive(Debug)]
pub(crate) struct Flight {
    pub(super) chain: FlightChain,
    pub(super) objects: FlightObjects,
    pub(super) held: FlightLease,
    pub(super) fate: FlightFate,
    pub(super) waiters: Vec<RequestId>,
    pub(super) began_ns: u64,
    /// When the flight's last get was sent.
    pub(super) sent_ns: u64,
    /// The predicted time of the flight, in nanoseconds; `None` without a prediction.
    pub(super) predicted_ns: Option<u64>,
}

/// The part of a prompt that a flight is about.
#[derive(Debug)]
pub(super) struct FlightChain {
    pub(super) ns: NsId,
    /// The life of the namespace in which the flight began. The index `ns` may belong to another namespace later.
    pub(super) instance: u64,
    pub(super) space: Space,
    /// Hash blocks of the hit that the tiers alone allow.
    pub(super) found: u32,
    /// Segments of the chain before the first segment of the flight.
    pub(super) skipped: u32,
    /// The depth before the first of `hashes`; `before` is the block hash there.
    pub(super) base: u32,
    pub(super) hashes: Box<[BlockHash]>,
    pub(super) before: Option<BlockHash>,
}

/// The objects of a flight: how many the store has, and how many have arrived.
#[derive(Debug)]
pub(super) struct FlightObjects {
    /// The search for the objects that the store has.
    pub(super) search: Search,
    /// When the round of probes in flight was sent.
    pub(super) asked_ns: Option<u64>,
    /// For each object: whether it has arrived, or is not needed.
    pub(super) here: Vec<bool>,
    /// How many objects, front to back, have arrived.
    pub(super) arrived: u32,
    /// The next object to be fetched.
    pub(super) next: u32,
    /// Gets in flight.
    pub(super) gets: u32,
    /// Most gets in flight. Gets share the store, so with fewer gets the first segments arrive earlier.
    pub(super) width: u32,
}

/// The nodes that a flight leases.
#[derive(Debug)]
pub(super) struct FlightLease {
    /// The leased node: the deepest that the flight has made, or the node below which it begins; `NONE` if there is
    /// none.
    pub(super) lease: NodeId,
    /// The deepest node that each object needs, for the objects whose gets have begun. The lease keeps these nodes.
    pub(super) ends: Vec<NodeId>,
    /// Further leased nodes, whose windows or states the flight brings.
    pub(super) kept: Vec<NodeId>,
    /// Slot bytes that the flight has filled or is filling, which the lease keeps.
    pub(super) bytes: u64,
}

/// Whether a flight goes on.
#[derive(Debug, Default)]
pub(super) struct FlightFate {
    /// Nothing more is fetched.
    pub(super) is_cut: bool,
    /// The store does not answer, or fails.
    pub(super) is_failed: bool,
    /// The flight has ended; the lease goes on until its waiters have looked again.
    pub(super) is_over: bool,
    /// The flight measures the store: it goes on even if no request waits.
    pub(super) is_measure: bool,
}

impl FlightChain {
    /// The block hash at a depth above `base`; `base` itself is the hash before.
    pub(super) fn hash_at(&self, depth: u32) -> Option<BlockHash> {
        match (depth - self.base).checked_sub(1) {
            Some(at) => Some(self.hashes[at as usize]),
            None => self.before,
        }
    }

    /// The block hashes of an object.
    pub(super) fn hashes_of(&self, piece: Piece) -> &[BlockHash] {
        &self.hashes[(piece.after - self.base) as usize..(piece.to - self.base) as usize]
    }

    /// The block hash before an object; `None` at the start of a chain.
    pub(super) fn parent_of(&self, piece: Piece) -> Option<BlockHash> {
        self.hash_at(piece.after)
    }

    /// The name of an object.
    pub(super) fn key(&self, piece: Piece) -> ObjectKey {
        let end = self.hash_at(piece.to);
        let end = end.expect("an object has hash blocks");
        piece.key(&self.space, end)
    }

    /// The blocks of an object, each with its group.
    pub(super) fn blocks_of(&self, piece: Piece, spec: &NamespaceSpec) -> Vec<(BlockHash, u8)> {
        let hashes = self.hashes_of(piece);
        let payloads = piece.payloads(spec).into_iter();
        let blocks = payloads.map(|of| (hashes[of.hash_block as usize], of.group));
        blocks.collect()
    }

    /// The digest of its namespace, for names and headers.
    pub(super) fn digest(&self) -> NamespaceDigest {
        self.space.digest
    }
}

impl FlightObjects {
    /// The objects that `search` finds. The first are to be fetched.
    pub(super) fn new(search: Search, count: u32) -> Self {
        Self {
            search,
            asked_ns: None,
            here: vec![false; count as usize],
            arrived: 0,
            next: 0,
            gets: 0,
            width: u32::MAX,
        }
    }

    /// Most objects that may be fetched.
    pub(super) fn count(&self) -> u32 {
        self.here.len() as u32
    }
}

impl Flight {
    /// A new flight for `objects`.
    pub(super) fn new(chain: FlightChain, objects: FlightObjects) -> Self {
        Self {
            chain,
            objects,
            held: FlightLease {
                lease: NONE,
                ends: Vec::new(),
                kept: Vec::new(),
                bytes: 0,
            },
            fate: FlightFate::default(),
            waiters: Vec::new(),
            began_ns: 0,
            sent_ns: 0,
            predicted_ns: None,
        }
    }

    /// One of the objects.
    pub(super) fn piece(&self, object: u32) -> Piece {
        let piece = self.objects.search.pieces().get(object as usize).copied();
        piece.unwrap_or_else(|| Piece::segment(&self.chain.space, self.chain.skipped + object))
    }

    /// The block hash by which requests find the flight, for one of the objects: the hash at the end of the segment.
    /// With windows or states, the hash at the end of the prompt part that the flight searches.
    pub(super) fn announced_by(&self, object: u32) -> BlockHash {
        let hash = match self.objects.search {
            Search::Segments(_) => self.chain.hash_at(self.piece(object).to),
            Search::Boundary(_) => self.chain.hashes.last().copied(),
        };
        hash.expect("a flight has hash blocks")
    }

    /// Hash blocks of a hit when `objects` objects have arrived, front to back.
    pub(super) fn reach(&self, objects: u32) -> u32 {
        match &self.objects.search {
            Search::Segments(_) => (self.chain.skipped + objects) * self.chain.space.hash_blocks,
            Search::Boundary(of) if !of.pieces.is_empty() && objects == self.objects.count() => {
                self.boundary()
            }
            Search::Boundary(_) => self.chain.found,
        }
    }

    /// With windows or states: where the hit is to end, as far as is known.
    pub(super) fn boundary(&self) -> u32 {
        let last = self
            .objects
            .search
            .pieces()
            .iter()
            .map(|piece| piece.to)
            .max();
        last.unwrap_or(self.chain.base + self.chain.hashes.len() as u32)
    }

    /// Hash blocks that have arrived, and hash blocks that will have arrived in the end. Objects that are usable only
    /// together count in proportion.
    pub(crate) fn progress(&self) -> (u32, u32) {
        if !self.objects.search.is_for_boundary() {
            return (self.reach(self.objects.arrived), self.reach(self.goal()));
        }
        let end = self.boundary();
        let part = u64::from(end - self.chain.found) * u64::from(self.objects.arrived);
        let objects = u64::from(self.objects.count()).max(1);
        (self.chain.found + (part / objects) as u32, end)
    }

    /// How many objects are fetched if the store has all objects that it may have.
    fn goal(&self) -> u32 {
        match self.is_searched() || self.fate.is_cut {
            true => self.end(),
            false => self.objects.count(),
        }
    }

    /// How many objects are fetched, as far as is known.
    fn end(&self) -> u32 {
        if self.fate.is_cut {
            self.objects.next
        } else {
            self.objects.search.present()
        }
    }

    /// Whether a get may be sent, if there is room.
    pub(super) fn has_gets(&self) -> bool {
        let is_needed =
            !self.fate.is_over && !self.fate.is_cut && self.objects.gets < self.objects.width;
        is_needed && self.objects.next < self.objects.search.present()
    }

    /// Whether an answer to a probe is awaited.
    pub(super) fn is_asking(&self) -> bool {
        self.objects.search.is_asking()
    }

    /// Whether no more probes are sent.
    pub(super) fn is_searched(&self) -> bool {
        self.objects.search.is_over()
    }

    /// Whether a probe is to be sent.
    pub(super) fn has_probes(&self) -> bool {
        !self.fate.is_over && !self.fate.is_cut && !self.is_asking() && !self.is_searched()
    }

    /// The objects to ask for now.
    pub(super) fn next_probe(&mut self, spec: &NamespaceSpec) -> Vec<ObjectKey> {
        let asked = self.objects.search.next_round().to_vec();
        let asked = asked.into_iter().map(|at| self.asked_piece(at, spec));
        asked.map(|piece| self.chain.key(piece)).collect()
    }

    /// An object that a probe asks for, by its number in the search.
    fn asked_piece(&self, at: u32, spec: &NamespaceSpec) -> Piece {
        match self.objects.search {
            Search::Segments(_) => self.piece(at),
            Search::Boundary(_) => last_of(spec, &self.chain.space, at),
        }
    }

    /// The objects that the store lacks by the answer to the probe in flight: one bit for each object of the probe.
    pub(super) fn absent(&self, bits: u64, spec: &NamespaceSpec) -> Vec<Piece> {
        let asked = self.objects.search.asked();
        let absent = (0..).zip(asked).filter(|(bit, _)| bits >> bit & 1 == 0);
        absent.map(|(_, &at)| self.asked_piece(at, spec)).collect()
    }

    /// With windows or states: the key under which the search for the end of a hit is remembered if it finds nothing.
    pub(super) fn question(&self) -> ObjectKey {
        question(self.chain.digest(), self.announced_by(0))
    }

    /// Whether more of it may arrive.
    pub(crate) fn continues(&self) -> bool {
        !self.fate.is_over
    }

    /// Whether it has failed, or goes on: a request that leaves it does not wait for another one.
    pub(crate) fn is_given_up(&self) -> bool {
        !self.fate.is_over || self.fate.is_failed
    }

    /// Whether it is about a namespace, in this life of the namespace.
    pub(crate) fn is_of(&self, ns: NsId, instance: u64) -> bool {
        self.chain.ns == ns && self.chain.instance == instance
    }

    /// Whether it brings blocks of a namespace and goes on.
    pub(crate) fn continues_in(&self, ns: NsId) -> bool {
        self.continues() && self.chain.ns == ns
    }

    /// The hash blocks between which it has brought blocks: the hit that the tiers alone allowed, and the hit now.
    pub(crate) fn brought(&self) -> (u32, u32) {
        (self.chain.found, self.reach(self.objects.arrived))
    }

    /// Hash blocks that arrive together.
    pub(crate) fn together(&self) -> u32 {
        self.objects.gets.max(1) * self.chain.space.hash_blocks
    }

    /// Objects whose gets have not been sent.
    pub(super) fn unsent(&self) -> u32 {
        self.goal().saturating_sub(self.objects.next)
    }

    /// Whether no request needs the flight any more.
    pub(super) fn is_unused(&self) -> bool {
        self.waiters.is_empty() && (self.fate.is_over || !self.fate.is_measure)
    }

    /// Whether no more objects arrive.
    pub(super) fn is_done(&self) -> bool {
        let is_known = self.fate.is_cut || self.is_searched();
        is_known && self.objects.gets == 0 && !self.has_gets()
    }

    /// Notes that an object has arrived.
    pub(super) fn came(&mut self, object: u32) {
        self.objects.here[object as usize] = true;
        let rest = self.objects.here[self.objects.arrived as usize..].iter();
        self.objects.arrived += rest.take_while(|&&here| here).count() as u32;
    }

    /// Notes that neither an object nor the objects behind it arrive.
    pub(super) fn ends_at(&mut self, object: u32) {
        self.objects.search.ends_at(object);
        // With windows or states, the objects before are of no use alone.
        self.fate.is_cut |= self.objects.next >= object || self.objects.search.is_for_boundary();
    }
}

/// The key for the search for the end of a hit in a prompt with windows or states, whose last boundary has this hash.
pub(super) fn question(namespace: NamespaceDigest, end: BlockHash) -> ObjectKey {
    ObjectKey {
        namespace,
        end,
        hash_blocks: 0,
        group: None,
    }
}
