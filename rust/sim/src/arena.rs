//! The arena outside of the engine: its contents, and the users of each slot.

use std::collections::{BTreeMap, BTreeSet};

use undercroft_contract::io::IO_ALIGN;

use crate::content::{SECTOR, Token, sectors};

/// The use of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hand {
    /// Its contents change.
    Write,
    /// Its contents must not change.
    Read,
}

#[derive(Debug)]
pub(crate) struct SimArena {
    tokens: Vec<Token>,
    /// For each 4 KiB: -1 for a writer, or the number of readers.
    hands: Vec<i32>,
    /// The holders of ranges, for messages.
    holders: BTreeMap<u64, String>,
    /// Sectors that have changed since they were written.
    changed: BTreeSet<usize>,
}

impl SimArena {
    pub(crate) fn new(bytes: u64) -> Self {
        Self {
            tokens: vec![0; sectors(bytes)],
            hands: vec![0; (bytes / IO_ALIGN) as usize],
            holders: BTreeMap::new(),
            changed: BTreeSet::new(),
        }
    }

    /// All processes have ended: no range is in use, and the contents are lost.
    pub(crate) fn abandon(&mut self) {
        self.hands.fill(0);
        self.holders.clear();
        self.changed.clear();
    }

    /// Begins a use of a slot. `Err` if another use forbids it.
    pub(crate) fn take(
        &mut self,
        offset: u64,
        len: u64,
        hand: Hand,
        who: &str,
    ) -> Result<(), String> {
        if !offset.is_multiple_of(IO_ALIGN) {
            return Err(format!("{who}: arena offset {offset} is not aligned"));
        }
        let (from, to) = units(offset, len);
        let Some(units) = self.hands.get_mut(from..to) else {
            return Err(format!("{who}: {offset}+{len} is beyond the arena"));
        };
        let conflict = match hand {
            Hand::Write => units.iter().any(|&unit| unit != 0),
            Hand::Read => units.iter().any(|&unit| unit < 0),
        };
        if conflict {
            let before = self.holders.range(..offset + len).next_back();
            let held = before.map_or("somebody", |(_, holder)| holder);
            return Err(format!(
                "{who} ({hand:?}) of {offset}+{len}, which is in the hand of {held}"
            ));
        }
        for unit in units {
            match hand {
                Hand::Write => *unit = -1,
                Hand::Read => *unit += 1,
            }
        }
        self.holders.insert(offset, format!("{who} ({hand:?})"));
        Ok(())
    }

    /// Ends a use of a slot.
    pub(crate) fn release(&mut self, offset: u64, len: u64, hand: Hand) {
        let (from, to) = units(offset, len);
        for unit in &mut self.hands[from..to] {
            match hand {
                Hand::Write => *unit = 0,
                Hand::Read => *unit -= 1,
            }
        }
    }

    /// Whether no range is in use.
    pub(crate) fn is_idle(&self) -> bool {
        self.hands.iter().all(|&unit| unit == 0)
    }

    pub(crate) fn at(&self, offset: u64, len: u64) -> &[Token] {
        let from = (offset / SECTOR) as usize;
        &self.tokens[from..from + sectors(len)]
    }

    /// Sectors to write.
    pub(crate) fn at_mut(&mut self, offset: u64, len: u64) -> &mut [Token] {
        let from = (offset / SECTOR) as usize;
        let range = from..from + sectors(len);
        while let Some(&sector) = self.changed.range(range.clone()).next() {
            self.changed.remove(&sector);
        }
        &mut self.tokens[range]
    }

    /// A bit flips in a sector that is not being written.
    pub(crate) fn change(&mut self, offset: u64, bit: u64) {
        let sector = (offset / SECTOR) as usize;
        self.tokens[sector] ^= 1 << bit;
        self.changed.insert(sector);
    }

    /// Whether the sector at `offset` has changed since it was written.
    pub(crate) fn has_changed(&self, offset: u64) -> bool {
        self.changed.contains(&((offset / SECTOR) as usize))
    }
}

fn units(offset: u64, len: u64) -> (usize, usize) {
    let to = (offset + len).div_ceil(IO_ALIGN);
    ((offset / IO_ALIGN) as usize, to as usize)
}
