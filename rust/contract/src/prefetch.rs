//! Hints to the processor's caches: which memory is read soon.

#![cfg_attr(
    target_arch = "x86_64",
    expect(unsafe_code, reason = "a prefetch is an intrinsic")
)]

/// Asks for the cache line of `place`, which is used soon. Unlike a load, a prefetch delays no later instruction.
pub fn prefetch<T>(place: &T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is part of x86_64, and a prefetch of any address has no effect but on the caches.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(
            std::ptr::from_ref(place).cast(),
        );
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = place;
}

/// Asks for the cache line of `byte`, which the caches need not keep.
#[inline]
pub fn prefetch_running(byte: &u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is part of x86_64, and a prefetch of any address has no effect but on the caches.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_NTA }>(
            std::ptr::from_ref(byte).cast(),
        );
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = byte;
}
