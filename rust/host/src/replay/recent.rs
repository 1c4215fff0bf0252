//! Keys in the order of their last use, of which the least recently used leave.

use std::collections::{BTreeMap, HashMap};

/// At most `capacity` keys.
#[derive(Debug)]
pub(super) struct RecentSet {
    capacity: usize,
    now: u64,
    used: HashMap<u64, u64>,
    order: BTreeMap<u64, u64>,
}

impl RecentSet {
    pub(super) fn new(capacity: usize) -> Self {
        Self {
            capacity,
            now: 0,
            used: HashMap::new(),
            order: BTreeMap::new(),
        }
    }

    pub(super) fn contains(&self, key: u64) -> bool {
        self.used.contains_key(&key)
    }

    /// A key is used: it is added if it is not there. Returns the key that leaves for it.
    pub(super) fn add(&mut self, key: u64) -> Option<u64> {
        self.now += 1;
        if let Some(before) = self.used.insert(key, self.now) {
            self.order.remove(&before);
        }
        self.order.insert(self.now, key);
        if self.order.len() <= self.capacity {
            return None;
        }
        let (_, oldest) = self.order.pop_first()?;
        self.used.remove(&oldest);
        Some(oldest)
    }
}
