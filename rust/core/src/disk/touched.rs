//! Blocks of the table in whose records only the tick of the last touch is out of date.

/// A set of blocks, with a bit for each. Blocks are taken in the order of their numbers; after the last, the first
/// follows.
///
/// Invariant: `count` is the number of bits that are set.
#[derive(Debug, Default)]
pub(super) struct TouchedBlocks {
    words: Vec<u64>,
    count: usize,
    /// The word to be looked at next.
    cursor: usize,
}

impl TouchedBlocks {
    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }

    pub(super) fn insert(&mut self, block: u32) {
        let (word, bit) = (block as usize / 64, 1 << (block % 64));
        if self.words.len() <= word {
            self.words.resize(word + 1, 0);
        }
        self.count += usize::from(self.words[word] & bit == 0);
        self.words[word] |= bit;
    }

    pub(super) fn remove(&mut self, block: u32) {
        let (word, bit) = (block as usize / 64, 1 << (block % 64));
        if let Some(word) = self.words.get_mut(word) {
            self.count -= usize::from(*word & bit != 0);
            *word &= !bit;
        }
    }

    /// Takes the next block.
    pub(super) fn take(&mut self) -> Option<u32> {
        if self.is_empty() {
            return None;
        }
        while self.words[self.cursor % self.words.len()] == 0 {
            self.cursor += 1;
        }
        self.cursor %= self.words.len();
        let bit = self.words[self.cursor].trailing_zeros();
        let block = self.cursor as u32 * 64 + bit;
        self.remove(block);
        Some(block)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_block_is_taken_once_wherever_the_cursor_is() {
        let mut blocks = TouchedBlocks::default();
        assert_eq!(blocks.take(), None);
        for block in [700, 3, 64, 3, 65] {
            blocks.insert(block);
        }
        blocks.remove(65);
        blocks.remove(9999);
        assert_eq!(
            [(); 3].map(|()| blocks.take()),
            [Some(3), Some(64), Some(700)]
        );
        blocks.insert(1);
        blocks.insert(700);
        assert_eq!([(); 3].map(|()| blocks.take()), [Some(700), Some(1), None]);
        assert!(blocks.is_empty());
    }
}
