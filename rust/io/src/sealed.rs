//! Payloads that are encrypted in the data file: they are encrypted after the copy out of the arena, and decrypted
//! before the copy into the arena. So the arena holds only plain bytes that were checked.

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use rustix::io::Errno;
use undercroft_contract::checksum::checksum;
use undercroft_contract::cipher::{PayloadCipher, SEAL_BYTES, close_seal, is_intact};
use undercroft_contract::io::IoFault;

use super::fault_hook::Verdict;
use super::operation::{Body, IoOperation};
use crate::arena::Arena;
use crate::secret::{SecretBytes, clear};

/// Largest buffer that a thread keeps between two payloads, in bytes.
const KEPT_BYTES: usize = 8 << 20;

/// A thread's buffer for the bytes of one payload as they are in the data file. It begins at a page, as O_DIRECT needs it.
#[derive(Debug)]
pub(super) struct SealedBuffer {
    /// `None` before the first payload.
    bytes: Option<SecretBytes>,
}

impl SealedBuffer {
    pub(super) fn new() -> Self {
        Self { bytes: None }
    }

    /// `len` bytes of the buffer.
    fn of_len(&mut self, len: u32) -> Result<&mut [u8], IoFault> {
        let len = len as usize;
        let kept = self.bytes.take().filter(|kept| kept.bytes().len() >= len);
        let bytes = match kept {
            Some(kept) => kept,
            None => {
                SecretBytes::zeros(len).map_err(|_| IoFault::Os(Errno::NOMEM.raw_os_error()))?
            }
        };
        Ok(&mut self.bytes.insert(bytes).bytes_mut()[..len])
    }

    /// Frees the memory of an unusually large payload.
    fn shrink(&mut self) {
        self.bytes = self
            .bytes
            .take()
            .filter(|kept| kept.bytes().len() <= KEPT_BYTES);
    }
}

/// Carries out the transfer of an encrypted payload: `transfer` reads or writes all bytes at the operation's place in
/// the file. Returns the checksum of the plain payload.
pub(super) fn carry_out(
    operation: &IoOperation,
    (arena, cipher): (&Arena, &Arc<dyn PayloadCipher>),
    buffer: &mut SealedBuffer,
    transfer: impl FnOnce(&mut [u8]) -> Result<(), IoFault>,
) -> Result<u64, IoFault> {
    let Body::Sealed {
        reads,
        arena_offset,
        payload_len,
        ref binding,
    } = operation.body
    else {
        return Err(IoFault::Os(Errno::INVAL.raw_os_error()));
    };
    let bytes = buffer.of_len(operation.len)?;
    let payload = 0..payload_len as usize;
    let sealed = 0..payload.end + SEAL_BYTES;
    // The range was checked when the request came.
    let outside = |_| IoFault::Os(Errno::INVAL.raw_os_error());
    let result = if reads {
        transfer(bytes)?;
        if !is_intact(&bytes[sealed.clone()]) {
            return Err(IoFault::Corrupt);
        }
        if !cipher.decrypt(binding, &mut bytes[sealed]) {
            return Err(IoFault::Cipher);
        }
        let plain = &mut bytes[payload];
        let copied = arena.write(arena_offset, plain).map_err(outside);
        let sum = checksum(plain);
        clear(plain);
        copied.map(|()| sum)
    } else {
        let plain = &mut bytes[payload];
        arena.copy_to(arena_offset, plain).map_err(outside)?;
        // Sums the copy, since the arena may change meanwhile.
        let sum = checksum(plain);
        if !cipher.encrypt(binding, &mut bytes[sealed.clone()]) {
            clear(bytes);
            return Err(IoFault::Cipher);
        }
        close_seal(&mut bytes[sealed.clone()]);
        bytes[sealed.end..].fill(0);
        transfer(bytes).map(|()| sum)
    };
    buffer.shrink();
    result
}

/// Makes one call that moves `range` of the bytes, or a part of them. Returns the number of bytes moved.
pub(super) fn call(
    file: BorrowedFd<'_>,
    (reads, at): (bool, u64),
    bytes: &mut [u8],
    range: Range<usize>,
    verdict: Verdict,
) -> Result<u32, Errno> {
    let part = &mut bytes[range];
    let moved = if reads {
        let moved = rustix::io::pread(file, &mut *part, at)?;
        if let Verdict::Flip { at, mask } = verdict {
            part[at as usize] ^= mask;
        }
        moved
    } else {
        rustix::io::pwrite(file, part, at)?
    };
    // At most the length of the range, which fits a slot.
    Ok(verdict.reported(moved as u32))
}
