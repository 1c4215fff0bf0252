//! Memory that this process and the helper's process map. Objects pass through it.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Instant;

use undercroft_contract::remote::RemoteError;
use undercroft_io::arena::{ARENA_ALIGN, Arena};

use crate::store_error::{ObjectStoreError, Result};

/// Size of the memory in bytes. Pages that no object has used are not allocated.
pub(super) const BUFFER_BYTES: u64 = 256 << 20;

/// The memory, and which ranges of it are in use.
#[derive(Debug)]
pub(super) struct SharedMemory {
    pub(super) arena: Arena,
    /// Ranges in use, by their start: first and end.
    used: Mutex<Vec<(u64, u64)>>,
    freed: Condvar,
}

/// A range that belongs to one operation until the range is dropped.
#[derive(Debug)]
pub(super) struct SharedRange {
    buffer: Arc<SharedMemory>,
    pub(super) at: u64,
    pub(super) len: u64,
}

impl SharedMemory {
    pub(super) fn new(bytes: u64) -> Result<Arc<Self>> {
        let arena = Arena::create(bytes);
        let arena = arena.map_err(|error| ObjectStoreError::new(RemoteError::Stopped, error))?;
        Ok(Arc::new(Self {
            arena,
            used: Mutex::default(),
            freed: Condvar::new(),
        }))
    }

    /// Waits for a free range of `len` bytes.
    pub(super) fn take(self: &Arc<Self>, len: u64, deadline: Instant) -> Result<SharedRange> {
        let len = len.next_multiple_of(ARENA_ALIGN);
        if len > self.arena.size() {
            let text = format!("an object of {len} bytes");
            return Err(ObjectStoreError::new(RemoteError::Full, text)
                .or_advice("set a smaller remote_object"));
        }
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some((index, at)) = gap(&used, len, self.arena.size()) {
                used.insert(index, (at, at + len));
                let buffer = Arc::clone(self);
                return Ok(SharedRange { buffer, at, len });
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let text = "no room in the memory shared with Mooncake's client";
                return Err(ObjectStoreError::new(RemoteError::Late, text));
            }
            let waited = self.freed.wait_timeout(used, left);
            (used, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// The first gap of `len` bytes: its place among the ranges, and its start.
fn gap(used: &[(u64, u64)], len: u64, size: u64) -> Option<(usize, u64)> {
    let mut start = 0;
    for (index, (first, end)) in used.iter().enumerate() {
        if first - start >= len {
            return Some((index, start));
        }
        start = *end;
    }
    (size - start >= len).then_some((used.len(), start))
}

impl Drop for SharedRange {
    fn drop(&mut self) {
        let used = self.buffer.used.lock();
        let mut used = used.unwrap_or_else(PoisonError::into_inner);
        used.retain(|(first, _)| *first != self.at);
        drop(used);
        self.buffer.freed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn ranges_do_not_overlap_and_come_back() {
        let buffer = SharedMemory::new(10 * ARENA_ALIGN).unwrap();
        let now = Instant::now();
        let take = |pages| buffer.take(pages * ARENA_ALIGN - 1, now);
        let slots: Vec<SharedRange> = [3, 2, 4].map(|pages| take(pages).unwrap()).into();
        let starts: Vec<u64> = slots.iter().map(|slot| slot.at / ARENA_ALIGN).collect();
        assert_eq!(starts, [0, 3, 5]);
        assert_eq!(take(2).unwrap_err().kind, RemoteError::Late);
        assert_eq!(take(11).unwrap_err().kind, RemoteError::Full);
        let [first, second, _third] = <[SharedRange; 3]>::try_from(slots).unwrap();
        drop(second);
        assert_eq!(take(2).unwrap().at, 3 * ARENA_ALIGN);
        drop(first);
        assert_eq!(take(5).unwrap().at, 0);
    }

    #[test]
    fn who_waits_gets_the_range_that_another_gives_back() {
        let buffer = SharedMemory::new(ARENA_ALIGN).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        let slot = buffer.take(1, deadline).unwrap();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| buffer.take(1, deadline).map(|slot| slot.at));
            drop(slot);
            assert_eq!(waiting.join().unwrap().unwrap(), 0);
        });
    }
}
