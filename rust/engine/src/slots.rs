//! Fixed-size slots in a region (the arena, or a data file).
//!
//! The region is cut into pages. A page belongs to one size class while any of its slots is in use, and
//! returns to the pool when its last slot is freed, so space moves between classes by use. The next slot
//! comes from the fullest page, so that emptier pages become empty. This module only keeps books
//! and never touches a byte.

use std::collections::BTreeSet;

use crate::buddy::Buddy;
use crate::work;

use cells::Cells;
pub(crate) use claims::Place;
use runs::ClosedRun;
pub(crate) use runs::Run;
use undercroft_contract::pages::{SLOT_ALIGN, unit_bytes_for};

/// Least number of slots of a page, unless the page has the largest size: each page costs bookkeeping.
const PAGE_SLOTS_MIN: u64 = 8;
/// A class has smaller pages if they waste no more than this part of the region beyond the waste of the largest pages.
const WASTE_SHARE: u64 = 64;
/// No page.
const NO_PAGE: u32 = u32::MAX;
/// The unit has no page, and gets none: it is withheld.
const WITHHELD: u32 = u32::MAX - 1;

/// The offset in bytes of a slot with this number, which counts units of [`SLOT_ALIGN`].
pub(crate) fn slot_offset(slot: u32) -> u64 {
    u64::from(slot) * SLOT_ALIGN
}

/// The number of a slot at an offset in bytes, in units of [`SLOT_ALIGN`].
pub(crate) fn slot_number(offset: u64) -> u32 {
    assert!(
        offset.is_multiple_of(SLOT_ALIGN),
        "no slot begins at {offset}"
    );
    u32::try_from(offset / SLOT_ALIGN).expect("a region has at most 16 TiB")
}

/// A size class: an index into the classes of one [`Slots`].
pub type Class = u16;

/// The user of a slot, which this module does not interpret.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    /// Node of the forest.
    pub node: u32,
    /// KV cache group.
    pub group: u8,
}

/// The owner of a slot or a record, if there is one, in five bytes: each slot and record has such a
/// cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OwnerCell {
    node: [u8; 4],
    group: u8,
}

/// No KV cache group: the slot is not in use.
const NO_GROUP: u8 = u8::MAX - 1;

impl OwnerCell {
    pub(crate) const FREE: Self = Self {
        node: [0; 4],
        group: NO_GROUP,
    };

    pub(crate) fn get(self) -> Option<Owner> {
        (self.group != NO_GROUP).then_some(Owner {
            node: u32::from_ne_bytes(self.node),
            group: self.group,
        })
    }

    /// A free cell, with the number of the next free cell of its page.
    fn free_before(next: u32) -> Self {
        Self {
            node: next.to_ne_bytes(),
            group: NO_GROUP,
        }
    }

    /// See [`OwnerCell::free_before`].
    fn next_free(self) -> u32 {
        u32::from_ne_bytes(self.node)
    }

    /// Gives the cell to an owner; returns the owner before.
    pub(crate) fn replace(&mut self, owner: Owner) -> Option<Owner> {
        assert_ne!(owner.group, NO_GROUP, "no group has this number");
        let new = Self {
            node: owner.node.to_ne_bytes(),
            group: owner.group,
        };
        std::mem::replace(self, new).get()
    }
}

#[derive(Debug)]
struct Page {
    class: Class,
    /// First unit.
    unit: u32,
    /// First cell; the others follow.
    cell: u32,
    /// Free slots.
    free: u32,
    /// The first free slot. The cell of a free slot holds the number of the next.
    first_free: u32,
}

impl Page {
    /// Position among the class's pages with a free slot: the fullest first.
    fn rank(&self, number: u32) -> (u32, u32) {
        (self.free, number)
    }
}

#[derive(Debug)]
struct ClassState {
    slot_bytes: u64,
    /// Pages of the class have `1 << order` units.
    order: u32,
    /// Pages with a free slot, by [`Page::rank`].
    partial: BTreeSet<(u32, u32)>,
    used: u64,
    /// The class has no slots: its pages are withheld.
    withholds: bool,
}

/// Allocator of slots.
#[derive(Debug)]
pub struct Slots {
    /// Bytes of the largest pages.
    page_bytes: u64,
    unit_bytes: u64,
    /// Pages by number; `None`: the number is free.
    pages: Vec<Option<Page>>,
    free_numbers: Vec<u32>,
    /// Page of each unit, `NO_PAGE` or `WITHHELD` (or excluded).
    page_at: Vec<u32>,
    withheld_units: u64,
    /// Units that never get a page, beside the withheld units.
    excluded_units: u64,
    cells: Cells,
    free_units: Buddy,
    classes: Vec<ClassState>,
    closed: Option<ClosedRun>,
    used_bytes: u64,
}

impl Slots {
    /// A region of `capacity` bytes with pages of at most `page_bytes`. Bytes that do not fill a page of this size are
    /// not used.
    pub fn new(capacity: u64, page_bytes: u64) -> Self {
        assert!(
            page_bytes.is_power_of_two() && page_bytes >= SLOT_ALIGN,
            "a page holds whole slots: {page_bytes} bytes"
        );
        let unit_bytes = unit_bytes_for(page_bytes);
        let units_per_page = page_bytes / unit_bytes;
        let units = u32::try_from(capacity / page_bytes * units_per_page)
            .expect("a region has fewer than 2^32 units");
        Self {
            page_bytes,
            unit_bytes,
            // Reserves only address space; the vector never moves.
            pages: Vec::with_capacity(units as usize),
            cells: Cells::new(),
            free_numbers: Vec::new(),
            page_at: vec![NO_PAGE; units as usize],
            withheld_units: 0,
            excluded_units: 0,
            free_units: Buddy::new(units, units_per_page.ilog2()),
            classes: Vec::new(),
            closed: None,
            used_bytes: 0,
        }
    }

    /// The class of payloads of `payload_bytes`; `None` if such a payload does not fit a page.
    pub fn class_for(&mut self, payload_bytes: u64) -> Option<Class> {
        let slot_bytes = payload_bytes.max(1).next_multiple_of(SLOT_ALIGN);
        if slot_bytes > self.page_bytes || self.page_at.is_empty() {
            return None;
        }
        let found = self
            .classes
            .iter()
            .position(|class| class.slot_bytes == slot_bytes && !class.withholds);
        let index = found.unwrap_or_else(|| {
            self.classes.push(ClassState {
                slot_bytes,
                order: self.order_for(slot_bytes),
                partial: BTreeSet::new(),
                used: 0,
                withholds: false,
            });
            self.classes.len() - 1
        });
        Class::try_from(index).ok()
    }

    /// Size of the pages for slots of `slot_bytes`: small, so that few evictions empty a page, unless the
    /// unused bytes at the ends of the pages would cost capacity.
    fn order_for(&self, slot_bytes: u64) -> u32 {
        let largest = (self.page_bytes / self.unit_bytes).ilog2();
        let usable = |order: u32| {
            let bytes = self.unit_bytes << order;
            (bytes / slot_bytes * slot_bytes) << (largest - order)
        };
        let most = usable(largest);
        (0..largest)
            .find(|&order| {
                self.unit_bytes << order >= PAGE_SLOTS_MIN * slot_bytes
                    && most - usable(order) <= self.page_bytes / WASTE_SHARE
            })
            .unwrap_or(largest)
    }

    /// Slots of a page of `class`.
    pub(crate) fn slots_per_page(&self, class: Class) -> usize {
        let class = &self.classes[usize::from(class)];
        // At most the page size over the alignment.
        ((self.unit_bytes << class.order) / class.slot_bytes) as usize
    }

    fn page(&self, number: u32) -> &Page {
        let page = self.pages[number as usize].as_ref();
        page.expect("the number of a page in use")
    }

    fn page_mut(&mut self, number: u32) -> &mut Page {
        let page = self.pages[number as usize].as_mut();
        page.expect("the number of a page in use")
    }

    /// Bytes of one slot of `class`.
    pub fn slot_bytes(&self, class: Class) -> u64 {
        self.classes[usize::from(class)].slot_bytes
    }

    /// Bytes in whole pages of the largest size, without withheld and excluded bytes.
    pub fn capacity(&self) -> u64 {
        self.usable() - self.withheld_bytes()
    }

    /// Bytes in whole pages of the largest size, without excluded bytes.
    pub(crate) fn usable(&self) -> u64 {
        self.extent() - self.unit_bytes * self.excluded_units
    }

    /// Bytes in whole pages of the largest size.
    pub fn extent(&self) -> u64 {
        self.unit_bytes * self.page_at.len() as u64
    }

    /// Bytes of slots in use.
    pub fn used_bytes(&self) -> u64 {
        self.used_bytes
    }

    /// Slots of `class` in use.
    pub fn used(&self, class: Class) -> u64 {
        self.classes[usize::from(class)].used
    }

    /// Slots in use, of all classes.
    pub fn blocks(&self) -> u64 {
        self.classes.iter().map(|class| class.used).sum()
    }

    /// Bytes of the largest pages.
    pub fn page_bytes(&self) -> u64 {
        self.page_bytes
    }

    /// Number of the page in use that holds `offset`.
    pub fn page_of(&self, offset: u64) -> u32 {
        let number = self.page_at(self.unit_of(offset));
        number.unwrap_or_else(|| panic!("no page in use holds {offset}"))
    }

    /// Number of the page in use that holds a unit.
    fn page_at(&self, unit: u32) -> Option<u32> {
        let number = self.page_at[unit as usize];
        (number < WITHHELD).then_some(number)
    }

    fn unit_of(&self, offset: u64) -> u32 {
        u32::try_from(offset / self.unit_bytes).expect("an offset lies in a unit of the region")
    }

    /// Size classes.
    pub fn classes(&self) -> std::ops::Range<Class> {
        0..Class::try_from(self.classes.len()).expect("`class_for` limits the size classes")
    }

    /// Allocates a slot. Returns its offset in bytes, or `None` if the class has no room and no page is free.
    pub fn alloc(&mut self, class: Class, owner: Owner) -> Option<u64> {
        work::slots(1);
        let number = match self.classes[usize::from(class)].partial.first() {
            Some(&(_, number)) => number,
            None => self.assign_page(class)?,
        };
        self.leave_partial(number);
        let slot_bytes = self.slot_bytes(class);
        let page = self.page(number);
        assert!(page.free > 0, "a partial page has a free slot");
        let (unit, slot) = (page.unit, page.first_free);
        let cell = self.cells.get_mut(page.cell + slot);
        let next = cell.next_free();
        let before = cell.replace(owner);
        assert!(before.is_none(), "a free slot has the owner {before:?}");
        let page = self.page_mut(number);
        page.free -= 1;
        page.first_free = next;
        self.enter_partial(number);
        self.classes[usize::from(class)].used += 1;
        self.used_bytes += slot_bytes;
        Some(u64::from(unit) * self.unit_bytes + u64::from(slot) * slot_bytes)
    }

    /// Cells of a page.
    fn cells_in(&self, page: &Page) -> std::ops::Range<u32> {
        // At most the page size over the alignment.
        page.cell..page.cell + self.slots_per_page(page.class) as u32
    }

    /// Cells of a page in use.
    pub(crate) fn cells_of_page(&self, number: u32) -> std::ops::Range<u32> {
        self.cells_in(self.page(number))
    }

    /// Cell of the slot at `offset`.
    pub(crate) fn cell_of(&self, class: Class, offset: u64) -> u32 {
        let page = self.page(self.page_of(offset));
        page.cell + self.slot_at(class, offset) as u32
    }

    /// The owner of a cell, if there is one.
    pub(crate) fn owner_of_cell(&self, cell: u32) -> Option<Owner> {
        self.cells.owner(cell)
    }

    /// Takes a free cell, for a record without a slot.
    pub(crate) fn take_cell(&mut self, owner: Owner) -> u32 {
        let cell = self.cells.take(1);
        self.cells.get_mut(cell).replace(owner);
        cell
    }

    /// Takes this cell, for a record without a slot, if the cell is free.
    pub(crate) fn take_cell_at(&mut self, cell: u32, owner: Owner) -> bool {
        let is_free = self.cells.take_at(cell..cell + 1);
        if is_free {
            self.cells.get_mut(cell).replace(owner);
        }
        is_free
    }

    /// Frees a cell without a slot.
    pub(crate) fn put_cell(&mut self, cell: u32) {
        self.cells.put(cell..cell + 1);
    }

    /// Cells in use.
    #[cfg(feature = "check")]
    pub(crate) fn cells_used(&self) -> usize {
        self.cells.used()
    }

    /// Bytes that the bookkeeping takes.
    pub fn bytes(&self) -> u64 {
        let pages = self.pages.len() * size_of::<Option<Page>>();
        let numbers = self.page_at.len() + self.free_numbers.capacity();
        self.cells.bytes() + (pages + numbers * size_of::<u32>()) as u64
    }

    /// Frees a slot.
    pub fn free(&mut self, class: Class, offset: u64) {
        work::slots(1);
        let slot_bytes = self.slot_bytes(class);
        let number = self.page_of(offset);
        let slot = self.slot_at(class, offset);
        assert_eq!(
            self.page(number).class,
            class,
            "the slot at {offset} is freed into another class"
        );
        self.leave_partial(number);
        let slots = self.slots_per_page(class);
        let page = self.page(number);
        let freed = OwnerCell::free_before(page.first_free);
        let cell = self.cells.get_mut(page.cell + slot as u32);
        let before = std::mem::replace(cell, freed);
        assert!(
            before.get().is_some(),
            "the slot at {offset} is freed twice"
        );
        let page = self.page_mut(number);
        page.first_free = slot as u32;
        page.free += 1;
        let is_empty = page.free as usize == slots;
        let used = &mut self.classes[usize::from(class)].used;
        *used = used.checked_sub(1).expect("the class has a slot in use");
        let used_bytes = self.used_bytes.checked_sub(slot_bytes);
        self.used_bytes = used_bytes.expect("the bytes in use include every slot");
        if is_empty {
            self.take_page_back(number);
        } else {
            self.enter_partial(number);
        }
    }

    /// Whether a slot of `class` is available only after another slot is freed.
    pub fn is_full(&self, class: Class) -> bool {
        let state = &self.classes[usize::from(class)];
        let is_kept = self.kept_for() == Some(class);
        state.partial.is_empty() && !is_kept && !self.free_units.has(state.order)
    }

    /// The owner of the slot at `offset`.
    #[cfg(feature = "check")]
    pub(crate) fn owner_at(&self, class: Class, offset: u64) -> Option<Owner> {
        let number = *self.page_at.get(self.unit_of(offset) as usize)?;
        let page = self.pages.get(number as usize)?.as_ref()?;
        let owner = self
            .cells
            .owner(page.cell + self.slot_at(class, offset) as u32);
        owner.filter(|_| page.class == class)
    }

    /// The class that a page belongs to now; `None` if no page has this number.
    pub fn page_class(&self, number: u32) -> Option<Class> {
        let page = self.pages.get(number as usize)?.as_ref();
        page.map(|page| page.class)
    }

    /// Units of a page of `class`.
    fn units(&self, class: Class) -> u32 {
        1 << self.classes[usize::from(class)].order
    }

    /// Index of the slot at `offset` in its page.
    pub(crate) fn slot_at(&self, class: Class, offset: u64) -> usize {
        let page_bytes = self.unit_bytes * u64::from(self.units(class));
        let slot = offset % page_bytes / self.slot_bytes(class);
        // At most the page size over the alignment.
        slot as usize
    }

    fn assign_page(&mut self, class: Class) -> Option<u32> {
        if self.kept_for() == Some(class) {
            self.open_run();
        }
        let order = self.classes[usize::from(class)].order;
        let unit = self.free_units.take(order)?;
        let number = self.give_page(unit, class, None);
        self.enter_partial(number);
        Some(number)
    }

    /// Makes a page for `class` from free units, with the cells from `cell` on if these are free.
    fn give_page(&mut self, unit: u32, class: Class, cell: Option<u32>) -> u32 {
        let slots = u32::try_from(self.slots_per_page(class))
            .expect("a page of at most 64 MiB has fewer than 2^32 slots");
        let cell = cell.filter(|&cell| {
            let end = cell.checked_add(slots);
            end.is_some_and(|end| self.cells.take_at(cell..end))
        });
        let page = Page {
            class,
            unit,
            cell: cell.unwrap_or_else(|| self.cells.take(slots)),
            free: slots,
            first_free: 0,
        };
        let number = self.free_numbers.pop().unwrap_or_else(|| {
            self.pages.push(None);
            u32::try_from(self.pages.len() - 1).expect("a region has fewer pages than units")
        });
        self.pages[number as usize] = Some(page);
        let run = unit as usize..(unit + self.units(class)) as usize;
        self.page_at[run].fill(number);
        self.link_free(number);
        number
    }

    /// Returns an empty page to the pool.
    fn take_page_back(&mut self, number: u32) {
        let Page { class, unit, .. } = self.clear_page(number);
        match &mut self.closed {
            Some(closed) if closed.run.holds(unit) => closed.pages -= 1,
            _ => {
                let order = self.classes[usize::from(class)].order;
                self.free_units.put(unit, order);
            }
        }
    }

    /// Removes an empty page, and frees its number.
    fn clear_page(&mut self, number: u32) -> Page {
        self.cells.put(self.cells_in(self.page(number)));
        let page = self.pages[number as usize].take();
        let page = page.expect("the number of a page in use");
        self.free_numbers.push(number);
        let run = page.unit as usize..(page.unit + self.units(page.class)) as usize;
        self.page_at[run].fill(NO_PAGE);
        page
    }

    /// Adds a page whose count of free slots has changed to the list of pages with free slots, if it has any.
    fn enter_partial(&mut self, number: u32) {
        let page = self.page(number);
        let (class, rank) = (usize::from(page.class), page.rank(number));
        if page.free > 0 && !self.is_closed(page.unit) {
            let is_new = self.classes[class].partial.insert(rank);
            assert!(is_new, "page {number} is listed as partial twice");
        }
    }

    /// Removes a page whose count of free slots is about to change from this list.
    fn leave_partial(&mut self, number: u32) {
        let page = self.page(number);
        let (class, rank) = (usize::from(page.class), page.rank(number));
        self.classes[class].partial.remove(&rank);
    }
}

mod cells;
mod claims;
mod runs;
#[cfg(test)]
mod tests;
mod withheld;
