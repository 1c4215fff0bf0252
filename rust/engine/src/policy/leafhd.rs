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
    classes: Vec<Leaves>,
    density: Density,
    cohorts: Cohorts,
    ghosts: GhostList,
    relearned: u64,
    random: SplitMix,
    /// The victim last drawn, with its size class and the tick: the weighed leaf is the one that is
    /// evicted.
    drawn: Option<(u16, u64, Leaf)>,
}

/// The leaves of one size class: an array to draw from, and the place of each node in it.
#[derive(Debug, Default)]
struct Leaves {
    leaves: Vec<Leaf>,
    place: Vec<u32>,
}

impl LeafHd {
    pub(super) fn new(capacity_blocks: usize, seed: u64) -> Self {
        let ghosts = capacity_blocks
            .saturating_mul(GHOSTS_PER_BLOCK)
            .saturating_add(GHOSTS_MIN);
        Self {
            classes: Vec::new(),
            density: Density::new(),
            cohorts: Cohorts::new(),
            ghosts: GhostList::new(ghosts.min(GHOSTS_MAX)),
            relearned: 0,
            random: SplitMix(seed),
            drawn: None,
        }
    }

    pub(super) fn insert_leaf(&mut self, class: u16, leaf: Leaf) {
        self.drawn = self.drawn.filter(|(_, _, drawn)| drawn.node != leaf.node);
        let class = usize::from(class);
        if class >= self.classes.len() {
            self.classes.resize_with(class + 1, Leaves::default);
        }
        self.classes[class].insert(leaf);
    }

    pub(super) fn remove_leaf(&mut self, class: u16, node: u32) -> bool {
        self.drawn = self.drawn.filter(|(_, _, drawn)| drawn.node != node);
        self.classes
            .get_mut(usize::from(class))
            .is_some_and(|leaves| leaves.remove(node))
    }

    pub(super) fn leaves(&self, class: u16) -> usize {
        self.classes
            .get(usize::from(class))
            .map_or(0, |leaves| leaves.leaves.len())
    }

    pub(super) fn victim(&mut self, class: u16, tick: u64) -> Option<Leaf> {
        if let Some((_, _, drawn)) = self
            .drawn
            .filter(|drawn| (drawn.0, drawn.1) == (class, tick))
        {
            return Some(drawn);
        }
        let leaves = &self.classes.get(usize::from(class))?.leaves;
        if leaves.is_empty() {
            return None;
        }
        let mut victim: Option<(f64, Leaf)> = None;
        for _ in 0..SAMPLES {
            let leaf = leaves[self.random.below(leaves.len())];
            let density = self
                .density
                .of(leaf.hit_class, tick.saturating_sub(leaf.last));
            if victim.is_none_or(|(lowest, _)| density < lowest) {
                victim = Some((density, leaf));
            }
        }
        let (_, leaf) = victim?;
        self.drawn = Some((class, tick, leaf));
        Some(leaf)
    }

    /// Some leaves of a class, drawn at random.
    pub(super) fn sample(&mut self, class: u16, count: usize) -> Vec<Leaf> {
        let Some(Leaves { leaves, .. }) = self.classes.get(usize::from(class)) else {
            return Vec::new();
        };
        let count = count.min(leaves.len());
        (0..count)
            .map(|_| leaves[self.random.below(leaves.len())])
            .collect()
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
    fn insert(&mut self, leaf: Leaf) {
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

    fn remove(&mut self, node: u32) -> bool {
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
