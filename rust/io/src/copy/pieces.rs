//! The runs of bytes that some blocks of a KV cache are on a device and in the arena.

use std::sync::Arc;

use super::CopyPiece;
use super::staged::UNIT;

/// The pages of the blocks of one KV cache group on one rank.
#[derive(Debug)]
pub struct BlockPages {
    pub(super) pages: Box<[BlockPage]>,
}

/// One layer's page, or neighbouring ones.
#[derive(Clone, Copy, Debug)]
pub struct BlockPage {
    /// Address in block 0.
    pub address: u64,
    /// Bytes from one block to the next.
    pub stride: u64,
    /// Bytes.
    pub len: u64,
    /// Offset in the block's shard, in bytes.
    pub offset: u64,
}

impl BlockPages {
    /// In the order of the copies.
    #[must_use]
    pub fn new(pages: impl IntoIterator<Item = BlockPage>) -> Self {
        Self {
            pages: pages.into_iter().collect(),
        }
    }

    /// Whether [`Staged`](super::Staged) can move the pages: they begin and end at multiples of 16 bytes.
    #[must_use]
    pub fn aligned(&self) -> bool {
        let numbers = |page: &BlockPage| [page.address, page.stride, page.len, page.offset];
        let mut all = self.pages.iter().flat_map(numbers);
        all.all(|number| number.is_multiple_of(UNIT))
    }

    /// Bytes of a shard.
    #[must_use]
    pub fn shard_len(&self) -> u64 {
        let ends = self.pages.iter().map(|page| page.offset + page.len);
        ends.max().unwrap_or(0)
    }
}

/// The pages of some blocks, in order, each as a piece.
#[derive(Clone, Debug)]
pub struct BlockPieces {
    pub(super) pages: Arc<BlockPages>,
    /// For each block, its number on the device, and the offset of its shard in the arena.
    pub(super) blocks: Arc<[(u64, u64)]>,
    /// The next block, and its next page.
    next: (usize, usize),
}

impl BlockPieces {
    /// ``blocks``: for each block, its number on the device, and the offset of its shard in the arena.
    #[must_use]
    pub fn new(pages: Arc<BlockPages>, blocks: Arc<[(u64, u64)]>) -> Self {
        Self {
            pages,
            blocks,
            next: (0, 0),
        }
    }
}

impl Iterator for BlockPieces {
    type Item = CopyPiece;

    fn next(&mut self) -> Option<CopyPiece> {
        let (block, page) = self.next;
        let (number, shard) = *self.blocks.get(block)?;
        let found = self.pages.pages.get(page)?;
        self.next = if page + 1 < self.pages.pages.len() {
            (block, page + 1)
        } else {
            (block + 1, 0)
        };
        Some(CopyPiece {
            address: (found.address + number * found.stride) as usize,
            offset: shard + found.offset,
            len: found.len,
        })
    }
}

/// Pieces of which neighbours on both sides are one, cut at the borders of chunks.
#[derive(Clone, Debug)]
pub struct Joined<I> {
    pub(super) pieces: I,
    /// No piece lies on both sides of a multiple of this many bytes in the arena.
    pub(super) chunk: u64,
    /// A piece that is not part of the pieces before it; cut from its start.
    rest: Option<CopyPiece>,
}

impl Joined<BlockPieces> {
    /// Whether [`Staged`](super::Staged) can copy the blocks through a buffer of `staging` bytes at `address`.
    #[must_use]
    pub fn fits(&self, address: u64, staging: u64) -> bool {
        let pages = &self.pieces.pages;
        let shard = pages.shard_len();
        pages.aligned() && address.is_multiple_of(UNIT) && (1..=staging).contains(&shard)
    }
}

impl<I: Iterator<Item = CopyPiece>> Joined<I> {
    /// No piece lies on both sides of a multiple of `chunk` bytes in the arena.
    ///
    /// # Panics
    ///
    /// If `chunk` is 0.
    pub fn new(pieces: impl IntoIterator<IntoIter = I>, chunk: u64) -> Self {
        assert!(chunk > 0, "a chunk has bytes");
        Self {
            pieces: pieces.into_iter(),
            chunk,
            rest: None,
        }
    }
}

impl<I: Iterator<Item = CopyPiece>> Iterator for Joined<I> {
    type Item = CopyPiece;

    fn next(&mut self) -> Option<CopyPiece> {
        let mut piece = match self.rest.take() {
            Some(rest) => rest,
            None => self.pieces.next()?,
        };
        loop {
            let room = self.chunk - piece.offset % self.chunk;
            if piece.len >= room {
                let rest = CopyPiece {
                    address: piece.address.wrapping_add(room as usize),
                    offset: piece.offset + room,
                    len: piece.len - room,
                };
                self.rest = (rest.len > 0).then_some(rest);
                piece.len = room;
                return Some(piece);
            }
            match self.pieces.next() {
                Some(following) if piece.adjoins(&following) => piece.len += following.len,
                following => {
                    self.rest = following;
                    return Some(piece);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(pages: &[BlockPage], blocks: &[(u64, u64)], chunk: u64) -> Vec<(usize, u64, u64)> {
        let pages = Arc::new(BlockPages::new(pages.iter().copied()));
        Joined::new(BlockPieces::new(pages, blocks.into()), chunk)
            .map(|piece| (piece.address, piece.offset, piece.len))
            .collect()
    }

    fn page(address: u64, stride: u64, len: u64, offset: u64) -> BlockPage {
        BlockPage {
            address,
            stride,
            len,
            offset,
        }
    }

    #[test]
    fn each_page_of_each_block_is_a_piece() {
        let pages = [page(1000, 10, 8, 0), page(5000, 20, 16, 8)];
        assert_eq!(
            pieces(&pages, &[(3, 100), (1, 400)], 1 << 20),
            [
                (1030, 100, 8),
                (5060, 108, 16),
                (1010, 400, 8),
                (5020, 408, 16)
            ]
        );
        assert_eq!(pieces(&pages, &[], 1 << 20), []);
        assert_eq!(pieces(&[], &[(3, 100)], 1 << 20), []);
    }

    #[test]
    fn neighbours_on_both_sides_are_one_piece() {
        let pages = [page(100, 16, 8, 0), page(108, 16, 8, 8)];
        assert_eq!(
            pieces(&pages, &[(0, 0), (1, 16), (2, 40), (4, 56)], 1 << 20),
            [(100, 0, 32), (132, 40, 16), (164, 56, 16)]
        );
    }

    #[test]
    fn a_piece_ends_where_a_chunk_does() {
        let pages = [page(200, 21, 21, 0)];
        assert_eq!(
            pieces(&pages, &[(0, 6), (1, 27), (2, 48)], 8),
            [
                (200, 6, 2),
                (202, 8, 8),
                (210, 16, 8),
                (218, 24, 3 + 5),
                (226, 32, 8),
                (234, 40, 8),
                (242, 48, 8),
                (250, 56, 8),
                (258, 64, 5)
            ]
        );
        assert_eq!(
            pieces(&[page(0, 8, 8, 0)], &[(2, 8), (3, 24)], 8),
            [(16, 8, 8), (24, 24, 8)]
        );
    }
}
