//! Leases keep payloads where they are; touches tell the policies which payloads were used.

use crate::forest::{DiskState, NONE, NodeId, Tier, Touch};
use crate::namespace::GroupKind;
use crate::slots::slot_offset;
use crate::work;

use super::state::Residency;

impl Residency {
    /// Adds a lease to a node.
    pub(in crate::engine) fn pin(&mut self, id: NodeId) {
        self.withdraw(id);
        self.forest.node_mut(id).change_uses(|uses| uses.pins += 1);
    }

    /// Ends a lease.
    pub(in crate::engine) fn unpin(&mut self, id: NodeId) {
        self.forest.node_mut(id).change_uses(|uses| {
            let pins = uses.pins.checked_sub(1);
            uses.pins = pins.unwrap_or_else(|| panic!("a lease of node {id} ends twice"));
        });
        self.reconcile(id);
    }

    /// Leases a node, and the nodes above whose windows or chunks a hit at the node needs.
    pub(in crate::engine) fn pin_hit(&mut self, id: NodeId) {
        self.pin(id);
        for above in self.window_above(id) {
            self.withdraw(above);
            let mut node = self.forest.node_mut(above);
            node.change_uses(|uses| uses.holds += 1);
        }
    }

    /// Ends a lease of [`Residency::pin_hit`].
    pub(in crate::engine) fn unpin_hit(&mut self, id: NodeId) {
        for above in self.window_above(id) {
            let mut node = self.forest.node_mut(above);
            node.change_uses(|uses| {
                let holds = uses.holds.checked_sub(1);
                uses.holds = holds.unwrap_or_else(|| panic!("a hold of node {above} ends twice"));
            });
            if !node.is_detached() {
                self.refresh(above);
            }
        }
        self.unpin(id);
    }

    /// The nodes above `id` with payloads of windows or chunks that a hit at `id` needs.
    pub(in crate::engine) fn window_above(&self, id: NodeId) -> Vec<NodeId> {
        let top = self.node(id);
        let spec = self.spec(top.ns);
        let kinds = spec.groups.iter().enumerate();
        let windows = kinds.filter(|(_, of)| {
            matches!(
                of.kind,
                GroupKind::SlidingWindow { .. } | GroupKind::ChunkedLocal { .. }
            )
        });
        let lowest = windows
            .map(|(group, _)| spec.needed_after(group, top.depth))
            .min();
        let Some(lowest) = lowest else {
            return Vec::new();
        };
        let above = self.forest.ancestors(id);
        above
            .take_while(|&at| self.node(at).depth > lowest)
            .collect()
    }

    /// Notes a touch of a hit that ends at `id`, at the current tick.
    pub(in crate::engine) fn touch_hit(&mut self, id: NodeId) {
        if self.touches_every_block() {
            let mut at = id;
            while at != NONE {
                work::node();
                self.touch(at);
                at = self.node(at).parent();
            }
        } else {
            self.touch(id);
            for above in self.window_above(id) {
                self.renew(above);
            }
        }
    }

    /// Sets a node's last use to the current tick, without counting a hit.
    pub(in crate::engine) fn renew(&mut self, id: NodeId) {
        // A policy that learns ages accounts for every change of an age by itself.
        if self.node(id).touch().last != self.tick && !self.touches_every_block() {
            self.withdraw(id);
            self.forest.node_mut(id).set_last(self.tick);
            self.refresh(id);
            self.note_touch(id);
        }
    }

    /// Marks the records of a node's payloads on disk: a later write stores the last touch in them.
    fn note_touch(&mut self, id: NodeId) {
        if self.node(id).slots(Tier::Disk) == 0 {
            return;
        }
        let region = self.region(id, Tier::Disk);
        for group in self.node(id).groups() {
            let payload = self.node(id).payload(group);
            if payload.disk == DiskState::Present {
                let (class, device) = (self.class(id, region, group), self.node(id).device);
                let offset = slot_offset(payload.disk_slot);
                self.disk_mut(device).mark_touched(class, offset);
            }
        }
    }

    /// Notes a touch at the current tick.
    fn touch(&mut self, id: NodeId) {
        let tick = self.tick;
        if self.node(id).touch().last == tick {
            return;
        }
        self.withdraw(id);
        let before = self.node(id).touch();
        let mut hit_class = before.hit_class;
        for tier in Tier::ALL {
            if self.node(id).slots(tier) > 0 {
                let region = self.region(id, tier);
                let policy = &mut self.policies(region).leaves;
                hit_class = policy.on_hit(before.hit_class, before.last, tick);
            }
        }
        self.forest.node_mut(id).set_touch(Touch {
            last: tick,
            hit_class,
        });
        self.refresh(id);
        self.note_touch(id);
    }
}
