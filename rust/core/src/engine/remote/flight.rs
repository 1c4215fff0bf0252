//! A flight: objects of one chain on their way from the store, for the requests that wait for them.

use crate::forest::{NONE, NodeId, NsId};
use crate::key::{BlockHash, NamespaceDigest};
use crate::namespace::NamespaceSpec;
use crate::remote::ObjectKey;

use super::super::ids::RequestId;
use super::boundaries::Boundaries;
use super::pieces::{Piece, last_of};
use super::search::Search;
use super::spaces::Space;

/// Objects of one chain, in the order of their gets. With full attention alone they are whole segments, from the first
/// that the tiers lack; each is usable with the segments before. Where a hit needs windows or states, they are all
/// objects of a hit at one boundary, which are usable only together.
#[derive(Debug)]
pub(super) struct Flight {
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
    /// The search for a boundary; `None` without windows and states.
    pub(super) boundaries: Option<Boundaries>,
    /// The objects of the boundary that was found; empty without windows and states.
    pub(super) pieces: Vec<Piece>,
    /// The search for the number of objects that the store has.
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
    /// The deepest node that each object needs, for the objects whose gets have begun. The lease keeps these nodes.
    pub(super) ends: Vec<NodeId>,
    /// The leased node: the deepest that the flight has made, or the node below which it begins; `NONE` if there is
    /// none.
    pub(super) lease: NodeId,
    /// Further leased nodes, whose windows or states the flight brings.
    pub(super) kept: Vec<NodeId>,
    /// Slot bytes that the flight has filled or is filling, which the lease keeps.
    pub(super) bytes: u64,
    /// Nothing more is fetched.
    pub(super) is_cut: bool,
    /// The store does not answer, or fails.
    pub(super) is_failed: bool,
    /// The flight has ended; the lease goes on until its waiters have looked again.
    pub(super) is_over: bool,
    pub(super) waiters: Vec<RequestId>,
    /// The flight measures the store: it goes on even if no request waits.
    pub(super) is_measure: bool,
    /// Most gets in flight. Gets share the store, so with fewer gets the first segments arrive earlier.
    pub(super) width: u32,
    pub(super) began_ns: u64,
    /// When the flight's last get was sent.
    pub(super) sent_ns: u64,
    /// The predicted time of the flight, in nanoseconds; `None` without a prediction.
    pub(super) predicted_ns: Option<u64>,
}

impl Flight {
    /// A new flight. `skipped` and `base` are one pair, and so are the hash before and the hashes.
    pub(super) fn new(
        (ns, instance, space): (NsId, u64, Space),
        found: u32,
        (skipped, base): (u32, u32),
        (before, hashes): (Option<BlockHash>, Vec<BlockHash>),
    ) -> Self {
        Self {
            ns,
            instance,
            space,
            found,
            skipped,
            base,
            hashes: hashes.into_boxed_slice(),
            before,
            boundaries: None,
            pieces: Vec::new(),
            search: Search::known(0),
            asked_ns: None,
            here: Vec::new(),
            arrived: 0,
            next: 0,
            gets: 0,
            ends: Vec::new(),
            lease: NONE,
            kept: Vec::new(),
            bytes: 0,
            is_cut: false,
            is_failed: false,
            is_over: false,
            waiters: Vec::new(),
            is_measure: false,
            width: u32::MAX,
            began_ns: 0,
            sent_ns: 0,
            predicted_ns: None,
        }
    }

    /// Most objects that may be fetched.
    pub(super) fn objects(&self) -> u32 {
        self.here.len() as u32
    }

    /// One of the objects.
    pub(super) fn piece(&self, object: u32) -> Piece {
        let piece = self.pieces.get(object as usize).copied();
        piece.unwrap_or_else(|| Piece::segment(&self.space, self.skipped + object))
    }

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

    /// The block hash by which requests find the flight, for one of the objects: the hash at the end of the segment.
    /// With windows or states, the hash at the end of the prompt part that the flight searches.
    pub(super) fn announced_by(&self, object: u32) -> BlockHash {
        let hash = match self.boundaries {
            None => self.hash_at(self.piece(object).to),
            Some(_) => self.hashes.last().copied(),
        };
        hash.expect("a flight has hash blocks")
    }

    /// Hash blocks of a hit when `objects` objects have arrived, front to back.
    pub(super) fn reach(&self, objects: u32) -> u32 {
        match self.boundaries {
            None => (self.skipped + objects) * self.space.hash_blocks,
            Some(_) if !self.pieces.is_empty() && objects == self.objects() => self.boundary(),
            Some(_) => self.found,
        }
    }

    /// With windows or states: where the hit is to end, as far as is known.
    pub(super) fn boundary(&self) -> u32 {
        let last = self.pieces.iter().map(|piece| piece.to).max();
        last.unwrap_or(self.base + self.hashes.len() as u32)
    }

    /// Hash blocks that have arrived, and hash blocks that will have arrived in the end. Objects that are usable only
    /// together count in proportion.
    pub(super) fn progress(&self) -> (u32, u32) {
        if self.boundaries.is_none() {
            return (self.reach(self.arrived), self.reach(self.goal()));
        }
        let end = self.boundary();
        let part = u64::from(end - self.found) * u64::from(self.arrived);
        let objects = u64::from(self.objects()).max(1);
        (self.found + (part / objects) as u32, end)
    }

    /// How many objects are fetched if the store has all objects that it may have.
    fn goal(&self) -> u32 {
        match self.is_searched() || self.is_cut {
            true => self.end(),
            false => self.objects(),
        }
    }

    /// How many objects are fetched, as far as is known.
    fn end(&self) -> u32 {
        if self.is_cut {
            self.next
        } else {
            self.search.present()
        }
    }

    /// Whether a get may be sent, if there is room.
    pub(super) fn has_gets(&self) -> bool {
        let is_needed = !self.is_over && !self.is_cut && self.gets < self.width;
        is_needed && self.next < self.search.present()
    }

    /// Whether an answer to a probe is awaited.
    pub(super) fn is_asking(&self) -> bool {
        let boundaries = self.boundaries.as_ref();
        boundaries.map_or(self.search.is_asking(), Boundaries::is_asking)
    }

    /// Whether no more probes are sent.
    pub(super) fn is_searched(&self) -> bool {
        let boundaries = self.boundaries.as_ref();
        boundaries.map_or(self.search.is_over(), Boundaries::is_over)
    }

    /// Whether a probe is to be sent.
    pub(super) fn has_probes(&self) -> bool {
        !self.is_over && !self.is_cut && !self.is_asking() && !self.is_searched()
    }

    /// The objects to ask for now.
    pub(super) fn next_probe(&mut self, spec: &NamespaceSpec) -> Vec<ObjectKey> {
        let asked = match &mut self.boundaries {
            None => self.search.next_round().to_vec(),
            Some(boundaries) => boundaries.next_round().to_vec(),
        };
        let asked = asked.into_iter().map(|at| self.asked_piece(at, spec));
        asked.map(|piece| self.key(piece)).collect()
    }

    /// An object that a probe asks for, by its number in the search.
    fn asked_piece(&self, at: u32, spec: &NamespaceSpec) -> Piece {
        match self.boundaries {
            None => self.piece(at),
            Some(_) => last_of(spec, &self.space, at),
        }
    }

    /// The objects that the store lacks by the answer to the probe in flight: one bit for each object of the probe.
    pub(super) fn absent(&self, bits: u64, spec: &NamespaceSpec) -> Vec<Piece> {
        let boundaries = self.boundaries.as_ref();
        let asked = boundaries.map_or(self.search.asked(), Boundaries::asked);
        let absent = (0..).zip(asked).filter(|(bit, _)| bits >> bit & 1 == 0);
        absent.map(|(_, &at)| self.asked_piece(at, spec)).collect()
    }

    /// The blocks of an object, each with its group.
    pub(super) fn blocks_of(&self, piece: Piece, spec: &NamespaceSpec) -> Vec<(BlockHash, u8)> {
        let hashes = self.hashes_of(piece);
        let payloads = piece.payloads(spec).into_iter();
        let blocks = payloads.map(|of| (hashes[of.hash_block as usize], of.group));
        blocks.collect()
    }

    /// With windows or states: the key under which the search for the end of a hit is remembered if it finds nothing.
    pub(super) fn question(&self) -> ObjectKey {
        question(self.digest(), self.announced_by(0))
    }

    /// Objects whose gets have not been sent.
    pub(super) fn unsent(&self) -> u32 {
        self.goal().saturating_sub(self.next)
    }

    /// Whether no request needs the flight any more.
    pub(super) fn is_unused(&self) -> bool {
        self.waiters.is_empty() && (self.is_over || !self.is_measure)
    }

    /// Whether no more objects arrive.
    pub(super) fn is_done(&self) -> bool {
        let is_known = self.is_cut || self.is_searched();
        is_known && self.gets == 0 && !self.has_gets()
    }

    /// Notes that an object has arrived.
    pub(super) fn came(&mut self, object: u32) {
        self.here[object as usize] = true;
        let rest = self.here[self.arrived as usize..].iter();
        self.arrived += rest.take_while(|&&here| here).count() as u32;
    }

    /// Notes that neither an object nor the objects behind it arrive.
    pub(super) fn ends_at(&mut self, object: u32) {
        self.search.ends_at(object);
        // With windows or states, the objects before are of no use alone.
        self.is_cut |= self.next >= object || self.boundaries.is_some();
    }

    /// The digest of its namespace, for names and headers.
    pub(super) fn digest(&self) -> NamespaceDigest {
        self.space.digest
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
