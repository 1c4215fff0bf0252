//! Fixed-size slots in a region (the arena, or a data file).
//!
//! The region is cut into pages. A page belongs to one size class while any of its slots is in use,
//! and goes back to the pool when the last one is freed, so space moves between classes by use.
//! Every operation is O(1). This module does bookkeeping only and never touches a byte.

use crate::work;

/// Slot sizes are multiples of this, in bytes (O_DIRECT alignment).
pub const SLOT_ALIGN: u64 = crate::io::IO_ALIGN;

const PAGE_BYTES_MIN: u64 = 256 << 10;
/// The largest page: no payload is larger.
pub(crate) const PAGE_BYTES_MAX: u64 = 64 << 20;
/// A region has about this many pages, so that every size class finds room.
const PAGES_TARGET: u64 = 64;

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

#[derive(Debug)]
struct Page {
    class: Option<Class>,
    owners: Vec<Option<Owner>>,
    free: Vec<u32>,
    /// Position in `ClassState::partial`, while the page has a free slot.
    partial_at: Option<usize>,
}

#[derive(Debug)]
struct ClassState {
    slot_bytes: u64,
    partial: Vec<u32>,
    used: u64,
}

/// Allocator of slots.
#[derive(Debug)]
pub struct Slots {
    page_bytes: u64,
    pages: Vec<Page>,
    free_pages: Vec<u32>,
    classes: Vec<ClassState>,
    used_bytes: u64,
}

/// The page size for a region of `capacity` bytes: a power of two.
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
    /// A region of `capacity` bytes in pages of `page_bytes`; what does not fill a page is left out.
    pub fn new(capacity: u64, page_bytes: u64) -> Self {
        assert!(
            page_bytes.is_power_of_two() && page_bytes >= SLOT_ALIGN,
            "a page holds whole slots: {page_bytes} bytes"
        );
        let count =
            u32::try_from(capacity / page_bytes).expect("a region has fewer than 2^32 pages");
        Self {
            page_bytes,
            pages: (0..count)
                .map(|_| Page {
                    class: None,
                    owners: Vec::new(),
                    free: Vec::new(),
                    partial_at: None,
                })
                .collect(),
            free_pages: (0..count).rev().collect(),
            classes: Vec::new(),
            used_bytes: 0,
        }
    }

    /// The class of payloads of `payload_bytes`; `None` if one does not fit a page.
    pub fn class_for(&mut self, payload_bytes: u64) -> Option<Class> {
        let slot_bytes = payload_bytes.max(1).next_multiple_of(SLOT_ALIGN);
        if slot_bytes > self.page_bytes || self.pages.is_empty() {
            return None;
        }
        let found = self
            .classes
            .iter()
            .position(|class| class.slot_bytes == slot_bytes);
        let index = found.unwrap_or_else(|| {
            self.classes.push(ClassState {
                slot_bytes,
                partial: Vec::new(),
                used: 0,
            });
            self.classes.len() - 1
        });
        Class::try_from(index).ok()
    }

    /// Bytes of one slot of `class`.
    pub fn slot_bytes(&self, class: Class) -> u64 {
        self.classes[usize::from(class)].slot_bytes
    }

    /// Bytes in whole pages.
    pub fn capacity(&self) -> u64 {
        self.page_bytes * self.pages.len() as u64
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

    /// Bytes of a page.
    pub fn page_bytes(&self) -> u64 {
        self.page_bytes
    }

    /// The page that holds `offset`.
    pub fn page_of(&self, offset: u64) -> u32 {
        u32::try_from(offset / self.page_bytes).expect("an offset lies in a page of the region")
    }

    /// Size classes.
    pub fn classes(&self) -> std::ops::Range<Class> {
        0..Class::try_from(self.classes.len()).expect("`class_for` limits the size classes")
    }

    /// Takes a slot; the offset in bytes, or `None` if the class has no room and no page is free.
    pub fn alloc(&mut self, class: Class, owner: Owner) -> Option<u64> {
        work::slots(1);
        let page_index = match self.classes[usize::from(class)].partial.last() {
            Some(&page) => page,
            None => self.assign_page(class)?,
        };
        let slot_bytes = self.slot_bytes(class);
        let page = &mut self.pages[page_index as usize];
        let slot = page.free.pop().expect("a partial page has a free slot");
        let before = page.owners[slot as usize].replace(owner);
        assert!(before.is_none(), "a free slot has the owner {before:?}");
        if page.free.is_empty() {
            self.leave_partial(page_index);
        }
        self.classes[usize::from(class)].used += 1;
        self.used_bytes += slot_bytes;
        Some(u64::from(page_index) * self.page_bytes + u64::from(slot) * slot_bytes)
    }

    /// Takes the slot at `offset` (recovery). False if it is taken, misplaced or of another class.
    pub fn claim(&mut self, class: Class, offset: u64, owner: Owner) -> bool {
        // The offset comes from disk: it may lie anywhere.
        if offset >= self.capacity() {
            return false;
        }
        let page_index = self.page_of(offset);
        let slot_bytes = self.slot_bytes(class);
        let within = offset % self.page_bytes;
        let slots_per_page = self.page_bytes / slot_bytes;
        let page = &self.pages[page_index as usize];
        if !within.is_multiple_of(slot_bytes) || within / slot_bytes >= slots_per_page {
            return false;
        }
        match page.class {
            None => self.give_page(page_index, class),
            Some(found) if found != class => return false,
            Some(_) => {}
        }
        let slot = self.slot_at(class, offset);
        let page = &mut self.pages[page_index as usize];
        if page.owners[slot].is_some() {
            return false;
        }
        page.owners[slot] = Some(owner);
        // The free lists are rebuilt once, by `finish_claims`.
        self.classes[usize::from(class)].used += 1;
        self.used_bytes += slot_bytes;
        true
    }

    /// Names the owner of a slot in use.
    pub fn set_owner(&mut self, class: Class, offset: u64, owner: Owner) {
        let (page, slot) = (self.page_of(offset) as usize, self.slot_at(class, offset));
        let before = self.pages[page].owners[slot].replace(owner);
        assert!(before.is_some(), "the slot at {offset} is not in use");
    }

    /// Rebuilds the free lists after a series of [`Slots::claim`].
    pub fn finish_claims(&mut self) {
        let free = (0u32..)
            .zip(&self.pages)
            .filter(|(_, page)| page.class.is_none());
        self.free_pages = free.map(|(index, _)| index).collect();
        self.free_pages.reverse();
        for index in 0..u32::try_from(self.pages.len()).expect("`new` counts the pages") {
            let page = &mut self.pages[index as usize];
            if page.class.is_none() {
                continue;
            }
            let free = (0u32..)
                .zip(&page.owners)
                .filter(|(_, owner)| owner.is_none());
            page.free = free.map(|(slot, _)| slot).collect();
            page.free.reverse();
            if page.free.is_empty() {
                self.leave_partial(index);
            }
        }
    }

    /// Gives a slot back.
    pub fn free(&mut self, class: Class, offset: u64) {
        work::slots(1);
        let slot_bytes = self.slot_bytes(class);
        let page_index = self.page_of(offset);
        let slot = self.slot_at(class, offset);
        let page = &mut self.pages[page_index as usize];
        assert_eq!(
            page.class,
            Some(class),
            "the slot at {offset} is freed into another class"
        );
        let owner = page.owners[slot].take();
        assert!(owner.is_some(), "the slot at {offset} is freed twice");
        page.free.push(slot as u32);
        let used = &mut self.classes[usize::from(class)].used;
        *used = used.checked_sub(1).expect("the class has a slot in use");
        let used_bytes = self.used_bytes.checked_sub(slot_bytes);
        self.used_bytes = used_bytes.expect("the bytes in use include every slot");
        if self.pages[page_index as usize].partial_at.is_none() {
            self.enter_partial(page_index, class);
        }
        let page = &self.pages[page_index as usize];
        if page.free.len() == page.owners.len() {
            self.leave_partial(page_index);
            let page = &mut self.pages[page_index as usize];
            page.class = None;
            page.owners = Vec::new();
            page.free = Vec::new();
            self.free_pages.push(page_index);
        }
    }

    /// Whether a slot of `class` can be had only by freeing another.
    pub fn is_full(&self, class: Class) -> bool {
        self.classes[usize::from(class)].partial.is_empty() && self.free_pages.is_empty()
    }

    /// Who uses the slots of a page.
    pub fn owners(&self, page: u32) -> impl Iterator<Item = Owner> + '_ {
        let owners = &self.pages[page as usize].owners;
        owners.iter().flatten().copied().inspect(|_| work::slots(1))
    }

    /// Who uses the slot at `offset`.
    #[cfg(feature = "check")]
    pub(crate) fn owner_at(&self, class: Class, offset: u64) -> Option<Owner> {
        let page = self.pages.get(self.page_of(offset) as usize)?;
        let owner = page.owners.get(self.slot_at(class, offset)).copied();
        owner.flatten().filter(|_| page.class == Some(class))
    }

    /// The class a page belongs to now.
    pub fn page_class(&self, page: u32) -> Option<Class> {
        self.pages.get(page as usize)?.class
    }

    /// Index in its page of the slot at `offset`.
    pub(crate) fn slot_at(&self, class: Class, offset: u64) -> usize {
        let slot = offset % self.page_bytes / self.slot_bytes(class);
        // At most the page size over the alignment.
        slot as usize
    }

    fn assign_page(&mut self, class: Class) -> Option<u32> {
        let page = self.free_pages.pop()?;
        self.give_page(page, class);
        Some(page)
    }

    fn give_page(&mut self, page_index: u32, class: Class) {
        let slots = self.page_bytes / self.slot_bytes(class);
        let slots =
            u32::try_from(slots).expect("a page of at most 64 MiB has fewer than 2^32 slots");
        let page = &mut self.pages[page_index as usize];
        assert_eq!(
            page.class, None,
            "page {page_index} belongs to another class"
        );
        page.class = Some(class);
        page.owners = vec![None; slots as usize];
        page.free = (0..slots).rev().collect();
        self.enter_partial(page_index, class);
    }

    fn enter_partial(&mut self, page_index: u32, class: Class) {
        let partial = &mut self.classes[usize::from(class)].partial;
        let before = self.pages[page_index as usize]
            .partial_at
            .replace(partial.len());
        assert!(
            before.is_none(),
            "page {page_index} is listed as partial twice"
        );
        partial.push(page_index);
    }

    fn leave_partial(&mut self, page_index: u32) {
        let page = &mut self.pages[page_index as usize];
        let (Some(at), Some(class)) = (page.partial_at.take(), page.class) else {
            return;
        };
        let partial = &mut self.classes[usize::from(class)].partial;
        partial.swap_remove(at);
        if let Some(&moved) = partial.get(at) {
            self.pages[moved as usize].partial_at = Some(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    const OWNER: Owner = Owner { node: 7, group: 0 };

    #[test]
    fn a_page_returns_to_the_pool_when_its_last_slot_is_freed() {
        let mut slots = Slots::new(1 << 20, 256 << 10);
        let small = slots.class_for(4096).unwrap();
        let large = slots.class_for(200 << 10).unwrap();
        let taken: Vec<u64> = (0..4).map(|_| slots.alloc(large, OWNER).unwrap()).collect();
        assert_eq!(slots.alloc(small, OWNER), None);
        slots.free(large, taken[2]);
        assert_eq!(slots.alloc(small, OWNER), Some(taken[2]));
    }

    #[test]
    fn a_payload_larger_than_a_page_has_no_class() {
        let mut slots = Slots::new(1 << 20, 256 << 10);
        assert!(slots.class_for(256 << 10).is_some());
        assert_eq!(slots.class_for((256 << 10) + 1), None);
    }

    #[test]
    fn claims_rebuild_the_same_state() {
        let mut slots = Slots::new(1 << 20, 256 << 10);
        let class = slots.class_for(8192).unwrap();
        assert!(slots.claim(class, 8192, OWNER));
        assert!(!slots.claim(class, 8192, OWNER));
        assert!(!slots.claim(class, 4096, OWNER));
        let other = slots.class_for(4096).unwrap();
        assert!(!slots.claim(other, 0, OWNER));
        slots.finish_claims();
        let mut seen: Vec<u64> = Vec::new();
        while let Some(offset) = slots.alloc(class, OWNER) {
            seen.push(offset);
        }
        assert_eq!(seen.len(), 4 * 32 - 1);
        assert!(!seen.contains(&8192));
    }

    proptest! {
        #[test]
        fn slots_in_use_never_overlap(ops in prop::collection::vec((0usize..3, any::<bool>(), 0usize..64), 1..400)) {
            let sizes = [4096u64, 12 << 10, 100 << 10];
            let mut slots = Slots::new(2 << 20, 256 << 10);
            let classes = sizes.map(|size| slots.class_for(size).unwrap());
            let mut live: Vec<(usize, u64)> = Vec::new();
            for (kind, allocate, pick) in ops {
                if allocate || live.is_empty() {
                    if let Some(offset) = slots.alloc(classes[kind], OWNER) {
                        live.push((kind, offset));
                    }
                } else {
                    let (kind, offset) = live.swap_remove(pick % live.len());
                    slots.free(classes[kind], offset);
                }
                let mut extents: Vec<(u64, u64)> =
                    live.iter().map(|&(k, o)| (o, o + slots.slot_bytes(classes[k]))).collect();
                extents.sort_unstable();
                prop_assert!(extents.windows(2).all(|pair| pair[0].1 <= pair[1].0));
                prop_assert!(extents.last().is_none_or(|last| last.1 <= slots.capacity()));
                let bytes: u64 = extents.iter().map(|(from, to)| to - from).sum();
                prop_assert_eq!(bytes, slots.used_bytes());
                let mut by_class: HashMap<usize, u64> = HashMap::new();
                live.iter().for_each(|(k, _)| *by_class.entry(*k).or_default() += 1);
                for (k, class) in classes.iter().enumerate() {
                    prop_assert_eq!(slots.used(*class), by_class.get(&k).copied().unwrap_or(0));
                }
            }
        }
    }
}
