//! Which nodes were refused a place on disk: without this memory, each block of a long chain would try all its
//! ancestors again.

use rustc_hash::FxHashMap;
use undercroft_contract::tier::Tier;

use crate::forest::NodeId;

use super::super::residency::{DiskRefusal, Residency};

/// How long a refusal is valid if no slot on disk is freed, in nanoseconds: payloads in use may become evictable.
const REFUSED_NS: u64 = 10_000_000_000;

/// Tables of refusals, each of which grows by itself: a single table would take long to grow.
const SHARDS: usize = 64;

fn shard(id: NodeId) -> usize {
    id as usize % SHARDS
}

/// Why a payload stays in the arena only.
#[derive(Clone, Copy, Debug)]
pub(super) enum WriteRefusal {
    /// No disk has a slot for the payload.
    Disk(DiskRefusal),
    /// The payload's required ancestor is not on disk.
    Ancestor,
}

/// Nodes, with their epochs, that were refused since a slot on disk was freed last.
///
/// Invariant: no entry is older than `REFUSED_NS`, or older than the last freeing of a slot.
#[derive(Debug)]
pub(super) struct Refusals {
    nodes: [FxHashMap<(NodeId, u32), WriteRefusal>; SHARDS],
    since_ns: u64,
    /// Number of slots that had been freed on disk at the last look.
    freed: u64,
}

impl Default for Refusals {
    fn default() -> Self {
        Self {
            nodes: std::array::from_fn(|_| FxHashMap::default()),
            since_ns: 0,
            freed: 0,
        }
    }
}

impl Refusals {
    fn clear(&mut self) {
        self.nodes.iter_mut().for_each(FxHashMap::clear);
    }

    /// Forgets refusals that are too old.
    pub(super) fn expire(&mut self, now_ns: u64) {
        if now_ns >= self.since_ns.saturating_add(REFUSED_NS) {
            self.since_ns = now_ns;
            self.clear();
        }
    }

    /// Forgets all refusals if a slot was freed since.
    fn catch_up(&mut self, residency: &Residency) {
        let freed = residency.freed(Tier::Disk);
        if self.freed != freed {
            self.freed = freed;
            self.clear();
        }
    }

    /// Notes why a node was refused.
    pub(super) fn note(&mut self, id: NodeId, why: WriteRefusal, residency: &Residency) {
        // Without a directory that takes writes, all nodes are refused anyway.
        if matches!(why, WriteRefusal::Disk(DiskRefusal::Degraded)) {
            return;
        }
        self.catch_up(residency);
        self.nodes[shard(id)].insert((id, residency.node(id).epoch), why);
    }

    /// Why a node was refused, if another attempt would be refused again.
    pub(super) fn of(
        &mut self,
        id: NodeId,
        residency: &Residency,
        now_ns: u64,
    ) -> Option<WriteRefusal> {
        if !residency.any_disk_takes_writes(now_ns) {
            return Some(WriteRefusal::Disk(DiskRefusal::Degraded));
        }
        self.catch_up(residency);
        let nodes = &self.nodes[shard(id)];
        nodes.get(&(id, residency.node(id).epoch)).copied()
    }
}
