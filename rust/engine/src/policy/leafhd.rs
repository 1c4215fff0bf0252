//! LeafHD: evicts the leaf with the lowest learned hit density, and does not admit blocks of lower density.

use super::cohorts::Cohorts;
use super::density::Density;
use super::ghost::{GhostList, Remembered};
use super::leaf::{Leaf, next_class};

/// Leaves that a choice of victim looks at.
const SAMPLES: usize = 64;
/// Ticks between two relearnings.
const RELEARN_TICKS: u64 = 50;
/// Remembered blocks for each block of capacity. A short memory breaks the estimate: only the memory
/// shows ages beyond the residence time.
const GHOSTS_PER_BLOCK: usize = 8;
const GHOSTS_MIN: usize = 1000;
/// Keeps the memory of a very large tier below 64 MiB. Such a tier holds blocks for longer than the
/// ages that the buckets distinguish.
const GHOSTS_MAX: usize = 4 << 20;

const ABSENT: u32 = u32::MAX;

#[derive(Debug)]
pub(super) struct LeafHd {
    sets: Vec<Leaves>,
    density: Density,
    cohorts: Cohorts,
    ghosts: GhostList,
    relearned: u64,
    random: SplitMix,
}

/// The leaves of one set: an array to draw from, and the place of each node in it.
#[derive(Debug, Default)]
struct Leaves {
    leaves: Vec<Leaf>,
    place: Vec<u32>,
    /// The victim last drawn, with the tick: the weighed leaf is the one that is evicted.
    drawn: Option<(u64, Leaf)>,
}

impl LeafHd {
    pub(super) fn new(capacity_blocks: usize, seed: u64) -> Self {
        let ghosts = capacity_blocks
            .saturating_mul(GHOSTS_PER_BLOCK)
            .saturating_add(GHOSTS_MIN);
        Self {
            sets: Vec::new(),
            density: Density::new(),
            cohorts: Cohorts::new(),
            ghosts: GhostList::new(ghosts.min(GHOSTS_MAX)),
            relearned: 0,
            random: SplitMix(seed),
        }
    }

    pub(super) fn insert_leaf(&mut self, set: usize, leaf: Leaf) {
        if set >= self.sets.len() {
            self.sets.resize_with(set + 1, Leaves::default);
        }
        self.sets[set].insert(leaf);
    }

    pub(super) fn remove_leaf(&mut self, set: usize, node: u32) -> bool {
        self.sets
            .get_mut(set)
            .is_some_and(|leaves| leaves.remove(node))
    }

    pub(super) fn leaves(&self, set: usize) -> usize {
        self.sets.get(set).map_or(0, |leaves| leaves.leaves.len())
    }

    pub(super) fn victim(&mut self, set: usize, tick: u64) -> Option<Leaf> {
        let Leaves { leaves, drawn, .. } = self.sets.get(set)?;
        if let Some((_, drawn)) = drawn.filter(|(then, _)| *then == tick) {
            return Some(drawn);
        }
        let count = leaves.len();
        if count == 0 {
            return None;
        }
        let mut victim: Option<(f64, Leaf)> = None;
        for _ in 0..SAMPLES {
            let leaf = leaves[self.random.below(count)];
            let density = self.density(&leaf, tick);
            if victim.is_none_or(|(lowest, _)| density < lowest) {
                victim = Some((density, leaf));
            }
        }
        let (_, leaf) = victim?;
        self.sets[set].drawn = Some((tick, leaf));
        Some(leaf)
    }

    /// Some leaves of a set, drawn at random.
    pub(super) fn sample(&mut self, set: usize, count: usize) -> Vec<Leaf> {
        let Some(Leaves { leaves, .. }) = self.sets.get(set) else {
            return Vec::new();
        };
        let count = count.min(leaves.len());
        (0..count)
            .map(|_| leaves[self.random.below(leaves.len())])
            .collect()
    }

    /// Expected hits per tick of residence of a leaf.
    pub(super) fn density(&self, leaf: &Leaf, tick: u64) -> f64 {
        let age = tick.saturating_sub(leaf.last);
        self.density.of(leaf.hit_class, age)
    }

    pub(super) fn admit(&self, hit_class: u8, victim: &Leaf, tick: u64) -> bool {
        self.density.of(hit_class, 0) >= self.density(victim, tick)
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
    fn insert(&mut self, leaf: Leaf) {
        self.forget_drawn(leaf.node);
        let node = leaf.node as usize;
        if node >= self.place.len() {
            self.place.resize(node + 1, ABSENT);
        }
        if self.place[node] == ABSENT {
            self.place[node] = self.leaves.len() as u32;
            self.leaves.push(leaf);
        } else {
            self.leaves[self.place[node] as usize] = leaf;
        }
    }

    /// A leaf that has left the set or changed is drawn anew.
    fn forget_drawn(&mut self, node: u32) {
        self.drawn = self.drawn.filter(|(_, drawn)| drawn.node != node);
    }

    fn remove(&mut self, node: u32) -> bool {
        self.forget_drawn(node);
        let Some(place) = self.place.get_mut(node as usize) else {
            return false;
        };
        let at = std::mem::replace(place, ABSENT);
        if at == ABSENT {
            return false;
        }
        self.leaves.swap_remove(at as usize);
        if let Some(moved) = self.leaves.get(at as usize) {
            self.place[moved.node as usize] = at;
        }
        true
    }
}

/// SplitMix64: small, seeded, good enough to draw samples.
#[derive(Debug)]
struct SplitMix(u64);

impl SplitMix {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `bound`, which is above 0 and fits 32 bits.
    fn below(&mut self, bound: usize) -> usize {
        (((self.next() >> 32) * bound as u64) >> 32) as usize
    }
}
