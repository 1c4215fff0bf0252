//! The common part of both IO engines: checks and preparation of requests, and the next action after
//! each system call.

use std::sync::Arc;

use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use undercroft_contract::checksum::RunningChecksum;
use undercroft_contract::cipher::{Binding, SEAL_BYTES};
use undercroft_contract::io::{FileKind, IO_ALIGN, IoFault, IoRequest, SealedTransfer};

use super::fault_hook::{Call, CallKind, Verdict};
use crate::arena::Arena;

/// The flags of fallocate for an erasure, in the order of the attempts. Both keep the file's size. The first also keeps
/// the file's space, but some filesystems lack this mode.
pub(super) const ERASE_MODES: [u32; 2] = [
    FallocateFlags::ZERO_RANGE
        .union(FallocateFlags::KEEP_SIZE)
        .bits(),
    FallocateFlags::PUNCH_HOLE
        .union(FallocateFlags::KEEP_SIZE)
        .bits(),
];

const UNIT: u32 = IO_ALIGN as u32;

/// How often an interrupted call (EINTR, EAGAIN) is repeated in a row.
const RETRIES_MAX: u32 = 128;

/// How often a call that moved less than a unit is repeated in a row, interrupted calls included.
const STALLS_MAX: u32 = 32;

/// A request all of whose fields have been checked.
#[derive(Debug)]
pub(super) struct IoOperation {
    pub(super) token: u64,
    pub(super) device: u16,
    pub(super) file: FileKind,
    pub(super) file_offset: u64,
    pub(super) len: u32,
    pub(super) body: Body,
}

#[derive(Debug)]
pub(super) enum Body {
    Read {
        arena_offset: u64,
        payload_len: u32,
        checksum: u64,
    },
    Write {
        arena_offset: u64,
        payload_len: u32,
        checksum: Option<u64>,
    },
    Meta {
        buffer: Arc<AlignedBuffer>,
        sync: bool,
    },
    Sealed {
        reads: bool,
        arena_offset: u64,
        payload_len: u32,
        binding: Binding,
    },
    Erase {
        frees: bool,
    },
    Sync,
}

impl IoOperation {
    /// Checks a request: EINVAL for an impossible device, range or alignment.
    pub(super) fn new(request: IoRequest, arena: &Arena, devices: usize) -> Result<Self, IoFault> {
        let operation = Self::unchecked(request);
        if operation.is_valid(arena, devices) {
            Ok(operation)
        } else {
            Err(IoFault::Os(Errno::INVAL.raw_os_error()))
        }
    }

    fn unchecked(request: IoRequest) -> Self {
        let (token, device, file, file_offset, len, body) = match request {
            IoRequest::ReadPayload {
                token,
                device,
                file_offset,
                arena_offset,
                len,
                payload_len,
                checksum,
            } => {
                let body = Body::Read {
                    arena_offset,
                    payload_len,
                    checksum,
                };
                (token, device, FileKind::Data, file_offset, len, body)
            }
            IoRequest::WritePayload {
                token,
                device,
                file_offset,
                arena_offset,
                len,
                payload_len,
                checksum,
            } => {
                let body = Body::Write {
                    arena_offset,
                    payload_len,
                    checksum,
                };
                (token, device, FileKind::Data, file_offset, len, body)
            }
            IoRequest::Erase {
                token,
                device,
                file_offset,
                len,
                frees,
            } => {
                let body = Body::Erase { frees };
                (token, device, FileKind::Data, file_offset, len, body)
            }
            IoRequest::WriteMeta {
                token,
                device,
                file,
                file_offset,
                bytes,
                sync,
            } => {
                let len = u32::try_from(bytes.len()).expect("metadata is written in small blocks");
                let buffer = Arc::new(AlignedBuffer::new(&bytes));
                let body = Body::Meta { buffer, sync };
                (token, device, file, file_offset, len, body)
            }
            IoRequest::Sync {
                token,
                device,
                file,
            } => (token, device, file, 0, 0, Body::Sync),
            IoRequest::Sealed(of) => return Self::sealed(*of),
        };
        Self {
            token,
            device,
            file,
            file_offset,
            len,
            body,
        }
    }

    fn sealed(of: SealedTransfer) -> Self {
        Self {
            token: of.token,
            device: of.device,
            file: FileKind::Data,
            file_offset: of.file_offset,
            len: of.len,
            body: Body::Sealed {
                reads: of.reads,
                arena_offset: of.arena_offset,
                payload_len: of.payload_len,
                binding: of.binding,
            },
        }
    }

    /// Like [`IoOperation::new`], and EINVAL for an encrypted payload.
    pub(super) fn plain(
        request: IoRequest,
        arena: &Arena,
        devices: usize,
    ) -> Result<Self, IoFault> {
        match request {
            IoRequest::Sealed(_) => Err(IoFault::Os(Errno::INVAL.raw_os_error())),
            request => Self::new(request, arena, devices),
        }
    }

    fn is_valid(&self, arena: &Arena, devices: usize) -> bool {
        let body = match &self.body {
            Body::Read {
                arena_offset,
                payload_len,
                ..
            }
            | Body::Write {
                arena_offset,
                payload_len,
                ..
            } => {
                arena_offset.is_multiple_of(IO_ALIGN)
                    && *payload_len <= self.len
                    && arena.check(*arena_offset, u64::from(self.len)).is_ok()
            }
            Body::Sealed {
                arena_offset,
                payload_len,
                ..
            } => {
                u64::from(*payload_len) + SEAL_BYTES as u64 <= u64::from(self.len)
                    && arena.check(*arena_offset, u64::from(*payload_len)).is_ok()
            }
            Body::Meta { .. } => self.file != FileKind::Data,
            Body::Erase { .. } => self.file == FileKind::Data,
            Body::Sync => true,
        };
        body && usize::from(self.device) < devices
            && (self.len > 0) != matches!(self.body, Body::Sync)
            && u64::from(self.len).is_multiple_of(IO_ALIGN)
            && self.file_offset.is_multiple_of(IO_ALIGN)
            && self
                .file_offset
                .checked_add(u64::from(self.len))
                .is_some_and(|end| i64::try_from(end).is_ok())
    }

    pub(super) fn is_read(&self) -> bool {
        matches!(
            self.body,
            Body::Read { .. } | Body::Sealed { reads: true, .. }
        )
    }

    pub(super) fn is_payload_write(&self) -> bool {
        matches!(self.body, Body::Write { .. })
    }

    pub(super) fn is_erasure(&self) -> bool {
        matches!(self.body, Body::Erase { .. })
    }

    /// The call that moves `len` bytes from an offset of the file on; for an erasure or a sync, the whole call.
    pub(super) fn call(&self, file_offset: u64, len: u32) -> Call {
        let kind = match self.body {
            Body::Erase { .. } => CallKind::Erase,
            Body::Sync => CallKind::Sync,
            _ if self.is_read() => CallKind::Read,
            _ => CallKind::Write,
        };
        Call {
            kind,
            device: self.device,
            file: self.file,
            file_offset,
            len,
        }
    }

    /// The call of the sync that follows the transfer, or is the operation.
    pub(super) fn sync_call(&self) -> Call {
        Call {
            kind: CallKind::Sync,
            ..self.call(self.file_offset, 0)
        }
    }

    /// Whether bytes are moved.
    pub(super) fn is_transfer(&self) -> bool {
        !matches!(self.body, Body::Erase { .. } | Body::Sync)
    }

    /// How many of [`ERASE_MODES`] an erasure leaves out.
    pub(super) fn erase_modes_skipped(&self) -> u16 {
        u16::from(matches!(self.body, Body::Erase { frees: true }))
    }

    /// Whether an fdatasync follows the transfer.
    pub(super) fn syncs(&self) -> bool {
        matches!(self.body, Body::Meta { sync: true, .. })
    }

    /// The checksum that the request of a write gives.
    pub(super) fn given_checksum(&self) -> Option<u64> {
        match self.body {
            Body::Write { checksum, .. } => checksum,
            _ => None,
        }
    }

    /// The checksum of the source of a write, given or computed; 0 for other operations.
    pub(super) fn source_checksum(&self, arena: &Arena) -> u64 {
        if let Some(given) = self.given_checksum() {
            return given;
        }
        let mut summing = Summing::default();
        while !self.sum(arena, &mut summing, u32::MAX) {}
        summing.finish()
    }

    /// Adds the next bytes of the source of a write to its checksum, at most `most`. Returns whether the checksum is
    /// complete.
    pub(super) fn sum(&self, arena: &Arena, summing: &mut Summing, most: u32) -> bool {
        let Body::Write {
            arena_offset,
            payload_len,
            ..
        } = self.body
        else {
            return true;
        };
        let len = most.min(payload_len - summing.done);
        let from = arena_offset + u64::from(summing.done);
        // The range was checked when the request came.
        let added = arena.sum_running(&mut summing.sum, from, u64::from(len));
        summing.done += len;
        added.is_err() || summing.done == payload_len
    }

    /// Carries out a [`Verdict::Flip`] on a piece that was read to `done` bytes behind the start.
    pub(super) fn flip(&self, arena: &Arena, done: u32, verdict: Verdict) {
        let (Body::Read { arena_offset, .. }, Verdict::Flip { at, mask }) = (&self.body, verdict)
        else {
            return;
        };
        let at = arena_offset + u64::from(done) + u64::from(at);
        if let Ok([byte]) = arena.read(at, 1).as_deref() {
            // The range was read from a moment ago.
            let _ = arena.write(at, &[byte ^ mask]);
        }
    }

    /// The result after the whole transfer; `written` is the checksum of the source.
    pub(super) fn verify(&self, arena: &Arena, written: u64) -> Result<u64, IoFault> {
        match self.body {
            Body::Read {
                arena_offset,
                payload_len,
                checksum,
            } => match arena.checksum(arena_offset, u64::from(payload_len)) {
                Ok(found) if found == checksum => Ok(found),
                _ => Err(IoFault::Corrupt),
            },
            _ => Ok(written),
        }
    }
}

/// The progress of the checksum of a source.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Summing {
    done: u32,
    sum: RunningChecksum,
}

impl Summing {
    /// The checksum.
    pub(super) fn finish(self) -> u64 {
        self.sum.finish()
    }
}

/// The progress of the transfer of one contiguous piece.
#[derive(Clone, Copy, Debug)]
pub(super) struct Progress {
    len: u32,
    done: u32,
    retries: u32,
}

/// The next action after a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Call again, for the rest.
    Again,
    Done,
    Failed(IoFault),
}

impl Progress {
    pub(super) fn new(len: u32) -> Self {
        Self {
            len,
            done: 0,
            retries: 0,
        }
    }

    pub(super) fn done(&self) -> u32 {
        self.done
    }

    pub(super) fn remaining(&self) -> u32 {
        self.len - self.done
    }

    /// Takes the outcome of a call for `remaining()` bytes.
    ///
    /// A short transfer continues behind its last whole unit of [`IO_ALIGN`], as O_DIRECT requires:
    /// the bytes after that unit are transferred again.
    pub(super) fn advance(&mut self, outcome: Result<u32, Errno>, reading: bool) -> Next {
        let limit = match outcome {
            Ok(moved) if moved >= self.remaining() => {
                self.done = self.len;
                return Next::Done;
            }
            Ok(0) if reading => return Next::Failed(IoFault::Truncated),
            Ok(moved) if moved >= UNIT => {
                self.done += moved - moved % UNIT;
                self.retries = 0;
                return Next::Again;
            }
            Ok(_) => STALLS_MAX,
            Err(Errno::INTR | Errno::AGAIN) => RETRIES_MAX,
            Err(_) => 0,
        };
        self.retries += 1;
        match outcome {
            _ if self.retries <= limit => Next::Again,
            Err(errno) => Next::Failed(IoFault::Os(errno.raw_os_error())),
            // The file ends inside a unit, or takes no byte.
            Ok(_) if reading => Next::Failed(IoFault::Truncated),
            Ok(_) => Next::Failed(IoFault::Os(Errno::IO.raw_os_error())),
        }
    }
}

/// Bytes at an address that O_DIRECT accepts. Never grows, so the address stays.
#[derive(Debug)]
pub(super) struct AlignedBuffer {
    memory: Vec<u8>,
    start: usize,
}

impl AlignedBuffer {
    fn new(bytes: &[u8]) -> Self {
        let mut buffer = Self::zeros(bytes.len());
        buffer.bytes_mut().copy_from_slice(bytes);
        buffer
    }

    /// A buffer of `len` zeros.
    pub(super) fn zeros(len: usize) -> Self {
        let align = IO_ALIGN as usize;
        let mut memory = vec![0; len + align];
        let start = memory.as_ptr().addr().next_multiple_of(align) - memory.as_ptr().addr();
        memory.truncate(start + len);
        Self { memory, start }
    }

    /// All of the bytes.
    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..]
    }

    /// The bytes from `done` on.
    pub(super) fn rest(&self, done: u32) -> &[u8] {
        &self.memory[self.start + done as usize..]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_transfer_continues_behind_its_last_whole_unit() {
        let mut progress = Progress::new(4 * UNIT);
        assert_eq!(progress.advance(Ok(UNIT), true), Next::Again);
        assert_eq!(progress.remaining(), 3 * UNIT);
        assert_eq!(progress.advance(Ok(UNIT + 100), true), Next::Again);
        assert_eq!(
            progress.remaining(),
            2 * UNIT,
            "the 100 bytes are read again"
        );
        assert_eq!(progress.advance(Ok(2 * UNIT), true), Next::Done);
        assert_eq!(progress.done(), 4 * UNIT);
    }

    #[test]
    fn interruptions_are_retried_but_not_for_ever() {
        let mut progress = Progress::new(2 * UNIT);
        for _ in 0..RETRIES_MAX {
            assert_eq!(progress.advance(Err(Errno::INTR), false), Next::Again);
        }
        assert_eq!(progress.advance(Ok(UNIT), false), Next::Again);
        for _ in 0..RETRIES_MAX {
            assert_eq!(progress.advance(Err(Errno::AGAIN), false), Next::Again);
        }
        let failed = Next::Failed(IoFault::Os(Errno::AGAIN.raw_os_error()));
        assert_eq!(progress.advance(Err(Errno::AGAIN), false), failed);
    }

    #[test]
    fn a_file_that_ends_is_truncated_also_inside_a_unit() {
        assert_eq!(
            Progress::new(UNIT).advance(Ok(0), true),
            Next::Failed(IoFault::Truncated)
        );
        let mut progress = Progress::new(UNIT);
        let end = (0..=STALLS_MAX)
            .map(|_| progress.advance(Ok(100), true))
            .last();
        assert_eq!(end, Some(Next::Failed(IoFault::Truncated)));
    }

    #[test]
    fn a_write_that_takes_nothing_fails() {
        let mut progress = Progress::new(UNIT);
        let end = (0..=STALLS_MAX)
            .map(|_| progress.advance(Ok(0), false))
            .last();
        assert_eq!(
            end,
            Some(Next::Failed(IoFault::Os(Errno::IO.raw_os_error())))
        );
    }

    #[test]
    fn other_errors_are_final() {
        let failed = Next::Failed(IoFault::Os(Errno::NOSPC.raw_os_error()));
        assert_eq!(
            Progress::new(UNIT).advance(Err(Errno::NOSPC), false),
            failed
        );
    }

    #[test]
    fn metadata_is_copied_to_an_aligned_place() {
        let bytes: Vec<u8> = (0..2 * UNIT).map(|i| (i / 7) as u8).collect();
        let buffer = AlignedBuffer::new(&bytes);
        assert!(
            buffer
                .rest(0)
                .as_ptr()
                .addr()
                .is_multiple_of(IO_ALIGN as usize)
        );
        assert_eq!(buffer.rest(0), bytes);
        assert_eq!(buffer.rest(UNIT), &bytes[UNIT as usize..]);
    }
}
