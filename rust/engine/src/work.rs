//! Counts of the work of an entry of the engine, since times on a shared machine prove nothing.
//!
//! A unit is a step of a loop that may be long: a node that is visited, an operation on
//! the index or on a policy's candidates, a payload that is evicted, a record that is allocated, freed or
//! read, a queued write. Each unit costs at most a few cache misses. Loops over namespaces, sessions,
//! directories and groups are not counted, since these are few.
//!
//! The counts are kept for each thread, and only with the feature `check`. Without the feature, counting
//! costs nothing.

/// Units of work since the last call of `Work::take`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Nodes visited.
    pub nodes: u64,
    /// Look-ups in the index, insertions and removals.
    pub index: u64,
    /// Insertions into a policy's candidates, removals, and searches for a victim.
    pub candidates: u64,
    /// Payloads evicted.
    pub evictions: u64,
    /// Slots and records that were allocated or freed.
    pub slots: u64,
    /// Entries of queues: writes, reads, payloads of a transfer.
    pub queued: u64,
}

impl Work {
    #[cfg(feature = "check")]
    const NONE: Self = Self {
        nodes: 0,
        index: 0,
        candidates: 0,
        evictions: 0,
        slots: 0,
        queued: 0,
    };

    /// Sum of all units.
    pub fn units(&self) -> u64 {
        self.nodes + self.index + self.candidates + self.evictions + self.slots + self.queued
    }

    /// The units of this thread since the last call.
    #[cfg(feature = "check")]
    pub fn take() -> Self {
        DONE.take()
    }
}

#[cfg(feature = "check")]
thread_local! {
    static DONE: std::cell::Cell<Work> = const { std::cell::Cell::new(Work::NONE) };
}

#[cfg(feature = "check")]
fn count(add: impl FnOnce(&mut Work)) {
    let mut work = DONE.get();
    add(&mut work);
    DONE.set(work);
}

#[cfg(not(feature = "check"))]
#[inline(always)]
fn count(_: impl FnOnce(&mut Work)) {}

/// Counts a node that is visited.
#[inline(always)]
pub(crate) fn node() {
    count(|work| work.nodes += 1);
}

/// Counts a search in the index, or a change of the index.
#[inline(always)]
pub(crate) fn index() {
    count(|work| work.index += 1);
}

/// Counts a search in a policy's candidates, or a change of them.
#[inline(always)]
pub(crate) fn candidate() {
    count(|work| work.candidates += 1);
}

/// Counts a payload that is evicted.
#[inline(always)]
pub(crate) fn eviction() {
    count(|work| work.evictions += 1);
}

/// Counts slots or records that are allocated or freed.
#[inline(always)]
pub(crate) fn slots(slots: usize) {
    count(|work| work.slots += slots as u64);
}

/// Counts an entry that is taken from a queue.
#[inline(always)]
pub(crate) fn queued() {
    count(|work| work.queued += 1);
}
