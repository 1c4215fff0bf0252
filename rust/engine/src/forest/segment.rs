//! One table of the index: open addressing with linear probing. A slot holds a node and its tag, so that a table is
//! split, and a place closed, without a look at the nodes.

use crate::work;

use super::node::{NONE, NodeId};

/// A part of the hash of a node's key. The lower bits choose the table of the node, the higher bits its place there.
pub(crate) type Tag = u32;

/// A slot without a node.
const EMPTY: u64 = u64::MAX;
const SLOTS_MIN: usize = 16;
/// A table is full when this many sixteenths of its slots are used.
const FULL_16THS: usize = 14;
/// Number of slots that are moved for about the cost of one cache miss.
const SLOTS_PER_UNIT: usize = 16;

/// A table.
///
/// Invariants: at least one slot is empty, so that every search ends; no slot between a node's first slot and its own
/// is empty.
#[derive(Debug)]
pub(super) struct Segment {
    slots: Box<[u64]>,
    nodes: u32,
    /// Number of the lowest bits in which all tags of the table are equal.
    bits: u32,
}

fn slot(tag: Tag, id: NodeId) -> u64 {
    u64::from(tag) << 32 | u64::from(id)
}

fn tag_of(slot: u64) -> Tag {
    (slot >> 32) as Tag
}

impl Segment {
    /// A table with room for this many nodes.
    pub(super) fn new(bits: u32, nodes: usize) -> Self {
        let slots = (nodes * 16).div_ceil(FULL_16THS).max(SLOTS_MIN);
        Self {
            slots: vec![EMPTY; slots].into_boxed_slice(),
            nodes: 0,
            bits,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.nodes as usize
    }

    pub(super) fn bits(&self) -> u32 {
        self.bits
    }

    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.slots)
    }

    /// The first slot in which a node with a tag may lie.
    fn home(&self, tag: Tag) -> usize {
        // The result is below the number of slots.
        ((u64::from(tag) * self.slots.len() as u64) >> 32) as usize
    }

    /// See [`Segment::home`].
    pub(super) fn first(&self, tag: Tag) -> &u64 {
        &self.slots[self.home(tag)]
    }

    fn next(&self, at: usize) -> usize {
        let next = at + 1;
        if next == self.slots.len() { 0 } else { next }
    }

    pub(super) fn find(&self, tag: Tag, mut is_it: impl FnMut(NodeId) -> bool) -> Option<NodeId> {
        let mut at = self.home(tag);
        loop {
            let slot = self.slots[at];
            if slot == EMPTY {
                return None;
            }
            // The lower half of a slot.
            let id = slot as NodeId;
            if tag_of(slot) == tag && is_it(id) {
                return Some(id);
            }
            at = self.next(at);
        }
    }

    /// Adds a node; grows the table if it is full.
    pub(super) fn insert(&mut self, tag: Tag, id: NodeId) {
        debug_assert_ne!(id, NONE, "that slot would be empty");
        if (self.len() + 1) * 16 > self.slots.len() * FULL_16THS {
            self.grow();
        }
        self.put(slot(tag, id));
    }

    fn put(&mut self, slot: u64) {
        let mut at = self.home(tag_of(slot));
        while self.slots[at] != EMPTY {
            at = self.next(at);
        }
        self.slots[at] = slot;
        self.nodes += 1;
    }

    /// Grows the table by an eighth of its slots.
    fn grow(&mut self) {
        let slots = self.slots.len();
        let room = (slots + slots / 8) * FULL_16THS / 16;
        let before = std::mem::replace(self, Self::new(self.bits, room));
        self.take_over(&before, |_| true);
    }

    fn take_over(&mut self, other: &Self, is_for_it: impl Fn(Tag) -> bool) {
        for &slot in other.slots.iter().filter(|&&slot| slot != EMPTY) {
            if self.len().is_multiple_of(SLOTS_PER_UNIT) {
                work::index();
            }
            if is_for_it(tag_of(slot)) {
                // The lower half of a slot.
                self.insert(tag_of(slot), slot as NodeId);
            }
        }
    }

    /// Splits off the nodes whose next bit is set.
    pub(super) fn split(&mut self) -> Self {
        let bit = 1 << self.bits;
        // Each table gets about half of the nodes.
        let half = Self::new(self.bits + 1, self.len() / 2 + self.len() / 8);
        let mut other = Self::new(half.bits, self.len() / 2 + self.len() / 8);
        let before = std::mem::replace(self, half);
        self.take_over(&before, |tag| tag & bit == 0);
        other.take_over(&before, |tag| tag & bit != 0);
        other
    }

    /// Removes a node. False if it is not in the table.
    pub(super) fn remove(&mut self, tag: Tag, id: NodeId) -> bool {
        let wanted = slot(tag, id);
        let mut hole = self.home(tag);
        while self.slots[hole] != wanted {
            if self.slots[hole] == EMPTY {
                return false;
            }
            hole = self.next(hole);
        }
        // The nodes behind move up, unless they would move before their first slot.
        let slots = self.slots.len();
        let behind = |from: usize, at: usize| (at + slots - from) % slots;
        let mut at = self.next(hole);
        while self.slots[at] != EMPTY {
            let home = self.home(tag_of(self.slots[at]));
            if behind(home, at) >= behind(hole, at) {
                self.slots[hole] = self.slots[at];
                hole = at;
            }
            at = self.next(at);
        }
        self.slots[hole] = EMPTY;
        self.nodes -= 1;
        true
    }
}
