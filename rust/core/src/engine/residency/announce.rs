//! Changes of payloads, noted for those who listen ([`Changes`](super::super::changes::Changes)).

use crate::forest::{NodeId, NsId, Tier};
use crate::key::BlockHash;
use crate::session::BlockEvent;

use super::super::changes::Change;
use super::state::Residency;

impl Residency {
    /// The event that a payload of a node has become readable in a tier (`stored`), or is no longer readable.
    pub(in crate::engine) fn event(
        &self,
        id: NodeId,
        group: u8,
        tier: Tier,
        stored: bool,
    ) -> BlockEvent {
        let parent = self.parent(id).filter(|_| stored);
        BlockEvent {
            tier: tier.into(),
            stored,
            group,
            hash: self.node(id).hash,
            parent: parent.map(|parent| self.node(parent).hash),
        }
    }

    /// Notes that a payload of a node has become readable in a tier (`stored`), or is no longer readable.
    pub(super) fn note_event(&mut self, id: NodeId, group: u8, tier: Tier, stored: bool) {
        if !self.changes.has_feeds || self.node(id).is_detached() {
            return;
        }
        let event = self.event(id, group, tier, stored);
        let (ns, node) = (self.node(id).ns, id);
        self.changes.note(Change::Payload { ns, node, event });
    }

    /// Notes that the last payload of a block has left a tier.
    pub(super) fn note_departure(
        &mut self,
        (ns, hash): (NsId, BlockHash),
        tier: Tier,
        evicted: bool,
    ) {
        if self.changes.has_departures {
            self.changes.note(Change::Departure {
                ns,
                hash,
                tier,
                evicted,
            });
        }
    }

    /// Notes that a node is about to leave the index: no lookup finds its payloads any more.
    pub(super) fn note_detached(&mut self, id: NodeId) {
        if !self.changes.has_feeds {
            return;
        }
        for (group, tier) in self.readable(id) {
            self.note_event(id, group, tier, false);
        }
    }

    /// Groups and tiers of a node's readable payloads.
    pub(in crate::engine) fn readable(&self, id: NodeId) -> Vec<(u8, Tier)> {
        let payloads = (0u8..).zip(self.node(id).payloads());
        let in_tiers = payloads.flat_map(|(group, payload)| {
            let tiers = Tier::ALL.into_iter();
            let tiers = tiers.filter(move |&tier| payload.is_readable(tier));
            tiers.map(move |tier| (group, tier))
        });
        in_tiers.collect()
    }

    /// The events that a complete feed has told of a namespace, by hash, group and tier.
    #[cfg(feature = "check")]
    pub(in crate::engine) fn announced(&self, ns: NsId) -> Vec<BlockEvent> {
        let ids = self.forest.ids();
        let ids = ids.filter(|&id| self.node(id).ns == ns && !self.node(id).is_detached());
        let all = ids.flat_map(|id| {
            let payloads = self.readable(id).into_iter();
            payloads.map(move |(group, tier)| self.event(id, group, tier, true))
        });
        all.collect()
    }

    /// The payloads in the tiers: namespace, hash, group, and the place on disk.
    #[cfg(feature = "check")]
    #[expect(clippy::type_complexity, reason = "only the simulator takes it")]
    pub(in crate::engine) fn held(&self) -> Vec<(NsId, BlockHash, u8, Option<(u16, u64, u32)>)> {
        let ids = self.forest.ids();
        let ids = ids.filter(|&id| !self.node(id).is_detached());
        let all = ids.flat_map(|id| {
            let node = self.node(id);
            let payloads = self.readable(id).into_iter();
            payloads.map(move |(group, tier)| {
                let place = (tier == Tier::Disk).then(|| {
                    let (offset, bytes) = self.disk_range(id, group);
                    (node.device.number(), offset, bytes)
                });
                (node.ns, node.hash, group, place)
            })
        });
        all.collect()
    }
}
