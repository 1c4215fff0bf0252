//! A memory copy that bypasses the caches.
//!
//! A job is far larger than any cache, and its bytes are not read again soon. With stores past the
//! caches, no line is read before it is overwritten, and the cache lines of the model's computation
//! stay in place.

#![expect(unsafe_code, reason = "copies between raw addresses")]

use super::Routine;
use crate::arena::{Arena, OutOfBounds};

/// Below this many bytes an ordinary copy is as fast.
#[cfg(any(target_arch = "x86_64", test))]
const STREAM_MIN: usize = 2048;

/// Copies `len` bytes as `routine` says. The stores become visible to other threads in order only after [`fence`].
///
/// # Safety
///
/// `from` must be valid for reads and `to` for writes of `len` bytes; they must not overlap.
pub(super) unsafe fn copy(routine: Routine, from: *const u8, to: *mut u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    if let Some(ahead) = routine.ahead()
        && len >= STREAM_MIN
    {
        // SAFETY: the caller's contract.
        unsafe { x86::copy(from, to, len, ahead) };
        return;
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = routine;
    // SAFETY: the caller's contract.
    unsafe { std::ptr::copy_nonoverlapping(from, to, len) };
}

/// Copies `from` to `to`, which is as long, and orders the copy before this thread's next stores.
pub(super) fn copy_slice(routine: Routine, from: &[u8], to: &mut [u8]) {
    assert_eq!(from.len(), to.len(), "a copy has the length of its source");
    // SAFETY: both are valid for the length, and two slices, one of them mutable, do not overlap.
    unsafe { copy(routine, from.as_ptr(), to.as_mut_ptr(), from.len()) };
    fence();
}

/// Copies `bytes`, which this processor's caches have and which it does not read again soon, into an arena, by the
/// fastest routine of this machine. The first call in a process measures the routines ([`Routine::fastest_of_cached`]).
///
/// # Errors
/// If the arena ends before the copy would.
pub fn write_once(arena: &Arena, offset: u64, bytes: &[u8]) -> Result<(), OutOfBounds> {
    let start = arena.pointer(offset, bytes.len() as u64)?;
    // SAFETY: both are valid for the length, and no Rust reference into the arena exists that `bytes` could be.
    unsafe {
        copy(
            Routine::fastest_of_cached(),
            bytes.as_ptr(),
            start,
            bytes.len(),
        )
    };
    fence();
    Ok(())
}

/// Orders all copies of this thread before its next stores.
pub(super) fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 processor has SSE.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __m128i, _MM_HINT_NTA, _mm_loadu_si128, _mm_prefetch, _mm_stream_si128,
    };

    /// A cache line, in bytes.
    const LINE: usize = 64;
    /// # Safety
    ///
    /// As for [`super::copy`]; `len` must be at least [`LINE`]. The source is asked for `ahead` bytes ahead, unless 0.
    pub(in crate::copy) unsafe fn copy(from: *const u8, to: *mut u8, len: usize, ahead: usize) {
        let head = to.align_offset(LINE);
        let lines = (len - head) / LINE;
        let tail = head + lines * LINE;
        // SAFETY: `head` is at most `LINE - 1` and so lies inside both ranges.
        unsafe { std::ptr::copy_nonoverlapping(from, to, head) };
        for at in (head..tail).step_by(LINE) {
            if ahead > 0 {
                let next = from.wrapping_add(at + ahead).cast();
                // SAFETY: a prefetch may name any address.
                unsafe { _mm_prefetch::<_MM_HINT_NTA>(next) };
            }
            // SAFETY: `at + LINE <= tail <= len`, and `to + at` is aligned to a line.
            unsafe { line(from.wrapping_add(at), to.wrapping_add(at)) };
        }
        let (from, to) = (from.wrapping_add(tail), to.wrapping_add(tail));
        // SAFETY: the rest of both ranges, from `tail <= len` on.
        unsafe { std::ptr::copy_nonoverlapping(from, to, len - tail) };
    }

    /// # Safety
    ///
    /// `from` must be valid for reads and `to` for writes of a line; `to` must be aligned to it.
    #[inline(always)]
    unsafe fn line(from: *const u8, to: *mut u8) {
        let from: *const __m128i = from.cast();
        let to: *mut __m128i = to.cast();
        for part in 0..LINE / size_of::<__m128i>() {
            // SAFETY: four parts make the line that the caller vouches for.
            let value = unsafe { _mm_loadu_si128(from.wrapping_add(part)) };
            // SAFETY: as above.
            unsafe { _mm_stream_si128(to.wrapping_add(part), value) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_routine_copies_exactly_the_range_at_any_alignment_and_length() {
        Routine::ALL.into_iter().for_each(copies_exactly_the_range);
    }

    #[test]
    fn bytes_are_written_once_where_they_belong_or_not_at_all() {
        let arena = Arena::create(8192).unwrap();
        let bytes: Vec<u8> = (0..5000).map(|i| (i % 251) as u8).collect();
        write_once(&arena, 100, &bytes).unwrap();
        assert_eq!(arena.read(100, 5000).unwrap(), bytes);
        assert_eq!(arena.read(0, 100).unwrap(), [0; 100]);
        assert_eq!(arena.read(5100, 3092).unwrap(), [0; 3092]);
        assert!(write_once(&arena, 3193, &bytes).is_err());
        assert_eq!(arena.read(100, 5000).unwrap(), bytes);
    }

    fn copies_exactly_the_range(routine: Routine) {
        let from: Vec<u8> = (0..STREAM_MIN * 3).map(|i| (i * 31 / 7) as u8).collect();
        for from_skew in [0, 1, 15, 33, 63] {
            for to_skew in [0, 1, 16, 31, 63] {
                for len in [
                    0,
                    1,
                    63,
                    64,
                    STREAM_MIN - 1,
                    STREAM_MIN,
                    STREAM_MIN + 1,
                    STREAM_MIN + 63,
                    STREAM_MIN + 64,
                    STREAM_MIN * 2 + 77,
                ] {
                    let mut to = vec![0xEE_u8; STREAM_MIN * 3];
                    let source = &from[from_skew..from_skew + len];
                    let target = &mut to[to_skew..to_skew + len];
                    copy_slice(routine, source, target);
                    assert_eq!(&to[to_skew..to_skew + len], source);
                    assert!(to[..to_skew].iter().all(|byte| *byte == 0xEE));
                    assert!(to[to_skew + len..].iter().all(|byte| *byte == 0xEE));
                }
            }
        }
    }
}
