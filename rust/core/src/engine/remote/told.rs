//! The blocks that the store is known to have, because this engine has written or fetched them. Routers that follow a
//! session's events need them. Without a session that asks for events nothing is noted.
//!
//! A block becomes known under a number that only grows, so a feed knows by one number which blocks it was told of.

use std::collections::BTreeMap;

use rustc_hash::FxHashMap;

use crate::forest::{NONE, NodeId, NsId};
use crate::key::{BlockHash, NamespaceDigest};
use crate::session::{BlockEvent, EventTier};
use crate::work;

use super::super::namespaces::Namespaces;
use super::super::parts::EngineParts;

/// Blocks that are remembered; the oldest are forgotten first.
const BLOCKS_MAX: usize = 1 << 17;
/// Blocks that a step of a replay looks at.
const REPLAY_STEP: usize = 512;

/// A block, by the digest of its namespace: a reset of the tiers changes nothing in the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Block {
    digest: NamespaceDigest,
    hash: BlockHash,
    group: u8,
}

/// The blocks that are known to be in the store.
///
/// Invariant: each block has one number, by which it is found.
#[derive(Debug)]
pub(super) struct Told {
    blocks: BTreeMap<u64, (Block, Option<BlockHash>)>,
    numbers: FxHashMap<Block, u64>,
    next: u64,
    most: usize,
}

impl Default for Told {
    fn default() -> Self {
        Self {
            blocks: BTreeMap::new(),
            numbers: FxHashMap::default(),
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
        if parts.residency.feeds.is_empty() {
            return;
        }
        for &(node, group) in payloads {
            let Some(block) = block_of(node, group, parts) else {
                return;
            };
            if self.numbers.contains_key(&block) {
                continue;
            }
            work::index();
            let parent = match parts.residency.node(node).parent() {
                NONE => None,
                above => Some(parts.residency.node(above).hash),
            };
            let number = self.next;
            self.next += 1;
            self.blocks.insert(number, (block, parent));
            self.numbers.insert(block, number);
            tell(number, &block, event(&block, parent, true), parts);
            if self.blocks.len() > self.most
                && let Some((&oldest, &(block, _))) = self.blocks.first_key_value()
            {
                self.forget(oldest, &block, parts);
            }
        }
    }

    /// Notes that an object with these payloads is not in the store any more.
    pub(super) fn remove(&mut self, payloads: &[(NodeId, u8)], parts: &mut EngineParts<'_>) {
        if self.blocks.is_empty() {
            return;
        }
        for &(node, group) in payloads {
            let block = block_of(node, group, parts);
            let number = block.and_then(|block| self.numbers.get(&block).copied());
            if let (Some(block), Some(number)) = (block, number) {
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

    /// The events that a complete feed of a namespace has told.
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

/// Notes an event for the feeds of the block's namespace that have been told of its number.
fn tell(number: u64, block: &Block, event: BlockEvent, parts: &mut EngineParts<'_>) {
    parts
        .residency
        .feeds
        .note_remote(&block.digest, number, event);
}
