//! The index from hashes to nodes. It grows in steps: one table would move all nodes when it doubles, in
//! one entry of the engine.

use undercroft_contract::key::{BlockHash, HASH_BYTES_MAX};
use undercroft_contract::prefetch::prefetch;

use crate::work;

use super::node::{NONE, NodeId, NsId};
use super::segment::{Segment, Tag};

/// A segment with more nodes is split.
const SEGMENT_MAX: usize = 832;
/// Most bits of a tag, from the lowest, that choose a segment. Tags that are equal in all of them share a segment.
const BITS_MAX: u32 = 24;

const WORDS: usize = HASH_BYTES_MAX / 8;

/// Extendible hashing: a directory of segments, each a table of its own. A full segment is split in two. The
/// directory, four bytes for some hundred nodes, doubles when a split needs one more bit.
#[derive(Debug)]
pub(super) struct HashIndex {
    /// The segment of each value of the lowest `bits` bits.
    directory: Vec<u32>,
    bits: u32,
    segments: Vec<Segment>,
    keys: TagKeys,
}

/// The seed that makes positions unpredictable, even for clients that choose the hashes.
#[derive(Clone, Copy, Debug)]
struct TagKeys([u64; WORDS + 1]);

/// The two halves of a product: each depends on every bit of both factors.
fn fold(left: u64, right: u64) -> u64 {
    let product = u128::from(left) * u128::from(right);
    // The cast keeps the lower half.
    product as u64 ^ (product >> 64) as u64
}

impl TagKeys {
    /// The tag of a node's key, by all of its bytes: a client may choose its block hashes.
    fn tag(&self, ns: NsId, hash: &BlockHash) -> Tag {
        let mut words = [0; WORDS];
        for (word, bytes) in words.iter_mut().zip(hash.padded().chunks_exact(8)) {
            *word = u64::from_le_bytes(bytes.try_into().unwrap_or_default());
        }
        let [a, b, c, d] = words;
        let [ka, kb, kc, kd, ke] = self.0;
        let head = fold(a ^ ka, b ^ kb);
        let tail = fold(c ^ kc, d ^ kd);
        let mixed = fold(head ^ tail.rotate_left(32) ^ u64::from(ns), ke);
        (mixed >> 32) as Tag
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
            segments: vec![Segment::new(0, 0)],
            keys: TagKeys(keys),
        }
    }

    /// Makes segments for this many nodes, so that few segments are split or grow later. For an index without nodes.
    pub(super) fn reserve(&mut self, nodes: usize) {
        assert_eq!(self.bits, 0, "an index with nodes grows by itself");
        let segments = nodes.div_ceil(SEGMENT_MAX).next_power_of_two();
        self.bits = segments.ilog2().min(BITS_MAX);
        self.directory = (0..1 << self.bits).collect();
        let share = nodes / self.directory.len();
        // Some segments get more than their share of the nodes.
        let room = (share + share / 8).min(SEGMENT_MAX);
        let new = || Segment::new(self.bits, room);
        self.segments = std::iter::repeat_with(new)
            .take(self.directory.len())
            .collect();
    }

    /// Loads the place of a tag, which will be looked for soon, into the processor's cache.
    pub(super) fn prefetch(&self, tag: Tag) {
        prefetch(self.segment(tag).first(tag));
    }

    /// Bytes that the index takes.
    pub(super) fn bytes(&self) -> u64 {
        let tables: usize = self.segments.iter().map(Segment::bytes).sum();
        let segments = self.segments.capacity() * size_of::<Segment>();
        let directory = self.directory.capacity() * size_of::<u32>();
        (tables + segments + directory) as u64
    }

    /// See [`Keys::tag`].
    pub(super) fn tag(&self, ns: NsId, hash: &BlockHash) -> Tag {
        self.keys.tag(ns, hash)
    }

    /// Index in `segments` of the segment of a tag.
    fn at(&self, tag: Tag) -> usize {
        let mask = (1 << self.bits) - 1;
        self.directory[(tag & mask) as usize] as usize
    }

    fn segment(&self, tag: Tag) -> &Segment {
        &self.segments[self.at(tag)]
    }

    /// The node with this tag for which `is_it` holds.
    pub(super) fn find(&self, tag: Tag, is_it: impl FnMut(NodeId) -> bool) -> Option<NodeId> {
        work::index();
        self.segment(tag).find(tag, is_it)
    }

    /// Adds a node that is not in the index.
    pub(super) fn insert(&mut self, tag: Tag, id: NodeId) {
        assert_ne!(id, NONE, "the last index means no node");
        work::index();
        let mut at = self.at(tag);
        while self.segments[at].len() >= SEGMENT_MAX && self.segments[at].bits() < BITS_MAX {
            self.split(at, tag);
            at = self.at(tag);
        }
        self.segments[at].insert(tag, id);
    }

    /// Splits the segment of `tag` in two, by its next bit.
    fn split(&mut self, at: usize, tag: Tag) {
        let shared = self.segments[at].bits();
        if shared == self.bits {
            self.directory.extend_from_within(..);
            self.bits += 1;
        }
        let new = u32::try_from(self.segments.len()).expect("there are fewer segments than nodes");
        let other = self.segments[at].split();
        self.segments.push(other);
        let step = 1 << shared;
        let first = tag as usize % step;
        // Every second place of the segment: the places whose next bit is set.
        for place in (first + step..self.directory.len()).step_by(2 * step) {
            self.directory[place] = new;
        }
    }

    /// Removes a node. False if it is not in the index.
    pub(super) fn remove(&mut self, tag: Tag, id: NodeId) -> bool {
        work::index();
        let at = self.at(tag);
        self.segments[at].remove(tag, id)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig { cases: 32, failure_persistence: None, ..ProptestConfig::default() })]

        /// With few values of the tags' bits, many tags are equal, and different tags lie close together.
        #[test]
        fn the_index_is_a_map_of_tags(
            mask in prop::sample::select(vec![u32::MAX, 0xFFFF_0000, 0x0000_FFFF, 0xF000_000F, 0x8000_0000]),
            reserved in prop::sample::select(vec![0usize, 500, 3000]),
            steps in prop::collection::vec((any::<u32>(), 0u32..4, any::<usize>()), 1..4000),
        ) {
            let mut index = HashIndex::new(1);
            index.reserve(reserved);
            let mut model: HashMap<NodeId, Tag> = HashMap::new();
            for (id, (tag, kind, pick)) in (0..).zip(steps) {
                if kind > 0 {
                    index.insert(tag & mask, id);
                    model.insert(id, tag & mask);
                } else if let Some((&gone, &tag)) = model.iter().nth(pick % model.len().max(1)) {
                    prop_assert!(index.remove(tag, gone));
                    prop_assert!(!index.remove(tag, gone));
                    model.remove(&gone);
                }
            }
            for (&id, &tag) in &model {
                prop_assert_eq!(index.find(tag, |found| found == id), Some(id));
            }
            let tags: Vec<Tag> = model.values().copied().collect();
            for tag in tags {
                let mut found = Vec::new();
                index.find(tag, |id| { found.push(id); false });
                let mut expected: Vec<NodeId> = model.iter().filter(|(_, of)| **of == tag).map(|(id, _)| *id).collect();
                found.sort_unstable();
                expected.sort_unstable();
                prop_assert_eq!(found, expected);
            }
        }
    }
}
