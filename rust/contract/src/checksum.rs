//! The payload checksum: CRC-64/NVME.
//!
//! It is part of the format on disk and never changes. A CRC finds every burst of up to 64 flipped
//! bits, and misses other damage once in 2^64. AVX-512 or carry-less multiplication is chosen at
//! run time; one core reaches memory speed.

use std::sync::OnceLock;
use std::time::Instant;

use crc_fast::{CrcAlgorithm, Digest};

use crate::prefetch::prefetch_running;

/// Bytes prefetched at a time, how many bytes before their use, and the bytes of one prefetch.
const CHUNK: usize = 4096;
const AHEAD: usize = 1024;
const CACHE_LINE: usize = 64;

/// Bytes that a measurement sums, more than a core's own caches hold, and the number of its rounds.
const MEASURED: usize = 16 << 20;
const ROUNDS: usize = 3;
/// Sums with prefetches may take so many times as long as without them: writes gain more than this from bytes that the
/// caches do not have.
const PREFETCH_COST: f64 = 1.15;

/// Whether [`RunningChecksum::update`] prefetches. It does until [`measure`] has ended.
static PREFETCHES: OnceLock<bool> = OnceLock::new();

/// Measures, once in a process, whether this processor sums memory with prefetches about as fast as without them. On
/// some processors such sums take half as long again. This takes some tens of milliseconds, and 16 MiB of memory.
pub fn measure() {
    PREFETCHES.get_or_init(|| {
        // The bytes are not zeros, since the system maps all pages of zeros to a single page.
        let bytes = vec![1_u8; MEASURED];
        let mut best = [f64::INFINITY; 2];
        for _ in 0..ROUNDS {
            for (best, prefetches) in best.iter_mut().zip([true, false]) {
                let (start, mut sum) = (Instant::now(), RunningChecksum::default());
                sum.update_as(&bytes, prefetches);
                std::hint::black_box(sum.finish());
                *best = best.min(start.elapsed().as_secs_f64());
            }
        }
        best[0] <= PREFETCH_COST * best[1]
    });
}

/// The checksum of `bytes`.
pub fn checksum(bytes: &[u8]) -> u64 {
    crc_fast::crc64_nvme(bytes)
}

/// The checksum, computed part by part, for bytes that this processor does not use again. Where that costs little, the
/// bytes bypass the processor's caches: these hold the working set of the engine's process, and a device that writes from memory would
/// have to look for the bytes there.
#[derive(Clone, Copy, Debug)]
pub struct RunningChecksum(Digest);

impl Default for RunningChecksum {
    /// The checksum of no bytes so far.
    fn default() -> Self {
        Self(Digest::new(CrcAlgorithm::Crc64Nvme))
    }
}

impl RunningChecksum {
    /// Adds the bytes that follow.
    pub fn update(&mut self, bytes: &[u8]) {
        self.update_as(bytes, PREFETCHES.get().copied().unwrap_or(true));
    }

    fn update_as(&mut self, bytes: &[u8], prefetches: bool) {
        if !prefetches {
            self.0.update(bytes);
            return;
        }
        for (index, chunk) in bytes.chunks(CHUNK).enumerate() {
            let ahead = index * CHUNK + AHEAD;
            let end = bytes.len().min(ahead + CHUNK);
            for line in (ahead..end).step_by(CACHE_LINE) {
                prefetch_running(&bytes[line]);
            }
            self.0.update(chunk);
        }
    }

    /// Adds the bytes that follow, which are in this processor's caches.
    pub fn update_cached(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The checksum of all bytes.
    pub fn finish(self) -> u64 {
        self.0.finalize()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bit by bit from the definition: reflected polynomial, all ones in and out.
    fn by_definition(bytes: &[u8]) -> u64 {
        const POLYNOMIAL: u64 = 0x9a6c_9329_ac4b_c9b5;
        let mut crc = u64::MAX;
        for byte in bytes {
            crc ^= u64::from(*byte);
            for _ in 0..8 {
                crc = if crc & 1 == 1 {
                    (crc >> 1) ^ POLYNOMIAL
                } else {
                    crc >> 1
                };
            }
        }
        !crc
    }

    #[test]
    fn known_answers() {
        assert_eq!(checksum(b""), 0);
        assert_eq!(checksum(b"123456789"), 0xae8b_1486_0a79_9888);
        // From the NVM Express command set specification: 4 KiB of zeros, and of ones.
        assert_eq!(checksum(&[0; 4096]), 0x6482_d367_eb22_b64e);
        assert_eq!(checksum(&[0xff; 4096]), 0xc0dd_ba73_02ec_a3ac);
    }

    #[test]
    fn every_length_and_alignment_agrees_with_the_definition() {
        let bytes: Vec<u8> = (0..5000u32)
            .map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8)
            .collect();
        for len in (0..600).chain([1023, 1024, 1025, 2047, 4096, 4097]) {
            for start in [0, 1, 7, 15, 63] {
                let part = &bytes[start..start + len];
                let mut running = RunningChecksum::default();
                let (head, tail) = part.split_at(len / 3);
                running.update(head);
                running.update(tail);
                assert_eq!(running.finish(), checksum(part));
                for prefetches in [true, false] {
                    let mut running = RunningChecksum::default();
                    running.update_as(part, prefetches);
                    assert_eq!(running.finish(), checksum(part));
                }
                assert_eq!(
                    checksum(part),
                    by_definition(part),
                    "start {start}, length {len}"
                );
            }
        }
    }
}
