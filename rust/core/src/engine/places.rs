//! Transitions of payload places: who holds what in which tier, what follows for visibility and
//! leaf-hood. Every change of a place goes through here.

use crate::forest::{DiskState, HostState, NONE, NodeId, Tier};
use crate::namespace::GroupKind;
use crate::policy::Policy;
use crate::slots::{Class, Owner, SLOT_ALIGN};

use super::Engine;

/// Why a payload leaves a tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Loss {
    /// For space: the policy remembers what it was worth.
    Evicted,
    /// For any other reason.
    Dropped,
}

/// Offset in bytes of a place.
pub(super) fn bytes(at: u32) -> u64 {
    u64::from(at) * SLOT_ALIGN
}

/// Place of an offset in bytes.
pub(super) fn units(offset: u64) -> u32 {
    u32::try_from(offset / SLOT_ALIGN).unwrap_or(u32::MAX)
}

impl Engine {
    pub(super) fn host_class(&self, id: NodeId, group: u8) -> Class {
        let ns = usize::from(self.forest.node(id).ns);
        self.namespaces[ns].host_class[usize::from(group)].unwrap_or(0)
    }

    pub(super) fn disk_class(&self, id: NodeId, device: usize, group: u8) -> Class {
        let ns = usize::from(self.forest.node(id).ns);
        self.namespaces[ns].disk_class[device][usize::from(group)].unwrap_or(0)
    }

    pub(super) fn policy(&mut self, id: NodeId, tier: Tier) -> &mut Policy {
        match tier {
            Tier::Host => &mut self.host_policy,
            Tier::Disk => &mut self.disks[usize::from(self.forest.node(id).device)].policy,
        }
    }

    /// One more place of `tier` is in use at a node.
    pub(super) fn place_taken(&mut self, id: NodeId, tier: Tier) {
        let was_active = self.forest.is_active(id, tier);
        let node = self.forest.node_mut(id);
        node.places_used[tier as usize] += 1;
        if node.places_used[tier as usize] == 1 {
            let (hit_class, last) = (node.hit_class, node.last);
            let fingerprint = Self::fingerprint(&node.hash);
            self.policy(id, tier)
                .on_insert(fingerprint, hit_class, last);
        }
        if !was_active {
            self.activity_changed(id, tier, true);
        }
    }

    /// One place of `tier` fewer is in use at a node.
    fn place_left(&mut self, id: NodeId, tier: Tier, loss: Loss) {
        self.rescue_waits = false;
        if tier == Tier::Disk {
            self.refused.forget();
        }
        let node = self.forest.node_mut(id);
        node.places_used[tier as usize] -= 1;
        if node.places_used[tier as usize] == 0 {
            let (hit_class, last) = (node.hit_class, node.last);
            let fingerprint = Self::fingerprint(&node.hash);
            match loss {
                Loss::Evicted => self.policy(id, tier).on_evict(fingerprint, last, hit_class),
                Loss::Dropped => self.policy(id, tier).on_drop(last, hit_class),
            }
        }
        if !self.forest.is_active(id, tier) {
            self.activity_changed(id, tier, false);
        }
    }

    /// Tells the ancestors that a node has become active in a tier, or has ceased to be.
    fn activity_changed(&mut self, id: NodeId, tier: Tier, active: bool) {
        let mut child = id;
        loop {
            let parent = self.forest.node(child).parent;
            if parent == NONE {
                return;
            }
            let was_active = self.forest.is_active(parent, tier);
            let count = &mut self.forest.node_mut(parent).tier_children[tier as usize];
            if active {
                *count += 1
            } else {
                *count -= 1
            }
            self.refresh(parent);
            if was_active == self.forest.is_active(parent, tier) {
                return;
            }
            child = parent;
        }
    }

    /// Adds a lease to a node.
    pub(super) fn pin(&mut self, id: NodeId) {
        self.unleaf_both(id);
        self.forest.node_mut(id).pins += 1;
    }

    /// Ends a lease.
    pub(super) fn unpin(&mut self, id: NodeId) {
        let node = self.forest.node_mut(id);
        debug_assert!(node.pins > 0, "lease ended twice");
        node.pins -= 1;
        self.settle(id);
    }

    /// Leases a node with all that a hit there needs of the nodes above it.
    pub(super) fn pin_hit(&mut self, id: NodeId) {
        self.pin(id);
        for above in self.window_above(id) {
            self.unleaf_both(above);
            self.forest.node_mut(above).holds += 1;
        }
    }

    /// Ends such a lease.
    pub(super) fn unpin_hit(&mut self, id: NodeId) {
        for above in self.window_above(id) {
            let node = self.forest.node_mut(above);
            debug_assert!(node.holds > 0, "hold ended twice");
            node.holds -= 1;
            if !node.detached {
                self.refresh(above);
            }
        }
        self.unpin(id);
    }

    /// The nodes above `id` with payloads of windows or chunks that a hit at `id` needs.
    pub(super) fn window_above(&self, id: NodeId) -> Vec<NodeId> {
        let top = self.forest.node(id);
        let spec = &self.namespaces[usize::from(top.ns)].spec;
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
        let mut above = Vec::new();
        let mut at = top.parent;
        while at != NONE && lowest.is_some_and(|lowest| self.forest.node(at).depth > lowest) {
            above.push(at);
            at = self.forest.node(at).parent;
        }
        above
    }

    /// Makes a node one of the current tick, without counting a hit.
    pub(super) fn renew(&mut self, id: NodeId) {
        // A policy that learns ages accounts for every change of one by itself.
        if self.forest.node(id).last != self.tick && !self.host_policy.touches_every_block() {
            self.unleaf_both(id);
            self.forest.node_mut(id).last = self.tick;
            self.refresh(id);
        }
    }

    /// Notes a touch at the current tick.
    pub(super) fn touch(&mut self, id: NodeId) {
        if self.forest.node(id).last == self.tick {
            return;
        }
        self.unleaf_both(id);
        let tick = self.tick;
        let node = self.forest.node(id);
        let (hit_class, last) = (node.hit_class, node.last);
        let mut class = hit_class;
        for tier in [Tier::Host, Tier::Disk] {
            if self.forest.node(id).places_used[tier as usize] > 0 {
                class = self.policy(id, tier).on_hit(hit_class, last, tick);
            }
        }
        let node = self.forest.node_mut(id);
        node.hit_class = class;
        node.last = tick;
        self.refresh(id);
    }

    /// Gives a slot of the arena to a payload, evicting if need be.
    pub(super) fn take_host(&mut self, id: NodeId, group: u8, state: HostState) -> bool {
        let class = self.host_class(id, group);
        let owner = Owner { node: id, group };
        let mut drains = 0;
        let offset = loop {
            if let Some(offset) = self.host.alloc(class, owner) {
                break offset;
            }
            if !self.make_room(Tier::Host, 0, class, &mut drains) {
                return false;
            }
        };
        self.unleaf_both(id);
        let node = self.forest.node_mut(id);
        let place = node.place_mut(group);
        debug_assert_eq!(place.host, HostState::Empty, "payload has a slot already");
        place.host = state;
        place.host_at = units(offset);
        node.busy += 1;
        self.place_taken(id, Tier::Host);
        self.refresh(id);
        true
    }

    /// The copy or read into a slot of the arena has ended well.
    pub(super) fn host_filled(&mut self, id: NodeId, group: u8) {
        let node = self.forest.node_mut(id);
        node.place_mut(group).host = HostState::Present;
        node.busy -= 1;
        if !node.detached {
            self.rise(id);
        }
        self.settle(id);
    }

    /// Frees a payload's slot in the arena; the caller settles the node.
    pub(super) fn drop_host(&mut self, id: NodeId, group: u8, loss: Loss) {
        let class = self.host_class(id, group);
        self.unleaf_both(id);
        let place = self.forest.node_mut(id).place_mut(group);
        debug_assert_ne!(place.host, HostState::Empty, "no slot to free");
        place.host = HostState::Empty;
        let offset = bytes(place.host_at);
        self.host.free(class, offset);
        self.place_left(id, Tier::Host, loss);
        if self.forest.node(id).host_chain && self.forest.node(id).requires(usize::from(group)) {
            self.sink(id);
        }
    }

    /// Frees a payload's slot on disk; the caller settles the node.
    pub(super) fn drop_disk(&mut self, id: NodeId, group: u8, loss: Loss) {
        let device = usize::from(self.forest.node(id).device);
        let class = self.disk_class(id, device, group);
        self.unleaf_both(id);
        let place = self.forest.node_mut(id).place_mut(group);
        debug_assert!(matches!(
            place.disk,
            DiskState::Writing | DiskState::Present
        ));
        place.disk = DiskState::Empty;
        let offset = bytes(place.disk_at);
        self.disks[device].free(class, offset);
        self.place_left(id, Tier::Disk, loss);
    }

    /// Whether all required payloads of a node are readable in some tier.
    pub(super) fn is_complete(&self, id: NodeId) -> bool {
        let node = self.forest.node(id);
        node.places().iter().enumerate().all(|(group, place)| {
            !node.requires(group)
                || place.host == HostState::Present
                || place.disk == DiskState::Present
        })
    }

    /// Whether all required payloads of a node are readable in the arena.
    pub(super) fn is_in_host(&self, id: NodeId) -> bool {
        let node = self.forest.node(id);
        node.places()
            .iter()
            .enumerate()
            .all(|(group, place)| !node.requires(group) || place.host == HostState::Present)
    }

    /// A node has gained a payload: it and what stands on it may become visible, or in the arena
    /// from the root on.
    pub(super) fn rise(&mut self, id: NodeId) {
        let mut stack = vec![id];
        while let Some(id) = stack.pop() {
            let parent = self.forest.node(id).parent;
            let (above_visible, above_host) = match parent {
                NONE => (true, true),
                parent => {
                    let parent = self.forest.node(parent);
                    (parent.visible, parent.host_chain)
                }
            };
            let node = self.forest.node(id);
            let visible = node.visible || (above_visible && self.is_complete(id));
            let host_chain = node.host_chain || (above_host && self.is_in_host(id));
            let became_visible = visible && !node.visible;
            if !became_visible && host_chain == node.host_chain {
                continue;
            }
            let node = self.forest.node_mut(id);
            node.visible = visible;
            node.host_chain = host_chain;
            if became_visible {
                self.offer_new_to_disk(id);
            }
            let mut child = self.forest.first_child(id);
            while child != NONE {
                stack.push(child);
                child = self.forest.next_sibling(child);
            }
        }
    }

    /// A node is no longer in the arena: nothing that stands on it is, from the root on.
    fn sink(&mut self, id: NodeId) {
        let mut stack = vec![id];
        while let Some(id) = stack.pop() {
            if !std::mem::replace(&mut self.forest.node_mut(id).host_chain, false) {
                continue;
            }
            let mut child = self.forest.first_child(id);
            while child != NONE {
                stack.push(child);
                child = self.forest.next_sibling(child);
            }
        }
    }

    /// Draws the consequences after a node lost something: a payload, a child, a lease, an
    /// operation. It may leave the index with its subtree, or be freed.
    pub(super) fn settle(&mut self, mut id: NodeId) {
        loop {
            let node = self.forest.node(id);
            if node.detached {
                match self.reap(id) {
                    Some(parent) => {
                        id = parent;
                        continue;
                    }
                    None => return,
                }
            }
            let lost = node.places().iter().enumerate().any(|(group, place)| {
                node.requires(group)
                    && place.host == HostState::Empty
                    && !matches!(place.disk, DiskState::Writing | DiskState::Present)
            });
            let idle_shell = node.children == 0
                && node.is_idle()
                && node.places_used == [0, 0]
                && node
                    .places()
                    .iter()
                    .all(|place| place.disk == DiskState::Empty);
            if !lost && !idle_shell {
                self.refresh(id);
                return;
            }
            // What could be freed was; a parent that is left may have become a leaf.
            match self.take_out(id) {
                Some(parent) => id = parent,
                None => return,
            }
        }
    }

    /// Takes a node and all that stands on it out of the index. What is in use lives on, unfindable,
    /// until it is let go.
    pub(super) fn detach(&mut self, id: NodeId) {
        if let Some(parent) = self.take_out(id) {
            self.settle(parent);
        }
    }

    /// As [`Engine::detach`]; returns a parent that is still in the index and has to be settled.
    fn take_out(&mut self, id: NodeId) -> Option<NodeId> {
        let mut order = vec![id];
        let mut next = 0;
        while let Some(&at) = order.get(next) {
            next += 1;
            let mut child = self.forest.first_child(at);
            while child != NONE {
                order.push(child);
                child = self.forest.next_sibling(child);
            }
        }
        for &id in &order {
            if self.forest.node(id).detached {
                continue;
            }
            self.unleaf_both(id);
            self.forest.unindex(id);
            let node = self.forest.node_mut(id);
            node.visible = false;
            node.host_chain = false;
            for group in 0..u8::try_from(node.places().len()).unwrap_or(0) {
                let place = self.forest.node_mut(id).place_mut(group);
                if place.disk == DiskState::Queued {
                    place.disk = DiskState::Empty;
                    self.queued_bytes -= self.host.slot_bytes(self.host_class(id, group));
                }
            }
        }
        let mut parent = None;
        for &id in order.iter().rev() {
            if self.forest.node(id).detached
                && let Some(above) = self.reap(id)
            {
                parent = Some(above);
            }
        }
        parent.filter(|&parent| !self.forest.node(parent).detached)
    }

    /// Frees a detached node that nothing refers to, with its slots; returns its parent.
    fn reap(&mut self, id: NodeId) -> Option<NodeId> {
        let node = self.forest.node(id);
        if node.children > 0 || !node.is_idle() {
            return None;
        }
        let parent = node.parent;
        for group in 0..u8::try_from(node.places().len()).unwrap_or(0) {
            let place = *self.forest.node(id).place(group);
            if place.host != HostState::Empty {
                self.drop_host(id, group, Loss::Dropped);
            }
            if matches!(place.disk, DiskState::Writing | DiskState::Present) {
                self.drop_disk(id, group, Loss::Dropped);
            }
        }
        if self.forest.node(id).required == 0 {
            self.disks.iter_mut().for_each(|disk| disk.remove_link(id));
        }
        self.forest.release(id);
        (parent != NONE).then_some(parent)
    }
}
