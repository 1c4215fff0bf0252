//! Events for the feeds: each change of a payload, and a replay of the payloads that are in the tiers.

use crate::forest::{NONE, NodeId, NsId, Tier};
#[cfg(feature = "check")]
use crate::key::BlockHash;
use crate::session::BlockEvent;
use crate::work;

use super::super::events::Replay;
use super::state::Residency;

/// Nodes that a step of a replay looks at.
const REPLAY_STEP: usize = 512;

impl Residency {
    fn event(&self, id: NodeId, group: u8, tier: Tier, stored: bool) -> BlockEvent {
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
        if self.feeds.is_empty() || self.node(id).is_detached() {
            return;
        }
        let event = self.event(id, group, tier, stored);
        self.feeds.note(self.node(id).ns, id, event);
    }

    /// Notes that a node is about to leave the index: no lookup finds its payloads any more.
    pub(super) fn note_detached(&mut self, id: NodeId) {
        if self.feeds.is_empty() {
            return;
        }
        for (group, tier) in self.readable(id) {
            self.note_event(id, group, tier, false);
        }
    }

    /// Groups and tiers of a node's readable payloads.
    fn readable(&self, id: NodeId) -> Vec<(u8, Tier)> {
        let payloads = (0u8..).zip(self.node(id).payloads());
        let in_tiers = payloads.flat_map(|(group, payload)| {
            let tiers = Tier::ALL.into_iter();
            let tiers = tiers.filter(move |&tier| payload.is_readable(tier));
            tiers.map(move |tier| (group, tier))
        });
        in_tiers.collect()
    }

    /// Adds events for some more of the payloads that a namespace has in the tiers.
    pub(in crate::engine) fn step_replay(
        &self,
        ns: NsId,
        replay: &mut Replay,
        events: &mut Vec<BlockEvent>,
    ) {
        for _ in 0..REPLAY_STEP {
            work::node();
            if replay.climbs {
                self.climb(replay);
            } else if let Some((id, epoch)) = replay.path.pop() {
                let is_here = self.forest.is_live(id, epoch) && !self.node(id).is_detached();
                if is_here && !replay.has_told(id) {
                    replay.ahead.insert(id);
                    let payloads = self.readable(id).into_iter();
                    events.extend(payloads.map(|(group, tier)| self.event(id, group, tier, true)));
                }
            } else if replay.next as usize >= self.forest.ids_given() {
                // The changes of all nodes are told from now on.
                replay.next = NONE;
                replay.ahead.clear();
                return;
            } else {
                let id = replay.next;
                let is_due = self.forest.is_used(id)
                    && self.node(id).ns == ns
                    && !self.node(id).is_detached()
                    && !replay.has_told(id);
                if is_due {
                    replay.path.push((id, self.node(id).epoch));
                    replay.climbs = true;
                } else {
                    replay.next += 1;
                    replay.ahead.remove(&id);
                }
            }
        }
    }

    /// Goes one node up from the top of a replay's path.
    fn climb(&self, replay: &mut Replay) {
        let top = replay.path.last().copied();
        let top = top.filter(|&(id, epoch)| self.forest.is_live(id, epoch));
        let Some((top, _)) = top else {
            // The node was freed meanwhile: the replay continues with the rest of the path.
            replay.path.pop();
            replay.climbs = false;
            return;
        };
        let above = self.parent(top);
        match above.filter(|&above| !self.node(above).is_detached() && !replay.has_told(above)) {
            Some(above) => replay.path.push((above, self.node(above).epoch)),
            None => replay.climbs = false,
        }
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
