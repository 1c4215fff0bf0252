//! Entries for a server, whose clients may ask for any amount of work: each entry does a bounded
//! part of a verb of [`Session`](undercroft_contract::session::Session).

use undercroft_contract::namespace::GroupKind;
use undercroft_contract::session::{Extent, Tokens, TransferId};

use crate::forest::{NONE, NodeId};

use super::super::fetch::LastAnswer;
use super::super::ids::{RequestId, SessionId, id_of};
use super::super::residency::NamespaceUsage;
use super::engine::Engine;

/// The places of the payloads of a hit, listed from the end of the hit to its beginning.
#[derive(Clone, Debug)]
pub struct HitExtents {
    request: RequestId,
    lease: NodeId,
    /// The node to be looked at next.
    at: NodeId,
    /// For each group: the depth after which the hit needs the group's blocks.
    after: Vec<u32>,
    /// Nodes that remain.
    nodes: u32,
    blocks: u64,
}

impl HitExtents {
    /// Blocks of all groups together.
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Whether all extents have been listed.
    pub fn is_done(&self) -> bool {
        self.nodes == 0
    }
}

/// Bytes of the slots in the arena of a chain's required payloads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChainBytes {
    hash_block_size: u32,
    /// For each group with required payloads: the hash blocks of a block, and the bytes of a slot.
    groups: Vec<(u32, u64)>,
}

impl ChainBytes {
    /// With hash blocks of so many tokens, and for each group with required payloads the hash blocks of a block and the
    /// bytes of a slot.
    pub fn of(hash_block_size: u32, groups: Vec<(u32, u64)>) -> Self {
        Self {
            hash_block_size,
            groups,
        }
    }

    /// Whole hash blocks of so many tokens.
    pub fn hash_blocks(&self, tokens: Tokens) -> u32 {
        tokens.0 / self.hash_block_size
    }

    /// Tokens of so many hash blocks.
    pub fn tokens(&self, hash_blocks: u32) -> Tokens {
        Tokens(hash_blocks.saturating_mul(self.hash_block_size))
    }

    /// Bytes between two depths in hash blocks (exclusive, inclusive).
    pub fn between(&self, after: u32, to: u32) -> u64 {
        let bytes = |&(of_block, bytes): &(u32, u64)| {
            u64::from((to / of_block).saturating_sub(after / of_block)) * bytes
        };
        self.groups.iter().map(bytes).sum()
    }
}

impl Engine {
    /// The bytes of the chains of a session's namespace; `None` if there is no such session.
    pub fn chain_bytes(&self, session: SessionId) -> Option<ChainBytes> {
        let ns = self.sessions.get(session)?.ns;
        let spec = self.residency.spec(ns);
        let groups = (0..spec.groups.len()).filter_map(|group| {
            let of_block = spec.hash_blocks(group);
            let bytes = self.residency.chain_bytes_of(ns, group, of_block);
            (bytes > 0).then_some((of_block, bytes))
        });
        Some(ChainBytes::of(spec.hash_block_size, groups.collect()))
    }

    /// Bytes of the windows and states that a hit of a session of so many tokens keeps in the arena.
    pub fn end_bytes(&self, session: SessionId, hit: Tokens) -> u64 {
        let Some(session) = self.sessions.get(session) else {
            return 0;
        };
        let depth = hit.0 / self.residency.hash_block_size(session.ns);
        self.residency.end_bytes(session.ns, depth)
    }

    /// Starts to list the places of the payloads of a request's hit, for [`Engine::step_hit_extents`]. `None` without
    /// a hit.
    pub fn start_hit_extents(
        &self,
        session: SessionId,
        request: &str,
        computed: Tokens,
    ) -> Option<HitExtents> {
        let id = self.sessions.request_id(session, request)?;
        let lease = self.shares[id].lease;
        if lease == NONE {
            return None;
        }
        let local = computed.0 / self.residency.spec_of(lease).hash_block_size;
        let top = self.residency.node(lease);
        let spec = self.residency.spec(top.ns);
        let after: Vec<u32> = top
            .groups()
            .map(|group| spec.needed_after(usize::from(group), top.depth).max(local))
            .collect();
        Some(HitExtents {
            request: id,
            lease,
            at: lease,
            nodes: top.depth
                - after
                    .iter()
                    .copied()
                    .min()
                    .map_or(0, |low| low.min(top.depth)),
            blocks: self.residency.blocks_of(top.ns, top.depth, &after),
            after,
        })
    }

    /// The extents of the next `nodes` hash blocks, front to back; the next call lists the blocks before them.
    /// `None` when no hash block is left, or if the request has another hit now.
    pub fn step_hit_extents(&self, hit: &mut HitExtents, nodes: u32) -> Option<Vec<Extent>> {
        let is_leased = self.shares.get(hit.request)?.lease == hit.lease;
        if !is_leased {
            return None;
        }
        let spec = self.residency.spec_of(hit.lease);
        let looks_at = hit.nodes.min(nodes);
        if looks_at == 0 {
            return None;
        }
        hit.nodes -= looks_at;
        let mut payloads = Vec::new();
        for _ in 0..looks_at {
            let node = self.residency.node(hit.at);
            for (group, &after) in (0u8..).zip(&hit.after) {
                if node.depth > after && spec.ends_block(usize::from(group), node.depth) {
                    payloads.push((hit.at, group));
                }
            }
            hit.at = node.parent();
        }
        payloads.reverse();
        Some(self.residency.extents(&payloads))
    }

    /// Begins a load like [`Engine::begin_load`], for a client that knows the extents of its hit: this function lists
    /// no extents.
    pub fn begin_known_load(
        &mut self,
        session: SessionId,
        request: &str,
        computed: Tokens,
        external: Tokens,
    ) -> Option<TransferId> {
        let begun = self.lease_load(session, request, computed, external);
        if begun.is_none() {
            self.counters.load_failures += 1;
        }
        begun
    }

    fn lease_load(
        &mut self,
        session: SessionId,
        request: &str,
        computed: Tokens,
        external: Tokens,
    ) -> Option<TransferId> {
        let id = self.sessions.request_id(session, request)?;
        let share = &self.shares[id];
        let (hit, LastAnswer::Hit { after: local, .. }) = (share.lease, share.answer) else {
            return None;
        };
        let ns = self.residency.node(hit).ns;
        let spec = self.residency.spec(ns);
        let end = computed.0.checked_add(external.0)?;
        let (boundary, from) = (
            end / spec.hash_block_size,
            computed.0 / spec.hash_block_size,
        );
        // The hit's payloads are in the arena. A shorter load may need other payloads of a window or a state.
        let depth = self.residency.node(hit).depth;
        let covers = boundary == depth || boundary < depth && spec.has_full_only();
        let is_sound = end.is_multiple_of(spec.hash_block_size) && spec.may_end(boundary);
        if !covers || !is_sound || from < local || boundary <= from {
            return None;
        }
        let after: Vec<u32> = (0..spec.groups.len())
            .map(|group| match spec.groups[group].kind {
                GroupKind::Ignored => boundary,
                _ => spec.needed_after(group, boundary).max(from),
            })
            .collect();
        let bytes = self.residency.bytes_of(ns, boundary, &after);
        let target = self.residency.forest().ancestor(hit, boundary);
        let key = self.start_load((id, request), (target, bytes), (computed, external));
        Some(id_of(key))
    }

    /// Ends a request's lookup unless the lookup was answered with a hit. After a hit, a worker may be copying from the
    /// leased slots: the message that begins its load may not have reached the engine yet.
    pub fn end_unanswered(&mut self, session: SessionId, request: &str) {
        let Some(id) = self.sessions.request_id(session, request) else {
            return;
        };
        let share = &self.shares[id];
        if share.waits.disk.is_some() || share.lease == NONE {
            self.end_lookup(session, request);
        }
    }

    /// Bytes of the slots of saves under way: for one session, and for all sessions.
    pub fn save_bytes(&self, session: SessionId) -> (u64, u64) {
        let own = self.sessions.transfers_of(session).save_bytes;
        (own, self.sessions.all_transfers().save_bytes)
    }

    /// Bytes of the arena.
    pub fn host_capacity(&self) -> u64 {
        self.residency.host().capacity()
    }

    /// The sessions.
    pub fn session_ids(&self) -> impl Iterator<Item = SessionId> {
        self.sessions.ids()
    }

    /// A session's lookups and transfers under way, and its totals. Costs a pass over its lookups.
    pub fn session_usage(&self, session: SessionId) -> SessionUsage {
        let Some(state) = self.sessions.get(session) else {
            return SessionUsage::default();
        };
        let transfers = self.sessions.transfers_of(session);
        let is_pending = |id: &&RequestId| self.shares[**id].waits.disk.is_some();
        SessionUsage {
            lookups: state.requests.len() as u64,
            pending: state.requests.values().filter(is_pending).count() as u64,
            loads: transfers.loads,
            saves: transfers.saves,
            load_bytes: transfers.load_bytes,
            save_bytes: transfers.save_bytes,
            answered: state.totals.answered,
            hits: state.totals.hits,
            loaded_bytes: state.totals.loaded_bytes,
            saved_bytes: state.totals.saved_bytes,
            namespace: self.residency.namespace_usage(state.ns),
        }
    }
}

/// A session's lookups and transfers under way, and its totals.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SessionUsage {
    /// Requests with a lookup.
    pub lookups: u64,
    /// Requests whose payloads are being read from disk.
    pub pending: u64,
    /// Loads under way.
    pub loads: u64,
    /// Saves under way.
    pub saves: u64,
    /// Bytes of slots that the loads copy from.
    pub load_bytes: u64,
    /// Bytes of slots that the saves copy to.
    pub save_bytes: u64,
    /// Requests whose lookup was answered since the session was opened.
    pub answered: u64,
    /// Answered requests with a hit.
    pub hits: u64,
    /// Bytes of the loads that have succeeded since the session was opened.
    pub loaded_bytes: u64,
    /// Bytes of the saves that have succeeded since the session was opened.
    pub saved_bytes: u64,
    /// The share and bytes of the session's namespace, those of all its sessions together.
    pub namespace: NamespaceUsage,
}
