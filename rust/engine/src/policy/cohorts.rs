//! Numbers of blocks that were last touched at each tick.

use super::HIT_CLASSES;
use super::leaf::class_index;

const CLASSES: usize = HIT_CLASSES as usize;
/// Number of ticks with a count of their own: at least the age at which the last age bucket begins.
const TICKS: usize = 8192;

/// Counts of all blocks that a policy knows, resident or remembered, by tick of last touch and hit
/// class. Exposure follows from them exactly, without a scan over the blocks.
#[derive(Debug)]
pub(super) struct Cohorts {
    now: u64,
    recent: Box<[[u32; CLASSES]]>,
    /// Blocks touched `TICKS` or more ago.
    older: [u32; CLASSES],
}

impl Cohorts {
    pub(super) fn new() -> Self {
        Self {
            now: 0,
            recent: vec![[0; CLASSES]; TICKS].into_boxed_slice(),
            older: [0; CLASSES],
        }
    }

    /// The latest tick seen.
    pub(super) fn now(&self) -> u64 {
        self.now
    }

    /// Advances the clock to `tick`. An earlier tick is ignored.
    pub(super) fn advance(&mut self, tick: u64) {
        let steps = tick.saturating_sub(self.now).min(TICKS as u64);
        self.now = self.now.max(tick);
        for step in 0..steps {
            let leaving = std::mem::take(&mut self.recent[slot_of(self.now - step)]);
            for (older, leaving) in self.older.iter_mut().zip(leaving) {
                *older += leaving;
            }
        }
    }

    pub(super) fn add(&mut self, hit_class: u8, last: u64, blocks: u32) {
        self.advance(last);
        *self.count(hit_class, last) += blocks;
    }

    pub(super) fn remove(&mut self, hit_class: u8, last: u64, blocks: u32) {
        let count = self.count(hit_class, last);
        // A caller that changed `last` unseen costs precision, not a wrap-around.
        *count = count.saturating_sub(blocks);
    }

    /// Blocks of each class whose age is at least `from`, and below `to` where that is given.
    pub(super) fn blocks_aged(&self, from: u64, to: Option<u64>) -> [u64; CLASSES] {
        let mut blocks = [0; CLASSES];
        let oldest = (self.now + 1).min(TICKS as u64);
        for age in from..to.unwrap_or(oldest).min(oldest) {
            for (blocks, count) in blocks.iter_mut().zip(self.recent[slot_of(self.now - age)]) {
                *blocks += u64::from(count);
            }
        }
        if to.is_none() {
            for (blocks, count) in blocks.iter_mut().zip(self.older) {
                *blocks += u64::from(count);
            }
        }
        blocks
    }

    fn count(&mut self, hit_class: u8, last: u64) -> &mut u32 {
        let class = class_index(hit_class);
        if self.now.saturating_sub(last) < TICKS as u64 {
            &mut self.recent[slot_of(last)][class]
        } else {
            &mut self.older[class]
        }
    }
}

fn slot_of(tick: u64) -> usize {
    (tick % TICKS as u64) as usize
}
