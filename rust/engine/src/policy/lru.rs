//! Least recently used, over leaves.

use std::collections::BTreeMap;

use super::leaf::Leaf;

/// The leaves of each size class, ordered by last touch and then by node, so that equal ticks have
/// one order. A list would not do: a parent whose last child is evicted re-enters at the place of its
/// `last`, which is rarely the young end.
#[derive(Debug)]
pub(super) struct Lru {
    classes: Vec<BTreeMap<(u64, u32), u8>>,
}

impl Lru {
    pub(super) fn new() -> Self {
        Self {
            classes: Vec::new(),
        }
    }

    pub(super) fn insert_leaf(&mut self, class: u16, leaf: Leaf) {
        let class = usize::from(class);
        if class >= self.classes.len() {
            self.classes.resize_with(class + 1, BTreeMap::new);
        }
        self.classes[class].insert((leaf.last, leaf.node), leaf.hit_class);
    }

    pub(super) fn remove_leaf(&mut self, class: u16, node: u32, last: u64) -> bool {
        self.classes
            .get_mut(usize::from(class))
            .is_some_and(|leaves| leaves.remove(&(last, node)).is_some())
    }

    pub(super) fn victim(&self, class: u16) -> Option<Leaf> {
        self.victims(class).next()
    }

    /// The leaves of a class, in the order of their eviction.
    pub(super) fn victims(&self, class: u16) -> impl Iterator<Item = Leaf> + '_ {
        let leaves = self.classes.get(usize::from(class)).into_iter().flatten();
        leaves.map(|(&(last, node), &hit_class)| Leaf {
            node,
            last,
            hit_class,
        })
    }

    pub(super) fn leaves(&self, class: u16) -> usize {
        self.classes
            .get(usize::from(class))
            .map_or(0, BTreeMap::len)
    }
}
