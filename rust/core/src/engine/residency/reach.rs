//! What a change of a payload means for lookups: nodes become visible, leave the index, are freed.

use crate::forest::{DiskState, HostState, NodeId, NsId, Reach, Tier};

use crate::work;

use super::slots::Loss;
use super::state::Residency;

impl Residency {
    /// Whether all required payloads of a node are readable in some tier.
    pub(super) fn is_complete(&self, id: NodeId) -> bool {
        let node = self.node(id);
        (0u8..).zip(node.payloads()).all(|(group, payload)| {
            !node.requires(group)
                || payload.host == HostState::Present
                || payload.disk == DiskState::Present
        })
    }

    /// Whether all required payloads of a node are readable in the arena.
    pub(super) fn is_in_host(&self, id: NodeId) -> bool {
        let node = self.node(id);
        let mut payloads = (0u8..).zip(node.payloads());
        payloads.all(|(group, payload)| !node.requires(group) || payload.is_readable(Tier::Host))
    }

    /// How far a lookup would reach a node now. What is visible stays so while its payloads move.
    fn reach(&self, id: NodeId) -> Reach {
        let node = self.node(id);
        let above = self
            .parent(id)
            .map_or(Reach::HostChain, |parent| self.node(parent).reach);
        let host_chain = above == Reach::HostChain && self.is_in_host(id);
        if node.is_host_chain() || host_chain {
            Reach::HostChain
        } else if node.is_visible() || above >= Reach::Visible && self.is_complete(id) {
            Reach::Visible
        } else {
            Reach::Hidden
        }
    }

    /// A node has gained a payload: it and the nodes below may become visible, or part of the host chain.
    /// Appends those that became visible.
    pub(in crate::engine) fn propagate_visible(
        &mut self,
        id: NodeId,
        became_visible: &mut Vec<NodeId>,
    ) {
        // Most nodes have no children yet: nothing is allocated for them.
        let (mut next, mut stack) = (Some(id), Vec::new());
        while let Some(id) = next.take().or_else(|| stack.pop()) {
            work::node();
            let before = self.node(id).reach;
            // A child that has left the index stays linked while it is in use.
            if before == Reach::Detached {
                continue;
            }
            let reach = self.reach(id);
            if reach == before {
                continue;
            }
            assert!(
                reach > before,
                "node {id} gained a payload and fell from {before:?} to {reach:?}"
            );
            self.forest.node_mut(id).reach = reach;
            if before == Reach::Hidden {
                became_visible.push(id);
            }
            stack.extend(self.forest.children(id));
        }
    }

    /// A required payload of a node has left the arena: neither the node nor those below are part of the
    /// host chain.
    pub(super) fn clear_host_chain(&mut self, id: NodeId) {
        let mut stack = vec![id];
        while let Some(id) = stack.pop() {
            work::node();
            let node = self.forest.node_mut(id);
            if node.is_host_chain() {
                node.reach = Reach::Visible;
                stack.extend(self.forest.children(id));
            }
        }
    }

    /// Re-establishes the invariants after a node lost a payload, a child, a lease or an operation. The
    /// node may leave the index with its subtree, or be freed.
    pub(in crate::engine) fn reconcile(&mut self, mut id: NodeId) {
        loop {
            work::node();
            let node = self.node(id);
            if node.is_detached() {
                match self.free_detached(id) {
                    Some(parent) => {
                        id = parent;
                        continue;
                    }
                    None => return,
                }
            }
            let is_lost = !node.is_gap && self.lacks_payload(id);
            let node = self.node(id);
            let is_empty_leaf = node.children() == 0
                && node.is_idle()
                && node.has_no_slots()
                && node
                    .payloads()
                    .iter()
                    .all(|payload| payload.disk == DiskState::Empty);
            if !is_lost && !is_empty_leaf {
                self.refresh(id);
                return;
            }
            // Nodes that could be freed were; a parent that is left may have become a leaf.
            match self.unlink_subtree(id) {
                Some(parent) => id = parent,
                None => return,
            }
        }
    }

    /// Group of a required payload of a node that is nowhere.
    pub(in crate::engine) fn missing_group(&self, id: NodeId) -> Option<u8> {
        let node = self.node(id);
        let mut payloads = (0u8..).zip(node.payloads());
        let missing = payloads.find(|(group, payload)| {
            node.requires(*group)
                && payload.host == HostState::Empty
                && !payload.has_slot(Tier::Disk)
        });
        missing.map(|(group, _)| group)
    }

    /// Whether a required payload of a node is nowhere.
    pub(super) fn lacks_payload(&self, id: NodeId) -> bool {
        self.missing_group(id).is_some()
    }

    /// A node lacks a required payload, and those below keep theirs: no lookup reaches any of them until
    /// the payload is saved again.
    pub(super) fn make_gap(&mut self, id: NodeId) {
        let node = self.forest.node_mut(id);
        node.is_gap = true;
        self.moves.gaps += 1;
        let node = self.forest.node_mut(id);
        self.disk_gaps |= node.tiers.active_children[Tier::Disk as usize] > 0;
        let mut stack = vec![id];
        while let Some(id) = stack.pop() {
            work::node();
            let node = self.forest.node_mut(id);
            if node.is_visible() {
                node.reach = Reach::Hidden;
                stack.extend(self.forest.children(id));
            }
        }
    }

    /// Takes all nodes of a namespace out of the index.
    pub(in crate::engine) fn remove_namespace(&mut self, ns: NsId) {
        let roots: Vec<NodeId> = self.forest.roots(ns).collect();
        for root in roots {
            if !self.node(root).is_detached() {
                self.remove_subtree(root);
            }
        }
    }

    /// Takes a node and all below it out of the index. Those in use live on, unfindable, until their last
    /// use ends.
    pub(in crate::engine) fn remove_subtree(&mut self, id: NodeId) {
        if let Some(parent) = self.unlink_subtree(id) {
            self.reconcile(parent);
        }
    }

    /// As [`Residency::remove_subtree`]; returns a parent that is still in the index and has to be
    /// reconciled.
    fn unlink_subtree(&mut self, id: NodeId) -> Option<NodeId> {
        // Parents first.
        let mut order = vec![id];
        let mut next = 0;
        while let Some(&at) = order.get(next) {
            next += 1;
            order.extend(self.forest.children(at));
        }
        for &id in &order {
            if self.node(id).is_detached() {
                continue;
            }
            self.withdraw(id);
            self.forest.unindex(id);
            for group in self.node(id).groups() {
                if self.node(id).payload(group).disk == DiskState::Queued {
                    self.unqueue_write(id, group);
                }
            }
        }
        let mut parent = None;
        // Children first: a node is freed only when its children are.
        for &id in order.iter().rev() {
            if self.node(id).is_detached()
                && let Some(above) = self.free_detached(id)
            {
                parent = Some(above);
            }
        }
        parent.filter(|&parent| !self.node(parent).is_detached())
    }

    /// Frees a detached node that nothing refers to, with its slots; returns its parent.
    fn free_detached(&mut self, id: NodeId) -> Option<NodeId> {
        let node = self.node(id);
        assert!(node.is_detached(), "node {id} is freed and in the index");
        if node.children() > 0 || !node.is_idle() {
            return None;
        }
        let parent = self.parent(id);
        for group in node.groups() {
            let payload = *self.node(id).payload(group);
            if payload.has_slot(Tier::Host) {
                self.free_host(id, group, Loss::Dropped);
            }
            if payload.has_slot(Tier::Disk) {
                self.free_disk(id, group, Loss::Dropped);
            }
        }
        if self.node(id).required == 0 {
            let disks = self.disks.iter_mut();
            disks.for_each(|disk| disk.remove_placeholder(id));
        }
        self.forest.release(id);
        parent
    }
}
