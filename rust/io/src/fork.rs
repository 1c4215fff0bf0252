//! Forks of this process.
//!
//! A forked child shares each open file description with its parent, and may end later. A lock of `flock`, a socket and
//! the memory behind a memfd last as long as the last process that has the description. So the child would keep the
//! directories of an engine that has ended, a socket at which nobody answers, and the arena. `O_CLOEXEC` does
//! not help a child that executes no other program.
//!
//! A lock that belongs to a process (`fcntl`) is not enough: it ends with any close of the file in that process, such
//! as that of a reader, and it admits a second engine of the process. So the child gives its copies
//! up: a handler of `fork` puts `/dev/null` in their place. The numbers stay taken, so that a later close in the child
//! closes no descriptor of somebody else. `vfork` and `posix_spawn` run no handler, and need none.
//!
//! Not covered: a fork by another thread in the microseconds between the opening of a descriptor and its mark, a child
//! made by a bare `clone`, and descriptors of libraries (the connections of object stores over HTTP).

#![expect(
    unsafe_code,
    reason = "registers a handler of fork, which replaces descriptors"
)]

use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Once;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

/// Descriptors from this number on are not marked: the usual limit of a process.
const NUMBERS: usize = 1 << 20;

/// A bit for each descriptor that children give up. A child reads it while another thread of the parent may have
/// changed it, so there is no lock.
static MARKED: [AtomicU64; NUMBERS / 64] = [const { AtomicU64::new(0) }; NUMBERS / 64];

/// How many words of [`MARKED`] may have bits.
static WORDS: AtomicUsize = AtomicUsize::new(0);

/// How many forks lie between this process and the first one.
static GENERATION: AtomicU32 = AtomicU32::new(0);

static HANDLER: Once = Once::new();

/// Has the handler called in each forked child from now on.
fn handle_forks() {
    HANDLER.call_once(|| {
        // SAFETY: the handler is a function of the program, and calls only functions that are safe after a fork.
        // Without memory for it, children keep descriptors: everything else works.
        let _ = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
}

/// Only this thread exists in the child, and a lock may be held by a thread that does not: this takes no lock and no
/// memory.
extern "C" fn in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    // SAFETY: the path ends with a zero. The call has no other requirement.
    let null = unsafe { libc::open(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC) };
    for (word, marked) in MARKED[..WORDS.load(Ordering::Relaxed)].iter().enumerate() {
        let mut bits = marked.swap(0, Ordering::Relaxed);
        while bits != 0 {
            let number = (word * 64) as RawFd + bits.trailing_zeros() as RawFd;
            bits &= bits - 1;
            if null >= 0 {
                // SAFETY: the owner of a marked descriptor is this process's copy of a value whose threads do not exist
                // here. The number stays open.
                unsafe { libc::dup3(null, number, libc::O_CLOEXEC) };
            } else {
                // SAFETY: as above. Without a free number nothing can take its place.
                unsafe { libc::close(number) };
            }
        }
    }
    if null >= 0 {
        // SAFETY: it was opened above, for this function alone.
        unsafe { libc::close(null) };
    }
}

/// Marks a descriptor as one that forked children give up, for as long as this lives.
#[derive(Debug)]
pub struct Mark {
    number: usize,
    generation: u32,
}

impl Mark {
    /// Marks a descriptor. Its owner drops the mark before the descriptor.
    pub fn new(descriptor: &impl AsRawFd) -> Self {
        handle_forks();
        let number = descriptor.as_raw_fd().unsigned_abs() as usize;
        if let Some(word) = MARKED.get(number / 64) {
            WORDS.fetch_max(number / 64 + 1, Ordering::Relaxed);
            word.fetch_or(1 << (number % 64), Ordering::Relaxed);
        }
        Self {
            number,
            generation: GENERATION.load(Ordering::Relaxed),
        }
    }

    /// Whether this process has made the mark: false in a forked child.
    pub fn is_own(&self) -> bool {
        self.generation == GENERATION.load(Ordering::Relaxed)
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        // In a child the bit was cleared, and may be set for a descriptor of its own only after this one is closed.
        if let Some(word) = MARKED.get(self.number / 64) {
            word.fetch_and(!(1 << (self.number % 64)), Ordering::Relaxed);
        }
    }
}

/// A descriptor that forked children give up.
#[derive(Debug)]
pub struct Unshared<T> {
    // Dropped first: when its number is free, it is not marked.
    mark: Mark,
    descriptor: T,
}

impl<T: AsRawFd> Unshared<T> {
    /// Marks a descriptor.
    pub fn new(descriptor: T) -> Self {
        Self {
            mark: Mark::new(&descriptor),
            descriptor,
        }
    }

    /// Whether this process has opened it: false in a forked child.
    pub fn is_own(&self) -> bool {
        self.mark.is_own()
    }

    /// The descriptor without the mark.
    pub fn into_inner(self) -> T {
        self.descriptor
    }
}

impl<T: AsRawFd> From<T> for Unshared<T> {
    fn from(descriptor: T) -> Self {
        Self::new(descriptor)
    }
}

impl<T> Deref for Unshared<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.descriptor
    }
}

impl<T> DerefMut for Unshared<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.descriptor
    }
}

impl<T: AsFd> AsFd for Unshared<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

/// A value with threads, which only the process that made it can use. A forked child has a copy without the threads. The
/// copy is never dropped: its end would wait for the threads, and remove files of the parent.
#[derive(Debug)]
pub struct OfProcess<T> {
    value: ManuallyDrop<T>,
    generation: u32,
}

impl<T> OfProcess<T> {
    /// A value of this process.
    pub fn new(value: T) -> Self {
        handle_forks();
        Self {
            value: ManuallyDrop::new(value),
            generation: GENERATION.load(Ordering::Relaxed),
        }
    }

    /// The value; `None` in a forked child.
    pub fn get(&self) -> Option<&T> {
        (self.generation == GENERATION.load(Ordering::Relaxed)).then_some(&*self.value)
    }
}

impl<T> Deref for OfProcess<T> {
    type Target = T;

    /// The value. In a forked child its calls may wait for ever.
    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> Drop for OfProcess<T> {
    fn drop(&mut self) {
        if self.get().is_some() {
            // SAFETY: this is the only place that drops the value, and runs once.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    fn is_marked(number: RawFd) -> bool {
        let word = MARKED[number as usize / 64].load(Ordering::Relaxed);
        word & 1 << (number % 64) != 0
    }

    #[test]
    fn a_number_is_marked_while_its_descriptor_is_owned() {
        let open = || File::open("/dev/null").unwrap();
        let file = Unshared::new(open());
        let number = file.as_raw_fd();
        assert!(is_marked(number) && file.is_own());
        let inner = file.into_inner();
        assert!(!is_marked(number));
        drop(Unshared::new(inner));
        assert!(!is_marked(number));
        let beyond = Mark {
            number: NUMBERS,
            generation: 0,
        };
        drop(beyond);
    }

    #[test]
    fn a_value_ends_in_its_own_process_only() {
        use std::rc::Rc;
        let value = Rc::new(());
        let own = OfProcess::new(Rc::clone(&value));
        assert!(own.get().is_some());
        drop(own);
        assert_eq!(Rc::strong_count(&value), 1);
        let mut of_parent = OfProcess::new(Rc::clone(&value));
        of_parent.generation = of_parent.generation.wrapping_sub(1);
        assert!(of_parent.get().is_none());
        drop(of_parent);
        assert_eq!(Rc::strong_count(&value), 2);
    }
}
