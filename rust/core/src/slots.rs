//! Fixed-size slots in a region (the arena, or a data file).
//!
//! The region is cut into pages. A page belongs to one size class while any of its slots is in use, and
//! goes back to the pool when the last one is freed, so space moves between classes by use. The fullest
//! page gives the next slot, so that the emptier ones empty themselves. This module does bookkeeping
//! only and never touches a byte.

use std::collections::BTreeSet;

use crate::buddy::Buddy;
pub(crate) use crate::error::PAGE_BYTES_MAX;
use crate::work;

/// Slot sizes are multiples of this, in bytes (O_DIRECT alignment).
pub const SLOT_ALIGN: u64 = crate::io::IO_ALIGN;

const PAGE_BYTES_MIN: u64 = 256 << 10;
/// A region has at least about this many of the largest pages, so that every size class finds room.
const PAGES_TARGET: u64 = 64;
/// The smallest page, as a part of the largest.
const UNITS_PER_PAGE: u64 = 64;
/// Slots that a page has at least, unless it is one of the largest: a page has its share of bookkeeping.
const PAGE_SLOTS_MIN: u64 = 8;
/// A class has smaller pages if they waste no more than this part of the region beyond what the largest
/// pages waste.
const WASTE_SHARE: u64 = 64;
/// No page.
const NO_PAGE: u32 = u32::MAX;

/// The offset in bytes of a slot that is counted in [`SLOT_ALIGN`].
pub(crate) fn slot_offset(slot: u32) -> u64 {
    u64::from(slot) * SLOT_ALIGN
}

/// An offset in bytes, counted in [`SLOT_ALIGN`].
pub(crate) fn slot_number(offset: u64) -> u32 {
    assert!(
        offset.is_multiple_of(SLOT_ALIGN),
        "no slot begins at {offset}"
    );
    u32::try_from(offset / SLOT_ALIGN).expect("a region has at most 16 TiB")
}

/// A size class: an index into the classes of one [`Slots`].
pub type Class = u16;

/// Who uses a slot: opaque here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    /// Node of the forest.
    pub node: u32,
    /// KV cache group.
    pub group: u8,
}

/// Who uses a slot or a record, if anybody does, in five bytes: there is one for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OwnerCell {
    node: [u8; 4],
    group: u8,
}

/// No KV cache group: nobody uses it.
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

    pub(crate) fn is_free(&self) -> bool {
        self.group == NO_GROUP
    }

    /// Gives it to an owner; returns the one before.
    pub(crate) fn replace(&mut self, owner: Owner) -> Option<Owner> {
        assert_ne!(owner.group, NO_GROUP, "no group has this number");
        let new = Self {
            node: owner.node.to_ne_bytes(),
            group: owner.group,
        };
        std::mem::replace(self, new).get()
    }

    /// Frees it; returns the owner.
    pub(crate) fn take(&mut self) -> Option<Owner> {
        std::mem::replace(self, Self::FREE).get()
    }
}

#[derive(Debug)]
struct Page {
    class: Class,
    /// First unit.
    unit: u32,
    owners: Vec<OwnerCell>,
    free: Vec<u32>,
}

impl Page {
    /// Position among the class's pages with a free slot: the fullest first.
    fn rank(&self, number: u32) -> (u32, u32) {
        // `give_page` counts the slots in 32 bits.
        (self.free.len() as u32, number)
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
}

/// An aligned run of units that becomes one page for a class, once nothing in the run is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    unit: u32,
    units: u32,
}

impl Run {
    fn holds(self, unit: u32) -> bool {
        (self.unit..self.unit + self.units).contains(&unit)
    }

    /// Its first unit.
    pub(crate) fn first_unit(self) -> u32 {
        self.unit
    }
}

/// A run that is being emptied, or that is empty, for a size class: it gives slots to no other.
#[derive(Clone, Copy, Debug)]
struct ClosedRun {
    run: Run,
    class: Class,
    /// Its pages in use.
    pages: usize,
}

/// Allocator of slots.
#[derive(Debug)]
pub struct Slots {
    /// Bytes of the largest pages.
    page_bytes: u64,
    unit_bytes: u64,
    /// By number; `None`: the number is free.
    pages: Vec<Option<Page>>,
    free_numbers: Vec<u32>,
    /// Page of each unit, or `NO_PAGE`.
    page_at: Vec<u32>,
    free_units: Buddy,
    classes: Vec<ClassState>,
    closed: Option<ClosedRun>,
    used_bytes: u64,
}

/// Bytes of the largest pages of a region of `capacity` bytes: a power of two.
pub fn page_bytes_for(capacity: u64) -> u64 {
    let share = (capacity / PAGES_TARGET).max(1);
    (1 << share.ilog2()).clamp(PAGE_BYTES_MIN, PAGE_BYTES_MAX)
}

/// A region whose pages hold payloads of `payload_bytes`; `None` if no page is so large.
pub(crate) fn region_for(payload_bytes: u64) -> Option<u64> {
    let page_bytes = payload_bytes.next_power_of_two().max(PAGE_BYTES_MIN);
    (page_bytes <= PAGE_BYTES_MAX).then_some(page_bytes * PAGES_TARGET)
}

impl Slots {
    /// A region of `capacity` bytes with pages of at most `page_bytes`; what does not fill such a page is
    /// left out.
    pub fn new(capacity: u64, page_bytes: u64) -> Self {
        assert!(
            page_bytes.is_power_of_two() && page_bytes >= SLOT_ALIGN,
            "a page holds whole slots: {page_bytes} bytes"
        );
        let unit_bytes = (page_bytes / UNITS_PER_PAGE).max(SLOT_ALIGN);
        let units_per_page = page_bytes / unit_bytes;
        let units = u32::try_from(capacity / page_bytes * units_per_page)
            .expect("a region has fewer than 2^32 units");
        Self {
            page_bytes,
            unit_bytes,
            pages: Vec::new(),
            free_numbers: Vec::new(),
            page_at: vec![NO_PAGE; units as usize],
            free_units: Buddy::new(units, units_per_page.ilog2()),
            classes: Vec::new(),
            closed: None,
            used_bytes: 0,
        }
    }

    /// The class of payloads of `payload_bytes`; `None` if one does not fit a page.
    pub fn class_for(&mut self, payload_bytes: u64) -> Option<Class> {
        let slot_bytes = payload_bytes.max(1).next_multiple_of(SLOT_ALIGN);
        if slot_bytes > self.page_bytes || self.page_at.is_empty() {
            return None;
        }
        let found = self
            .classes
            .iter()
            .position(|class| class.slot_bytes == slot_bytes);
        let index = found.unwrap_or_else(|| {
            self.classes.push(ClassState {
                slot_bytes,
                order: self.order_for(slot_bytes),
                partial: BTreeSet::new(),
                used: 0,
            });
            self.classes.len() - 1
        });
        Class::try_from(index).ok()
    }

    /// Size of the pages for slots of `slot_bytes`: small, so that little has to go for one, unless the
    /// rests at their ends would cost capacity.
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

    /// Bytes in whole pages of the largest size.
    pub fn capacity(&self) -> u64 {
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
        let number = self.page_at[self.unit_of(offset) as usize];
        assert_ne!(number, NO_PAGE, "no page in use holds {offset}");
        number
    }

    fn unit_of(&self, offset: u64) -> u32 {
        u32::try_from(offset / self.unit_bytes).expect("an offset lies in a unit of the region")
    }

    /// Size classes.
    pub fn classes(&self) -> std::ops::Range<Class> {
        0..Class::try_from(self.classes.len()).expect("`class_for` limits the size classes")
    }

    /// Takes a slot; the offset in bytes, or `None` if the class has no room and no page is free.
    pub fn alloc(&mut self, class: Class, owner: Owner) -> Option<u64> {
        work::slots(1);
        let number = match self.classes[usize::from(class)].partial.first() {
            Some(&(_, number)) => number,
            None => self.assign_page(class)?,
        };
        self.leave_partial(number);
        let slot_bytes = self.slot_bytes(class);
        let page = self.page_mut(number);
        let slot = page.free.pop().expect("a partial page has a free slot");
        let before = page.owners[slot as usize].replace(owner);
        assert!(before.is_none(), "a free slot has the owner {before:?}");
        let unit = page.unit;
        self.enter_partial(number);
        self.classes[usize::from(class)].used += 1;
        self.used_bytes += slot_bytes;
        Some(u64::from(unit) * self.unit_bytes + u64::from(slot) * slot_bytes)
    }

    /// Takes the slot at `offset` (recovery). False if it is taken, misplaced or of another class.
    pub fn claim(&mut self, class: Class, offset: u64, owner: Owner) -> bool {
        // The offset comes from disk: it may lie anywhere.
        if offset >= self.capacity() {
            return false;
        }
        let (slot_bytes, units) = (self.slot_bytes(class), self.units(class));
        let unit = self.unit_of(offset) / units * units;
        let within = offset - u64::from(unit) * self.unit_bytes;
        if !within.is_multiple_of(slot_bytes)
            || within / slot_bytes >= self.slots_per_page(class) as u64
        {
            return false;
        }
        let mut number = self.page_at[unit as usize];
        if number == NO_PAGE {
            let run = unit as usize..(unit + units) as usize;
            if self.page_at[run].iter().any(|&page| page != NO_PAGE) {
                return false;
            }
            number = self.give_page(unit, class);
        }
        if self.page(number).class != class {
            return false;
        }
        let slot = self.slot_at(class, offset);
        let owner_of_slot = &mut self.page_mut(number).owners[slot];
        if !owner_of_slot.is_free() {
            return false;
        }
        owner_of_slot.replace(owner);
        // The free lists are rebuilt once, by `finish_claims`.
        self.classes[usize::from(class)].used += 1;
        self.used_bytes += slot_bytes;
        true
    }

    /// Names the owner of a slot in use.
    pub fn set_owner(&mut self, class: Class, offset: u64, owner: Owner) {
        let (page, slot) = (self.page_of(offset), self.slot_at(class, offset));
        let before = self.page_mut(page).owners[slot].replace(owner);
        assert!(before.is_some(), "the slot at {offset} is not in use");
    }

    /// Rebuilds the free lists after a series of [`Slots::claim`].
    pub fn finish_claims(&mut self) {
        let is_free = |unit: u32| self.page_at[unit as usize] == NO_PAGE;
        self.free_units.rebuild(is_free);
        for class in &mut self.classes {
            class.partial.clear();
        }
        for number in 0..u32::try_from(self.pages.len()).expect("`give_page` counts the pages") {
            let Some(page) = &mut self.pages[number as usize] else {
                continue;
            };
            let free = (0u32..)
                .zip(&page.owners)
                .filter(|(_, owner)| owner.is_free());
            page.free = free.map(|(slot, _)| slot).collect();
            page.free.reverse();
            self.enter_partial(number);
        }
    }

    /// Gives a slot back.
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
        let page = self.page_mut(number);
        let owner = page.owners[slot].take();
        assert!(owner.is_some(), "the slot at {offset} is freed twice");
        page.free.push(slot as u32);
        let is_empty = page.free.len() == page.owners.len();
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

    /// Whether a slot of `class` can be had only by freeing another.
    pub fn is_full(&self, class: Class) -> bool {
        let state = &self.classes[usize::from(class)];
        let is_kept = self.kept_for() == Some(class);
        state.partial.is_empty() && !is_kept && !self.free_units.has(state.order)
    }

    /// The run around `offset` that has to be emptied for a page of `class`.
    pub(crate) fn run_at(&self, offset: u64, class: Class) -> Run {
        let mut units = self.units(class);
        let unit = self.unit_of(offset);
        let number = self.page_at[unit as usize];
        if number != NO_PAGE {
            units = units.max(self.units(self.page(number).class));
        }
        let unit = unit / units * units;
        Run { unit, units }
    }

    /// The run that is `index`th of the region, where all are as large as pages of `class`, or more around
    /// it. Counts on from the front behind the end.
    pub(crate) fn run_number(&self, index: u64, class: Class) -> Run {
        let run_bytes = self.unit_bytes * u64::from(self.units(class));
        let runs = self.capacity() / run_bytes;
        self.run_at(index % runs * run_bytes, class)
    }

    /// Bytes of a run.
    pub(crate) fn run_bytes(&self, run: Run) -> u64 {
        u64::from(run.units) * self.unit_bytes
    }

    /// The page of a run that holds `unit`, or comes next: its class and owners, and the unit behind it. `None` if the
    /// rest of the run is free.
    pub(crate) fn owners_from(&self, run: Run, unit: u32) -> Option<(Class, Vec<Owner>, u32)> {
        let page = (unit..run.unit + run.units).find_map(|unit| {
            work::slots(1);
            let number = self.page_at[unit as usize];
            (number != NO_PAGE).then(|| self.page(number))
        })?;
        work::slots(page.owners.len());
        let owners = page.owners.iter().filter_map(|owner| owner.get()).collect();
        Some((page.class, owners, page.unit + self.units(page.class)))
    }

    /// Whether `offset` lies in a run.
    pub(crate) fn is_in(&self, run: Run, offset: u64) -> bool {
        run.holds(self.unit_of(offset))
    }

    /// Keeps what is free of a run, or becomes free, for a page of `class`, until [`Slots::open_run`] or a slot of that
    /// class is taken. One run at a time.
    pub(crate) fn close_run(&mut self, run: Run, class: Class) {
        assert!(self.closed.is_none(), "one run is closed at a time");
        let pages = self.pages_of(run);
        for &number in &pages {
            self.leave_partial(number);
        }
        self.free_units.withhold(run.unit, run.units);
        let pages = pages.len();
        self.closed = Some(ClosedRun { run, class, pages });
    }

    /// The class that the closed run is for.
    pub(crate) fn closed_for(&self) -> Option<Class> {
        self.closed.map(|closed| closed.class)
    }

    /// The class that an empty run is kept for.
    pub(crate) fn kept_for(&self) -> Option<Class> {
        let empty = self.closed.filter(|closed| closed.pages == 0);
        empty.map(|closed| closed.class)
    }

    /// What is free of the closed run may be taken by every class.
    pub(crate) fn open_run(&mut self) {
        let Some(ClosedRun { run, .. }) = self.closed.take() else {
            return;
        };
        for number in self.pages_of(run) {
            self.enter_partial(number);
        }
        for unit in run.unit..run.unit + run.units {
            if self.page_at[unit as usize] == NO_PAGE {
                self.free_units.put(unit, 0);
            }
        }
    }

    /// Whether a unit belongs to the closed run.
    fn is_closed(&self, unit: u32) -> bool {
        self.closed.is_some_and(|closed| closed.run.holds(unit))
    }

    /// Numbers of the pages in use of a run.
    fn pages_of(&self, run: Run) -> Vec<u32> {
        let units = run.unit as usize..(run.unit + run.units) as usize;
        work::slots(units.len());
        let mut pages: Vec<u32> = self.page_at[units].to_vec();
        pages.dedup();
        pages.retain(|&number| number != NO_PAGE);
        pages
    }

    /// Who uses the slot at `offset`.
    #[cfg(feature = "check")]
    pub(crate) fn owner_at(&self, class: Class, offset: u64) -> Option<Owner> {
        let number = *self.page_at.get(self.unit_of(offset) as usize)?;
        let page = self.pages.get(number as usize)?.as_ref()?;
        let owner = page.owners.get(self.slot_at(class, offset))?.get();
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

    /// Index in its page of the slot at `offset`.
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
        Some(self.give_page(unit, class))
    }

    /// Makes a page for `class` of free units.
    fn give_page(&mut self, unit: u32, class: Class) -> u32 {
        let slots = u32::try_from(self.slots_per_page(class))
            .expect("a page of at most 64 MiB has fewer than 2^32 slots");
        let page = Page {
            class,
            unit,
            owners: vec![OwnerCell::FREE; slots as usize],
            free: (0..slots).rev().collect(),
        };
        let number = self.free_numbers.pop().unwrap_or_else(|| {
            self.pages.push(None);
            u32::try_from(self.pages.len() - 1).expect("a region has fewer pages than units")
        });
        self.pages[number as usize] = Some(page);
        let run = unit as usize..(unit + self.units(class)) as usize;
        self.page_at[run].fill(number);
        self.enter_partial(number);
        number
    }

    /// An empty page goes back to the pool.
    fn take_page_back(&mut self, number: u32) {
        let page = self.pages[number as usize].take();
        let Page { class, unit, .. } = page.expect("the number of a page in use");
        self.free_numbers.push(number);
        let run = unit as usize..(unit + self.units(class)) as usize;
        self.page_at[run].fill(NO_PAGE);
        match &mut self.closed {
            Some(closed) if closed.run.holds(unit) => closed.pages -= 1,
            _ => {
                let order = self.classes[usize::from(class)].order;
                self.free_units.put(unit, order);
            }
        }
    }

    /// A page's count of free slots has changed: the page is listed if it has any.
    fn enter_partial(&mut self, number: u32) {
        let page = self.page(number);
        let (class, rank) = (usize::from(page.class), page.rank(number));
        if !page.free.is_empty() && !self.is_closed(page.unit) {
            let is_new = self.classes[class].partial.insert(rank);
            assert!(is_new, "page {number} is listed as partial twice");
        }
    }

    /// A page's count of free slots is about to change.
    fn leave_partial(&mut self, number: u32) {
        let page = self.page(number);
        let (class, rank) = (usize::from(page.class), page.rank(number));
        self.classes[class].partial.remove(&rank);
    }
}

#[cfg(test)]
mod tests;
