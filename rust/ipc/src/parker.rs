//! Decides whether the thread that carries frames must be woken for frames that were just queued.

use super::atomic::{AtomicU8, Ordering};

/// The thread is awake and has taken all frames.
const IDLE: u8 = 0;
/// There are frames that the thread has not taken.
const QUEUED: u8 = 1;
/// The thread is parked, or is about to be.
const PARKED: u8 = 2;

/// One thread takes frames and parks when there are none. Others queue frames, under a lock that the taker
/// holds too.
#[derive(Debug)]
pub(crate) struct Parker(AtomicU8);

impl Parker {
    pub(crate) fn new() -> Self {
        Self(AtomicU8::new(IDLE))
    }

    /// Frames have been queued. Returns whether the caller must wake the thread: it is parked, and no other caller
    /// wakes it.
    #[must_use]
    pub(crate) fn queued(&self) -> bool {
        self.0.swap(QUEUED, Ordering::AcqRel) == PARKED
    }

    /// The thread takes all frames; called while the lock is held under which they are queued.
    pub(crate) fn taken(&self) {
        // A swap, like every change: a plain store could be ordered before the last change.
        self.0.swap(IDLE, Ordering::AcqRel);
    }

    /// Whether nothing has been queued since frames were last taken.
    pub(crate) fn is_idle(&self) -> bool {
        self.0.load(Ordering::Acquire) == IDLE
    }

    /// The thread is about to park. Whether it may: nothing has been queued since frames were last taken.
    #[must_use]
    pub(crate) fn park(&self) -> bool {
        self.0
            .compare_exchange(IDLE, PARKED, Ordering::AcqRel, Ordering::Acquire)
            .is_ok()
    }
}
