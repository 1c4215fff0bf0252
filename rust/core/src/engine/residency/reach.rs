//! Consequences of a payload's change for lookups: nodes become visible, leave the index, are freed.

use crate::forest::{DiskState, HostState, NONE, NodeId, Reach, Tier};

use crate::work;

use super::slots::Loss;
use super::state::Residency;

/// Nodes below a payload that has come to the arena whose flags are updated in the same entry.
const RISES_MAX: usize = 512;

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

    /// How far a lookup would reach a node now. A visible node stays visible while its payloads move.
    pub(super) fn reach(&self, id: NodeId) -> Reach {
        let node = self.node(id);
        let above = self
            .parent(id)
            .map_or(Reach::HostChain, |parent| self.node(parent).reach());
        let host_chain = above == Reach::HostChain && self.is_in_host(id);
        if node.is_host_chain() || host_chain {
            Reach::HostChain
        } else if node.is_visible() || above >= Reach::Visible && self.is_complete(id) {
            Reach::Visible
        } else {
            Reach::Hidden
        }
    }

    /// A node has gained a payload. The node and the nodes below it may become visible, or part of the host chain.
    /// Appends the nodes that became visible; if there are many, some follow in later entries.
    pub(in crate::engine) fn propagate_visible(
        &mut self,
        id: NodeId,
        became_visible: &mut Vec<NodeId>,
    ) {
        work::node();
        // Most nodes have no children yet: nothing is allocated for them.
        let below = self.look_again(id, became_visible);
        if below != NONE {
            self.show(vec![below], became_visible);
        }
    }

    /// Looks at nodes, each with the siblings behind it, and at those below the ones that become visible.
    pub(super) fn show(&mut self, mut siblings: Vec<NodeId>, became_visible: &mut Vec<NodeId>) {
        while let Some(id) = siblings.pop() {
            work::node();
            let next = self.forest.next_sibling(id);
            // In a chain that is saved front to back, the next node has nothing to tell yet.
            if next == NONE && self.reach(id) == self.node(id).reach() {
                continue;
            }
            if !self.rest.take() {
                siblings.push(id);
                break;
            }
            let below = self.look_again(id, became_visible);
            siblings.extend([next, below].into_iter().filter(|&id| id != NONE));
        }
        self.show_later(siblings);
    }

    /// Notes how far a lookup would reach a node now. Its first child, if those below may become visible by it, or `NONE`.
    fn look_again(&mut self, id: NodeId, became_visible: &mut Vec<NodeId>) -> NodeId {
        let before = self.node(id).reach();
        // A node that has left the index stays while it is in use.
        if before == Reach::Detached {
            return NONE;
        }
        let reach = self.reach(id);
        if reach == before {
            return NONE;
        }
        assert!(
            reach > before,
            "node {id} gained a payload and fell from {before:?} to {reach:?}"
        );
        self.forest.node_mut(id).set_reach(reach);
        if before == Reach::Hidden {
            became_visible.push(id);
            return self.forest.first_child(id);
        }
        self.rise_below(id);
        NONE
    }

    /// A visible node has become part of the host chain, and those below may be.
    fn rise_below(&mut self, id: NodeId) {
        // A shared prefix may have any number of branches. A lookup checks for itself a branch whose flag was
        // not updated.
        let mut stack: Vec<NodeId> = self.forest.children(id).take(RISES_MAX).collect();
        let mut rises = stack.len();
        while let Some(id) = stack.pop() {
            work::node();
            let before = self.node(id).reach();
            // A hidden one is told when it becomes visible.
            if before != Reach::Visible || self.reach(id) != Reach::HostChain {
                continue;
            }
            self.forest.node_mut(id).set_reach(Reach::HostChain);
            let listed = stack.len();
            stack.extend(self.forest.children(id).take(RISES_MAX - rises));
            rises += stack.len() - listed;
        }
        self.is_rise_cut |= rises == RISES_MAX;
    }

    /// A hit ends at `id`. A node whose flag was not updated is part of the host chain if all above it are.
    pub(in crate::engine) fn note_host_chain(&mut self, id: NodeId) {
        if !self.is_rise_cut || self.node(id).is_host_chain() {
            return;
        }
        let above = std::iter::once(id).chain(self.forest.ancestors(id));
        let chain: Vec<NodeId> = above
            .take_while(|&at| !self.node(at).is_host_chain())
            .collect();
        for at in chain.into_iter().rev() {
            let reach = self.reach(at);
            if reach != Reach::HostChain {
                return;
            }
            self.forest.node_mut(at).set_reach(reach);
        }
    }

    /// A required payload of a node has left the arena: neither the node nor those below are part of the
    /// host chain.
    pub(super) fn clear_host_chain(&mut self, id: NodeId) {
        let mut stack = vec![id];
        while let Some(id) = stack.pop() {
            work::node();
            let mut node = self.forest.node_mut(id);
            if node.is_host_chain() {
                node.set_reach(Reach::Visible);
                stack.extend(self.forest.children(id));
            }
        }
    }

    /// Re-establishes the invariants after a node lost a payload, a child, a lease or an operation. The
    /// node may leave the index with its subtree, or be freed. So may those above it: of a long chain some go in later
    /// entries.
    pub(in crate::engine) fn reconcile(&mut self, id: NodeId) {
        let mut at = id;
        for _ in 0..self.chain_steps {
            match self.reconcile_one(at) {
                Some(above) => at = above,
                None => return,
            }
        }
        self.reconcile_later(at);
    }

    /// As [`Residency::reconcile`], for one node; its parent if that has to be reconciled next.
    pub(super) fn reconcile_one(&mut self, id: NodeId) -> Option<NodeId> {
        work::node();
        if self.node(id).is_detached() {
            return self.free_detached(id);
        }
        if !self.is_to_go(id) {
            self.refresh(id);
            return None;
        }
        // A parent that is left may have become a leaf.
        self.unlink_subtree(id)
    }

    /// Whether a node of the index has nothing left that keeps it there.
    pub(super) fn is_to_go(&self, id: NodeId) -> bool {
        let node = self.node(id);
        let is_lost = !node.is_gap() && self.lacks_payload(id);
        is_lost
            || node.children() == 0
                && node.is_idle()
                && node.has_no_slots()
                && node
                    .payloads()
                    .all(|payload| payload.disk == DiskState::Empty)
    }

    /// Group of a required payload of a node that is in no tier.
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

    /// Whether a required payload of a node is in no tier.
    pub(super) fn lacks_payload(&self, id: NodeId) -> bool {
        self.missing_group(id).is_some()
    }

    /// A node lacks a required payload, and those below keep theirs: no lookup reaches any of them until
    /// the payload is saved again. Returns how many they are.
    pub(super) fn make_gap(&mut self, id: NodeId) -> u32 {
        self.moves.gaps += 1;
        self.forest.node_mut(id).set_gap(true);
        let node = self.node(id);
        self.disk_gaps |= node.active_children(Tier::Disk) > 0;
        let (mut hidden, mut stack) = (0, vec![id]);
        while let Some(id) = stack.pop() {
            work::node();
            let mut node = self.forest.node_mut(id);
            if node.is_visible() {
                node.set_reach(Reach::Hidden);
                hidden += 1;
                stack.extend(self.forest.children(id));
            }
        }
        hidden
    }

    /// Frees a detached node that nothing refers to, with its slots; returns its parent.
    pub(super) fn free_detached(&mut self, id: NodeId) -> Option<NodeId> {
        let node = self.node(id);
        assert!(node.is_detached(), "node {id} is freed and in the index");
        if node.children() > 0 || !node.is_idle() {
            return None;
        }
        if self.erases(id) && self.queue_erasures(id) {
            return None;
        }
        let node = self.node(id);
        let parent = self.parent(id);
        for group in node.groups() {
            let payload = self.node(id).payload(group);
            if payload.has_slot(Tier::Host) {
                self.free_host(id, group, Loss::Dropped);
            }
            if payload.has_slot(Tier::Disk) {
                self.free_disk(id, group, Loss::Dropped);
            }
        }
        if self.node(id).required() == 0 {
            let disks = self.disks.iter_mut();
            disks.for_each(|disk| disk.remove_placeholder(id));
        }
        self.forest.release(id);
        parent
    }
}
