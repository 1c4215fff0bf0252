//! The index from hashes to nodes. It grows in steps: one table would move all nodes when it doubles, in
//! one entry of the engine.

use hashbrown::HashTable;

use crate::key::{BlockHash, HASH_BYTES_MAX};
use crate::work;

use super::node::{NodeId, NsId};

/// A segment with more nodes is split. A table of 1,024 buckets takes 896; the rest is for the
/// marks that removals leave behind.
const SEGMENT_MAX: usize = 832;
/// Nodes that a segment's table takes.
const SEGMENT_CAPACITY: usize = 896;
/// Bits of a hash that choose a segment, from this one on. Tables use the bits below and above.
const SEGMENT_SHIFT: u32 = 16;
/// Bits that choose a segment at most. Hashes that are equal in all of them share one.
const BITS_MAX: u32 = 32;

const WORDS: usize = HASH_BYTES_MAX / 8;

/// Extendible hashing: a directory of segments, each a table of its own. A full segment is split in two; the
/// directory, four bytes for some hundred nodes, doubles when it must.
#[derive(Debug)]
pub(super) struct HashIndex {
    /// The segment of each value of the lowest `bits` bits.
    directory: Vec<u32>,
    bits: u32,
    segments: Vec<Segment>,
    keys: Keys,
}

/// The seed that makes positions unpredictable, even for clients that choose the hashes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Keys([u64; WORDS + 1]);

#[derive(Debug)]
struct Segment {
    nodes: HashTable<NodeId>,
    /// How many bits all of its hashes share.
    bits: u32,
}

impl Segment {
    fn new(bits: u32) -> Self {
        Self {
            nodes: HashTable::with_capacity(SEGMENT_CAPACITY),
            bits,
        }
    }
}

/// The two halves of a product: each depends on every bit of both factors.
fn fold(left: u64, right: u64) -> u64 {
    let product = u128::from(left) * u128::from(right);
    // Both halves, on purpose.
    product as u64 ^ (product >> 64) as u64
}

impl Keys {
    /// The hash of a node's key, over all of its bytes: a client may choose its block hashes.
    pub(super) fn hash(&self, ns: NsId, hash: &BlockHash) -> u64 {
        let mut words = [0; WORDS];
        for (word, bytes) in words.iter_mut().zip(hash.padded().chunks_exact(8)) {
            *word = u64::from_le_bytes(bytes.try_into().unwrap_or_default());
        }
        let [a, b, c, d] = words;
        let [ka, kb, kc, kd, ke] = self.0;
        let head = fold(a ^ ka, b ^ kb);
        let tail = fold(c ^ kc, d ^ kd);
        fold(head ^ tail.rotate_left(32) ^ u64::from(ns), ke)
    }
}

impl HashIndex {
    pub(super) fn new(seed: u64) -> Self {
        let mut state = seed;
        let keys = std::array::from_fn(|_| {
            // SplitMix64 (Steele, Lea, Flood 2014).
            state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mut z = state;
            z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
            (z ^ z >> 31) | 1
        });
        Self {
            directory: vec![0],
            bits: 0,
            segments: vec![Segment::new(0)],
            keys: Keys(keys),
        }
    }

    /// Has segments for so many nodes, so that none is split meanwhile. For an index without nodes.
    pub(super) fn reserve(&mut self, nodes: usize) {
        assert_eq!(self.bits, 0, "an index with nodes grows by itself");
        // Segments that get more than their share are split: fewer segments, and the table takes
        // less.
        let segments = nodes.div_ceil(SEGMENT_MAX).next_power_of_two();
        self.bits = segments.ilog2().min(BITS_MAX);
        self.directory = (0..1 << self.bits).collect();
        let new = || Segment::new(self.bits);
        self.segments = std::iter::repeat_with(new)
            .take(self.directory.len())
            .collect();
    }

    /// Looks at the place of a hash, so that it is in the processor's caches when it is needed.
    pub(super) fn prefetch(&self, hash: u64) {
        std::hint::black_box(self.segment(hash).nodes.find(hash, |_| false));
    }

    /// Bytes that it takes.
    pub(super) fn bytes(&self) -> u64 {
        let tables = self.segments.iter().map(|of| of.nodes.allocation_size());
        let segments = self.segments.capacity() * size_of::<Segment>();
        let directory = self.directory.capacity() * size_of::<u32>();
        (tables.sum::<usize>() + segments + directory) as u64
    }

    pub(super) fn keys(&self) -> Keys {
        self.keys
    }

    /// See [`Keys::hash`].
    pub(super) fn hash(&self, ns: NsId, hash: &BlockHash) -> u64 {
        self.keys.hash(ns, hash)
    }

    fn place(&self, hash: u64) -> usize {
        let mask = (1u64 << self.bits) - 1;
        // Below the length of the directory.
        (hash >> SEGMENT_SHIFT & mask) as usize
    }

    fn segment(&self, hash: u64) -> &Segment {
        &self.segments[self.directory[self.place(hash)] as usize]
    }

    pub(super) fn find(&self, hash: u64, is_it: impl FnMut(&NodeId) -> bool) -> Option<NodeId> {
        work::index();
        self.segment(hash).nodes.find(hash, is_it).copied()
    }

    /// Adds a node that is not there. `hash_of` tells the hashes of those that are.
    pub(super) fn insert(&mut self, hash: u64, id: NodeId, hash_of: impl Fn(NodeId) -> u64) {
        work::index();
        let mut at = self.directory[self.place(hash)] as usize;
        while self.segments[at].nodes.len() >= SEGMENT_MAX && self.segments[at].bits < BITS_MAX {
            self.split(at, hash, &hash_of);
            at = self.directory[self.place(hash)] as usize;
        }
        let segment = &mut self.segments[at];
        if segment.nodes.len() == segment.nodes.capacity() && segment.bits < BITS_MAX {
            // Full of marks of removals: a table would double.
            let nodes = std::mem::replace(segment, Segment::new(segment.bits)).nodes;
            for id in nodes {
                work::index();
                segment
                    .nodes
                    .insert_unique(hash_of(id), id, |&id| hash_of(id));
            }
        }
        segment.nodes.insert_unique(hash, id, |&id| {
            work::index();
            hash_of(id)
        });
    }

    /// Splits the segment of `hash` in two, by its next bit.
    fn split(&mut self, at: usize, hash: u64, hash_of: &impl Fn(NodeId) -> u64) {
        let shared = self.segments[at].bits;
        if shared == self.bits {
            self.directory.extend_from_within(..);
            self.bits += 1;
        }
        let new = u32::try_from(self.segments.len()).expect("there are fewer segments than nodes");
        self.segments.push(Segment::new(shared + 1));
        let step = 1 << shared;
        let first = self.place(hash) % step;
        // Every other place of the segment, those with the next bit set.
        for place in (first + step..self.directory.len()).step_by(2 * step) {
            self.directory[place] = new;
        }
        let nodes = std::mem::replace(&mut self.segments[at], Segment::new(shared + 1)).nodes;
        for id in nodes {
            work::index();
            let hash = hash_of(id);
            let at = self.directory[self.place(hash)] as usize;
            self.segments[at]
                .nodes
                .insert_unique(hash, id, |&id| hash_of(id));
        }
    }

    /// Removes a node. False if it is not there.
    pub(super) fn remove(&mut self, hash: u64, id: NodeId) -> bool {
        work::index();
        let at = self.directory[self.place(hash)] as usize;
        let found = self.segments[at]
            .nodes
            .find_entry(hash, |&found| found == id);
        found.map(|entry| entry.remove()).is_ok()
    }
}
