//! Least recently used, over leaves.

use std::collections::BTreeMap;

use super::leaf::Leaf;

/// The leaves of each set, ordered by last touch and then by node, so that equal ticks have
/// one order. A list would not do: a parent whose last child is evicted re-enters at the place of its
/// `last`, which is rarely the young end.
#[derive(Debug)]
pub(super) struct Lru {
    sets: Vec<BTreeMap<(u64, u32), u8>>,
}

impl Lru {
    pub(super) fn new() -> Self {
        Self { sets: Vec::new() }
    }

    pub(super) fn insert_leaf(&mut self, set: usize, leaf: Leaf) {
        if set >= self.sets.len() {
            self.sets.resize_with(set + 1, BTreeMap::new);
        }
        self.sets[set].insert((leaf.last, leaf.node), leaf.hit_class);
    }

    pub(super) fn remove_leaf(&mut self, set: usize, node: u32, last: u64) -> bool {
        self.sets
            .get_mut(set)
            .is_some_and(|leaves| leaves.remove(&(last, node)).is_some())
    }

    pub(super) fn victim(&self, set: usize) -> Option<Leaf> {
        let (&(last, node), &hit_class) = self.sets.get(set)?.first_key_value()?;
        Some(Leaf {
            node,
            last,
            hit_class,
        })
    }

    /// The leaves of a set, in the order of their eviction.
    pub(super) fn victims(&self, set: usize) -> impl Iterator<Item = Leaf> + '_ {
        let leaves = self.sets.get(set).into_iter().flatten();
        leaves.map(|(&(last, node), &hit_class)| Leaf {
            node,
            last,
            hit_class,
        })
    }

    pub(super) fn leaves(&self, set: usize) -> usize {
        self.sets.get(set).map_or(0, BTreeMap::len)
    }
}
