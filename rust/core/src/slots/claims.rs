//! Recovery: slots that the table on disk says are in use, before any is given.

use super::{Class, NO_PAGE, Owner, OwnerCell, Slots};

impl Slots {
    /// The table on disk has `records`: cells for slots that are claimed with them.
    pub(crate) fn reserve_cells(&mut self, records: u32) {
        self.cells.reserve(records);
    }

    /// The owners that have claimed bytes of a slot, or of its page for another class. `None` if no slot of `class`
    /// is at `offset`, which comes from disk and may have any value.
    pub(crate) fn rivals(&self, class: Class, offset: u64) -> Option<Vec<(Owner, u32)>> {
        if offset >= self.extent() {
            return None;
        }
        let (slot_bytes, units) = (self.slot_bytes(class), self.units(class));
        let unit = self.unit_of(offset) / units * units;
        let within = offset - u64::from(unit) * self.unit_bytes;
        if !within.is_multiple_of(slot_bytes)
            || within / slot_bytes >= self.slots_per_page(class) as u64
        {
            return None;
        }
        if let Some(number) = self.page_at(unit)
            && self.page(number).class == class
        {
            let cell = self.page(number).cell + self.slot_at(class, offset) as u32;
            let owner = self.cells.owner(cell);
            return Some(owner.map(|owner| (owner, cell)).into_iter().collect());
        }
        let pages = self.pages_of(self.run_at(offset, class)).into_iter();
        let cells = pages.flat_map(|number| self.cells_of_page(number));
        Some(
            cells
                .filter_map(|cell| Some((self.cells.owner(cell)?, cell)))
                .collect(),
        )
    }

    /// Takes a slot without rivals (recovery); its cell, which is `record` unless that belongs to other slots.
    pub(crate) fn claim(&mut self, class: Class, offset: u64, record: u32, owner: Owner) -> u32 {
        let units = self.units(class);
        let unit = self.unit_of(offset) / units * units;
        let slot = self.slot_at(class, offset) as u32;
        let number = self.page_at(unit);
        let number =
            number.unwrap_or_else(|| self.give_page(unit, class, record.checked_sub(slot)));
        assert_eq!(
            self.page(number).class,
            class,
            "the slot at {offset} is claimed for another class"
        );
        let cell = self.page(number).cell + slot;
        let before = self.cells.get_mut(cell).replace(owner);
        assert!(before.is_none(), "the slot at {offset} is claimed twice");
        // The list of free slots is made by `finish_claims`.
        self.page_mut(number).free -= 1;
        self.classes[usize::from(class)].used += 1;
        self.used_bytes += self.slot_bytes(class);
        cell
    }

    /// Takes a claim back.
    pub(crate) fn unclaim(&mut self, class: Class, offset: u64) {
        let (number, cell) = (self.page_of(offset), self.cell_of(class, offset));
        *self.cells.get_mut(cell) = OwnerCell::FREE;
        self.classes[usize::from(class)].used -= 1;
        self.used_bytes -= self.slot_bytes(class);
        let slots = self.slots_per_page(class);
        let page = self.page_mut(number);
        page.free += 1;
        if page.free as usize == slots {
            self.clear_page(number);
        }
    }

    /// Makes the lists of free units and slots after a series of [`Slots::claim`].
    pub(crate) fn finish_claims(&mut self) {
        let is_free = |unit: u32| self.page_at[unit as usize] == NO_PAGE;
        self.free_units.rebuild(is_free);
        for class in &mut self.classes {
            class.partial.clear();
        }
        for number in 0..u32::try_from(self.pages.len()).expect("`give_page` counts the pages") {
            if self.pages[number as usize].is_some() {
                self.link_free(number);
                self.enter_partial(number);
            }
        }
    }

    /// Makes a page's list of free slots, the first of them first.
    pub(super) fn link_free(&mut self, number: u32) {
        let page = self.page(number);
        let (mut first_free, mut free) = (0, 0);
        let cells = self.cells_in(page);
        for cell in cells.clone().rev() {
            let of_cell = self.cells.get_mut(cell);
            if of_cell.get().is_none() {
                *of_cell = OwnerCell::free_before(first_free);
                first_free = cell - cells.start;
                free += 1;
            }
        }
        let page = self.page_mut(number);
        (page.first_free, page.free) = (first_free, free);
    }
}
