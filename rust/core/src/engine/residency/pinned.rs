//! The payloads that a pin keeps: the node at its end, and their bytes.

use crate::forest::{DiskState, HostState, NodeId, NsId, Tier};
use crate::key::HashSource;
use crate::metrics::Counters;
use crate::namespace::GroupKind;
use crate::work;

use super::state::Residency;

/// Nodes that are looked at, from the end of a chain upwards, in search of a node with a state.
const STATE_SEARCH: usize = 256;

impl Residency {
    /// The deepest node of a chain where a hit may end: its depth is at most `depth`, all nodes above are in the index,
    /// and each of its states is in a tier, or is being saved.
    pub(in crate::engine) fn pin_end(
        &self,
        ns: NsId,
        hashes: &dyn HashSource,
        depth: u32,
    ) -> Option<NodeId> {
        let spec = self.spec(ns);
        let boundary = (1..=depth).rev().find(|&depth| spec.may_end(depth))?;
        let hash = hashes.get(boundary as usize - 1)?;
        let mut at = self.forest.find(ns, &hash)?;
        for _ in 0..STATE_SEARCH {
            work::node();
            if spec.may_end(self.node(at).depth) && self.has_states(at) {
                return Some(at);
            }
            at = self.parent(at)?;
        }
        None
    }

    /// Whether the states of a node are in a tier, or are being saved.
    fn has_states(&self, id: NodeId) -> bool {
        let groups = self.spec_of(id).groups.iter();
        let mut groups = groups.zip(self.node(id).payloads());
        groups.all(|(group, payload)| {
            group.kind != GroupKind::State
                || payload.host != HostState::Empty
                || payload.disk != DiskState::Empty
        })
    }

    /// Slot bytes in the arena of a chain's required payloads between two depths (exclusive, inclusive).
    pub(in crate::engine) fn chain_bytes(&self, ns: NsId, after: u32, to: u32) -> u64 {
        let after_of = |kind| if kind == GroupKind::Full { after } else { to };
        let groups = self.spec(ns).groups.iter();
        let after: Vec<u32> = groups.map(|group| after_of(group.kind)).collect();
        self.bytes_of(ns, to, &after)
    }

    /// Slot bytes in the arena of a block of a group in a chain, 0 if no hit below needs the block.
    pub(in crate::engine) fn chain_bytes_of(&self, ns: NsId, group: usize, of_block: u32) -> u64 {
        let groups = self.spec(ns).groups.len();
        let after: Vec<u32> = (0..groups)
            .map(|other| if other == group { 0 } else { of_block })
            .collect();
        let is_required = self.spec(ns).groups[group].kind == GroupKind::Full;
        if is_required {
            self.bytes_of(ns, of_block, &after)
        } else {
            0
        }
    }

    /// Slot bytes in the arena of the windows and states that a hit at a depth needs.
    pub(in crate::engine) fn end_bytes(&self, ns: NsId, depth: u32) -> u64 {
        let spec = self.spec(ns);
        let groups = 0..spec.groups.len();
        let after: Vec<u32> = groups
            .map(|group| match spec.groups[group].kind {
                GroupKind::Full | GroupKind::Ignored => depth,
                _ => spec.needed_after(group, depth),
            })
            .collect();
        self.bytes_of(ns, depth, &after)
    }

    /// Whether a payload of a node waits to be written to disk, or is being saved.
    pub(in crate::engine) fn is_unsettled(&self, id: NodeId) -> bool {
        let mut payloads = self.node(id).payloads();
        payloads.any(|payload| {
            payload.is_in_flight() || matches!(payload.disk, DiskState::Queued | DiskState::Writing)
        })
    }

    /// Demotes a node that will not be used soon: its payloads in the arena are evicted now if they are on disk, else
    /// before the payloads of other nodes. Returns the parent, unless other requests or chains use the node.
    pub(in crate::engine) fn demote(
        &mut self,
        id: NodeId,
        counters: &mut Counters,
    ) -> Option<NodeId> {
        work::node();
        let uses = self.node(id).uses();
        if uses.pins > 0 || uses.holds > 0 || self.node(id).children() > 1 {
            return None;
        }
        let mut payloads = self.node(id).payloads();
        let on_disk = payloads
            .all(|payload| !payload.is_readable(Tier::Host) || payload.disk == DiskState::Present);
        let parent = self.parent(id);
        if on_disk && self.is_host_leaf(id) {
            self.evict(id, Tier::Host, counters);
        } else if !self.touches_every_block() {
            self.withdraw(id);
            self.forest.node_mut(id).set_last(0);
            self.refresh(id);
        }
        parent
    }
}
