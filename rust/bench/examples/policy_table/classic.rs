//! Policies of the literature, as their authors describe them.

use std::collections::{BTreeMap, HashMap, VecDeque};

use super::BlockCache;

/// Blocks in the order of their insertion.
#[derive(Default)]
struct Queue {
    places: HashMap<usize, u64>,
    order: BTreeMap<u64, usize>,
    next: u64,
}

impl Queue {
    fn len(&self) -> usize {
        self.order.len()
    }

    fn contains(&self, block: usize) -> bool {
        self.places.contains_key(&block)
    }

    fn push(&mut self, block: usize) {
        self.next += 1;
        self.places.insert(block, self.next);
        self.order.insert(self.next, block);
    }

    fn remove(&mut self, block: usize) -> bool {
        let place = self.places.remove(&block);
        place.is_some_and(|place| self.order.remove(&place).is_some())
    }

    fn pop(&mut self) -> Option<usize> {
        let (_, block) = self.order.pop_first()?;
        self.places.remove(&block);
        Some(block)
    }
}

/// Adaptive replacement (Megiddo and Modha, FAST 2003).
#[derive(Default)]
pub(crate) struct Arc {
    capacity: usize,
    /// Wanted length of `once`.
    target: usize,
    once: Queue,
    often: Queue,
    once_gone: Queue,
    often_gone: Queue,
}

impl Arc {
    pub(crate) fn new(capacity: usize) -> Self {
        Self {
            capacity,
            ..Self::default()
        }
    }

    fn replace(&mut self, was_often: bool) {
        let once = self.once.len();
        if once > 0 && (once > self.target || was_often && once == self.target) {
            self.once_gone.push(self.once.pop().unwrap_or_default());
        } else if let Some(block) = self.often.pop() {
            self.often_gone.push(block);
        }
    }

    fn make_room_for_new(&mut self) {
        let seen_once = self.once.len() + self.once_gone.len();
        let resident = self.once.len() + self.often.len();
        let all = seen_once + self.often.len() + self.often_gone.len();
        if seen_once >= self.capacity {
            if self.once.len() < self.capacity {
                self.once_gone.pop();
                self.replace(false);
            } else {
                self.once.pop();
            }
        } else if all >= self.capacity {
            if all >= 2 * self.capacity {
                self.often_gone.pop();
            }
            if resident >= self.capacity {
                self.replace(false);
            }
        }
    }
}

impl BlockCache for Arc {
    fn contains(&self, block: usize) -> bool {
        self.once.contains(block) || self.often.contains(block)
    }

    fn offer(&mut self, block: usize) {
        let gone = (self.once_gone.len().max(1), self.often_gone.len().max(1));
        if self.once.remove(block) || self.often.remove(block) {
            self.often.push(block);
        } else if self.once_gone.contains(block) {
            self.target = (self.target + (gone.1 / gone.0).max(1)).min(self.capacity);
            self.replace(false);
            self.once_gone.remove(block);
            self.often.push(block);
        } else if self.often_gone.contains(block) {
            self.target = self.target.saturating_sub((gone.0 / gone.1).max(1));
            self.replace(true);
            self.often_gone.remove(block);
            self.often.push(block);
        } else {
            self.make_room_for_new();
            self.once.push(block);
        }
    }
}

/// S3-FIFO (Yang and others, SOSP 2023): a tenth of the capacity for new blocks.
pub(crate) struct S3Fifo {
    capacity: usize,
    small: VecDeque<usize>,
    main: VecDeque<usize>,
    gone: Queue,
    /// Uses since the insertion, up to 3; `None` if the block is not present.
    uses: Vec<Option<u8>>,
}

impl S3Fifo {
    pub(crate) fn new(capacity: usize, unique: usize) -> Self {
        Self {
            capacity,
            small: VecDeque::new(),
            main: VecDeque::new(),
            gone: Queue::default(),
            uses: vec![None; unique],
        }
    }

    fn small_capacity(&self) -> usize {
        (self.capacity / 10).max(1)
    }

    fn evict(&mut self) {
        let from_small = self.small.len() >= self.small_capacity() || self.main.is_empty();
        let queue = if from_small {
            &mut self.small
        } else {
            &mut self.main
        };
        let Some(block) = queue.pop_front() else {
            return;
        };
        let uses = self.uses[block].unwrap_or(0);
        if from_small && uses > 1 {
            self.uses[block] = Some(0);
            self.main.push_back(block);
        } else if !from_small && uses > 0 {
            self.uses[block] = Some(uses - 1);
            self.main.push_back(block);
        } else {
            self.uses[block] = None;
            if from_small {
                self.gone.push(block);
                if self.gone.len() > self.capacity - self.small_capacity() {
                    self.gone.pop();
                }
            }
        }
    }
}

impl BlockCache for S3Fifo {
    fn contains(&self, block: usize) -> bool {
        self.uses[block].is_some()
    }

    fn offer(&mut self, block: usize) {
        if let Some(uses) = self.uses[block] {
            self.uses[block] = Some(3.min(uses + 1));
            return;
        }
        while self.small.len() + self.main.len() >= self.capacity {
            self.evict();
        }
        self.uses[block] = Some(0);
        if self.gone.remove(block) {
            self.main.push_back(block);
        } else {
            self.small.push_back(block);
        }
    }
}
