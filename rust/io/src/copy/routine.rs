//! The choice of the routine that copies: the fastest by a measurement on this processor.
//!
//! With stores past the caches, no line is read before it is overwritten, which is worth a fifth on some
//! processors. On other processors, one core stores past its caches more slowly than libc's memcpy copies. The best
//! distance of prefetches differs, too: on some processors, prefetches make such a copy slower than memcpy. If the
//! caches have the source, the order of the routines is another one.

use std::sync::OnceLock;
use std::time::Instant;

use super::nontemporal::copy_slice;

/// Bytes copied to measure a routine: source and copy together exceed a core's share of the caches.
const MEASURED: usize = 32 << 20;

/// Bytes of each piece of the measured copy, like a page of a KV cache.
const PIECE: usize = 256 << 10;

/// Measurements of each routine; the routines take turns.
const ROUNDS: usize = 3;

/// A way to copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Routine {
    /// Stores past the caches; the processor alone decides when it reads the source.
    Stream,
    /// Stores past the caches; the source is asked for 1 KiB ahead.
    StreamNear,
    /// Stores past the caches; the source is asked for 4 KiB ahead.
    StreamFar,
    /// libc's memcpy.
    Memcpy,
}

impl Routine {
    /// All routines. Of two equally fast routines, the earlier is chosen, which bypasses the
    /// caches.
    #[cfg(target_arch = "x86_64")]
    pub const ALL: [Self; 4] = [
        Self::Stream,
        Self::StreamNear,
        Self::StreamFar,
        Self::Memcpy,
    ];
    /// All routines: other processors have no stores past the caches here.
    #[cfg(not(target_arch = "x86_64"))]
    pub const ALL: [Self; 1] = [Self::Memcpy];

    /// The routine's name, for benchmarks and logs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stream => "streaming",
            Self::StreamNear => "streaming, 1 KiB ahead",
            Self::StreamFar => "streaming, 4 KiB ahead",
            Self::Memcpy => "memcpy",
        }
    }

    /// How far ahead of the copy the source is asked for, in bytes (0: not at all); `None` for a copy through the caches.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn ahead(self) -> Option<usize> {
        match self {
            Self::Stream => Some(0),
            Self::StreamNear => Some(1 << 10),
            Self::StreamFar => Some(4 << 10),
            Self::Memcpy => None,
        }
    }

    /// The fastest routine on this machine for bytes in memory. The first call measures all routines, which takes some
    /// tens of milliseconds and 64 MiB of memory. Other callers wait for the result.
    pub fn fastest() -> Self {
        static FASTEST: OnceLock<Routine> = OnceLock::new();
        *FASTEST.get_or_init(|| choose(&measure(MEASURED)))
    }

    /// The fastest routine on this machine for bytes that this processor's caches have, such as bytes that have just
    /// arrived. The first call measures as [`Routine::fastest`] does.
    pub fn fastest_of_cached() -> Self {
        static FASTEST: OnceLock<Routine> = OnceLock::new();
        *FASTEST.get_or_init(|| choose(&measure(PIECE)))
    }
}

/// Seconds that each routine took in each round.
type Measured = [(Routine, [f64; ROUNDS]); Routine::ALL.len()];

/// The routine whose best round was the shortest: each disturbance makes a round longer.
fn choose(measured: &[(Routine, [f64; ROUNDS])]) -> Routine {
    let best = |rounds: &[f64; ROUNDS]| rounds.iter().copied().fold(f64::INFINITY, f64::min);
    let fastest = measured
        .iter()
        .min_by(|(_, one), (_, other)| best(one).total_cmp(&best(other)));
    fastest.map_or(Routine::Memcpy, |(routine, _)| *routine)
}

/// Measures copies of a source of `from` bytes, which is copied again until [`MEASURED`] bytes are copied.
fn measure(from: usize) -> Measured {
    // The bytes are not zeros, since the system maps all pages of zeros to a single page.
    let from = vec![1_u8; from];
    let mut to = vec![2_u8; MEASURED];
    let mut measured = Routine::ALL.map(|routine| (routine, [0.0; ROUNDS]));
    for round in 0..ROUNDS {
        for (routine, rounds) in &mut measured {
            let start = Instant::now();
            for (from, to) in from.chunks(PIECE).cycle().zip(to.chunks_mut(PIECE)) {
                copy_slice(*routine, from, to);
            }
            rounds[round] = start.elapsed().as_secs_f64();
        }
    }
    measured
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(stream: [f64; 3], far: [f64; 3], memcpy: [f64; 3]) -> Routine {
        choose(&[
            (Routine::Stream, stream),
            (Routine::StreamFar, far),
            (Routine::Memcpy, memcpy),
        ])
    }

    #[test]
    fn the_shortest_round_decides() {
        let (fast, slow) = ([1.0, 9.0, 9.0], [2.0; 3]);
        assert_eq!(of(fast, slow, slow), Routine::Stream);
        assert_eq!(of(slow, fast, slow), Routine::StreamFar);
        assert_eq!(of(slow, slow, fast), Routine::Memcpy);
    }

    #[test]
    fn a_tie_selects_the_routine_that_leaves_the_caches_alone() {
        assert_eq!(of([1.0; 3], [1.0; 3], [1.0; 3]), Routine::Stream);
        assert_eq!(of([2.0; 3], [1.0; 3], [1.0; 3]), Routine::StreamFar);
    }

    #[test]
    fn the_choice_is_made_once() {
        assert_eq!(Routine::fastest(), Routine::fastest());
        assert_eq!(Routine::fastest_of_cached(), Routine::fastest_of_cached());
    }
}
