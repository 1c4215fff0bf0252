//! An io_uring with registered files and, where allowed, registered buffers: the part that calls
//! the kernel, shared by the engine ([`super::uring`]) and the bare loop ([`super::raw`]).

#![expect(unsafe_code, reason = "hands memory to the kernel")]

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use io_uring::{IoUring, opcode, squeue, types};
use rustc_hash::FxHashMap;
use rustix::event::PollFlags;
use rustix::io::Errno;

use super::operation::AlignedBuffer;
use crate::arena::Arena;
use crate::fork::Mark;

/// The user data of a wake-up.
pub(super) const WAKE: u64 = u64::MAX;

/// Registered buffers are pieces of the arena of this size in bytes. A piece is so small that pinning it
/// (a millisecond once it is populated) never stalls the IO thread.
const REGION: u64 = 64 << 20;

/// Pause after the kernel has refused the ring (out of memory, say).
pub(super) const REFUSAL_PAUSE: rustix::event::Timespec = rustix::event::Timespec {
    tv_sec: 0,
    tv_nsec: 10_000_000,
};

/// The kernel's limit for registered buffers.
const REGIONS_MAX: u64 = 1 << 14;

/// Entries of the submission queue. Further entries wait in the caller's own queue.
const SUBMISSION_ENTRIES: u32 = 256;

/// A transfer of one contiguous piece.
#[derive(Debug)]
pub(super) struct RingTransfer {
    pub(super) reading: bool,
    /// Index in the files given to [`Ring::new`].
    pub(super) file: u32,
    pub(super) file_offset: u64,
    pub(super) buffer: Buffer,
    pub(super) len: u32,
}

/// Where the bytes are.
#[derive(Debug)]
pub(super) enum Buffer {
    /// At this offset in the arena.
    Arena(u64),
    /// In metadata to be written, from this byte on.
    Metadata(Arc<AlignedBuffer>, u32),
}

/// Holds all memory that the kernel may read or write for an entry until the entry's completion has been
/// reaped, so that no use of this type can free memory that the kernel uses.
pub(super) struct Ring {
    /// Dropped before the ring.
    _mark: Mark,
    ring: Box<IoUring>,
    arena: Arc<Arena>,
    /// Metadata being written, by user data.
    metadata: FxHashMap<u64, Arc<AlignedBuffer>>,
    regions: Regions,
    needs_enabling: bool,
    /// Transfers and syncs pushed and not yet reaped.
    pending: usize,
}

impl fmt::Debug for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ring")
            .field("pending", &self.pending)
            .field("regions", &self.regions)
            .finish_non_exhaustive()
    }
}

/// The part of the arena that is registered, from its start on, in whole regions.
#[derive(Debug)]
enum Regions {
    /// The kernel refused the first region or a later one.
    Refused {
        registered: u64,
    },
    Growing {
        registered: u64,
    },
}

impl Ring {
    /// A ring for at most `completions` entries at a time. With `register_buffers`, tries to register
    /// the arena: the beginning at once, the rest by [`Ring::register_more`].
    pub(super) fn new(
        completions: u32,
        files: &[BorrowedFd<'_>],
        arena: Arc<Arena>,
        register_buffers: bool,
    ) -> io::Result<Self> {
        let (ring, needs_enabling) = build(completions)?;
        if !ring.params().is_feature_ext_arg() || !ring.params().is_feature_nodrop() {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "the kernel is older than 5.11",
            ));
        }
        let files: Vec<_> = files.iter().map(AsRawFd::as_raw_fd).collect();
        ring.submitter().register_files(&files)?;
        let regions = Regions::Refused { registered: 0 };
        let mut ring = Self {
            _mark: Mark::new(&ring),
            ring: Box::new(ring),
            arena,
            metadata: FxHashMap::default(),
            regions,
            needs_enabling,
            pending: 0,
        };
        if register_buffers {
            ring.start_registering();
        }
        Ok(ring)
    }

    /// Registers files in place of the files from `first` on, which no operation uses.
    pub(super) fn replace_files(
        &mut self,
        first: usize,
        files: &[BorrowedFd<'_>],
    ) -> io::Result<()> {
        let files: Vec<_> = files.iter().map(AsRawFd::as_raw_fd).collect();
        let first = u32::try_from(first).expect("a ring has few files");
        let replaced = self.ring.submitter().register_files_update(first, &files)?;
        assert_eq!(replaced, files.len(), "all files are replaced or none");
        Ok(())
    }

    fn start_registering(&mut self) {
        let regions = self.arena.size().div_ceil(REGION).min(REGIONS_MAX);
        if self
            .ring
            .submitter()
            .register_buffers_sparse(regions as u32)
            .is_ok()
            && self
                .arena
                .prefault(0, REGION.min(self.arena.size()))
                .is_ok()
        {
            self.regions = Regions::Growing { registered: 0 };
            self.register_region(0);
        }
    }

    /// Registers the next region if the region is populated, so that the kernel need not populate it now.
    /// Returns whether there was such a region.
    pub(super) fn register_more(&mut self) -> bool {
        let Regions::Growing { registered } = self.regions else {
            return false;
        };
        let end = (registered + REGION).min(self.arena.size());
        let due =
            registered < end && end <= self.arena.populated() && registered / REGION < REGIONS_MAX;
        if due {
            self.register_region(registered);
        }
        due
    }

    fn register_region(&mut self, start: u64) {
        let len = REGION.min(self.arena.size() - start);
        let registered = self.arena.pointer(start, len).is_ok_and(|base| {
            let buffer = [libc::iovec {
                iov_base: base.cast(),
                iov_len: len as usize,
            }];
            let index = (start / REGION) as u32;
            // SAFETY: the range belongs to the arena, which this ring holds until it is gone.
            unsafe {
                self.ring
                    .submitter()
                    .register_buffers_update(index, &buffer, None)
            }
            .is_ok()
        });
        self.regions = if registered {
            Regions::Growing {
                registered: start + len,
            }
        } else {
            Regions::Refused { registered: start }
        };
    }

    /// Deregisters all buffers: the kernel would continue to use their old pages where the arena gets new pages.
    fn unregister_regions(&mut self) -> io::Result<()> {
        let registered = self.registered();
        // After a failure in the middle, transfers pin their own pages.
        self.regions = Regions::Refused { registered: 0 };
        for index in 0..registered.div_ceil(REGION) {
            let nothing = [libc::iovec {
                iov_base: std::ptr::null_mut(),
                iov_len: 0,
            }];
            let submitter = self.ring.submitter();
            // SAFETY: no memory is registered.
            unsafe { submitter.register_buffers_update(index as u32, &nothing, None) }?;
        }
        Ok(())
    }

    /// Returns the memory behind a range of the arena to the system.
    pub(super) fn release_memory(&mut self, offset: u64, len: u64) -> io::Result<()> {
        let arena = Arc::clone(&self.arena);
        // If another process has pinned the arena, the buffers stay registered.
        let release = arena.begin_release(offset, len)?;
        // The kernel looks a transfer's buffer up when the transfer is submitted, and fails the transfer without it.
        self.submit()?;
        if !self.ring.submission().is_empty() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        self.unregister_regions()?;
        release.finish()
    }

    /// Bytes of the arena, from its start on, that transfers need not pin.
    pub(super) fn registered(&self) -> u64 {
        match self.regions {
            Regions::Refused { registered } | Regions::Growing { registered } => registered,
        }
    }

    /// Transfers and syncs pushed and not yet reaped.
    #[cfg(feature = "bare-loop")]
    pub(super) fn pending(&self) -> usize {
        self.pending
    }

    /// Whether the submission queue takes one more entry.
    pub(super) fn has_room(&mut self) -> bool {
        !self.ring.submission().is_full()
    }

    /// Queues a transfer whose length fits its buffer, with user data that no other present entry has.
    /// The caller has checked [`Ring::has_room`].
    pub(super) fn push_transfer(&mut self, transfer: RingTransfer, user_data: u64) {
        let RingTransfer {
            reading,
            file,
            file_offset,
            buffer,
            len,
        } = transfer;
        let fd = types::Fixed(file);
        let (base, region) = match buffer {
            Buffer::Arena(offset) => match self.arena.pointer(offset, u64::from(len)) {
                Ok(base) => (base, self.region_of(offset, len)),
                Err(error) => panic!("a transfer was checked before it was queued: {error:?}"),
            },
            Buffer::Metadata(bytes, done) => {
                assert!(!reading, "metadata is read when a directory is opened");
                let part = bytes.rest(done).get(..len as usize);
                let part = part.expect("a transfer's length fits its buffer");
                let base = part.as_ptr().cast_mut();
                self.metadata.insert(user_data, bytes);
                (base, None)
            }
        };
        let entry = match (reading, region) {
            (true, Some(region)) => opcode::ReadFixed::new(fd, base, len, region)
                .offset(file_offset)
                .build(),
            (true, None) => opcode::Read::new(fd, base, len).offset(file_offset).build(),
            (false, Some(region)) => opcode::WriteFixed::new(fd, base, len, region)
                .offset(file_offset)
                .build(),
            (false, None) => opcode::Write::new(fd, base, len)
                .offset(file_offset)
                .build(),
        };
        // SAFETY: the length was checked against the buffer, and arena and metadata are held here
        // until the completion has been reaped.
        unsafe { self.push(entry, user_data) };
    }

    /// The registered buffer that holds the whole range.
    fn region_of(&self, offset: u64, len: u32) -> Option<u16> {
        let end = offset + u64::from(len);
        let whole = end <= self.registered() && offset / REGION == (end - 1) / REGION;
        whole.then_some((offset / REGION) as u16)
    }

    /// Queues an fdatasync.
    pub(super) fn push_sync(&mut self, file: u32, user_data: u64) {
        let entry = opcode::Fsync::new(types::Fixed(file))
            .flags(types::FsyncFlags::DATASYNC)
            .build();
        // SAFETY: no memory is involved.
        unsafe { self.push(entry, user_data) };
    }

    /// Queues an fallocate of one of [`ERASE_MODES`](super::operation::ERASE_MODES).
    pub(super) fn push_erasure(
        &mut self,
        file: u32,
        (file_offset, len): (u64, u32),
        mode: u32,
        user_data: u64,
    ) {
        let entry = opcode::Fallocate::new(types::Fixed(file), u64::from(len))
            .offset(file_offset)
            .mode(mode.cast_signed())
            .build();
        // SAFETY: no memory is involved.
        unsafe { self.push(entry, user_data) };
    }

    /// # Safety
    ///
    /// The memory of the entry stays valid until its completion has been reaped.
    unsafe fn push(&mut self, entry: squeue::Entry, user_data: u64) {
        let entry = entry.user_data(user_data);
        // SAFETY: the caller's promise.
        if unsafe { self.ring.submission().push(&entry) }.is_ok() {
            self.pending += 1;
        }
    }

    /// Makes [`Ring::enter`] return once when the descriptor becomes readable, with a completion of
    /// user data [`WAKE`]. False if there is no room.
    pub(super) fn push_wake(&mut self, fd: BorrowedFd<'_>) -> bool {
        let entry = opcode::PollAdd::new(types::Fd(fd.as_raw_fd()), PollFlags::IN.bits().into());
        let entry = entry.build().user_data(WAKE);
        // SAFETY: no memory is involved, and the kernel holds the file itself.
        unsafe { self.ring.submission().push(&entry) }.is_ok()
    }

    /// Submits the queued entries, and waits until there is a completion or the time is over
    /// (`None`: no limit). An interruption ends the wait, too.
    pub(super) fn enter(&mut self, timeout: Option<Duration>) -> Result<(), Errno> {
        self.enable()?;
        let timespec = timeout.map(|timeout| {
            types::Timespec::new()
                .sec(timeout.as_secs())
                .nsec(timeout.subsec_nanos())
        });
        let args = match &timespec {
            Some(timespec) => types::SubmitArgs::new().timespec(timespec),
            None => types::SubmitArgs::new(),
        };
        pass(self.ring.submitter().submit_with_args(1, &args))
    }

    /// Submits the queued entries, and takes the completions. If there are neither, makes no call. Never waits for zero
    /// seconds, since such a wait sets a timer and takes 28 us on a virtual machine.
    pub(super) fn submit(&mut self) -> Result<(), Errno> {
        self.enable()?;
        let queue = self.ring.submission();
        if queue.is_empty() && !queue.taskrun() {
            return Ok(());
        }
        drop(queue);
        pass(self.ring.submit())
    }

    /// Binds the ring to the thread that uses it first, which need not be the thread that made it.
    fn enable(&mut self) -> Result<(), Errno> {
        if self.needs_enabling {
            pass(self.ring.submitter().register_enable_rings().map(|()| 0))?;
            self.needs_enabling = false;
        }
        Ok(())
    }

    /// Waits for all operations whose memory and files the kernel may still use, for as long as their devices take.
    /// False if the kernel refuses the wait, as to another thread than the ring's.
    pub(super) fn drain(&mut self) -> bool {
        while self.pending > 0 && self.enter(None).is_ok() {
            let before = self.pending;
            while self.reap().is_some() {}
            if self.pending == before {
                // A kernel that is short of something answers at once.
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        self.pending == 0
    }

    /// One completion: its user data, and the bytes moved or the error.
    pub(super) fn reap(&mut self) -> Option<(u64, Result<u32, Errno>)> {
        let entry = self.ring.completion().next()?;
        if entry.user_data() != WAKE {
            self.pending -= 1;
            self.metadata.remove(&entry.user_data());
        }
        let result = u32::try_from(entry.result())
            .map_err(|_| Errno::from_raw_os_error(entry.result().wrapping_neg()));
        Some((entry.user_data(), result))
    }
}

impl Drop for Ring {
    /// If the ring cannot be drained, the ring leaks the memory of its operations: closing a ring does not wait for its
    /// transfers, so the kernel could later write to memory that was freed.
    fn drop(&mut self) {
        if !self.drain() {
            std::mem::forget(Arc::clone(&self.arena));
            std::mem::forget(std::mem::take(&mut self.metadata));
        }
    }
}

/// Makes a ring. Newer kernels (6.1) run completions when the only submitting thread asks for them; older kernels
/// interrupt this thread.
fn build(completions: u32) -> io::Result<(IoUring, bool)> {
    let submissions = SUBMISSION_ENTRIES.min(completions.next_power_of_two());
    let mut builder = IoUring::builder();
    builder
        .setup_cqsize(completions.next_power_of_two().max(2 * submissions))
        .setup_clamp()
        // A forked child would keep the ring, and with it the registered files and buffers.
        .dontfork();
    let plain = builder.clone();
    builder
        .setup_single_issuer()
        .setup_defer_taskrun()
        .setup_taskrun_flag()
        .setup_r_disabled();
    match builder.build(submissions) {
        Err(error) if error.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => {
            Ok((plain.build(submissions)?, false))
        }
        built => Ok((built?, true)),
    }
}

/// Passes on errors, except timeouts, interruptions, and a completion queue that has to be reaped first (EBUSY,
/// EAGAIN), which are normal.
fn pass(entered: io::Result<usize>) -> Result<(), Errno> {
    match entered.map_err(|error| Errno::from_io_error(&error)) {
        Ok(_) | Err(Some(Errno::TIME | Errno::INTR | Errno::BUSY | Errno::AGAIN)) => Ok(()),
        Err(errno) => Err(errno.unwrap_or(Errno::IO)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_are_registered_as_the_arena_is_populated() {
        if let Err(reason) = crate::probe_io_uring() {
            return eprintln!("not run: {reason}");
        }
        let arena = Arc::new(Arena::create(2 * REGION + 4096).unwrap());
        let mut ring = Ring::new(8, &[arena.fd()], Arc::clone(&arena), true).unwrap();
        if ring.registered() == 0 {
            // The machine does not allow registration (RLIMIT_MEMLOCK): transfers pin their own pages.
            assert_eq!(ring.region_of(0, 4096), None);
            return;
        }
        assert_eq!(ring.registered(), REGION);
        assert!(!ring.register_more(), "nothing more is populated");
        crate::arena::prefault_in_background(Arc::clone(&arena))
            .unwrap()
            .join();
        assert!(ring.register_more());
        assert_eq!(ring.registered(), 2 * REGION);
        assert!(ring.register_more());
        assert_eq!(ring.registered(), arena.size());
        assert!(!ring.register_more());
        assert_eq!(ring.region_of(REGION - 4096, 4096), Some(0));
        assert_eq!(
            ring.region_of(REGION - 4096, 8192),
            None,
            "crosses two regions"
        );
        assert_eq!(ring.region_of(2 * REGION, 4096), Some(2));
    }

    /// A read of seven everywhere into this place of an arena. The first file of the ring is the arena itself.
    fn read_of(arena: &Arena, offset: u64) -> RingTransfer {
        arena.write(8192, &[7; 4096]).unwrap();
        RingTransfer {
            reading: true,
            file: 0,
            file_offset: 8192,
            buffer: Buffer::Arena(offset),
            len: 4096,
        }
    }

    #[test]
    fn a_release_unregisters_the_buffers_and_a_refused_release_keeps_them() {
        if let Err(reason) = crate::probe_io_uring() {
            return eprintln!("not run: {reason}");
        }
        let arena = Arc::new(Arena::create(REGION).unwrap());
        let mut ring = Ring::new(8, &[arena.fd()], Arc::clone(&arena), true).unwrap();
        let registered = ring.registered();
        // Holds the lock, like a process that has pinned the arena.
        let pinner = arena.begin_release(0, 4096).unwrap();
        assert!(ring.release_memory(0, 4096).is_err());
        assert_eq!(ring.registered(), registered);
        drop(pinner);
        ring.push_transfer(read_of(&arena, 1 << 20), 0);
        ring.release_memory(0, 4096).unwrap();
        assert_eq!(ring.registered(), 0);
        ring.enter(None).unwrap();
        assert_eq!(
            ring.reap(),
            Some((0, Ok(4096))),
            "queued before the release"
        );
        // A read comes to the new page.
        ring.push_transfer(read_of(&arena, 0), 1);
        ring.enter(None).unwrap();
        assert_eq!(ring.reap(), Some((1, Ok(4096))));
        assert!(arena.read(0, 4096).unwrap() == [7; 4096]);
    }
}
