//! Second-touch admission: a block is written to disk only after it was offered twice. (The name is
//! TinyLFU's.)

use super::ghost::{GhostList, Remembered};

/// Remembers blocks that were offered once, the latest ones up to a bound.
#[derive(Debug)]
pub struct Doorkeeper {
    blocks: GhostList,
}

impl Doorkeeper {
    /// A memory of `blocks` blocks, of about 15 bytes each.
    pub fn new(blocks: usize) -> Self {
        Self {
            blocks: GhostList::new(blocks),
        }
    }

    /// Whether the block was offered before; remembers that it was now.
    pub fn again(&mut self, fingerprint: u64) -> bool {
        let known = self.blocks.take(fingerprint, 0).is_some();
        let block = Remembered {
            last: 0,
            hit_class: 0,
            weight: 0,
        };
        self.blocks.push(fingerprint, block, 0);
        known
    }
}
