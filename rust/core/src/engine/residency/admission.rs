//! New blocks: whether the policies admit them, and their nodes.

use crate::forest::{NONE, NodeId, NsId, Touch};
use crate::key::BlockHash;

use super::geometry::Region;
use super::state::Residency;

impl Residency {
    /// Offers a block that is in no tier to the policies. Returns the hit class with which the block enters.
    pub(in crate::engine) fn offer_block(&mut self, fingerprint: u64) -> u8 {
        let tick = self.tick;
        let mut hit_class = self.host_policies.leaves.on_offer(fingerprint, tick);
        for disk in &mut self.disks {
            hit_class = hit_class.max(disk.policies.leaves.on_offer(fingerprint, tick));
        }
        hit_class
    }

    /// Lets the policy of the arena remember a block that was offered and is not saved.
    pub(in crate::engine) fn refuse_block(&mut self, fingerprint: u64, hit_class: u8) {
        let policy = &mut self.host_policies.leaves;
        policy.on_refuse(fingerprint, hit_class, self.tick);
    }

    /// Whether a region is full and its policy keeps every leaf of a new payload's size class.
    pub(in crate::engine) fn refuses_new(
        &mut self,
        id: NodeId,
        group: u8,
        region: Region,
        hit_class: u8,
    ) -> bool {
        let (class, tick) = (self.class(id, region, group), self.tick);
        self.slots(region).is_full(class) && self.policies(region).refuses(class, hit_class, tick)
    }

    /// Adds a block below `parent` (`NONE`: a root), without payloads.
    pub(in crate::engine) fn insert(
        &mut self,
        ns: NsId,
        parent: NodeId,
        hash: BlockHash,
        hit_class: u8,
    ) -> NodeId {
        let depth = self.forest.depth(parent) + 1;
        let spec = self.spec(ns);
        let (groups, required) = (spec.groups.len(), spec.required(depth));
        let id = self.forest.insert(ns, parent, hash, groups, required);
        self.forest.node_mut(id).set_touch(Touch {
            last: self.tick,
            hit_class,
        });
        if required == 0 {
            // Nothing has to be copied for this block: it is visible once its parent is, and there is nothing to write.
            let reach = self.reach(id);
            self.forest.node_mut(id).set_reach(reach);
        }
        if parent != NONE {
            // The child needs the last copy of its parent's payload.
            self.refresh(parent);
        }
        id
    }
}
