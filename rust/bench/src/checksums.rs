//! How fast one thread compares payloads in the arena with their checksums: the cost of `verify_host`.

use std::sync::Arc;
use std::time::Instant;

use undercroft_contract::io::ChecksumRequest;
use undercroft_io::ChecksumQueue;
use undercroft_io::arena::Arena;

use crate::rig::{BenchError, failed};

/// Bytes that the engine's IO thread sums between two looks at an idle device.
const SLICE: u32 = 512 << 10;

/// Sums `blocks` payloads of `block_bytes` in an arena, `rounds` times; the speed of the median round in 1e9 bytes/s.
///
/// # Errors
/// If there is no memory for the arena.
pub fn speed(block_bytes: u32, blocks: u32, rounds: usize) -> Result<f64, BenchError> {
    let slot = u64::from(block_bytes).next_multiple_of(4096);
    let total = slot * u64::from(blocks);
    let arena = Arena::create(total).map_err(std::io::Error::other);
    let arena = Arc::new(arena.map_err(failed("making an arena"))?);
    for offset in (0..total).step_by(4096) {
        // Pages that were never written are all one page.
        let _ = arena.write(offset, &[1]);
    }
    let mut queue = ChecksumQueue::new(arena);
    let mut seconds: Vec<f64> = (0..rounds.max(1))
        .map(|_| {
            queue.extend((0..u64::from(blocks)).map(|block| ChecksumRequest {
                token: block,
                arena_offset: block * slot,
                payload_len: block_bytes,
            }));
            let (start, mut ended) = (Instant::now(), Vec::new());
            while !queue.is_empty() {
                queue.advance(SLICE, &mut ended);
            }
            start.elapsed().as_secs_f64()
        })
        .collect();
    seconds.sort_by(f64::total_cmp);
    let bytes = u64::from(block_bytes) * u64::from(blocks);
    Ok(bytes as f64 / seconds[seconds.len() / 2] / 1e9)
}
