//! Checksums of payloads in the arena, computed on the thread that waits for the device, a part of a payload at a time.

use std::collections::VecDeque;
use std::sync::Arc;

use rustix::io::Errno;
use undercroft_contract::checksum::RunningChecksum;
use undercroft_contract::io::{ChecksumRequest, IoCompletion, IoFault};

use crate::arena::Arena;

/// Checksums to compute, in the order of their requests.
#[derive(Debug)]
pub struct ChecksumQueue {
    arena: Arc<Arena>,
    requests: VecDeque<ChecksumRequest>,
    /// Number of bytes of the first request that are summed, and their checksum.
    done: u32,
    sum: RunningChecksum,
}

impl ChecksumQueue {
    /// A queue without requests.
    pub fn new(arena: Arc<Arena>) -> Self {
        Self {
            arena,
            requests: VecDeque::new(),
            done: 0,
            sum: RunningChecksum::default(),
        }
    }

    /// Whether no checksum is left to compute.
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Adds requests.
    pub fn extend(&mut self, requests: impl IntoIterator<Item = ChecksumRequest>) {
        self.requests.extend(requests);
    }

    /// Sums at most `most` bytes. Pushes the completions of finished requests to `out`: the checksum, or EINVAL for a
    /// range outside the arena.
    pub fn advance(&mut self, mut most: u32, out: &mut Vec<IoCompletion>) {
        while most > 0
            && let Some(&ChecksumRequest {
                token,
                arena_offset,
                payload_len,
            }) = self.requests.front()
        {
            let len = most.min(payload_len - self.done);
            let from = arena_offset + u64::from(self.done);
            let added = self.arena.sum_running(&mut self.sum, from, u64::from(len));
            self.done += len;
            most -= len;
            if added.is_ok() && self.done < payload_len {
                return;
            }
            let sum = std::mem::take(&mut self.sum).finish();
            let invalid = IoFault::Os(Errno::INVAL.raw_os_error());
            out.push(IoCompletion {
                token,
                result: added.map(|()| sum).map_err(|_| invalid),
            });
            self.done = 0;
            self.requests.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(payloads: &[(u64, &[u8])]) -> ChecksumQueue {
        let arena = Arc::new(Arena::create(1 << 20).unwrap());
        for (offset, bytes) in payloads {
            arena.write(*offset, bytes).unwrap();
        }
        let mut queue = ChecksumQueue::new(arena);
        queue.extend(
            (0..)
                .zip(payloads)
                .map(|(token, (arena_offset, bytes))| ChecksumRequest {
                    token,
                    arena_offset: *arena_offset,
                    payload_len: bytes.len() as u32,
                }),
        );
        queue
    }

    #[test]
    fn parts_add_up_and_ends_come_in_order() {
        let (first, second) = ([7; 10_000], [9; 3]);
        let mut queue = queue(&[(4096, &first), (65536, &second)]);
        let mut out = Vec::new();
        for _ in 0..2 {
            queue.advance(4096, &mut out);
            assert_eq!(out, []);
        }
        queue.advance(4096, &mut out);
        let end = |token, bytes: &[u8]| IoCompletion {
            token,
            result: Ok(undercroft_contract::checksum::checksum(bytes)),
        };
        assert_eq!(out, [end(0, &first), end(1, &second)]);
        assert!(queue.is_empty());
    }

    #[test]
    fn a_range_outside_the_arena_is_an_error_and_those_behind_it_go_on() {
        let mut queue = queue(&[((1 << 20) - 4096, &[1; 4096])]);
        let outside = ChecksumRequest {
            token: 5,
            arena_offset: 1 << 20,
            payload_len: 1,
        };
        queue.requests.push_front(outside);
        let mut out = Vec::new();
        queue.advance(u32::MAX, &mut out);
        let ok: Vec<_> = out
            .iter()
            .map(|end| (end.token, end.result.is_ok()))
            .collect();
        assert_eq!(ok, [(5, false), (0, true)]);
    }
}
