//! Requests to an IO engine, its completions, and the trait that all engines implement.

use std::sync::Arc;
use std::time::Duration;

use super::files::DeviceFiles;
use super::waker::Waker;
use crate::arena::Arena;
use crate::cipher::Binding;

/// Alignment of every file offset, arena offset and length in an O_DIRECT transfer, in bytes.
pub const IO_ALIGN: u64 = 4096;

/// The files of a disk directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum FileKind {
    /// Superblock and namespace table.
    Super,
    /// Fixed-size records, one per slot.
    Table,
    /// Payload slots.
    Data,
}

/// One operation. The completion has the same `token`, which has no meaning to the IO engine. Offsets and `len`
/// are multiples of [`IO_ALIGN`]; `payload_len <= len`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IoRequest {
    /// Data file -> arena. Completes with an error of [`IoFault::Corrupt`] unless the checksum of
    /// the first `payload_len` bytes read is `checksum`.
    ReadPayload {
        /// Returned in the completion.
        token: u64,
        /// Index of the device (directory).
        device: u16,
        /// Source, in bytes from the start of the data file.
        file_offset: u64,
        /// Destination, in bytes from the start of the arena.
        arena_offset: u64,
        /// Bytes to transfer.
        len: u32,
        /// Bytes that the checksum covers.
        payload_len: u32,
        /// Expected checksum.
        checksum: u64,
    },
    /// Arena -> data file. Completes with the checksum of the first `payload_len` bytes, or with `checksum` if it is
    /// given.
    WritePayload {
        /// Returned in the completion.
        token: u64,
        /// Index of the device (directory).
        device: u16,
        /// Destination, in bytes from the start of the data file.
        file_offset: u64,
        /// Source, in bytes from the start of the arena.
        arena_offset: u64,
        /// Bytes to transfer.
        len: u32,
        /// Bytes that the checksum covers.
        payload_len: u32,
        /// The checksum, if it need not be computed.
        checksum: Option<u64>,
    },
    /// Like [`IoRequest::ReadPayload`] or [`IoRequest::WritePayload`], for a payload that is encrypted in the data
    /// file.
    Sealed(Box<SealedTransfer>),
    /// Makes bytes of the data file read as zeros.
    Erase {
        /// Returned in the completion.
        token: u64,
        /// Index of the device (directory).
        device: u16,
        /// The first byte.
        file_offset: u64,
        /// How many bytes.
        len: u32,
        /// Whether their space is returned to the filesystem. If not, the file keeps the space where it can.
        frees: bool,
    },
    /// fdatasync: completes when all writes and erasures of the file that had ended are durable.
    Sync {
        /// Returned in the completion.
        token: u64,
        /// Index of the device (directory).
        device: u16,
        /// The file.
        file: FileKind,
    },
    /// Metadata -> table or super file; `bytes` is a multiple of [`IO_ALIGN`] long. With `sync`,
    /// completes only after an fdatasync that followed the write.
    WriteMeta {
        /// Returned in the completion.
        token: u64,
        /// Index of the device (directory).
        device: u16,
        /// The file, `Super` or `Table`.
        file: FileKind,
        /// Destination, in bytes from the start of the file.
        file_offset: u64,
        /// The bytes to write.
        bytes: Box<[u8]>,
        /// Whether to wait until the write is durable.
        sync: bool,
    },
}

/// A transfer of a payload that is plain in the arena, and encrypted with its seal in the data file. Both directions
/// complete with the checksum of the plain bytes. A read completes with [`IoFault::Corrupt`] if the bytes in the file
/// differ from the written bytes, and with [`IoFault::Cipher`] if they are the same and cannot be decrypted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SealedTransfer {
    /// Returned in the completion.
    pub token: u64,
    /// Whether the transfer is from the file to the arena.
    pub reads: bool,
    /// Index of the device (directory).
    pub device: u16,
    /// Where the payload lies in the data file, in bytes from the start of the file.
    pub file_offset: u64,
    /// Bytes in the file: at least the bytes of payload and seal.
    pub len: u32,
    /// Where the payload lies in the arena, in bytes from the start of the arena.
    pub arena_offset: u64,
    /// Bytes of the payload.
    pub payload_len: u32,
    /// The payload, and its place on disk.
    pub binding: Binding,
}

/// A payload in the arena whose checksum is to be computed. The completion has the same `token`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChecksumRequest {
    /// Returned in the completion.
    pub token: u64,
    /// Where the payload begins, in bytes from the start of the arena.
    pub arena_offset: u64,
    /// Bytes of the payload.
    pub payload_len: u32,
}

impl IoRequest {
    /// The token of any operation.
    pub fn token(&self) -> u64 {
        match self {
            Self::ReadPayload { token, .. }
            | Self::WritePayload { token, .. }
            | Self::Erase { token, .. }
            | Self::Sync { token, .. }
            | Self::WriteMeta { token, .. } => *token,
            Self::Sealed(of) => of.token,
        }
    }

    /// Index of the device.
    pub fn device(&self) -> u16 {
        match self {
            Self::ReadPayload { device, .. }
            | Self::WritePayload { device, .. }
            | Self::Erase { device, .. }
            | Self::Sync { device, .. }
            | Self::WriteMeta { device, .. } => *device,
            Self::Sealed(of) => of.device,
        }
    }

    /// Whether the operation is a read: reads start before writes.
    pub fn is_read(&self) -> bool {
        match self {
            Self::ReadPayload { .. } => true,
            Self::Sealed(of) => of.reads,
            _ => false,
        }
    }
}

/// Why an operation failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoFault {
    /// The bytes read do not match their checksum.
    Corrupt,
    /// The bytes read are whole, but no key decrypts them as the requested payload.
    Cipher,
    /// The file ended before the transfer was complete.
    Truncated,
    /// The operating system's error number.
    Os(i32),
    /// The IO engine was shut down before the operation was started.
    Stopped,
}

impl std::fmt::Display for IoFault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Corrupt => f.write_str("checksum mismatch"),
            Self::Cipher => f.write_str("no key of key_file decrypts the block"),
            Self::Truncated => f.write_str("the file ends too early"),
            Self::Os(errno) => write!(f, "{}", std::io::Error::from_raw_os_error(*errno)),
            Self::Stopped => f.write_str("the IO engine was stopped"),
        }
    }
}

/// The end of one operation: exactly one for each request submitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoCompletion {
    /// The request's token.
    pub token: u64,
    /// The payload checksum (0 for `WriteMeta`, `Erase` and `Sync`), or why it failed.
    pub result: Result<u64, IoFault>,
}

/// Carries out operations. Owned by the IO thread alone: another thread may make the IO engine, but the thread that
/// first submits or waits has to make all further calls, and drop it.
///
/// Short transfers are resubmitted, EINTR and EAGAIN are retried; the caller sees neither.
/// Buffers: the arena outlives the engine (it holds an `Arc` of the mapping); metadata is owned by
/// the operation until its completion.
pub trait IoEngine: Send + std::fmt::Debug {
    /// The arena of the transfers.
    fn arena(&self) -> &Arc<Arena>;
    /// `"io_uring"`, `"thread_pool"`, ...; shown to the operator.
    fn name(&self) -> &'static str;
    /// How many operations each device may have in flight.
    fn depth(&self) -> usize;
    /// Operations submitted and not yet completed, of all devices.
    fn in_flight(&self) -> usize;
    /// How many operations of a device may be submitted now. Operations that the device has ended
    /// and that are still to be verified need not count.
    fn room(&self, device: u16) -> usize;
    /// Starts an operation. The caller does so only while its device has `room()`.
    fn submit(&mut self, request: IoRequest);
    /// Pushes completions to `out`. Blocks until there is at least one, [`Waker::wake`] was called,
    /// or `timeout` has passed (`None`: no limit; zero: without blocking).
    fn wait(&mut self, timeout: Option<Duration>, out: &mut Vec<IoCompletion>);
    /// Returns the memory behind a range of the arena, which no operation uses, to the system.
    ///
    /// # Errors
    /// Like [`Arena::release`].
    fn release_memory(&mut self, offset: u64, len: u64) -> std::io::Result<()>;
    /// A handle by which other threads end a `wait`.
    fn waker(&self) -> Waker;
    /// Sets the files of a device that had [`DeviceFiles::absent`], and so no operations.
    ///
    /// # Errors
    /// If the files cannot be used.
    fn replace_files(&mut self, _device: u16, _files: DeviceFiles) -> std::io::Result<()> {
        Err(std::io::ErrorKind::Unsupported.into())
    }
}

/// How many operations may be started now on each device.
#[derive(Clone, Copy, Debug)]
pub enum IoRoom<'a> {
    /// The same number on every device.
    Same(usize),
    /// A number by the index of the device; 0 for further devices.
    Each(&'a [usize]),
}

impl IoRoom<'_> {
    pub(crate) fn of(self, device: usize) -> usize {
        match self {
            Self::Same(room) => room,
            Self::Each(rooms) => rooms.get(device).copied().unwrap_or(0),
        }
    }
}

impl From<usize> for IoRoom<'_> {
    fn from(room: usize) -> Self {
        Self::Same(room)
    }
}

impl<'a> From<&'a [usize]> for IoRoom<'a> {
    fn from(rooms: &'a [usize]) -> Self {
        Self::Each(rooms)
    }
}

/// The [`IoEngine::depth`] with which a device has up to `device_depth` reads, or as many writes, at a time. The same
/// number of further writes is ready to follow at once. A quarter is added for reads, since a device may delay writes
/// for seconds and still read.
pub(super) fn engine_depth(device_depth: usize) -> usize {
    2 * device_depth + device_depth.div_ceil(4)
}

/// How many reads, or how many writes, a device has at a time if its engine has this [`IoEngine::depth`].
pub(crate) fn device_depth(engine_depth: usize) -> usize {
    (engine_depth * 4 / 9).max(1)
}

/// How long dropping an engine waits for operations that the device has not answered. After that it
/// abandons them, and leaks the memory that the kernel may still write to.
pub(super) const DRAIN_LIMIT: Duration = Duration::from_secs(10);

/// Longer transfers go to the ring in pieces of this size in bytes.
pub(super) const SPLIT: u32 = 512 << 10;
