//! Decides whether the thread that sends frames must be woken for frames that were just queued.

use super::atomic::{AtomicU8, Ordering};

/// The thread is awake and has taken all frames.
const IDLE: u8 = 0;
/// There are frames that the thread has not taken.
const QUEUED: u8 = 1;
/// The thread is parked, or is about to be.
const PARKED: u8 = 2;

/// One thread takes frames, and parks when there are none. Other threads queue frames. All of them hold the same lock
/// while they queue or take frames.
#[derive(Debug)]
pub(crate) struct Parker(AtomicU8);

impl Parker {
    pub(crate) fn new() -> Self {
        Self(AtomicU8::new(IDLE))
    }

    /// Frames have been queued. Returns whether the caller must wake the thread: whether the thread is parked, and no
    /// other caller wakes it.
    #[must_use]
    pub(crate) fn queued(&self) -> bool {
        self.0.swap(QUEUED, Ordering::AcqRel) == PARKED
    }

    /// The thread takes all frames. It calls this under the lock.
    pub(crate) fn taken(&self) {
        // This is a swap, like every change: a plain store could be ordered before the last change.
        self.0.swap(IDLE, Ordering::AcqRel);
    }

    /// Whether nothing has been queued since frames were last taken.
    pub(crate) fn is_idle(&self) -> bool {
        self.0.load(Ordering::Acquire) == IDLE
    }

    /// The thread is about to park. Returns whether it may: whether nothing was queued since frames were last taken.
    #[must_use]
    pub(crate) fn park(&self) -> bool {
        self.0
            .compare_exchange(IDLE, PARKED, Ordering::AcqRel, Ordering::Acquire)
            .is_ok()
    }
}
