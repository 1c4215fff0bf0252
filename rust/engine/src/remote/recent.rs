//! A bounded memory of segments, for a time.

use rustc_hash::{FxBuildHasher, FxHashMap};
use undercroft_contract::remote::ObjectKey;

use crate::work;

/// The fingerprint of an object: 64 bits of its name. Two objects with the same fingerprint cost a request or a write,
/// and nothing else.
pub(super) fn fingerprint(object: &ObjectKey) -> u64 {
    let mix = |sum: u64, word: u64| {
        let sum = (sum ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        sum ^ sum >> 29
    };
    let words = |bytes: &[u8; 32], mut sum: u64| {
        for word in bytes.chunks_exact(8) {
            let mut lane = [0; 8];
            lane.copy_from_slice(word);
            sum = mix(sum, u64::from_le_bytes(lane));
        }
        sum
    };
    let group = object.group.map_or(0, |group| u64::from(group) + 1);
    let sum = words(object.end.padded(), words(&object.namespace.0, 0));
    mix(sum, u64::from(object.hash_blocks) << 32 | group)
}

/// Segments that were noted lately: about `most` of them, each for `keep_ns`. Both halves have room from the start: a
/// hash table moves all of its entries when it grows, in one entry of the engine.
#[derive(Debug)]
pub(super) struct Recent {
    /// When each segment was noted, in the older half and the younger half.
    old: FxHashMap<u64, u64>,
    young: FxHashMap<u64, u64>,
    most: usize,
    keep_ns: u64,
}

fn half(most: usize) -> FxHashMap<u64, u64> {
    FxHashMap::with_capacity_and_hasher(most / 2 + 1, FxBuildHasher)
}

impl Recent {
    pub(super) fn new(most: usize, keep_ns: u64) -> Self {
        Self {
            old: half(most),
            young: half(most),
            most,
            keep_ns,
        }
    }

    /// Notes a segment.
    pub(super) fn insert(&mut self, segment: u64, now_ns: u64) {
        work::index();
        self.young.insert(segment, now_ns);
        if self.young.len() > self.most / 2 {
            std::mem::swap(&mut self.old, &mut self.young);
            self.young.clear();
        }
    }

    /// Whether a segment was noted, and not too long ago.
    pub(super) fn contains(&self, segment: u64, now_ns: u64) -> bool {
        work::index();
        let noted_ns = self.young.get(&segment).or_else(|| self.old.get(&segment));
        noted_ns.is_some_and(|&noted_ns| now_ns < noted_ns.saturating_add(self.keep_ns))
    }

    /// Forgets a segment. Returns whether it was noted.
    pub(super) fn remove(&mut self, segment: u64) -> bool {
        work::index();
        let was_young = self.young.remove(&segment).is_some();
        self.old.remove(&segment).is_some() || was_young
    }
}

#[cfg(test)]
mod tests {
    use undercroft_contract::key::{BlockHash, NamespaceDigest};

    use super::*;

    #[test]
    fn the_tables_never_grow() {
        for most in [10, 1 << 14] {
            let mut recent = Recent::new(most, 5);
            let room = [recent.old.capacity(), recent.young.capacity()];
            for at in 0..3 * most as u64 {
                recent.insert(at, 0);
            }
            assert_eq!([recent.old.capacity(), recent.young.capacity()], room);
        }
    }

    #[test]
    fn a_segment_is_remembered_for_a_time() {
        let mut recent = Recent::new(10, 5);
        recent.insert(1, 100);
        assert!(recent.contains(1, 104) && !recent.contains(1, 105));
        recent.insert(1, 105);
        assert!(recent.contains(1, 105));
        assert!(recent.remove(1));
        assert!(!recent.contains(1, 105) && !recent.remove(1));
    }

    #[test]
    fn the_oldest_are_forgotten_first() {
        let mut recent = Recent::new(10, u64::MAX);
        (0..100).for_each(|segment| recent.insert(segment, segment));
        let known: Vec<u64> = (0..100).filter(|&of| recent.contains(of, 100)).collect();
        assert!(known.len() <= 11 && known.len() >= 5, "{known:?}");
        assert!(known.contains(&99) && !known.contains(&80));
    }

    #[test]
    fn objects_that_end_with_the_same_block_hash_are_different() {
        let object = |namespace: &str, hash_blocks, group| {
            fingerprint(&ObjectKey {
                namespace: NamespaceDigest::of(namespace),
                end: BlockHash::new(&[7; 32]).expect("32 bytes"),
                hash_blocks,
                group,
            })
        };
        let one = object("a", 8, None);
        let others = [
            object("b", 8, None),
            object("a", 4, None),
            object("a", 8, Some(0)),
            object("a", 8, Some(1)),
        ];
        assert!(!others.contains(&one), "{others:?}");
        assert_ne!(others[2], others[3]);
    }
}
