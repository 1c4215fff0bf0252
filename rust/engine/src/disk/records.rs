//! Which records of the table belong to no slot, and which blocks of the table are to be written.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;

use undercroft_contract::format::RECORDS_PER_BLOCK;

use crate::work;

use super::block_set::BlockSet;
use super::ordered::OrderedBlocks;

/// The records of one directory, beside the cells of [`Slots`](crate::slots::Slots): a record has the number of a cell.
///
/// Invariants: a placeholder's record belongs to its node; a block of the table is in flight at most once.
#[derive(Debug, Default)]
pub(super) struct Records {
    /// Records of nodes that may be without payloads.
    placeholders: HashMap<u32, u32>,
    dirty_blocks: BTreeSet<u32>,
    /// Blocks in whose records only the tick of the last touch has changed.
    touched: BlockSet,
    /// Blocks that may have a record, on disk, of a payload that is not there any more. As long as its bytes stay, a
    /// restart finds the payload again.
    stale: BlockSet,
    blocks_in_flight: BTreeSet<u32>,
    ordered: OrderedBlocks,
}

impl Records {
    /// Frees the records of a page that has lost its size class. Until the records are overwritten, they describe
    /// bytes that may belong to slots of another size.
    pub(super) fn release(&mut self, records: Range<u32>) {
        work::slots(records.len());
        let per_block = RECORDS_PER_BLOCK as u32;
        self.dirty_blocks
            .extend(records.start / per_block..records.end.div_ceil(per_block));
    }

    pub(super) fn placeholders(&self) -> u64 {
        self.placeholders.len() as u64
    }

    pub(super) fn has_placeholder(&self, node: u32) -> bool {
        self.placeholders.contains_key(&node)
    }

    /// Adds a placeholder record of a node.
    pub(super) fn add_placeholder(&mut self, node: u32, record: u32) {
        let before = self.placeholders.insert(node, record);
        assert!(before.is_none(), "node {node} has two placeholder records");
    }

    /// Removes a node's placeholder record. Returns the number of the record.
    pub(super) fn remove_placeholder(&mut self, node: u32) -> Option<u32> {
        self.placeholders.remove(&node)
    }

    /// Nodes with placeholder records.
    #[cfg(feature = "check")]
    pub(super) fn nodes(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        self.placeholders
            .iter()
            .map(|(&node, &record)| (node, record))
    }

    /// A record has changed: its block is to be written.
    pub(super) fn mark_dirty(&mut self, record: u32) {
        self.dirty_blocks.insert(record / RECORDS_PER_BLOCK as u32);
    }

    /// The payload of a record was used: its block is written later.
    pub(super) fn mark_touched(&mut self, record: u32) {
        self.touched.insert(record / RECORDS_PER_BLOCK as u32);
    }

    /// A record does not describe a payload any more. Its block is written with the next change, or for an order.
    pub(super) fn mark_stale(&mut self, record: u32) {
        self.stale.insert(record / RECORDS_PER_BLOCK as u32);
    }

    /// No restart may find a payload that is not there now: all blocks that differ from the records are written, and
    /// synced.
    pub(super) fn order(&mut self) {
        for &block in &self.dirty_blocks {
            self.stale.insert(block);
        }
        let stale = std::mem::take(&mut self.stale);
        self.ordered.order(&stale, &self.blocks_in_flight);
    }

    /// The blocks that an order makes durable.
    pub(super) fn ordered(&self) -> &OrderedBlocks {
        &self.ordered
    }

    /// A sync of the table begins.
    pub(super) fn sync_begins(&mut self) {
        self.ordered.sync_begins();
    }

    /// A sync of the table has ended.
    pub(super) fn sync_ended(&mut self, ok: bool) {
        self.ordered.sync_ended(ok, &self.blocks_in_flight);
    }

    /// Whether blocks with touched records wait to be written.
    pub(super) fn has_touched(&self) -> bool {
        !self.touched.is_empty()
    }

    /// Marks at most `most` blocks with touched records to be written now.
    pub(super) fn write_touched(&mut self, most: usize) {
        for _ in 0..most {
            let Some(block) = self.touched.take() else {
                break;
            };
            self.dirty_blocks.insert(block);
        }
    }

    /// Blocks of the table that are to be written.
    pub(super) fn dirty_blocks(&self) -> usize {
        self.dirty_blocks.len() + self.ordered.waiting()
    }

    /// Takes the next block of the table to write. A block has one write in flight at a time, so that an
    /// older image never overwrites a newer image.
    pub(super) fn take_dirty_block(&mut self) -> Option<u32> {
        let mut blocks = self.dirty_blocks.iter().copied();
        let dirty = blocks.find(|block| !self.blocks_in_flight.contains(block));
        let block = dirty.or_else(|| self.ordered.take())?;
        self.dirty_blocks.remove(&block);
        self.touched.remove(block);
        self.stale.remove(block);
        self.ordered.begins(block);
        self.blocks_in_flight.insert(block);
        Some(block)
    }

    /// The write of a block has ended: `None` if it was never made, because the engine ends.
    pub(super) fn block_written(&mut self, block: u32, ok: Option<bool>) {
        let was_in_flight = self.blocks_in_flight.remove(&block);
        assert!(was_in_flight, "block {block} of the table is written twice");
        let Some(ok) = ok else {
            return;
        };
        if !ok {
            self.dirty_blocks.insert(block);
        }
        self.ordered.ended(block, ok);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(records: &mut Records, block: u32) {
        records.mark_dirty(block * RECORDS_PER_BLOCK as u32);
        assert_eq!(records.take_dirty_block(), Some(block));
        records.block_written(block, Some(true));
    }

    #[test]
    fn an_order_syncs_blocks_that_were_written_before_it() {
        let mut records = Records::default();
        records.order();
        assert!(!records.ordered().needs_sync() && records.ordered().is_durable());
        written(&mut records, 3);
        records.order();
        assert!(records.ordered().needs_sync() && !records.ordered().is_durable());
        records.sync_begins();
        // Nobody waits for a block that is written later.
        written(&mut records, 4);
        records.sync_ended(true);
        assert!(!records.ordered().needs_sync() && records.ordered().is_durable());
    }

    #[test]
    fn a_block_that_is_being_written_when_an_order_comes_is_written_again() {
        let mut records = Records::default();
        records.mark_dirty(3 * RECORDS_PER_BLOCK as u32);
        assert_eq!(records.take_dirty_block(), Some(3));
        records.order();
        records.block_written(3, Some(true));
        assert!(!records.ordered().needs_sync() && !records.ordered().is_durable());
        assert_eq!(records.take_dirty_block(), Some(3));
        records.block_written(3, Some(true));
        assert!(records.ordered().needs_sync());
    }

    #[test]
    fn an_order_waits_for_records_that_have_changed_before_it() {
        let mut records = Records::default();
        records.mark_dirty(3 * RECORDS_PER_BLOCK as u32);
        records.order();
        assert!(!records.ordered().is_durable());
        assert_eq!(records.take_dirty_block(), Some(3));
        records.block_written(3, Some(true));
        assert!(records.ordered().needs_sync());
    }

    #[test]
    fn blocks_that_were_written_before_an_order_are_written_again_after_a_failed_sync() {
        let mut records = Records::default();
        written(&mut records, 3);
        records.order();
        records.sync_begins();
        records.sync_ended(false);
        assert!(!records.ordered().needs_sync() && !records.ordered().is_durable());
        assert_eq!(records.take_dirty_block(), Some(3));
        records.block_written(3, Some(true));
        assert!(records.ordered().needs_sync());
        records.sync_begins();
        records.sync_ended(true);
        assert!(records.ordered().is_durable());
    }
}
