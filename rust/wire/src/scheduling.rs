//! How the client's thread is scheduled.
#![expect(unsafe_code, reason = "a call that no safe crate has")]

/// Where cores are few, the scheduler that has just woken this thread goes on first, and this thread runs when it
/// sleeps or on another core: threads of SCHED_BATCH take no core away when they wake (sched(7)).
pub(crate) fn yield_to_who_wakes() {
    // SAFETY: all zeros is a value of this plain struct.
    let none: libc::sched_param = unsafe { std::mem::zeroed() };
    // SAFETY: it concerns the calling thread alone and reads a live struct. If it is refused nothing changes.
    let _ = unsafe { libc::sched_setscheduler(0, libc::SCHED_BATCH, &raw const none) };
}
