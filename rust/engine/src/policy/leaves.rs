//! The leaves of one set, in the order of their last touch.

use std::collections::BTreeSet;

use super::HIT_CLASSES;
use super::leaf::{Leaf, class_index};

/// For each hit class, its leaves ordered by last touch and then by node, so that equal ticks have one order. A list would
/// not do: a parent whose last child is evicted enters at the place of its `last`, which is rarely the young end.
#[derive(Debug, Default)]
pub(super) struct Leaves {
    by_hits: [BTreeSet<(u64, u32)>; HIT_CLASSES as usize],
}

impl Leaves {
    pub(super) fn insert(&mut self, leaf: Leaf) {
        self.by_hits[class_index(leaf.hit_class)].insert((leaf.last, leaf.node));
    }

    pub(super) fn remove(&mut self, leaf: Leaf) -> bool {
        self.by_hits[class_index(leaf.hit_class)].remove(&(leaf.last, leaf.node))
    }

    pub(super) fn len(&self) -> usize {
        self.by_hits.iter().map(BTreeSet::len).sum()
    }

    /// The oldest leaf of each hit class.
    pub(super) fn oldest_of_each(&self) -> impl Iterator<Item = Leaf> + '_ {
        (0..HIT_CLASSES).filter_map(|hit_class| self.oldest(hit_class).next())
    }

    /// Up to `count` leaves: the oldest of each hit class in turn.
    pub(super) fn oldest_in_turn(&self, count: usize) -> Vec<Leaf> {
        let mut orders: Vec<_> = (0..HIT_CLASSES).map(|class| self.oldest(class)).collect();
        let mut leaves = Vec::new();
        while leaves.len() < count {
            let before = leaves.len();
            leaves.extend(orders.iter_mut().filter_map(Iterator::next));
            if leaves.len() == before {
                break;
            }
        }
        leaves.truncate(count);
        leaves
    }

    /// Up to `count` leaves, the oldest first.
    pub(super) fn oldest_of_all(&self, count: usize) -> Vec<Leaf> {
        let classes = 0..HIT_CLASSES;
        let mut leaves: Vec<_> = classes
            .flat_map(|class| self.oldest(class).take(count))
            .collect();
        leaves.sort_by_key(|leaf| (leaf.last, leaf.node));
        leaves.truncate(count);
        leaves
    }

    /// The leaves of a hit class, the oldest first.
    fn oldest(&self, hit_class: u8) -> impl Iterator<Item = Leaf> + '_ {
        let order = self.by_hits[class_index(hit_class)].iter();
        order.map(move |&(last, node)| Leaf {
            node,
            last,
            hit_class,
        })
    }
}
