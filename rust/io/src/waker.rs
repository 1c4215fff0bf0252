//! Ending another thread's wait.

use std::fmt::Debug;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

use crate::fork::Unshared;

/// The handle by which other threads end an IO engine's `wait`.
pub trait Wake: Send + Sync + Debug {
    /// Ends the present `wait`, or the next `wait` if there is none now.
    fn wake(&self);
}

/// Ends the `wait` of its IO engine. Cheap to clone; has no effect after the IO engine was dropped.
#[derive(Clone, Debug)]
pub struct Waker(Arc<dyn Wake>);

impl Waker {
    /// A waker over an IO engine's own way to end a wait.
    pub fn new(wake: Arc<dyn Wake>) -> Self {
        Self(wake)
    }

    /// Ends the present `wait`, or the next `wait` if there is none now.
    pub fn wake(&self) {
        self.0.wake();
    }
}

/// An eventfd that the ring polls. The flag saves the system call if a wake-up is already due.
#[derive(Debug)]
pub(super) struct EventWake {
    fd: Unshared<OwnedFd>,
    woken: AtomicBool,
}

impl EventWake {
    pub(super) fn new() -> Result<Self, Errno> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self {
            fd: fd.into(),
            woken: AtomicBool::new(false),
        })
    }

    /// Readable when a wake-up is due.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Whether a wake-up was due. The waker's earlier writes are visible afterwards.
    pub(super) fn take(&self) -> bool {
        self.woken.swap(false, Ordering::AcqRel)
    }

    /// Makes the descriptor unreadable again.
    pub(super) fn reset(&self) {
        let _ = rustix::io::read(&self.fd, &mut [0; 8]);
    }
}

impl Wake for EventWake {
    fn wake(&self) {
        if !self.woken.swap(true, Ordering::AcqRel) {
            // The write cannot fail: the count is far from its limit.
            let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
        }
    }
}
