//! Old objects that were read and are to be put again: how many, and the memory of their copies.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Most copies at a time: of objects that arrive, are pending, or are being put.
#[cfg(feature = "s3")]
const COPIES_MAX: usize = 64;

/// Most bytes of these copies. A larger object is renewed while there is no other copy.
#[cfg(feature = "s3")]
const BYTES_MAX: u64 = 128 << 20;

/// After a failed renewal nothing is renewed for this time: the credentials may allow only reads.
const PAUSE: Duration = Duration::from_secs(600);

/// The renewals of one pool. A renewal without room is dropped: a later reader renews the object.
#[derive(Debug)]
pub(crate) struct Renewals {
    /// Most bytes a second, 0 for no limit; `None` if nothing is renewed.
    #[cfg(feature = "s3")]
    rate: Option<u64>,
    state: Mutex<RenewalState>,
}

#[derive(Debug, Default)]
struct RenewalState {
    copies: usize,
    bytes: u64,
    /// By the rate, no further object is copied before this time.
    #[cfg(feature = "s3")]
    next: Option<Instant>,
    /// The end of the pause after a failure.
    paused_until: Option<Instant>,
}

impl RenewalState {
    fn is_paused(&self, now: Instant) -> bool {
        self.paused_until.is_some_and(|until| now < until)
    }
}

/// The copy of an object. It uses its share of the memory until it is dropped.
#[derive(Debug)]
pub(crate) struct Copied {
    pub(crate) bytes: Vec<u8>,
    room: u64,
    of: Arc<Renewals>,
}

impl Drop for Copied {
    fn drop(&mut self) {
        let mut state = self.of.lock();
        state.copies -= 1;
        state.bytes -= self.room;
    }
}

impl Renewals {
    #[cfg_attr(not(feature = "s3"), expect(unused_variables))]
    pub(crate) fn new(rate: Option<u64>) -> Arc<Self> {
        Arc::new(Self {
            #[cfg(feature = "s3")]
            rate,
            state: Mutex::default(),
        })
    }

    /// An empty copy with room for the bytes of an object. `None` if the object is not to be renewed.
    #[cfg(feature = "s3")]
    pub(crate) fn copy(self: &Arc<Self>, room: u64, now: Instant) -> Option<Copied> {
        let rate = self.rate?;
        let mut state = self.lock();
        let is_full = state.copies >= COPIES_MAX || state.bytes + room > BYTES_MAX;
        let is_early = state.next.is_some_and(|next| now < next);
        if state.is_paused(now) || is_early || is_full && state.copies > 0 {
            return None;
        }
        state.copies += 1;
        state.bytes += room;
        let time = room
            .checked_mul(1_000_000)
            .and_then(|all| all.checked_div(rate));
        state.next = time.map(|micros| now + Duration::from_micros(micros));
        drop(state);
        Some(Copied {
            bytes: Vec::with_capacity(room as usize),
            room,
            of: Arc::clone(self),
        })
    }

    /// Whether a renewal has failed lately.
    pub(crate) fn is_paused(&self, now: Instant) -> bool {
        self.lock().is_paused(now)
    }

    /// Renews nothing for a while: a renewal has failed.
    pub(crate) fn pause(&self, now: Instant) {
        self.lock().paused_until = Some(now + PAUSE);
    }

    fn lock(&self) -> MutexGuard<'_, RenewalState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(all(test, feature = "s3"))]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn copies_are_limited_by_number_and_bytes_and_give_their_room_back() {
        let renewals = Renewals::new(Some(0));
        let now = Instant::now();
        let copy = |bytes| renewals.copy(bytes, now);
        let small: Vec<_> = (0..64).map(|_| copy(1).unwrap()).collect();
        assert!(copy(1).is_none());
        drop(small);
        let large: Vec<_> = (0..8).map(|_| copy(16 * MIB).unwrap()).collect();
        assert!(copy(1).is_none());
        drop(large);
        let larger = copy(200 * MIB).unwrap();
        assert!(copy(1).is_none(), "the largest is alone");
        drop(larger);
        let _small = copy(1).unwrap();
        assert!(copy(200 * MIB).is_none());
    }

    #[test]
    fn copies_keep_the_rate() {
        let renewals = Renewals::new(Some(16 * MIB));
        let now = Instant::now();
        let _first = renewals.copy(8 * MIB, now).unwrap();
        let copy = |millis| renewals.copy(8 * MIB, now + Duration::from_millis(millis));
        assert!(copy(499).is_none());
        let _second = copy(500).unwrap();
        assert!(copy(501).is_none());
    }

    #[test]
    fn nothing_is_copied_without_a_rate_and_after_a_failure() {
        let now = Instant::now();
        assert!(Renewals::new(None).copy(1, now).is_none());
        let renewals = Renewals::new(Some(0));
        renewals.pause(now);
        let end = now + PAUSE;
        assert!(renewals.is_paused(now) && renewals.copy(1, now).is_none());
        assert!(!renewals.is_paused(end) && renewals.copy(1, end).is_some());
    }
}
