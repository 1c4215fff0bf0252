//! Whether the thread that carries frames must be woken for those that were just queued.

use super::atomic::{AtomicU8, Ordering};

/// The thread is awake and has taken all frames.
const IDLE: u8 = 0;
/// There are frames that the thread has not taken.
const QUEUED: u8 = 1;
/// The thread sleeps, or is about to.
const ASLEEP: u8 = 2;

/// One thread takes frames and sleeps when there are none; others queue them, under a lock of theirs.
#[derive(Debug)]
pub(crate) struct Doze(AtomicU8);

impl Doze {
    pub(crate) fn new() -> Self {
        Self(AtomicU8::new(IDLE))
    }

    /// Frames have been queued. Whether the thread must be woken: it is asleep, and nobody else wakes it.
    #[must_use]
    pub(crate) fn queued(&self) -> bool {
        self.0.swap(QUEUED, Ordering::AcqRel) == ASLEEP
    }

    /// The thread takes all frames; called while the lock is held under which they are queued.
    pub(crate) fn taken(&self) {
        // Like every change, on top of the last one: a store could be ordered before it.
        self.0.swap(IDLE, Ordering::AcqRel);
    }

    /// Whether nothing has been queued since frames were last taken.
    pub(crate) fn is_idle(&self) -> bool {
        self.0.load(Ordering::Acquire) == IDLE
    }

    /// The thread is about to sleep. Whether it may: nothing has been queued since frames were last taken.
    #[must_use]
    pub(crate) fn fall_asleep(&self) -> bool {
        self.0
            .compare_exchange(IDLE, ASLEEP, Ordering::AcqRel, Ordering::Acquire)
            .is_ok()
    }
}
