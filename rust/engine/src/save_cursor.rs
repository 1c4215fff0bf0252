//! The answer of a save, its progress while its slots are reserved in steps, and the blocks that are offered to it.

use undercroft_contract::key::{BlockHash, HashSource};
use undercroft_contract::namespace::{GroupKind, NamespaceSpec};
use undercroft_contract::session::{Extent, Offer, SaveEnd, SaveRefusal, SaveRequest, TransferId};

use crate::forest::{NodeId, NsId};

use super::residency::Residency;

/// The slots that a worker copies to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// Names the transfer for [`Session::end_transfer`](undercroft_contract::session::Session::end_transfer).
    pub id: TransferId,
    /// Slots by group.
    pub extents: Vec<Extent>,
}

/// The answer to a [`SaveRequest`](undercroft_contract::session::SaveRequest).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Granted {
    /// `None` if there is nothing to copy.
    pub transfer: Option<Transfer>,
    /// Where the save ends.
    pub end: SaveEnd,
}

/// The most work that one step of a save does.
#[derive(Clone, Copy, Debug)]
pub struct SaveLimit {
    /// Blocks that the step looks at.
    pub blocks: u32,
    /// Bytes of slots that the step reserves; blocks that do not fit are left out.
    pub bytes: u64,
}

impl SaveLimit {
    /// The whole save, in all of the memory.
    pub const NONE: Self = Self {
        blocks: u32::MAX,
        bytes: u64::MAX,
    };
}

/// The result of a step of a save.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SaveProgress {
    /// Slots that this step has reserved; more steps follow.
    More(Vec<Extent>),
    /// The last slots: the copies may begin, and [`Session::end_transfer`](undercroft_contract::session::Session::end_transfer) follows. If no
    /// step has reserved a slot, the save has ended.
    Ended {
        /// Slots of this step.
        extents: Vec<Extent>,
        /// Where the save ends.
        end: SaveEnd,
    },
}

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
    /// Hash blocks of the chain that were in the index when the save began, up to a gap that stays.
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
    /// Where the save ends, as far as it is known.
    pub(super) end: SaveEnd,
}

impl SaveCursor {
    /// Notes the gap at which the search for gaps is.
    pub(super) fn note_gap(&mut self, residency: &Residency) {
        let id = self.gaps.at;
        self.gaps.found.push(id);
        if !self.offers.only {
            return;
        }
        let (spec, depth) = (residency.spec(self.ns), residency.node(id).depth);
        for group in residency.missing_groups(id) {
            let block = depth / spec.hash_blocks(usize::from(group)) - 1;
            if !self.offers.contains(group, block) {
                self.gaps.stay = true;
                self.gaps.found.clear();
                self.depth = depth - 1;
                self.end.refused = Some(SaveRefusal::PrefixGone);
                self.end.lacks.push(Offer {
                    group,
                    first_block: block,
                    end_block: block + 1,
                });
            }
        }
    }
}

/// The nodes in the middle of a chain whose required payloads were evicted.
#[derive(Debug)]
pub(super) struct Gaps {
    /// The deepest node of the chain when the save began, or `NONE`.
    pub(super) anchor: NodeId,
    /// The node to be looked at next, on the way up from the anchor to the first node that lookups reach;
    /// `NONE` when all have been looked at.
    pub(super) at: NodeId,
    /// Gaps that were found and are not filled yet, the deepest first.
    pub(super) found: Vec<NodeId>,
    /// Neither the index nor the device has a block of one: nothing is saved from the first such gap on.
    pub(super) stay: bool,
}

impl Gaps {
    /// The nodes at `anchor` and above, which have not been looked at.
    pub(super) fn above(anchor: NodeId) -> Self {
        Self {
            anchor,
            at: anchor,
            found: Vec::new(),
            stay: false,
        }
    }
}

/// Blocks that the device holds.
#[derive(Debug)]
pub(super) struct Offers {
    /// Ranges of each group that neither overlap nor touch, in order.
    ranges: Vec<Offer>,
    /// See [`SaveRequest::only_offers`](undercroft_contract::session::SaveRequest::only_offers).
    only: bool,
    /// See [`SaveRequest::is_wanted`](undercroft_contract::session::SaveRequest::is_wanted).
    pub(super) are_wanted: bool,
}

/// Blocks in any order, which may overlap, as ranges that neither overlap nor touch, in order.
pub(super) fn merged(blocks: &[Offer]) -> Vec<Offer> {
    let not_empty = blocks.iter().filter(|of| of.first_block < of.end_block);
    let mut all: Vec<Offer> = not_empty.copied().collect();
    all.sort_unstable_by_key(|of| (of.group, of.first_block));
    all.dedup_by(|of, before| {
        let touches = of.group == before.group && of.first_block <= before.end_block;
        if touches {
            before.end_block = before.end_block.max(of.end_block);
        }
        touches
    });
    all
}

impl Offers {
    pub(super) fn of(save: &SaveRequest<'_>) -> Self {
        Self {
            ranges: merged(save.offers),
            only: save.only_offers,
            are_wanted: save.is_wanted,
        }
    }

    /// The required blocks after the first `depth` hash blocks and up to `end` hash blocks that are not offered, and the hash
    /// blocks before the first of them. The index has no block after `depth`.
    pub(super) fn lacking(
        &self,
        spec: &NamespaceSpec,
        (depth, end): (u32, u32),
    ) -> (Vec<Offer>, u32) {
        let (mut lacks, mut before) = (Vec::new(), end);
        for (group, of) in (0u8..).zip(&spec.groups) {
            if of.kind != GroupKind::Full {
                continue;
            }
            let hash_blocks = spec.hash_blocks(usize::from(group));
            let (mut next, end) = (depth / hash_blocks, end / hash_blocks);
            let first = lacks.len();
            let after_end = Offer {
                group,
                first_block: end,
                end_block: end,
            };
            let of_group = self.ranges.iter().filter(|offer| offer.group == group);
            for offer in of_group.copied().chain([after_end]) {
                let until = offer.first_block.min(end);
                if next < until {
                    lacks.push(Offer {
                        group,
                        first_block: next,
                        end_block: until,
                    });
                }
                next = next.max(offer.end_block);
            }
            if let Some(lack) = lacks.get(first) {
                before = before.min((lack.first_block + 1) * hash_blocks - 1);
            }
        }
        (lacks, before)
    }

    pub(super) fn get(&self, index: usize) -> Option<Offer> {
        self.ranges.get(index).copied()
    }

    /// Whether a block of a group is offered.
    pub(super) fn contains(&self, group: u8, block: u32) -> bool {
        let after = self
            .ranges
            .partition_point(|of| (of.group, of.first_block) <= (group, block));
        let offer = after.checked_sub(1).map(|index| self.ranges[index]);
        offer.is_some_and(|of| of.group == group && block < of.end_block)
    }
}

/// The first `len` hashes.
pub(super) struct Limited<'a> {
    hashes: &'a dyn HashSource,
    len: usize,
}

impl<'a> Limited<'a> {
    pub(super) fn new(hashes: &'a dyn HashSource, len: u32) -> Self {
        Self {
            hashes,
            len: len as usize,
        }
    }
}

impl HashSource for Limited<'_> {
    fn len(&self) -> usize {
        self.len
    }
    fn get(&self, index: usize) -> Option<BlockHash> {
        (index < self.len).then(|| self.hashes.get(index)).flatten()
    }
}

#[cfg(test)]
mod tests {
    use undercroft_contract::namespace::GroupSpec;
    use undercroft_contract::session::Tokens;

    use super::*;

    fn offer(group: u8, first_block: u32, end_block: u32) -> Offer {
        Offer {
            group,
            first_block,
            end_block,
        }
    }

    fn offers_of(offers: &[Offer], only: bool) -> Offers {
        let hashes = Vec::<BlockHash>::new();
        let save = SaveRequest::new("save", &hashes, Tokens(0));
        Offers::of(&save.offers(offers).only_offers(only))
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
        let merged = offers_of(&all, false);
        assert_eq!(
            merged.ranges,
            [offer(0, 0, 5), offer(0, 7, 9), offer(1, 4, 6)]
        );
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
    fn blocks_that_are_not_offered_are_lacking_in_each_group_of_full_attention() {
        let group = |kind, hash_blocks: u32| GroupSpec {
            kind,
            block_tokens: 16 * hash_blocks,
            payload_bytes: 1,
        };
        let spec = NamespaceSpec {
            description: String::new(),
            hash_block_size: 16,
            alignment_tokens: 32,
            groups: vec![
                group(GroupKind::Full, 1),
                group(GroupKind::Full, 2),
                group(GroupKind::SlidingWindow { tokens: 32 }, 1),
            ],
        };
        let lacking = |offers: &[Offer], depth| offers_of(offers, true).lacking(&spec, (depth, 9));
        let all = [offer(0, 0, 9), offer(1, 0, 9)];
        assert_eq!(lacking(&all, 0), (vec![], 9));
        // The block of 32 tokens that begins before the depth ends behind it.
        assert_eq!(lacking(&[offer(0, 3, 9), offer(1, 1, 4)], 3), (vec![], 9));
        assert_eq!(
            lacking(&[offer(0, 3, 9), offer(1, 2, 4)], 3),
            (vec![offer(1, 1, 2)], 3)
        );
        assert_eq!(
            lacking(&[offer(0, 4, 6), offer(1, 0, 3)], 4),
            (vec![offer(0, 6, 9), offer(1, 3, 4)], 6)
        );
        assert_eq!(lacking(&[], 9), (vec![], 9));
    }

    #[test]
    fn the_same_offer_many_times_is_one() {
        let merged = merged(&vec![offer(0, 0, 4000); 20_000]);
        assert_eq!(merged, [offer(0, 0, 4000)]);
    }
}
