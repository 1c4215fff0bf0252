//! The host arena: one shared-memory region that the engine and the workers of all ranks map.
//!
//! **Aliasing rule.** Other processes write this memory, so no reference into it is ever kept. The engine's state
//! machine gives each slot to one party at a time (a worker that fills it, an IO operation, or readers only); each
//! access to bytes goes through the bounds-checked methods here, each of which makes its slice for the length of one
//! system call or checksum. A process that breaks the rule can make the bytes of any slot wrong. The checksum finds
//! that when the payload is read back, written again or encrypted and, with `verify_host`, before a hit, if the bytes changed
//! after they were summed behind the save. The process cannot make the mapping shrink, since the file is sealed.

#![expect(
    unsafe_code,
    reason = "maps shared memory and lends slices of it for single calls"
)]

use std::ffi::c_void;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};
use undercroft_contract::checksum::{RunningChecksum, checksum};
use undercroft_contract::size::Bytes;

use super::{ARENA_ALIGN, HUGE_PAGE, numa};
use crate::fork::Unshared;
use crate::memory;

/// Why an arena could not be made or mapped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ArenaError {
    /// The size is zero, not a multiple of [`ARENA_ALIGN`], or beyond the address space.
    #[error(
        "arena of {size} bytes: must be a positive multiple of {}; round host_memory",
        Bytes(ARENA_ALIGN)
    )]
    Size {
        /// The requested size.
        size: u64,
    },
    /// The machine does not have that much memory left.
    #[error(
        "host_memory {}: only {} of memory are available; lower host_memory",
        Bytes(*size),
        Bytes(*available)
    )]
    Memory {
        /// The requested size.
        size: u64,
        /// The memory that the machine or the container's limit leaves.
        available: u64,
    },
    /// A received descriptor is not an arena of the announced size.
    #[error(
        "arena descriptor: expected a memfd of {expected} bytes sealed against resizing, found {found} bytes, sealed: {sealed}"
    )]
    Foreign {
        /// Announced size in bytes.
        expected: u64,
        /// Size of the file in bytes.
        found: u64,
        /// Whether it is sealed against shrinking.
        sealed: bool,
    },
    /// The kernel refused a step.
    #[error("arena of {size} bytes: {step} failed: {source}")]
    Os {
        /// Size in bytes.
        size: u64,
        /// The operation that failed.
        step: &'static str,
        /// The kernel's answer.
        source: Errno,
    },
}

/// A range outside the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("range of {len} bytes at {offset} lies outside the arena of {size} bytes")]
pub struct OutOfBounds {
    /// Start of the range, in bytes from the start of the arena.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
    /// Size of the arena in bytes.
    pub size: u64,
}

/// A shared mapping. Unmapped on drop; the memory itself stays until the last process unmaps it.
///
/// ```
/// # use undercroft_io::arena::Arena;
/// let arena = Arena::create(8192)?;
/// arena.write(4096, b"payload")?;
/// // A worker maps the same memory by the descriptor that the engine's socket hands out.
/// assert_eq!(Arena::from_fd(arena.fd().try_clone_to_owned()?, 8192)?.read(4096, 7)?, b"payload");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Arena {
    fd: Unshared<OwnedFd>,
    base: NonNull<u8>,
    size: u64,
    huge_pages: bool,
    /// NUMA nodes over which the pages are interleaved; empty if the kernel chooses.
    pub(super) nodes: Vec<u32>,
    pub(super) populated: AtomicU64,
    /// Some of the memory was returned to the system: from then on nothing populates the arena.
    pub(super) is_released: AtomicBool,
}

// SAFETY: the mapping is plain memory that stays valid for the life of the value; every access goes
// through methods that follow the aliasing rule above.
unsafe impl Send for Arena {}
// SAFETY: as for Send; the only mutable state of the value itself is atomic.
unsafe impl Sync for Arena {}

impl Arena {
    /// A new arena of `size` bytes: a memfd, on reserved huge pages if enough of them are free, else on plain pages with
    /// a request for transparent huge pages. Sealed against resizing.
    pub fn create(size: u64) -> Result<Self, ArenaError> {
        Self::create_within(size, memory::available())
    }

    fn create_within(size: u64, available: Option<u64>) -> Result<Self, ArenaError> {
        if size == 0 || !size.is_multiple_of(ARENA_ALIGN) || isize::try_from(size).is_err() {
            return Err(ArenaError::Size { size });
        }
        if let Some(arena) = Self::create_on_huge_pages(size) {
            return Ok(arena);
        }
        if let Some(available) = available.filter(|available| *available < size) {
            return Err(ArenaError::Memory { size, available });
        }
        let fd = sealed_memfd(size, MemfdFlags::empty())?;
        Self::map(fd, size, false)
    }

    /// A new arena on reserved huge pages. `None` if too few of them are free, or if the kernel refuses.
    fn create_on_huge_pages(size: u64) -> Option<Self> {
        if !memory::has_huge_pages(size) {
            return None;
        }
        let fd = sealed_memfd(size, MemfdFlags::HUGETLB).ok()?;
        Self::map(fd, size, true).ok()
    }

    /// Maps an arena that another process created, by its descriptor.
    pub fn from_fd(fd: OwnedFd, size: u64) -> Result<Self, ArenaError> {
        let os = |step| move |source| ArenaError::Os { size, step, source };
        if size == 0 || !size.is_multiple_of(ARENA_ALIGN) || isize::try_from(size).is_err() {
            return Err(ArenaError::Size { size });
        }
        let found = rustix::fs::fstat(&fd)
            .map_err(os("fstat"))?
            .st_size
            .cast_unsigned();
        // F_GET_SEALS fails if the file is no memfd, which counts as not sealed.
        let sealed = rustix::fs::fcntl_get_seals(&fd)
            .is_ok_and(|seals| seals.contains(SealFlags::SHRINK | SealFlags::GROW));
        if found != size || !sealed {
            return Err(ArenaError::Foreign {
                expected: size,
                found,
                sealed,
            });
        }
        let huge_pages = rustix::fs::fstatfs(&fd).is_ok_and(|fs| fs.f_bsize as u64 > ARENA_ALIGN);
        Self::map(fd, size, huge_pages)
    }

    pub(super) fn map(fd: OwnedFd, size: u64, huge_pages: bool) -> Result<Self, ArenaError> {
        let os = |step| move |source| ArenaError::Os { size, step, source };
        let len = usize::try_from(size).map_err(|_| ArenaError::Size { size })?;
        let (place, fixed) = if huge_pages {
            (std::ptr::null_mut(), MapFlags::empty())
        } else {
            (reserve(len).map_err(os("mmap"))?, MapFlags::FIXED)
        };
        // SAFETY: a new mapping, at an address that the kernel chooses or over a reservation that no other code uses;
        // no memory in use is touched.
        let base = unsafe {
            rustix::mm::mmap(
                place,
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | fixed,
                &fd,
                0,
            )
        }
        .map_err(os("mmap"))?;
        let base = NonNull::new(base.cast::<u8>()).ok_or(ArenaError::Size { size })?;
        let mut arena = Self {
            fd: fd.into(),
            base,
            size,
            huge_pages,
            nodes: Vec::new(),
            populated: AtomicU64::new(0),
            is_released: AtomicBool::new(false),
        };
        // Failures are ignored: the arena then works, but more slowly, or core dumps and forked children have it.
        let _ = arena.advise(0, size, Advice::LinuxDontDump);
        let _ = arena.advise(0, size, Advice::LinuxDontFork);
        if !huge_pages {
            let _ = arena.advise(0, size, Advice::LinuxHugepage);
        }
        let nodes = numa::gpu_nodes(Path::new("/sys"));
        if nodes.len() > 1 && arena.interleave(&nodes).is_ok() {
            arena.nodes = nodes;
        }
        Ok(arena)
    }

    /// The memfd, to be sent to workers.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Size in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Address of the first byte in this process.
    pub fn address(&self) -> usize {
        self.base.as_ptr().addr()
    }

    /// Whether the arena lies on reserved huge pages.
    pub fn huge_pages(&self) -> bool {
        self.huge_pages
    }

    /// NUMA nodes over which its pages are interleaved; empty if the kernel chooses.
    pub fn nodes(&self) -> &[u32] {
        &self.nodes
    }

    /// Number of bytes, from the start, that are known to be populated.
    pub fn populated(&self) -> u64 {
        self.populated.load(Ordering::Acquire)
    }

    /// Checks that the range lies inside the arena.
    pub fn check(&self, offset: u64, len: u64) -> Result<(), OutOfBounds> {
        match offset.checked_add(len) {
            Some(end) if end <= self.size => Ok(()),
            _ => Err(OutOfBounds {
                offset,
                len,
                size: self.size,
            }),
        }
    }

    /// Pointer to the range, valid for `len` bytes while the arena lives. The aliasing rule of this module binds it.
    pub fn pointer(&self, offset: u64, len: u64) -> Result<*mut u8, OutOfBounds> {
        self.check(offset, len)?;
        // SAFETY: the offset lies inside the mapping, or is its end for an empty range.
        Ok(unsafe { self.base.as_ptr().add(offset as usize) })
    }

    /// The checksum of the range.
    pub fn checksum(&self, offset: u64, len: u64) -> Result<u64, OutOfBounds> {
        self.with(offset, len, checksum)
    }

    /// Adds the range to a checksum.
    pub fn sum_running(
        &self,
        sum: &mut RunningChecksum,
        offset: u64,
        len: u64,
    ) -> Result<(), OutOfBounds> {
        self.with(offset, len, |bytes| sum.update(bytes))
    }

    /// Adds the range, which is in this processor's caches, to a checksum.
    pub fn sum_cached(
        &self,
        sum: &mut RunningChecksum,
        offset: u64,
        len: u64,
    ) -> Result<(), OutOfBounds> {
        self.with(offset, len, |bytes| sum.update_cached(bytes))
    }

    fn with<R>(
        &self,
        offset: u64,
        len: u64,
        work: impl FnOnce(&[u8]) -> R,
    ) -> Result<R, OutOfBounds> {
        let start = self.pointer(offset, len)?;
        // SAFETY: valid for `len` bytes by the check; no process writes the slot now (aliasing
        // rule).
        Ok(work(unsafe {
            std::slice::from_raw_parts(start, len as usize)
        }))
    }

    /// Copies `bytes` into the arena.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), OutOfBounds> {
        let start = self.pointer(offset, bytes.len() as u64)?;
        // SAFETY: both are valid for the length, and no Rust reference into the arena exists that
        // `bytes` could be.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), start, bytes.len()) };
        Ok(())
    }

    /// Copies a range of another arena into this arena. No reference to the range is made, since another process may
    /// write the range meanwhile: the copy may then have any of the written bytes.
    pub fn copy_from(
        &self,
        offset: u64,
        from: &Self,
        place: u64,
        len: u64,
    ) -> Result<(), OutOfBounds> {
        let (to, from) = (self.pointer(offset, len)?, from.pointer(place, len)?);
        // SAFETY: both are valid for `len` bytes by the checks; `copy` allows that they overlap.
        unsafe { std::ptr::copy(from, to, len as usize) };
        Ok(())
    }

    /// Copies a range out of the arena.
    pub fn read(&self, offset: u64, len: u64) -> Result<Vec<u8>, OutOfBounds> {
        let start = self.pointer(offset, len)?;
        // SAFETY: valid for `len` bytes by the check; no process writes the slot now (aliasing
        // rule).
        Ok(unsafe { std::slice::from_raw_parts(start, len as usize) }.to_vec())
    }

    /// Appends a copy of a range to `out`.
    pub fn append_to(&self, out: &mut Vec<u8>, offset: u64, len: u64) -> Result<(), OutOfBounds> {
        self.with(offset, len, |bytes| out.extend_from_slice(bytes))
    }

    /// Fills `out` with the bytes of the arena from `offset` on.
    pub fn copy_to(&self, offset: u64, out: &mut [u8]) -> Result<(), OutOfBounds> {
        let start = self.pointer(offset, out.len() as u64)?;
        // SAFETY: both are valid for the length, and no Rust reference into the arena exists that `out` could be.
        unsafe { std::ptr::copy_nonoverlapping(start, out.as_mut_ptr(), out.len()) };
        Ok(())
    }

    /// Makes one `pread` into the range. Returns the number of bytes read, which may be less than `len`.
    pub fn pread(
        &self,
        file: BorrowedFd<'_>,
        at: u64,
        offset: u64,
        len: u64,
    ) -> Result<usize, Errno> {
        let start = self.pointer(offset, len).map_err(|_| Errno::INVAL)?;
        // SAFETY: valid for `len` bytes by the check; the operation owns the slot (aliasing rule).
        let buffer = unsafe { std::slice::from_raw_parts_mut(start, len as usize) };
        rustix::io::pread(file, buffer, at)
    }

    /// Makes one `pwrite` of the range. Returns the number of bytes written, which may be less than `len`.
    pub fn pwrite(
        &self,
        file: BorrowedFd<'_>,
        at: u64,
        offset: u64,
        len: u64,
    ) -> Result<usize, Errno> {
        let start = self.pointer(offset, len).map_err(|_| Errno::INVAL)?;
        // SAFETY: valid for `len` bytes by the check; no process writes the slot now (aliasing rule).
        let bytes = unsafe { std::slice::from_raw_parts(start, len as usize) };
        rustix::io::pwrite(file, bytes, at)
    }

    pub(super) fn advise(&self, offset: u64, len: u64, advice: Advice) -> Result<(), Errno> {
        let start = self.pointer(offset, len).map_err(|_| Errno::INVAL)?;
        // SAFETY: the range lies inside the mapping, and none of the advices used here changes the
        // content of memory.
        unsafe { rustix::mm::madvise(start.cast(), len as usize, advice) }
    }

    /// Asks the kernel to replace the pages of the range by huge pages now, with the same bytes.
    pub(super) fn collapse(&self, offset: u64, len: u64) -> std::io::Result<()> {
        let start = self.pointer(offset, len).map_err(std::io::Error::other)?;
        // SAFETY: the range lies inside the mapping, and its bytes stay the same.
        match unsafe { libc::madvise(start.cast(), len as usize, libc::MADV_COLLAPSE) } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        }
    }
}

impl Arena {
    /// Makes the kernel take pages that are not populated yet from `nodes` in turn, since the policy is the file's.
    pub(super) fn interleave(&self, nodes: &[u32]) -> std::io::Result<()> {
        let mask = numa::mask(nodes);
        // SAFETY: the range is this mapping, the mask lives beyond the call, and no byte changes.
        let code = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.base.as_ptr(),
                self.size,
                libc::MPOL_INTERLEAVE,
                mask.as_ptr(),
                numa::MASK_BITS,
                0,
            )
        };
        match code {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        }
    }
}

/// Locks the first byte of a file exclusively for this open file description, until it is closed.
pub(super) fn lock_alone(file: &File) -> std::io::Result<()> {
    let lock = libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 1,
        l_pid: 0,
    };
    // SAFETY: the kernel reads the lock during the call.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// Address space for `len` bytes, aligned to huge pages.
fn reserve(len: usize) -> Result<*mut c_void, Errno> {
    let spare = HUGE_PAGE as usize;
    let whole = len.checked_add(spare).ok_or(Errno::NOMEM)?;
    // SAFETY: a new mapping at an address that the kernel chooses.
    let start = unsafe {
        rustix::mm::mmap_anonymous(
            std::ptr::null_mut(),
            whole,
            ProtFlags::empty(),
            MapFlags::PRIVATE | MapFlags::NORESERVE,
        )
    }?;
    let before = start.addr().next_multiple_of(spare) - start.addr();
    let place = start.wrapping_byte_add(before);
    // The parts before and behind the mapping are not used. They may stay reserved if the call fails. SAFETY:
    // the beginning of the mapping above.
    let _ = unsafe { rustix::mm::munmap(start, before) };
    // SAFETY: its end.
    let _ = unsafe { rustix::mm::munmap(place.wrapping_byte_add(len), spare - before) };
    Ok(place)
}

impl Drop for Arena {
    fn drop(&mut self) {
        // A forked child has no mapping, and may have another one there.
        if self.fd.is_own() {
            // SAFETY: unmaps exactly the range that `map` mapped; each holder of a pointer holds the arena, too.
            let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.size as usize) };
        }
    }
}

pub(super) fn sealed_memfd(size: u64, flags: MemfdFlags) -> Result<OwnedFd, ArenaError> {
    let os = |step| move |source| ArenaError::Os { size, step, source };
    let flags = flags | MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("undercroft-arena", flags).map_err(os("memfd_create"))?;
    rustix::fs::ftruncate(&fd, size).map_err(os("ftruncate"))?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
        .map_err(os("sealing"))?;
    Ok(fd)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_mappings_share_their_bytes() {
        let arena = Arena::create(1 << 20).unwrap();
        let fd = arena.fd().try_clone_to_owned().unwrap();
        let other = Arena::from_fd(fd, 1 << 20).unwrap();
        assert_ne!(arena.address(), other.address());
        arena.write(4096, b"shared").unwrap();
        assert_eq!(other.read(4096, 6).unwrap(), b"shared");
        assert_eq!(other.checksum(4096, 6).unwrap(), checksum(b"shared"));
        drop(arena);
        assert_eq!(other.read(4096, 6).unwrap(), b"shared");
    }

    #[test]
    fn sizes_that_make_no_sense_are_refused() {
        for size in [0, 1, 4095, 4097, u64::MAX - 4095] {
            let made = Arena::create(size);
            assert!(matches!(made, Err(ArenaError::Size { .. })), "{size}");
        }
    }

    #[test]
    fn more_than_the_available_memory_is_refused_with_both_numbers() {
        let error = Arena::create_within(1 << 30, Some(5000))
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("1 GiB") && error.contains("4.882 KiB"),
            "{error}"
        );
        assert!(Arena::create(1 << 50).is_err());
    }

    #[test]
    fn the_file_cannot_be_resized() {
        let arena = Arena::create(8192).unwrap();
        assert_eq!(rustix::fs::ftruncate(arena.fd(), 4096), Err(Errno::PERM));
        assert_eq!(rustix::fs::ftruncate(arena.fd(), 16384), Err(Errno::PERM));
    }

    #[test]
    fn descriptors_that_are_no_arena_are_refused() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(8192).unwrap();
        let foreign = Arena::from_fd(file.into(), 8192);
        assert!(matches!(
            foreign,
            Err(ArenaError::Foreign { sealed: false, .. })
        ));
        let arena = Arena::create(8192).unwrap();
        let other_size = Arena::from_fd(arena.fd().try_clone_to_owned().unwrap(), 4096);
        assert!(matches!(
            other_size,
            Err(ArenaError::Foreign {
                found: 8192,
                expected: 4096,
                ..
            })
        ));
    }

    /// `MPOL_F_ADDR`.
    const OF_ADDRESS: libc::c_int = 2;

    /// Policy and nodes of the page at an address, which is not populated yet.
    fn policy_at(address: usize) -> (i32, u64) {
        let mut mode: libc::c_int = -1;
        let mut mask = numa::mask(&[]);
        // SAFETY: the kernel writes the mode, and at most `MASK_BITS` bits of the mask.
        let code = unsafe {
            libc::syscall(
                libc::SYS_get_mempolicy,
                &raw mut mode,
                mask.as_mut_ptr(),
                numa::MASK_BITS,
                address,
                OF_ADDRESS,
            )
        };
        assert_eq!(code, 0, "{}", std::io::Error::last_os_error());
        (mode, mask[0])
    }

    #[test]
    fn every_mapping_of_an_interleaved_arena_takes_its_pages_from_the_nodes() {
        let arena = Arena::create(1 << 20).unwrap();
        if let Err(error) = arena.interleave(&[0]) {
            return eprintln!("not shown: this machine lets nobody choose nodes ({error})");
        }
        let fd = arena.fd().try_clone_to_owned().unwrap();
        let other = Arena::from_fd(fd, 1 << 20).unwrap();
        for address in [arena.address(), other.address() + (1 << 19)] {
            assert_eq!(policy_at(address), (libc::MPOL_INTERLEAVE, 1));
        }
    }

    #[test]
    fn ranges_are_checked() {
        let arena = Arena::create(8192).unwrap();
        assert!(arena.pointer(0, 8192).is_ok());
        assert!(arena.pointer(8192, 0).is_ok());
        for (offset, len) in [(0, 8193), (8192, 1), (u64::MAX, 2), (4096, u64::MAX)] {
            let error = OutOfBounds {
                offset,
                len,
                size: 8192,
            };
            assert_eq!(arena.pointer(offset, len), Err(error));
            assert_eq!(arena.read(offset, len), Err(error));
            assert_eq!(arena.checksum(offset, len), Err(error));
            assert_eq!(arena.pread(arena.fd(), 0, offset, len), Err(Errno::INVAL));
            assert_eq!(arena.prefault(offset, len), Err(Errno::INVAL));
        }
        assert!(arena.write(8190, b"abc").is_err());
    }
}
