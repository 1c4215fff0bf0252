//! The hits of LRU and of the optimum in a cache of the same size, for comparison with the engine's policy.
//!
//! Each request offers its blocks from the last to the first, as an engine frees them: so a block never leaves before the
//! blocks that need it.

use std::collections::{BTreeSet, HashMap};

use super::recent::RecentSet;

const NEVER: usize = usize::MAX;

/// A request: the number of its prompt's blocks, and all its blocks.
type Request<'a> = (usize, &'a [u64]);

/// Blocks of prompts that were found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReferenceHits {
    /// By LRU.
    pub lru: usize,
    /// By the policy that knows the future (Belady): it keeps the blocks that are used next, and does not store a block
    /// that would be the last of them. A block is used no earlier than the blocks above it, so only leaves are evicted.
    pub optimum: usize,
}

/// The hits of a cache of `capacity` blocks.
pub fn reference_hits(requests: &[Request<'_>], capacity: usize) -> ReferenceHits {
    ReferenceHits {
        lru: lru_hits(requests, capacity),
        optimum: optimum_hits(requests, capacity),
    }
}

fn lru_hits(requests: &[Request<'_>], capacity: usize) -> usize {
    let mut cache = RecentSet::new(capacity);
    let mut hits = 0;
    for &(prompt, blocks) in requests {
        let prompt = &blocks[..prompt.min(blocks.len())];
        let leading = prompt.iter().take_while(|&&block| cache.contains(block));
        hits += leading.count();
        for &block in blocks.iter().rev() {
            cache.add(block);
        }
    }
    hits
}

fn optimum_hits(requests: &[Request<'_>], capacity: usize) -> usize {
    let mut next_uses = next_uses(requests);
    let mut kept: HashMap<u64, usize> = HashMap::new();
    let mut by_use: BTreeSet<(usize, u64)> = BTreeSet::new();
    let mut hits = 0;
    for &(prompt, blocks) in requests {
        let prompt = &blocks[..prompt.min(blocks.len())];
        let leading = prompt.iter().take_while(|block| kept.contains_key(block));
        hits += leading.count();
        for &block in blocks {
            if let Some(until) = kept.remove(&block) {
                by_use.remove(&(until, block));
            }
            let next = next_uses.next().unwrap_or(NEVER);
            let last = by_use.last().copied();
            if next == NEVER || by_use.len() >= capacity && last.is_none_or(|last| last.0 <= next) {
                continue;
            }
            if by_use.len() >= capacity
                && let Some((_, evicted)) = by_use.pop_last()
            {
                kept.remove(&evicted);
            }
            by_use.insert((next, block));
            kept.insert(block, next);
        }
    }
    hits
}

/// For each block of each request, in order, the number of the request whose prompt has the block next.
fn next_uses(requests: &[Request<'_>]) -> impl Iterator<Item = usize> + use<> {
    let mut next: HashMap<u64, usize> = HashMap::new();
    let mut uses = Vec::new();
    for (number, &(prompt, blocks)) in requests.iter().enumerate().rev() {
        for (at, &block) in blocks.iter().enumerate().rev() {
            uses.push(next.get(&block).copied().unwrap_or(NEVER));
            if at < prompt {
                next.insert(block, number);
            }
        }
    }
    uses.into_iter().rev()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_optimum_keeps_what_comes_again() {
        // Two blocks come again after one that does not.
        let requests: [(usize, &[u64]); 4] = [(2, &[1, 2]), (1, &[9]), (1, &[8]), (2, &[1, 2])];
        let hits = reference_hits(&requests, 2);
        assert_eq!((hits.lru, hits.optimum), (0, 2));
        let hits = reference_hits(&requests, 4);
        assert_eq!((hits.lru, hits.optimum), (2, 2));
    }

    #[test]
    fn generated_blocks_are_hits_of_later_prompts_alone() {
        let requests: [(usize, &[u64]); 3] = [(1, &[1, 2]), (1, &[1, 2]), (2, &[1, 2])];
        let hits = reference_hits(&requests, 2);
        assert_eq!((hits.lru, hits.optimum), (3, 3));
    }
}
