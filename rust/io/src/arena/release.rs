//! Returns memory of the arena to the system.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering;

use rustix::fs::FallocateFlags;

use super::region::{Arena, lock_alone};

/// A range of the arena whose memory may be returned to the system. While this lives, no process can pin the arena.
#[derive(Debug)]
pub(crate) struct Release<'a> {
    arena: &'a Arena,
    /// Holds the lock.
    file: File,
    offset: u64,
    len: u64,
}

impl Arena {
    /// Returns the memory behind a range, which no slot uses, to the system. The range then reads as zeros.
    ///
    /// A device whose driver has pinned the range would keep the old pages and copy from and to them. So a process that
    /// pins a part of the arena holds a shared lock on the file's first byte, by an open file description of its own
    /// (`python/undercroft/device/pinning.py`).
    ///
    /// Reserved huge pages are not returned: only users of huge pages could take them, and then the range could not
    /// be populated again. An access to the range would end the process (SIGBUS).
    ///
    /// # Errors
    /// If a process has pinned a part of the arena, the arena lies on reserved huge pages, or the kernel refuses.
    pub fn release(&self, offset: u64, len: u64) -> io::Result<()> {
        self.begin_release(offset, len)?.finish()
    }

    /// Checks that [`Arena::release`] may return a range, before its caller gives up anything for it.
    ///
    /// # Errors
    /// Like [`Arena::release`].
    pub(crate) fn begin_release(&self, offset: u64, len: u64) -> io::Result<Release<'_>> {
        self.check(offset, len).map_err(io::Error::other)?;
        if self.huge_pages() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        // A lock belongs to an open file description, and workers share the arena's description.
        let name = format!("/proc/self/fd/{}", self.fd().as_raw_fd());
        let file = File::options().read(true).write(true).open(name)?;
        lock_alone(&file)?;
        Ok(Release {
            arena: self,
            file,
            offset,
            len,
        })
    }
}

impl Release<'_> {
    /// Returns the memory.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub(crate) fn finish(self) -> io::Result<()> {
        self.arena.is_released.store(true, Ordering::Relaxed);
        let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(rustix::fs::fallocate(
            &self.file,
            mode,
            self.offset,
            self.len,
        )?)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rustix::fs::MemfdFlags;

    use super::super::prefault_in_background;
    use super::super::region::sealed_memfd;
    use super::*;

    #[test]
    fn memory_is_given_back_unless_a_process_has_pinned_the_arena() {
        let arena = Arc::new(Arena::create(8 << 20).unwrap());
        let blocks = || rustix::fs::fstat(arena.fd()).unwrap().st_blocks;
        arena.write(0, &[7; 4096]).unwrap();
        arena.write(4 << 20, &[8; 4096]).unwrap();
        let before = blocks();
        let pinner = arena.fd().try_clone_to_owned().unwrap();
        let name = format!("/proc/self/fd/{}", pinner.as_raw_fd());
        let pinner = File::options().read(true).write(true).open(name).unwrap();
        lock_alone(&pinner).unwrap();
        assert!(arena.release(0, 4 << 20).is_err());
        assert_eq!(arena.read(0, 2).unwrap(), [7, 7]);
        drop(pinner);
        arena.release(0, 4 << 20).unwrap();
        // The read of a byte populates a page.
        assert!(blocks() < before, "{before} blocks");
        assert_eq!(arena.read(0, 2).unwrap(), [0, 0]);
        assert_eq!(arena.read(4 << 20, 2).unwrap(), [8, 8]);
        assert!(arena.release(8 << 20, 4096).is_err());
        // The range can be used again, and only used pages have memory.
        prefault_in_background(Arc::clone(&arena)).unwrap().join();
        assert_eq!(arena.populated(), 0);
        arena.write(0, &[9; 4096]).unwrap();
        assert_eq!(arena.read(0, 2).unwrap(), [9, 9]);
    }

    #[test]
    fn reserved_huge_pages_are_not_given_back() {
        // This machine need not have such pages: an arena on plain pages counts as an arena on huge pages.
        let fd = sealed_memfd(8192, MemfdFlags::empty()).unwrap();
        let arena = Arena::map(fd, 8192, true).unwrap();
        arena.write(0, b"kept").unwrap();
        assert!(arena.release(0, 4096).is_err());
        assert_eq!(arena.read(0, 4).unwrap(), b"kept");
    }
}
