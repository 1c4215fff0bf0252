//! Bytes of an object that have arrived.

use undercroft_core::arena::{Arena, OutOfBounds};
use undercroft_core::checksum::RunningChecksum;
use undercroft_core::copy::write_once;

/// A run of bytes.
#[derive(Clone, Copy)]
pub(crate) enum Piece<'a> {
    /// Bytes of this process.
    Bytes(&'a [u8]),
    /// A range of memory that another process may write: offset and length, which have been checked.
    Shared(&'a Arena, u64, u64),
}

impl Piece<'_> {
    pub(crate) fn len(&self) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes.len() as u64,
            Self::Shared(_, _, len) => *len,
        }
    }

    /// The first `count` bytes (or all if there are fewer), and the rest.
    pub(crate) fn split_at(self, count: u64) -> (Self, Self) {
        let count = count.min(self.len());
        match self {
            Self::Bytes(bytes) => {
                let (first, rest) = bytes.split_at(count as usize);
                (Self::Bytes(first), Self::Bytes(rest))
            }
            Self::Shared(from, place, len) => (
                Self::Shared(from, place, count),
                Self::Shared(from, place + count, len - count),
            ),
        }
    }

    pub(crate) fn append_to(&self, out: &mut Vec<u8>) {
        match self {
            Self::Bytes(bytes) => out.extend_from_slice(bytes),
            Self::Shared(from, place, len) => {
                let start = out.len();
                out.resize(start + *len as usize, 0);
                (from.copy_to(*place, &mut out[start..])).expect("the range is inside");
            }
        }
    }

    /// Copies the bytes into an arena, and adds them to a checksum. Bytes that have just arrived are in the processor's
    /// caches. Their copy bypasses the caches: it is larger than them, and this processor does not read it again soon.
    /// If another process may change the source, the bytes of the copy are added.
    pub(crate) fn write_to(
        &self,
        arena: &Arena,
        offset: u64,
        sum: &mut RunningChecksum,
    ) -> Result<(), OutOfBounds> {
        match self {
            Self::Bytes(bytes) => {
                sum.update_cached(bytes);
                write_once(arena, offset, bytes)
            }
            Self::Shared(from, place, len) => {
                arena.copy_from(offset, from, *place, *len)?;
                arena.sum_cached(sum, offset, *len)
            }
        }
    }
}
