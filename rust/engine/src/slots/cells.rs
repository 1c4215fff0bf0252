//! The owner of each slot, in a cell. A cell has the number of the slot's record in the table.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::{Owner, OwnerCell};
use crate::pool::Pool;

/// The cells of all pages: each page has a run of cells.
///
/// Invariant: the free runs are disjoint, and no two of them touch.
#[derive(Debug)]
pub(super) struct Cells {
    cells: Pool<OwnerCell>,
    /// Length of each free run, by its first cell.
    free: BTreeMap<u32, u32>,
    /// Length and first cell of each free run.
    by_length: BTreeSet<(u32, u32)>,
}

impl Cells {
    pub(super) fn new() -> Self {
        Self {
            cells: Pool::new(),
            free: BTreeMap::new(),
            by_length: BTreeSet::new(),
        }
    }

    fn end(&self) -> u32 {
        u32::try_from(self.cells.len()).expect("a region has fewer than 2^32 slots")
    }

    /// Grows to at least `count` cells.
    pub(super) fn reserve(&mut self, count: u32) {
        let end = self.end();
        if let Some(missing) = count.checked_sub(end).filter(|&missing| missing > 0) {
            self.grow_to(count);
            self.join(end..end + missing);
        }
    }

    fn grow_to(&mut self, end: u32) {
        self.cells.grow(end as usize, OwnerCell::FREE);
    }

    fn enter(&mut self, run: Range<u32>) {
        if !run.is_empty() {
            let length = run.end - run.start;
            self.free.insert(run.start, length);
            self.by_length.insert((length, run.start));
        }
    }

    fn leave(&mut self, start: u32, length: u32) {
        self.free.remove(&start);
        self.by_length.remove(&(length, start));
    }

    /// The free run at the end of the cells; empty if the last cell is in use.
    fn tail(&self) -> Range<u32> {
        let end = self.end();
        let last = self.free.last_key_value();
        match last.filter(|&(&start, &length)| start + length == end) {
            Some((&start, _)) => start..end,
            None => end..end,
        }
    }

    /// Takes `count` cells from the shortest free run that is long enough. Returns the first cell.
    pub(super) fn take(&mut self, count: u32) -> u32 {
        let found = self.by_length.range((count, 0)..).next().copied();
        let (length, start) = found.unwrap_or_else(|| {
            let tail = self.tail();
            self.grow_to(tail.start + count);
            (tail.end - tail.start, tail.start)
        });
        self.leave(start, length);
        self.enter(start + count..start + length.max(count));
        start
    }

    /// Takes a run of cells, if they are free. Cells behind the end are free.
    pub(super) fn take_at(&mut self, run: Range<u32>) -> bool {
        let tail = self.tail();
        let before = self.free.range(..=run.start).next_back();
        let found = before.map(|(&start, &length)| start..start + length);
        let around = found.filter(|free| run.end <= free.end);
        let around = around.or_else(|| (tail.start <= run.start).then_some(tail));
        let Some(around) = around else {
            return false;
        };
        self.grow_to(run.end);
        self.leave(around.start, around.end - around.start);
        self.enter(around.start..run.start);
        self.enter(run.end..around.end.max(run.end));
        true
    }

    /// Frees a run of cells, whose slots are free.
    pub(super) fn put(&mut self, run: Range<u32>) {
        for cell in run.clone() {
            *self.get_mut(cell) = OwnerCell::FREE;
        }
        self.join(run);
    }

    /// Adds a run of free cells, joined with the free runs that it touches.
    fn join(&mut self, mut run: Range<u32>) {
        if let Some((&start, &length)) = self.free.range(..run.start).next_back()
            && start + length == run.start
        {
            self.leave(start, length);
            run.start = start;
        }
        if let Some(&length) = self.free.get(&run.end) {
            self.leave(run.end, length);
            run.end += length;
        }
        self.enter(run);
    }

    pub(super) fn get_mut(&mut self, cell: u32) -> &mut OwnerCell {
        &mut self.cells[cell as usize]
    }

    /// The owner of a cell, if the cell exists and has an owner.
    pub(super) fn owner(&self, cell: u32) -> Option<Owner> {
        self.cells.get(cell as usize)?.get()
    }

    /// Cells in use.
    #[cfg(feature = "check")]
    pub(super) fn used(&self) -> usize {
        let cells = (0..self.end()).filter(|&cell| self.owner(cell).is_some());
        cells.count()
    }

    /// Bytes that the cells take.
    pub(super) fn bytes(&self) -> u64 {
        // A set and a map of two words, about half full.
        let runs = self.free.len() * 2 * 2 * size_of::<(u32, u32)>();
        self.cells.bytes() + runs as u64
    }
}
