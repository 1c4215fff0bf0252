//! The host memory that sessions keep from eviction: the blocks of their hits and of their loads.
//!
//! A lease keeps a whole chain, however few of its blocks are loaded. Chains that share a prefix share its blocks. These
//! count once: thousands of requests with one system prompt wait in the queue of a vLLM. So the chains are sorted by
//! their hashes. Then each chain shares most with one of its two neighbours.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::sync::Arc;

use undercroft_contract::key::BlockHash;
use undercroft_engine::ChainBytes;

/// Hash blocks between two marks of a chain. A prefix that two chains share counts up to its last mark.
const STRIDE: usize = 16;

/// A chain that a hit or a load keeps.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct HeldChain {
    /// Chains of one scope share blocks if they share hashes.
    scope: Arc<str>,
    /// Each [`STRIDE`]th hash. A hash determines all hashes before it.
    marks: Box<[BlockHash]>,
    last: BlockHash,
    depth: u32,
    bytes: Arc<ChainBytes>,
    /// Bytes of the windows and states at the end.
    end_bytes: u64,
}

impl HeldChain {
    /// The chain of these hashes; `None` if there are none.
    pub(super) fn new(
        scope: &Arc<str>,
        hashes: &[BlockHash],
        bytes: &Arc<ChainBytes>,
        end_bytes: u64,
    ) -> Option<Arc<Self>> {
        let marks = hashes.chunks_exact(STRIDE);
        Some(Arc::new(Self {
            scope: Arc::clone(scope),
            marks: marks.map(|of_mark| of_mark[STRIDE - 1]).collect(),
            last: *hashes.last()?,
            depth: u32::try_from(hashes.len()).ok()?,
            bytes: Arc::clone(bytes),
            end_bytes,
        }))
    }

    /// Bytes of the server's memory for a chain of so many hash blocks.
    pub(super) fn memory(hash_blocks: usize) -> u64 {
        // The chain, its entries in two maps, and its marks.
        (size_of::<Self>() + 128 + hash_blocks / STRIDE * size_of::<BlockHash>()) as u64
    }

    pub(super) fn own_memory(&self) -> u64 {
        Self::memory(self.depth as usize)
    }

    /// The number of leading marks that two chains share.
    fn common(&self, other: &Self) -> usize {
        let most = self.marks.len().min(other.marks.len());
        let (mut low, mut high) = (0, most);
        while low < high {
            let middle = low + (high - low) / 2;
            if self.marks[middle] == other.marks[middle] {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        low
    }

    /// Hash blocks, from the first, that two chains share.
    fn shared(&self, other: &Self) -> u32 {
        if self.scope != other.scope {
            0
        } else if self == other {
            self.depth
        } else {
            (self.common(other) * STRIDE) as u32
        }
    }
}

impl Ord for HeldChain {
    fn cmp(&self, other: &Self) -> Ordering {
        self.scope.cmp(&other.scope).then_with(|| {
            let at = self.common(other);
            let next = self.marks.get(at).cmp(&other.marks.get(at));
            next.then_with(|| (self.depth, self.last).cmp(&(other.depth, other.last)))
        })
    }
}

impl PartialOrd for HeldChain {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// Chains that are kept, each with the number of its hits and loads.
///
/// Invariant: `bytes` is the sum over all blocks of the chains, and over the ends of all hits and loads.
#[derive(Debug, Default)]
pub(super) struct HeldChains {
    chains: BTreeMap<Arc<HeldChain>, u32>,
    bytes: u64,
}

impl HeldChains {
    /// Bytes that are kept.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Hash blocks of a chain, from the first, that are kept already.
    pub(super) fn shared(&self, chain: &HeldChain) -> u32 {
        let before = self.chains.range::<HeldChain, _>(..chain).next_back();
        let after = self.chains.range::<HeldChain, _>(chain..).next();
        let shared = |found: Option<(&Arc<HeldChain>, &u32)>| {
            found.map_or(0, |(other, _)| chain.shared(other))
        };
        shared(before).max(shared(after))
    }

    /// Bytes that a chain adds.
    pub(super) fn more(&self, chain: &HeldChain) -> u64 {
        chain.bytes.between(self.shared(chain), chain.depth) + chain.end_bytes
    }

    pub(super) fn add(&mut self, chain: &Arc<HeldChain>) {
        self.bytes += self.more(chain);
        *self.chains.entry(Arc::clone(chain)).or_default() += 1;
    }

    pub(super) fn remove(&mut self, chain: &Arc<HeldChain>) {
        let count = self.chains.get_mut(chain);
        let count = count.expect("a chain is removed as often as it was added");
        *count -= 1;
        if *count == 0 {
            self.chains.remove(chain);
        }
        self.bytes -= self.more(chain);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: u64 = 1000;

    fn hashes(path: &[(u8, usize)]) -> Vec<BlockHash> {
        let mut name = Vec::new();
        let mut all = Vec::new();
        for &(part, count) in path {
            name.push(part);
            for at in 0..count {
                let mut hash = [0; 32];
                hash[..name.len()].copy_from_slice(&name);
                // Unlike a counter, a mixed number does not sort as the chain does.
                let mixed = (at as u64 + 1)
                    .wrapping_mul(0x9e37_79b9_7f4a_7c15)
                    .to_le_bytes();
                hash[24..].copy_from_slice(&mixed);
                all.push(BlockHash::new(&hash).unwrap());
            }
        }
        all
    }

    fn chain_in(scope: &str, path: &[(u8, usize)], end_bytes: u64) -> Arc<HeldChain> {
        let bytes = Arc::new(ChainBytes::of(16, vec![(1, BLOCK)]));
        HeldChain::new(&Arc::from(scope), &hashes(path), &bytes, end_bytes).unwrap()
    }

    fn chain(path: &[(u8, usize)]) -> Arc<HeldChain> {
        chain_in("a", path, 0)
    }

    #[test]
    fn blocks_that_chains_share_count_once_in_any_order() {
        let system = (1, 64);
        let all = [
            chain(&[system]),
            chain(&[system, (2, 32)]),
            chain(&[system, (3, 48), (4, 16)]),
            chain(&[system, (3, 48), (5, 5)]),
            chain(&[(6, 7)]),
            chain_in("another namespace", &[system], 50),
            chain(&[system, (2, 32)]),
        ];
        let distinct = (64 + 32 + 48 + 16 + 5 + 7 + 64) * BLOCK + 50;
        for first in 0..all.len() {
            let mut held = HeldChains::default();
            for at in 0..all.len() {
                held.add(&all[(first + at) % all.len()]);
            }
            assert_eq!(held.bytes(), distinct);
            assert_eq!(held.shared(&chain(&[system, (3, 48), (9, 99)])), 64 + 48);
            for at in 0..all.len() {
                held.remove(&all[(first + 3 * at) % all.len()]);
            }
            assert_eq!((held.bytes(), held.chains.len()), (0, 0));
        }
    }

    #[test]
    fn each_hit_keeps_its_own_windows_and_states() {
        let mut held = HeldChains::default();
        let both = [(1, 32)];
        for _ in 0..3 {
            held.add(&chain_in("a", &both, 7));
        }
        assert_eq!(held.bytes(), 32 * BLOCK + 3 * 7);
        for _ in 0..3 {
            held.remove(&chain_in("a", &both, 7));
        }
        assert_eq!(held.bytes(), 0);
    }

    #[test]
    fn a_prefix_that_is_shared_counts_twice_for_less_than_a_stride_at_most() {
        for shared in 0..40 {
            let mut held = HeldChains::default();
            held.add(&chain(&[(1, shared), (2, 20)]));
            held.add(&chain(&[(1, shared), (3, 20)]));
            let least = (shared as u64 + 40) * BLOCK;
            let most = least + (STRIDE as u64 - 1) * BLOCK;
            assert!((least..=most).contains(&held.bytes()), "{shared}");
        }
    }
}
