//! LeafHD: learns the hit density of leaves, and does not admit blocks of clearly lower density than those they would replace.

use super::cohorts::Cohorts;
use super::density::Density;
use super::ghost::{GhostList, Remembered};
use super::leaf::{Leaf, next_class};
use super::sample::weight;

/// Most ticks between two relearnings.
const RELEARN_TICKS: u64 = 50;
/// A young policy relearns more often: whenever its age has grown by a part of this number, and at least after
/// [`RELEARN_TICKS_MIN`]. A small tier that learns late keeps new blocks out in the meantime.
const RELEARN_PARTS: u64 = 16;
const RELEARN_TICKS_MIN: u64 = 10;
/// Remembered blocks for each block of capacity. A short memory breaks the estimate: only the memory
/// shows ages beyond the residence time.
const GHOSTS_PER_BLOCK: usize = 3;
const GHOSTS_MIN: usize = 1000;
/// Keeps the memory of a very large tier below 64 MiB. Such a tier holds blocks for longer than the
/// ages that the buckets distinguish.
const GHOSTS_MAX: usize = 4 << 20;

/// The part of a leaf's density below which another density is clearly lower. Densities decide only then, and the
/// order of last use otherwise: an estimate is never exact, so that on a workload made for that order each small difference
/// would be a mistake.
pub(super) const CLEARLY: f64 = 0.8;

/// The learned densities, and the blocks that the policy counts: see [`super::sample`].
#[derive(Debug)]
pub(super) struct LeafHd {
    density: Density,
    cohorts: Cohorts,
    ghosts: GhostList,
    /// The tick of the first request.
    born: Option<u64>,
    relearned: u64,
}

impl LeafHd {
    pub(super) fn new(capacity_blocks: usize) -> Self {
        let ghosts = capacity_blocks
            .saturating_mul(GHOSTS_PER_BLOCK)
            .saturating_add(GHOSTS_MIN);
        Self {
            density: Density::new(),
            cohorts: Cohorts::new(),
            ghosts: GhostList::new(ghosts.min(GHOSTS_MAX)),
            born: None,
            relearned: 0,
        }
    }

    /// Expected hits per tick of residence of a leaf.
    pub(super) fn density(&self, leaf: &Leaf, tick: u64) -> f64 {
        let age = tick.saturating_sub(leaf.last);
        self.density.of(leaf.hit_class, age)
    }

    pub(super) fn admit(&self, hit_class: u8, victim: &Leaf, tick: u64) -> bool {
        self.density.of(hit_class, 0) >= CLEARLY * self.density(victim, tick)
    }

    pub(super) fn on_hit(&mut self, depth: u32, hit_class: u8, last: u64, tick: u64) {
        // A demoted block has no age.
        if last > 0 {
            let age = tick.saturating_sub(last);
            self.density.observe_hit(hit_class, age, weight(depth));
        }
    }

    pub(super) fn on_touch(&mut self, depth: u32, before: (u8, u64), after: (u8, u64)) {
        let weight = weight(depth);
        if weight > 0 {
            self.cohorts.remove(before.0, before.1, weight);
            self.cohorts.add(after.0, after.1, weight);
        }
    }

    pub(super) fn on_offer(&mut self, fingerprint: u64, tick: u64) -> u8 {
        self.cohorts.advance(tick);
        let Some(block) = self.forget(fingerprint) else {
            return 0;
        };
        if block.last >= tick {
            // The same request offers the block again: no reuse.
            return block.hit_class;
        }
        let age = tick - block.last;
        self.density.observe_hit(block.hit_class, age, block.weight);
        next_class(block.hit_class)
    }

    pub(super) fn on_insert(&mut self, fingerprint: u64, depth: u32, hit_class: u8, last: u64) {
        self.cohorts.add(hit_class, last, weight(depth));
        self.forget(fingerprint);
    }

    pub(super) fn on_refuse(&mut self, fingerprint: u64, depth: u32, hit_class: u8, tick: u64) {
        self.cohorts.add(hit_class, tick, weight(depth));
        self.on_evict(fingerprint, depth, hit_class, tick);
    }

    pub(super) fn on_evict(&mut self, fingerprint: u64, depth: u32, hit_class: u8, last: u64) {
        self.forget(fingerprint);
        let block = Remembered {
            last,
            hit_class,
            weight: weight(depth),
        };
        if let Some(dropped) = self.ghosts.push(fingerprint, block, self.cohorts.now()) {
            self.on_drop(dropped.weight, dropped.hit_class, dropped.last);
        }
    }

    /// A block of a weight is no longer known.
    pub(super) fn on_drop(&mut self, weight: u32, hit_class: u8, last: u64) {
        self.cohorts.remove(hit_class, last, weight);
    }

    pub(super) fn end_of_request(&mut self, tick: u64) -> bool {
        self.cohorts.advance(tick);
        let born = *self.born.get_or_insert(tick);
        let elapsed = tick.saturating_sub(self.relearned.max(born));
        let often = ((tick - born) / RELEARN_PARTS).clamp(RELEARN_TICKS_MIN, RELEARN_TICKS);
        let is_due = elapsed >= often;
        if is_due {
            let kept = elapsed as f64 / RELEARN_TICKS as f64;
            self.density.relearn(&self.cohorts, elapsed, kept);
            self.relearned = tick;
        }
        is_due
    }

    /// Forgets a remembered block: a block is known once, as resident or as remembered.
    fn forget(&mut self, fingerprint: u64) -> Option<Remembered> {
        let block = self.ghosts.take(fingerprint, self.cohorts.now())?;
        self.on_drop(block.weight, block.hit_class, block.last);
        Some(block)
    }
}
