//! Which record of the table describes which slot, and which blocks of the table are to be written.

use std::collections::{BTreeSet, HashMap};

use rustc_hash::FxHashMap;

use crate::slots::{Owner, OwnerCell};
use crate::work;

use super::format::{PLACEHOLDER, RECORDS_PER_BLOCK};
use super::touched::TouchedBlocks;

/// In place of a record that is not known yet, while a table is being read.
const UNKNOWN: u32 = u32::MAX;

/// The records of one directory.
///
/// Invariants: a record has at most one owner; every slot of a page in use has a record of its own, which
/// stays the same while the page keeps its size class; a placeholder's record belongs to its node; a
/// block of the table is in flight at most once.
#[derive(Debug, Default)]
pub(super) struct Records {
    /// Record of each slot, by page.
    of_page: FxHashMap<u32, Vec<u32>>,
    owners: Vec<OwnerCell>,
    /// Records of nodes that may be without payloads.
    placeholders: HashMap<u32, u32>,
    free: BTreeSet<u32>,
    dirty_blocks: BTreeSet<u32>,
    /// Blocks whose records have changed in nothing but the tick of the last touch.
    touched: TouchedBlocks,
    blocks_in_flight: BTreeSet<u32>,
}

impl Records {
    /// The record of a slot; the page's slots get theirs when the first is used.
    pub(super) fn of_slot(&mut self, page: u32, slot: usize, slots_per_page: usize) -> u32 {
        if !self.of_page.contains_key(&page) {
            let records = (0..slots_per_page).map(|_| self.take()).collect();
            self.of_page.insert(page, records);
        }
        self.of_page[&page][slot]
    }

    fn take(&mut self) -> u32 {
        work::slots(1);
        self.free.pop_first().unwrap_or_else(|| {
            self.owners.push(OwnerCell::FREE);
            record_number(self.owners.len() - 1)
        })
    }

    /// Gives a free record to a payload.
    pub(super) fn assign(&mut self, record: u32, owner: Owner) {
        let before = self.owners[record as usize].replace(owner);
        assert!(before.is_none(), "record {record} belongs to {before:?}");
    }

    /// Names the owner of a record that was claimed.
    pub(super) fn set_owner(&mut self, record: u32, owner: Owner) {
        let before = self.owners[record as usize].replace(owner);
        assert!(before.is_some(), "record {record} was not claimed");
    }

    /// The payload of a record has left its slot.
    pub(super) fn vacate(&mut self, record: u32) {
        let before = self.owners[record as usize].take();
        assert!(before.is_some(), "record {record} is vacated twice");
    }

    /// A page has lost its size class: its records are free.
    pub(super) fn release_page(&mut self, page: u32) {
        let records = self.of_page.remove(&page);
        let records = records.expect("a page in use has records");
        work::slots(records.len());
        let mut last = None;
        for &record in &records {
            let block = record / RECORDS_PER_BLOCK as u32;
            // Most records of a page follow each other.
            if last.replace(block) != Some(block) {
                // It may describe bytes of slots that are now of another size, and that their records outlive.
                self.mark_dirty(record);
            }
        }
        self.free.extend(records);
    }

    /// Whether a record that a table on disk names is taken already.
    pub(super) fn is_taken(&self, record: u32) -> bool {
        let owner = self.owners.get(record as usize);
        owner.is_some_and(|owner| !owner.is_free())
    }

    /// Takes the record of a slot, as a table on disk says.
    pub(super) fn claim(
        &mut self,
        record: u32,
        (page, slot): (u32, usize),
        slots_per_page: usize,
        owner: Owner,
    ) {
        let records = self.of_page.entry(page).or_default();
        records.resize(slots_per_page, UNKNOWN);
        records[slot] = record;
        self.reach(record);
        self.assign(record, owner);
    }

    /// The table has at least `record` and those before it.
    fn reach(&mut self, record: u32) {
        if self.owners.len() <= record as usize {
            self.owners.resize(record as usize + 1, OwnerCell::FREE);
        }
    }

    /// Completes a series of claims: the other slots of their pages get records.
    pub(super) fn finish_claims(&mut self) {
        let mut given: Vec<bool> = self.owners.iter().map(|owner| !owner.is_free()).collect();
        let mut next = 0;
        let mut pages: Vec<u32> = self.of_page.keys().copied().collect();
        pages.sort_unstable();
        for page in pages {
            let records = self.of_page.get_mut(&page).expect("a key of the map");
            for record in records.iter_mut().filter(|record| **record == UNKNOWN) {
                while given.get(next).copied().unwrap_or(false) {
                    next += 1;
                }
                if next == given.len() {
                    given.push(false);
                    self.owners.push(OwnerCell::FREE);
                }
                given[next] = true;
                *record = record_number(next);
            }
        }
        let free = (0u32..).zip(&given).filter(|(_, given)| !**given);
        self.free = free.map(|(record, _)| record).collect();
    }

    pub(super) fn placeholders(&self) -> u64 {
        self.placeholders.len() as u64
    }

    pub(super) fn has_placeholder(&self, node: u32) -> bool {
        self.placeholders.contains_key(&node)
    }

    /// Takes the record of a placeholder, as a table on disk says. False if the record is taken.
    pub(super) fn claim_placeholder(&mut self, node: u32, record: u32) -> bool {
        self.reach(record);
        if self.is_taken(record) {
            return false;
        }
        self.enter_placeholder(node, record);
        true
    }

    /// Gives a node a record of its own, to be written.
    pub(super) fn add_placeholder(&mut self, node: u32) {
        let record = self.take();
        self.enter_placeholder(node, record);
        self.mark_dirty(record);
    }

    fn enter_placeholder(&mut self, node: u32, record: u32) {
        let group = PLACEHOLDER;
        self.assign(record, Owner { node, group });
        let before = self.placeholders.insert(node, record);
        assert!(before.is_none(), "node {node} has two placeholder records");
    }

    /// Frees a node's own record, if it has one.
    pub(super) fn remove_placeholder(&mut self, node: u32) {
        if let Some(record) = self.placeholders.remove(&node) {
            self.vacate(record);
            self.free.insert(record);
        }
    }

    /// A record has changed: its block is to be written.
    pub(super) fn mark_dirty(&mut self, record: u32) {
        self.dirty_blocks.insert(record / RECORDS_PER_BLOCK as u32);
    }

    /// The payload of a record was used: its block is to be written some time.
    pub(super) fn mark_touched(&mut self, record: u32) {
        self.touched.insert(record / RECORDS_PER_BLOCK as u32);
    }

    /// Whether blocks are to be written some time.
    pub(super) fn has_touched(&self) -> bool {
        !self.touched.is_empty()
    }

    /// Has at most `most` blocks with touched records written.
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
        self.dirty_blocks.len()
    }

    /// Takes the next block of the table to write. A block is in flight once at a time, so that an
    /// older image never lands on a newer one.
    pub(super) fn take_dirty_block(&mut self) -> Option<u32> {
        let mut blocks = self.dirty_blocks.iter().copied();
        let block = blocks.find(|block| !self.blocks_in_flight.contains(block))?;
        self.dirty_blocks.remove(&block);
        self.touched.remove(block);
        self.blocks_in_flight.insert(block);
        Some(block)
    }

    /// The write of a block has ended.
    pub(super) fn block_written(&mut self, block: u32, ok: bool) {
        let was_in_flight = self.blocks_in_flight.remove(&block);
        assert!(was_in_flight, "block {block} of the table is written twice");
        if !ok {
            self.dirty_blocks.insert(block);
        }
    }

    /// Owners of the records of a block.
    pub(super) fn block_owners(&self, block: u32) -> impl Iterator<Item = Option<Owner>> + '_ {
        let first = block as usize * RECORDS_PER_BLOCK;
        (first..first + RECORDS_PER_BLOCK).map(|at| self.owners.get(at)?.get())
    }

    /// The record of a slot in use, and whose it is.
    #[cfg(feature = "check")]
    pub(super) fn record_at(&self, page: u32, slot: usize) -> Option<(u32, Option<Owner>)> {
        let record = *self.of_page.get(&page)?.get(slot)?;
        Some((record, self.owners.get(record as usize)?.get()))
    }

    /// How many records are in use for payloads, and whether each placeholder has its own.
    #[cfg(feature = "check")]
    pub(super) fn in_use(&self) -> (usize, bool) {
        let group = PLACEHOLDER;
        let owned = self.placeholders.iter().all(|(&node, &record)| {
            self.owners[record as usize].get() == Some(Owner { node, group })
        });
        let used = self.owners.iter().filter(|owner| !owner.is_free()).count();
        (used - self.placeholders.len(), owned)
    }
}

fn record_number(index: usize) -> u32 {
    u32::try_from(index).expect("a table has fewer than 2^32 records")
}
