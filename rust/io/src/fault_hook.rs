//! The hook below the retry logic, by which tests make system calls fail or move fewer bytes.

use std::fmt::Debug;

use rustix::io::Errno;
use undercroft_contract::io::{FileKind, IO_ALIGN};

/// A system call (or ring entry) about to be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// The kind of the call.
    pub kind: CallKind,
    /// Index of the device.
    pub device: u16,
    /// The device's file.
    pub file: FileKind,
    /// Offset in the file, in bytes.
    pub file_offset: u64,
    /// Length in bytes; 0 for a sync.
    pub len: u32,
}

/// The kind of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CallKind {
    /// File to memory.
    Read,
    /// Memory to file.
    Write,
    /// fdatasync.
    Sync,
    /// fallocate: bytes read as zeros from then on.
    Erase,
}

/// How a call is carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The call is made.
    Pass,
    /// The call moves at most this many bytes.
    Short(u32),
    /// The call is not made, and fails with this error number.
    Fail(i32),
    /// The call is made; then the bits of `mask` are flipped in the byte `at` of the result.
    Flip {
        /// Index of the byte among the bytes read, from 0.
        at: u32,
        /// The bits to flip.
        mask: u8,
    },
}

impl Verdict {
    /// How many of `len` bytes the call asks for. A short call asks for whole units of [`IO_ALIGN`],
    /// since O_DIRECT accepts nothing else.
    pub(super) fn issued(self, len: u32) -> Result<u32, Errno> {
        match self {
            Self::Fail(errno) => Err(Errno::from_raw_os_error(errno)),
            Self::Short(limit) => Ok(limit.max(1).next_multiple_of(IO_ALIGN as u32).min(len)),
            Self::Pass | Self::Flip { .. } => Ok(len),
        }
    }

    /// How many bytes the call says that it moved.
    pub(super) fn reported(self, moved: u32) -> u32 {
        match self {
            Self::Short(limit) => moved.min(limit),
            _ => moved,
        }
    }
}

/// Sees each call before the call is made. The IO engines are generic over the hook, so that [`Direct`] costs
/// production nothing.
pub trait FaultHook: Send + Sync + Debug + 'static {
    /// Returns the verdict on one call. Called from the engine's threads.
    fn on_call(&self, call: &Call) -> Verdict;
}

/// Makes every call unchanged.
#[derive(Clone, Copy, Debug, Default)]
pub struct Direct;

impl FaultHook for Direct {
    fn on_call(&self, _: &Call) -> Verdict {
        Verdict::Pass
    }
}
