//! Sets of blocks of a table.

/// A set of blocks, with a bit for each. Blocks are taken in the order of their numbers; after the last, the first
/// follows.
///
/// Invariant: `count` is the number of bits that are set.
#[derive(Debug, Default)]
pub(super) struct BlockSet {
    words: Vec<u64>,
    count: usize,
    /// The word to be looked at next.
    cursor: usize,
}

impl BlockSet {
    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }

    pub(super) fn len(&self) -> usize {
        self.count
    }

    pub(super) fn insert(&mut self, block: u32) {
        let (word, bit) = (block as usize / 64, 1 << (block % 64));
        if self.words.len() <= word {
            self.words.resize(word + 1, 0);
        }
        self.count += usize::from(self.words[word] & bit == 0);
        self.words[word] |= bit;
    }

    /// Removes a block. Returns whether the set had it.
    pub(super) fn remove(&mut self, block: u32) -> bool {
        let (word, bit) = (block as usize / 64, 1 << (block % 64));
        let Some(word) = self.words.get_mut(word) else {
            return false;
        };
        let had = *word & bit != 0;
        self.count -= usize::from(had);
        *word &= !bit;
        had
    }

    /// Adds the blocks of another set.
    pub(super) fn add(&mut self, other: &Self) {
        let len = self.words.len().max(other.words.len());
        self.words.resize(len, 0);
        self.count = 0;
        for (at, word) in self.words.iter_mut().enumerate() {
            *word |= other.words.get(at).copied().unwrap_or(0);
            self.count += word.count_ones() as usize;
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
        let mut blocks = BlockSet::default();
        assert_eq!(blocks.take(), None);
        for block in [700, 3, 64, 3, 65] {
            blocks.insert(block);
        }
        assert_eq!(blocks.len(), 4);
        assert_eq!(
            [65, 65, 9999].map(|block| blocks.remove(block)),
            [true, false, false]
        );
        assert_eq!(blocks.len(), 3);
        assert_eq!(
            [(); 3].map(|()| blocks.take()),
            [Some(3), Some(64), Some(700)]
        );
        blocks.insert(1);
        blocks.insert(700);
        assert_eq!([(); 3].map(|()| blocks.take()), [Some(700), Some(1), None]);
        assert!(blocks.is_empty());
    }

    #[test]
    fn a_set_takes_the_blocks_of_another_once() {
        let mut sets = [BlockSet::default(), BlockSet::default()];
        [3, 70].into_iter().for_each(|block| sets[0].insert(block));
        [3, 700].into_iter().for_each(|block| sets[1].insert(block));
        let [mut one, other] = sets;
        one.add(&other);
        assert_eq!((one.len(), other.len()), (3, 2));
        assert_eq!(
            [(); 4].map(|()| one.take()),
            [Some(3), Some(70), Some(700), None]
        );
    }
}
