//! The progress of a save whose slots are reserved in steps, and the blocks that are offered to it.

use crate::forest::{NodeId, NsId};
use crate::session::Offer;

/// Which blocks of a request the policies have weighed for a save.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct BlockOffers {
    /// Hash blocks, from the first, that were offered to the policies.
    pub(super) offered: u32,
    /// Depth of the block that a policy did not admit, or 0: no block below it is saved.
    pub(super) not_admitted: u32,
}

/// The progress of a save.
#[derive(Debug)]
pub(super) struct SaveCursor {
    /// The namespace in which it began.
    pub(super) ns: NsId,
    /// The life of the namespace at that time.
    pub(super) instance: u64,
    /// Hash blocks that it covers.
    pub(super) hash_blocks: u32,
    pub(super) gaps: Gaps,
    pub(super) offers: Offers,
    /// Hash blocks of the chain that were in the index when the save began.
    pub(super) depth: u32,
    /// The first hash block that has not been looked at.
    pub(super) next: u32,
    /// The index of the offer, and the block in the offer, to be looked at next.
    pub(super) next_offer: (usize, u32),
    /// Which blocks the policies have weighed for this request.
    pub(super) blocks: BlockOffers,
    /// The deepest node of the chain so far, which is leased, or `NONE`.
    pub(super) tail: NodeId,
    /// Hash blocks of the chain that are in the index now.
    pub(super) here: u32,
    /// A block was left out because memory was short.
    pub(super) refused: bool,
}

/// The nodes in the middle of a chain whose required payloads were evicted.
#[derive(Debug)]
pub(super) struct Gaps {
    /// The node to be looked at next, on the way up from the anchor to the first node that lookups reach;
    /// `NONE` when all have been looked at.
    pub(super) at: NodeId,
    /// Gaps that were found and are not filled yet, the deepest first.
    pub(super) found: Vec<NodeId>,
}

impl Gaps {
    /// The nodes at `anchor` and above, which have not been looked at.
    pub(super) fn above(anchor: NodeId) -> Self {
        Self {
            at: anchor,
            found: Vec::new(),
        }
    }
}

/// Blocks that the device holds: ranges of each group that neither overlap nor touch, in order.
#[derive(Debug)]
pub(super) struct Offers(Vec<Offer>);

impl Offers {
    /// Merges offers, which may come in any order and overlap.
    pub(super) fn new(offers: &[Offer]) -> Self {
        let not_empty = offers.iter().filter(|of| of.first_block < of.end_block);
        let mut all: Vec<Offer> = not_empty.copied().collect();
        all.sort_unstable_by_key(|of| (of.group, of.first_block));
        all.dedup_by(|of, before| {
            let touches = of.group == before.group && of.first_block <= before.end_block;
            if touches {
                before.end_block = before.end_block.max(of.end_block);
            }
            touches
        });
        Self(all)
    }

    pub(super) fn get(&self, index: usize) -> Option<Offer> {
        self.0.get(index).copied()
    }

    /// Whether a block of a group is offered.
    pub(super) fn contains(&self, group: u8, block: u32) -> bool {
        let after = self
            .0
            .partition_point(|of| (of.group, of.first_block) <= (group, block));
        let offer = after.checked_sub(1).map(|index| self.0[index]);
        offer.is_some_and(|of| of.group == group && block < of.end_block)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(group: u8, first_block: u32, end_block: u32) -> Offer {
        Offer {
            group,
            first_block,
            end_block,
        }
    }

    #[test]
    fn offers_are_merged_by_group() {
        let all = [
            offer(1, 4, 6),
            offer(0, 3, 3),
            offer(0, 7, 9),
            offer(1, 5, 5),
            offer(0, 0, 4),
            offer(0, 4, 5),
            offer(0, 1, 2),
        ];
        let merged = Offers::new(&all);
        assert_eq!(merged.0, [offer(0, 0, 5), offer(0, 7, 9), offer(1, 4, 6)]);
        for group in 0..3 {
            for block in 0..12 {
                let is_offered = |of: &Offer| {
                    of.group == group && (of.first_block..of.end_block).contains(&block)
                };
                assert_eq!(
                    merged.contains(group, block),
                    all.iter().any(is_offered),
                    "group {group} block {block}"
                );
            }
        }
    }

    #[test]
    fn the_same_offer_many_times_is_one() {
        let merged = Offers::new(&vec![offer(0, 0, 4000); 20_000]);
        assert_eq!(merged.0, [offer(0, 0, 4000)]);
    }
}
