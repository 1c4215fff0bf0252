//! Recovery: claims of slots that are in use by the table on disk, before any slot is allocated.

use smallvec::SmallVec;

use super::{Class, NO_PAGE, Owner, OwnerCell, Run, Slots};

/// Where a slot lies, by its record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    class: Class,
    /// First unit of the page that the slot is in, or would be.
    unit: u32,
    /// Index of the slot in this page.
    slot: u32,
}

/// Owners and cells of the slots whose bytes a record claims, too: mostly none.
pub(crate) type Rivals = SmallVec<[(Owner, u32); 2]>;

impl Slots {
    /// Makes cells for the slots that are claimed, since the table on disk has `records`.
    pub(crate) fn reserve_cells(&mut self, records: u32) {
        self.cells.reserve(records);
    }

    /// The place of the slot of `class` at `offset`, which comes from disk and may be anything; `None` if there is no
    /// such slot, or if a part of its page is excluded.
    pub(crate) fn place(&self, class: Class, offset: u64) -> Option<Place> {
        if offset >= self.extent() {
            return None;
        }
        let state = &self.classes[usize::from(class)];
        // The size of a page is a power of two.
        let page_bytes = self.unit_bytes << state.order;
        let within = offset & (page_bytes - 1);
        let slot = within / state.slot_bytes;
        let is_slot = slot * state.slot_bytes == within && within + state.slot_bytes <= page_bytes;
        let unit = self.unit_of(offset - within);
        let units = self.units(class);
        (is_slot && !self.has_withheld(Run { unit, units })).then_some(Place {
            class,
            unit,
            // At most the page size over the alignment.
            slot: slot as u32,
        })
    }

    /// The owners that have claimed the bytes of a slot, or its page for another class, with their cells.
    pub(crate) fn rivals(&self, place: Place) -> Rivals {
        if let Some(number) = self.page_at(place.unit)
            && self.page(number).class == place.class
        {
            let cell = self.page(number).cell + place.slot;
            let owner = self.cells.owner(cell);
            return owner.map(|owner| (owner, cell)).into_iter().collect();
        }
        let run = self.run_at(u64::from(place.unit) * self.unit_bytes, place.class);
        let cells = self.pages_of(run).into_iter();
        let cells = cells.flat_map(|number| self.cells_of_page(number));
        cells
            .filter_map(|cell| Some((self.cells.owner(cell)?, cell)))
            .collect()
    }

    /// Claims a slot without rivals. Returns its cell, which is `record` unless that cell belongs to another slot.
    pub(crate) fn claim(&mut self, place: Place, record: u32, owner: Owner) -> u32 {
        let Place { class, unit, slot } = place;
        let number = self.page_at(unit);
        let number =
            number.unwrap_or_else(|| self.give_page(unit, class, record.checked_sub(slot)));
        // The list of free slots is made by `finish_claims`.
        let page = self.page_mut(number);
        page.free -= 1;
        let (of_page, cell) = (page.class, page.cell + slot);
        assert_eq!(
            of_page, class,
            "slot {slot} of unit {unit} is claimed for another class"
        );
        let before = self.cells.get_mut(cell).replace(owner);
        assert!(
            before.is_none(),
            "slot {slot} of unit {unit} is claimed twice"
        );
        let state = &mut self.classes[usize::from(class)];
        state.used += 1;
        self.used_bytes += state.slot_bytes;
        cell
    }

    /// Revokes a claim.
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

    /// Makes a page's list of free slots, in ascending order.
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
