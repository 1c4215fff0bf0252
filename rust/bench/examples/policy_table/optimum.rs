//! The policy that knows the future: it keeps the blocks that are used next (Belady), and does not store a block that would
//! be the last of them. A block is used no earlier than the blocks above it, so only leaves are evicted.

use std::collections::BTreeSet;

const NEVER: usize = usize::MAX;

pub(crate) fn hits(requests: &[Vec<usize>], capacity: usize, unique: usize) -> usize {
    let mut next_uses = next_uses(requests, unique);
    let mut kept = vec![None; unique];
    let mut by_use: BTreeSet<(usize, usize)> = BTreeSet::new();
    let mut hits = 0;
    for blocks in requests {
        let leading = blocks.iter().take_while(|&&block| kept[block].is_some());
        hits += leading.count();
        for &block in blocks {
            if let Some(until) = kept[block].take() {
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
                kept[evicted] = None;
            }
            by_use.insert((next, block));
            kept[block] = Some(next);
        }
    }
    hits
}

/// For each use of a block, in order, the number of the request that uses the block next.
fn next_uses(requests: &[Vec<usize>], unique: usize) -> impl Iterator<Item = usize> + use<> {
    let mut next = vec![NEVER; unique];
    let mut uses = Vec::new();
    for (number, blocks) in requests.iter().enumerate().rev() {
        let blocks = blocks.iter().rev();
        uses.extend(blocks.map(|&block| std::mem::replace(&mut next[block], number)));
    }
    uses.into_iter().rev()
}
