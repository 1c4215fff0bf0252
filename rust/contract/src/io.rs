//! Requests to an IO engine, and its completions.

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

impl IoFault {
    /// There is no such device: ENODEV, which has one number on all of Linux's processors.
    pub const NO_DEVICE: Self = Self::Os(19);

    /// Whether the medium takes no bytes, now or ever: it is full, its quota is used up, or it is read-only.
    pub fn is_full_medium(self) -> bool {
        use std::io::ErrorKind::{QuotaExceeded, ReadOnlyFilesystem, StorageFull};
        let Self::Os(errno) = self else { return false };
        let kind = std::io::Error::from_raw_os_error(errno).kind();
        matches!(kind, StorageFull | QuotaExceeded | ReadOnlyFilesystem)
    }
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

/// How many operations may be started now on each device.
#[derive(Clone, Copy, Debug)]
pub enum IoRoom<'a> {
    /// The same number on every device.
    Same(usize),
    /// A number by the index of the device; 0 for further devices.
    Each(&'a [usize]),
}

impl IoRoom<'_> {
    /// How many operations may be started on a device.
    pub fn of(self, device: usize) -> usize {
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

/// The `IoEngine::depth` with which a device has up to `device_depth` reads, or as many writes, at a time. The same
/// number of further writes is ready to follow at once. A quarter is added for reads, since a device may delay writes
/// for seconds and still read.
pub fn engine_depth(device_depth: usize) -> usize {
    2 * device_depth + device_depth.div_ceil(4)
}

/// How many reads, or how many writes, a device has at a time if its engine has this `IoEngine::depth`.
pub fn device_depth(engine_depth: usize) -> usize {
    (engine_depth * 4 / 9).max(1)
}
