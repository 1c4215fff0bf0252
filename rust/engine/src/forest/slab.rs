//! Elements that come and go, by index: a pool with a list of its free places.

use super::node::NONE;
use crate::pool::Pool;

/// An element that can hold an index of a place while its own place is free.
pub(super) trait Linked {
    fn link(&mut self) -> &mut u32;
}

/// Elements and free places.
#[derive(Debug)]
pub(super) struct Slab<T> {
    elements: Pool<T>,
    /// The first free place, or `NONE`; each free place holds the index of the next.
    free: u32,
}

impl<T: Linked> Slab<T> {
    pub(super) fn new() -> Self {
        Self {
            elements: Pool::new(),
            free: NONE,
        }
    }

    /// Adds an element; returns its index.
    pub(super) fn insert(&mut self, element: T) -> u32 {
        if self.free == NONE {
            let index = u32::try_from(self.elements.len()).ok();
            self.elements.push(element);
            return index
                .filter(|&index| index != NONE)
                .expect("there are fewer than 2^32 - 1 elements");
        }
        let index = self.free;
        let place = &mut self.elements[index as usize];
        self.free = *place.link();
        *place = element;
        index
    }

    /// Frees the place of an element.
    pub(super) fn remove(&mut self, index: u32) {
        *self.elements[index as usize].link() = self.free;
        self.free = index;
    }

    pub(super) fn get(&self, index: u32) -> &T {
        &self.elements[index as usize]
    }

    pub(super) fn get_mut(&mut self, index: u32) -> &mut T {
        &mut self.elements[index as usize]
    }

    /// Bytes that the elements and free places take.
    pub(super) fn bytes(&self) -> u64 {
        self.elements.bytes()
    }
}
