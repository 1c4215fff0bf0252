//! The blocks that the store is known to have, because this engine has written or fetched them. Routers that follow a
//! session's events need them. Without a session that asks for events nothing is noted.
//!
//! A block becomes known under a number that only grows, so a feed knows by one number which blocks it was told of.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use undercroft_contract::key::{BlockHash, NamespaceDigest};
use undercroft_contract::session::{BlockEvent, EventTier};

use crate::forest::{NONE, NodeId, NsId};
use crate::work;

use super::super::changes::Change;
use super::super::namespaces::Namespaces;
use super::super::parts::EngineParts;

/// Blocks that are remembered; the oldest are forgotten first.
const BLOCKS_MAX: usize = 1 << 17;
/// Blocks that a step of a replay looks at.
const REPLAY_STEP: usize = 512;

/// A block, by the digest of its namespace: a reset of the tiers changes nothing in the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Block {
    digest: NamespaceDigest,
    hash: BlockHash,
    group: u8,
}

impl Block {
    /// The hashes come first: nearly all blocks differ in them.
    fn key(&self) -> (&BlockHash, u8, &NamespaceDigest) {
        (&self.hash, self.group, &self.digest)
    }
}

impl Ord for Block {
    fn cmp(&self, other: &Self) -> Ordering {
        #[cfg(test)]
        tests::COMPARED.set(tests::COMPARED.get() + 1);
        self.key().cmp(&other.key())
    }
}

impl PartialOrd for Block {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// The blocks that are known to be in the store.
///
/// Invariant: each block has one number, by which it is found.
#[derive(Debug)]
pub(super) struct Told {
    blocks: BTreeMap<u64, (Block, Option<BlockHash>)>,
    /// A tree, because a hash table moves all of its entries when it grows, in one entry of the engine.
    numbers: BTreeMap<Block, u64>,
    next: u64,
    most: usize,
}

impl Default for Told {
    fn default() -> Self {
        Self {
            blocks: BTreeMap::new(),
            numbers: BTreeMap::new(),
            next: 0,
            most: BLOCKS_MAX,
        }
    }
}

/// The digest of a namespace whose blocks are in the store, by its description.
fn digest_of(ns: NsId, namespaces: &Namespaces) -> Option<NamespaceDigest> {
    (!namespaces.is_private(ns)).then(|| *namespaces.digest(ns))
}

fn event(block: &Block, parent: Option<BlockHash>, stored: bool) -> BlockEvent {
    BlockEvent {
        tier: EventTier::Remote,
        stored,
        group: block.group,
        hash: block.hash,
        parent: parent.filter(|_| stored),
    }
}

impl Told {
    /// Notes that the store has these payloads: a write or a read has succeeded.
    pub(super) fn add(&mut self, payloads: &[(NodeId, u8)], parts: &mut EngineParts<'_>) {
        if !parts.residency.changes.has_feeds {
            return;
        }
        for &(node, group) in payloads {
            let Some(block) = block_of(node, group, parts) else {
                return;
            };
            work::index();
            if self.numbers.contains_key(&block) {
                continue;
            }
            let parent = match parts.residency.node(node).parent() {
                NONE => None,
                above => Some(parts.residency.node(above).hash),
            };
            let number = self.enter(block, parent);
            tell(number, &block, event(&block, parent, true), parts);
            if self.blocks.len() > self.most
                && let Some((&oldest, &(block, _))) = self.blocks.first_key_value()
            {
                self.forget(oldest, &block, parts);
            }
        }
    }

    /// Gives the next number to a block that has none.
    fn enter(&mut self, block: Block, parent: Option<BlockHash>) -> u64 {
        let number = self.next;
        self.next += 1;
        self.blocks.insert(number, (block, parent));
        self.numbers.insert(block, number);
        number
    }

    pub(super) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Whether the store is known to have a block.
    pub(super) fn knows(&self, digest: NamespaceDigest, (hash, group): (BlockHash, u8)) -> bool {
        work::index();
        let block = Block {
            digest,
            hash,
            group,
        };
        self.numbers.contains_key(&block)
    }

    /// Notes that an object with these blocks is not in the store any more.
    pub(super) fn remove(
        &mut self,
        digest: NamespaceDigest,
        blocks: &[(BlockHash, u8)],
        parts: &mut EngineParts<'_>,
    ) {
        if self.is_empty() {
            return;
        }
        for &(hash, group) in blocks {
            work::index();
            let block = Block {
                digest,
                hash,
                group,
            };
            if let Some(&number) = self.numbers.get(&block) {
                self.forget(number, &block, parts);
            }
        }
    }

    fn forget(&mut self, number: u64, block: &Block, parts: &mut EngineParts<'_>) {
        work::index();
        self.blocks.remove(&number);
        self.numbers.remove(block);
        tell(number, block, event(block, None, false), parts);
    }

    /// Adds events for some more blocks of a namespace, from a number on. Returns the number that comes next;
    /// `u64::MAX` if all have been told.
    pub(super) fn step_replay(
        &self,
        ns: NsId,
        from: u64,
        namespaces: &Namespaces,
        events: &mut Vec<BlockEvent>,
    ) -> u64 {
        let Some(digest) = digest_of(ns, namespaces) else {
            return u64::MAX;
        };
        let mut rest = self.blocks.range(from..);
        for (_, (block, parent)) in rest.by_ref().take(REPLAY_STEP) {
            work::node();
            if block.digest == digest {
                events.push(event(block, *parent, true));
            }
        }
        rest.next().map_or(u64::MAX, |(&number, _)| number)
    }

    /// The blocks of a namespace that a router knows once it has taken all events, as these events.
    #[cfg(feature = "check")]
    pub(super) fn all(&self, ns: NsId, namespaces: &Namespaces) -> Vec<BlockEvent> {
        let digest = digest_of(ns, namespaces);
        let blocks = self.blocks.values();
        blocks
            .filter(|(block, _)| Some(block.digest) == digest)
            .map(|(block, parent)| event(block, *parent, true))
            .collect()
    }
}

fn block_of(node: NodeId, group: u8, parts: &EngineParts<'_>) -> Option<Block> {
    let state = parts.residency.node(node);
    let digest = digest_of(state.ns, parts.namespaces)?;
    Some(Block {
        digest,
        hash: state.hash,
        group,
    })
}

/// Notes an event for the feeds of the block's namespace.
fn tell(number: u64, block: &Block, event: BlockEvent, parts: &mut EngineParts<'_>) {
    parts.residency.changes.note(Change::Remote {
        digest: block.digest,
        number,
        event,
    });
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    thread_local! {
        /// Comparisons of blocks in this thread.
        pub(super) static COMPARED: Cell<u64> = const { Cell::new(0) };
    }

    fn block(at: u64) -> Block {
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&at.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes());
        bytes[8..16].copy_from_slice(&at.to_le_bytes());
        Block {
            digest: NamespaceDigest([7; 32]),
            hash: BlockHash::new(&bytes).expect("32 bytes are a hash"),
            group: 0,
        }
    }

    #[test]
    fn a_further_block_touches_few_of_the_others() {
        let mut told = Told::default();
        let mut most = 0;
        for at in 0..=BLOCKS_MAX as u64 {
            COMPARED.set(0);
            assert_eq!(told.enter(block(at), None), at);
            most = most.max(COMPARED.get());
        }
        assert!(most <= 100, "{most} comparisons for one block");
        assert_eq!(told.numbers.len(), told.blocks.len());
        assert_eq!(told.numbers.get(&block(9)), Some(&9));
    }
}
