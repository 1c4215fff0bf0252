//! Blocks of a table that an order to clear makes durable.

use std::collections::BTreeSet;

use super::block_set::BlockSet;

/// Blocks whose present records have to reach the medium before an order is durable.
///
/// Invariant: no waiting block is in flight.
#[derive(Debug, Default)]
pub(super) struct OrderedBlocks {
    /// Blocks that are to be written.
    waiting: BlockSet,
    /// Blocks that are being written for the order.
    in_flight: BTreeSet<u32>,
    /// Blocks that were being written when the order came: the bytes written may be older than the order.
    again: BTreeSet<u32>,
    /// Blocks that have been written since the last sync began, for an order or before it.
    written: BlockSet,
    /// An order waits for a sync of the written blocks.
    is_due: bool,
    /// Blocks whose sync is under way.
    syncing: Option<BlockSet>,
}

impl OrderedBlocks {
    /// An order comes: these blocks are written, and synced with all that were written before.
    pub(super) fn order(&mut self, blocks: &BlockSet, in_flight: &BTreeSet<u32>) {
        self.add(blocks, in_flight);
        self.is_due |= !self.written.is_empty();
    }

    /// Adds blocks. Those in flight are written once more.
    fn add(&mut self, blocks: &BlockSet, in_flight: &BTreeSet<u32>) {
        self.waiting.add(blocks);
        self.again.extend(in_flight);
        for &block in in_flight {
            self.waiting.remove(block);
        }
    }

    /// Blocks that are to be written.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// The next block to write.
    pub(super) fn take(&mut self) -> Option<u32> {
        let block = self.waiting.take()?;
        self.in_flight.insert(block);
        Some(block)
    }

    /// The write of any block begins.
    pub(super) fn begins(&mut self, block: u32) {
        if self.waiting.remove(block) {
            self.in_flight.insert(block);
        }
    }

    /// The write of any block has ended, well or not.
    pub(super) fn ended(&mut self, block: u32, ok: bool) {
        let was_ordered = self.in_flight.remove(&block);
        if ok {
            self.written.insert(block);
        }
        if self.again.remove(&block) || was_ordered && !ok {
            self.waiting.insert(block);
        } else if was_ordered {
            self.is_due = true;
        }
    }

    /// Whether all blocks have been written, and some were not synced.
    pub(super) fn needs_sync(&self) -> bool {
        self.waiting.is_empty()
            && self.in_flight.is_empty()
            && self.again.is_empty()
            && self.syncing.is_none()
            && self.is_due
    }

    /// A sync begins.
    pub(super) fn sync_begins(&mut self) {
        self.syncing = Some(std::mem::take(&mut self.written));
        self.is_due = false;
    }

    /// The sync has ended. After a failure nobody knows which blocks are on the medium: all are written again.
    pub(super) fn sync_ended(&mut self, ok: bool, in_flight: &BTreeSet<u32>) {
        let blocks = self.syncing.take().filter(|_| !ok);
        if let Some(blocks) = blocks {
            self.add(&blocks, in_flight);
        }
    }

    /// Whether the medium has all of the blocks.
    pub(super) fn is_durable(&self) -> bool {
        self.waiting.is_empty()
            && self.in_flight.is_empty()
            && self.again.is_empty()
            && !self.is_due
            && self.syncing.is_none()
    }
}
