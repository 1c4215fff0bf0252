//! LeafHD: evicts the leaf with the lowest learned hit density, and does not admit blocks of lower density.

use std::collections::BTreeSet;

use super::HIT_CLASSES;
use super::cohorts::Cohorts;
use super::density::Density;
use super::ghost::{GhostList, Remembered};
use super::leaf::{Leaf, class_index, next_class};

/// Ticks between two relearnings.
const RELEARN_TICKS: u64 = 50;
/// Remembered blocks for each block of capacity. A short memory breaks the estimate: only the memory
/// shows ages beyond the residence time.
const GHOSTS_PER_BLOCK: usize = 8;
const GHOSTS_MIN: usize = 1000;
/// Keeps the memory of a very large tier below 64 MiB. Such a tier holds blocks for longer than the
/// ages that the buckets distinguish.
const GHOSTS_MAX: usize = 4 << 20;

#[derive(Debug)]
pub(super) struct LeafHd {
    classes: Vec<Leaves>,
    density: Density,
    cohorts: Cohorts,
    ghosts: GhostList,
    relearned: u64,
}

/// The leaves of one size class: for each hit class, ordered by last touch and then by node.
#[derive(Debug, Default)]
struct Leaves {
    by_hits: [BTreeSet<(u64, u32)>; HIT_CLASSES as usize],
}

impl LeafHd {
    pub(super) fn new(capacity_blocks: usize) -> Self {
        let ghosts = capacity_blocks
            .saturating_mul(GHOSTS_PER_BLOCK)
            .saturating_add(GHOSTS_MIN);
        Self {
            classes: Vec::new(),
            density: Density::new(),
            cohorts: Cohorts::new(),
            ghosts: GhostList::new(ghosts.min(GHOSTS_MAX)),
            relearned: 0,
        }
    }

    pub(super) fn insert_leaf(&mut self, class: u16, leaf: Leaf) {
        let class = usize::from(class);
        if class >= self.classes.len() {
            self.classes.resize_with(class + 1, Leaves::default);
        }
        self.classes[class].of(leaf).insert((leaf.last, leaf.node));
    }

    pub(super) fn remove_leaf(&mut self, class: u16, leaf: Leaf) -> bool {
        self.classes
            .get_mut(usize::from(class))
            .is_some_and(|leaves| leaves.of(leaf).remove(&(leaf.last, leaf.node)))
    }

    pub(super) fn leaves(&self, class: u16) -> usize {
        self.classes.get(usize::from(class)).map_or(0, Leaves::len)
    }

    /// The leaf of lowest density among the oldest and the youngest of each hit class. Within a class, density
    /// mostly falls or rises with the age, so that the leaves between them are hardly ever the worst.
    pub(super) fn victim(&self, class: u16, tick: u64) -> Option<Leaf> {
        let leaves = self.classes.get(usize::from(class))?;
        let worth = |leaf: Leaf| {
            let age = tick.saturating_sub(leaf.last);
            (self.density.of(leaf.hit_class, age), leaf)
        };
        let weighed = leaves.ends().map(worth);
        let lowest = weighed.min_by(|(one, _), (other, _)| one.total_cmp(other));
        lowest.map(|(_, leaf)| leaf)
    }

    /// The oldest leaves of each hit class in turn, up to `count` of them.
    pub(super) fn victims(&self, class: u16, count: usize) -> Vec<Leaf> {
        let Some(leaves) = self.classes.get(usize::from(class)) else {
            return Vec::new();
        };
        let mut orders: Vec<_> = (0..HIT_CLASSES).map(|hits| leaves.oldest(hits)).collect();
        let mut victims = Vec::new();
        while victims.len() < count {
            let before = victims.len();
            victims.extend(orders.iter_mut().filter_map(Iterator::next));
            if victims.len() == before {
                break;
            }
        }
        victims.truncate(count);
        victims
    }

    pub(super) fn admit(&self, hit_class: u8, victim: &Leaf, tick: u64) -> bool {
        let age = tick.saturating_sub(victim.last);
        self.density.of(hit_class, 0) >= self.density.of(victim.hit_class, age)
    }

    pub(super) fn on_hit(&mut self, hit_class: u8, last: u64, tick: u64) {
        self.density
            .observe_hit(hit_class, tick.saturating_sub(last));
        self.cohorts.remove(hit_class, last);
        self.cohorts.add(next_class(hit_class), tick);
    }

    pub(super) fn on_offer(&mut self, fingerprint: u64, tick: u64) -> u8 {
        self.cohorts.advance(tick);
        let Some(block) = self.ghosts.take(fingerprint, self.cohorts.now()) else {
            return 0;
        };
        self.cohorts.remove(block.hit_class, block.last);
        if block.last >= tick {
            // The same request offers the block again: no reuse.
            return block.hit_class;
        }
        self.density.observe_hit(block.hit_class, tick - block.last);
        next_class(block.hit_class)
    }

    pub(super) fn on_insert(&mut self, fingerprint: u64, hit_class: u8, last: u64) {
        self.cohorts.add(hit_class, last);
        self.forget(fingerprint);
    }

    pub(super) fn on_refuse(&mut self, fingerprint: u64, hit_class: u8, tick: u64) {
        self.cohorts.add(hit_class, tick);
        self.remember(
            fingerprint,
            Remembered {
                last: tick,
                hit_class,
            },
        );
    }

    pub(super) fn on_evict(&mut self, fingerprint: u64, last: u64, hit_class: u8) {
        self.remember(fingerprint, Remembered { last, hit_class });
    }

    pub(super) fn on_drop(&mut self, last: u64, hit_class: u8) {
        self.cohorts.remove(hit_class, last);
    }

    pub(super) fn end_of_request(&mut self, tick: u64) {
        self.cohorts.advance(tick);
        let elapsed = tick.saturating_sub(self.relearned);
        if elapsed >= RELEARN_TICKS {
            self.density.relearn(&self.cohorts, elapsed);
            self.relearned = tick;
        }
    }

    /// Forgets a remembered block: a block is known once, as resident or as remembered.
    fn forget(&mut self, fingerprint: u64) {
        if let Some(block) = self.ghosts.take(fingerprint, self.cohorts.now()) {
            self.cohorts.remove(block.hit_class, block.last);
        }
    }

    fn remember(&mut self, fingerprint: u64, block: Remembered) {
        self.forget(fingerprint);
        if let Some(dropped) = self.ghosts.push(fingerprint, block, self.cohorts.now()) {
            self.cohorts.remove(dropped.hit_class, dropped.last);
        }
    }
}

impl Leaves {
    /// The order that a leaf belongs to.
    fn of(&mut self, leaf: Leaf) -> &mut BTreeSet<(u64, u32)> {
        &mut self.by_hits[class_index(leaf.hit_class)]
    }

    fn len(&self) -> usize {
        self.by_hits.iter().map(BTreeSet::len).sum()
    }

    /// The leaves of a hit class, the oldest first.
    fn oldest(&self, hit_class: u8) -> impl DoubleEndedIterator<Item = Leaf> + '_ {
        let order = self.by_hits[class_index(hit_class)].iter();
        order.map(move |&(last, node)| Leaf {
            node,
            last,
            hit_class,
        })
    }

    /// The oldest and the youngest leaf of each hit class.
    fn ends(&self) -> impl Iterator<Item = Leaf> + '_ {
        (0..HIT_CLASSES).flat_map(|hit_class| {
            let mut order = self.oldest(hit_class);
            let (oldest, youngest) = (order.next(), order.next_back());
            oldest.into_iter().chain(youngest)
        })
    }
}
