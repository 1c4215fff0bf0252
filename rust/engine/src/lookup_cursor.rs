//! The search of a lookup: what it asks for, how far it has come, and what it has found.

use undercroft_contract::explain::Reason;
use undercroft_contract::key::HashSource;

use crate::forest::{NONE, NodeId, NsId};

use super::residency::Residency;

/// A lookup's question in hash blocks.
#[derive(Clone, Copy, Debug)]
pub(super) struct SearchSpan {
    /// Computed tokens: the device has their hash blocks.
    pub(super) computed: u32,
    /// Number of whole hash blocks among the computed tokens.
    pub(super) local: u32,
    /// The session's hits end at multiples of this number.
    pub(super) align: u32,
    /// Tokens of a hash block.
    pub(super) hash_block_size: u32,
    /// A hit of fewer tokens does not serve the request.
    pub(super) min: u32,
    /// A hit that gains fewer tokens is not worth a load.
    pub(super) least: u32,
    /// Whether the planner decides which loads are worth their time.
    pub(super) is_planned: bool,
}

impl SearchSpan {
    /// Where a hit begins, and the number of which its end is a multiple.
    pub(super) fn bounds(&self) -> (u32, u32) {
        (self.local, self.align)
    }

    /// Whether a hit at `boundary` is worth a load.
    pub(super) fn is_worth(&self, boundary: u32) -> bool {
        boundary > self.local && boundary * self.hash_block_size - self.computed >= self.least
    }
}

/// The nodes of a prompt that lookups may use.
#[derive(Clone, Copy, Debug)]
pub(super) struct FoundChain {
    /// The deepest node, or `NONE`, and its depth.
    pub(super) deepest: NodeId,
    pub(super) depth: u32,
    /// The next block is in the index, and no lookup may use it yet.
    pub(super) is_incomplete: bool,
}

impl FoundChain {
    /// The deepest node, or `NONE`, and its depth.
    pub(super) fn end(&self) -> (NodeId, u32) {
        (self.deepest, self.depth)
    }

    /// The epoch of the deepest node, 0 without one.
    pub(super) fn epoch(&self, residency: &Residency) -> u32 {
        match self.deepest {
            NONE => 0,
            node => residency.node(node).epoch,
        }
    }

    /// Whether the chain is as it was found with this epoch, if nothing was added since.
    pub(super) fn is_there(&self, epoch: u32, residency: &Residency) -> bool {
        let is_live = || residency.forest().is_live(self.deepest, epoch);
        self.deepest == NONE || is_live() && !residency.has_left_index(self.deepest)
    }
}

/// Where a hit may end.
#[derive(Clone, Copy, Debug)]
pub(super) enum Ending {
    /// There are more nodes to look at.
    Further,
    /// All payloads are in the arena. The hit has no more tokens for this reason.
    InHost(NodeId, Reason),
    /// Payloads have to be read from disk, or to be compared with their checksums.
    OnDisk(NodeId),
    /// Nowhere. The request reaches this many tokens at best.
    None { reason: Reason, reach: u32 },
}

/// The progress of a lookup that takes several entries.
///
/// With windows or states a hit may end far above the deepest node of the prompt, and each node on the way has to be
/// looked at.
#[derive(Debug, Default)]
pub struct LookupCursor {
    /// The first entry has been made.
    pub(super) has_begun: bool,
    pub(super) may_promote: bool,
    /// The deepest node where a hit may end as far as the search has come, and its epoch.
    pub(super) at: Option<(NodeId, u32)>,
    /// A hit may end at that node only by a read from disk, which this lookup does not start. The search continues
    /// for a hit that is in the arena.
    pub(super) host_only: bool,
    /// Why this lookup starts no read.
    pub(super) unread: Reason,
    /// The request waits for the remote store: the answer is pending even if the search finds a hit.
    pub(super) awaits_remote: bool,
}

impl LookupCursor {
    pub(super) fn set(&mut self, node: NodeId, residency: &Residency) {
        self.at = Some((node, residency.node(node).epoch));
    }

    /// The node at which the search continues, at or above the depth `limit` on the chain of `deepest`. The search
    /// begins anew if the chain has changed.
    pub(super) fn top(
        &mut self,
        ns: NsId,
        hashes: &dyn HashSource,
        (deepest, limit): (NodeId, u32),
        residency: &Residency,
    ) -> NodeId {
        let is_there = |&(id, epoch): &(NodeId, u32)| {
            let node = residency.node(id);
            residency.forest().is_live(id, epoch)
                && node.is_visible()
                && node.ns == ns
                && node.depth <= limit
                && hashes.get(node.depth as usize - 1) == Some(node.hash)
                && !residency.has_left_index(id)
        };
        if let Some((id, _)) = self.at.filter(is_there) {
            return id;
        }
        (self.at, self.host_only) = (None, false);
        residency.forest().ancestor(deepest, limit)
    }
}
