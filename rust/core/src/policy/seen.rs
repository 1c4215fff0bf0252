//! Which blocks were offered before: the gate of second-touch admission.

use super::ghost::{GhostList, Remembered};

/// Remembers blocks that were offered once, the latest ones up to a bound.
#[derive(Debug)]
pub struct Seen {
    blocks: GhostList,
}

impl Seen {
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
        };
        self.blocks.push(fingerprint, block, 0);
        known
    }
}
