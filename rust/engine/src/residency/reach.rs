//! Consequences of a payload's change for lookups: nodes become visible, leave the index, are freed.
//!
//! The nodes below a payload that arrives late are marked as visible in steps: some at once, the others in later
//! entries. Other requests may save any number of blocks below a block whose copy is still under way. Until their nodes
//! are marked, lookups do not find them: a miss is never wrong.
//!
//! A node that has no required payload, above a payload on disk, gets a placeholder record: without it, a restart could
//! not find the payload.

use undercroft_contract::key::HashSource;
use undercroft_contract::tier::Tier;

use crate::forest::{DeviceIndex, DiskState, HostState, NONE, NodeId, NsId, Reach};
use crate::work;

use super::slots::Loss;
use super::state::Residency;

/// Nodes below a payload that has come to the arena whose flags are updated in the same entry.
const RISES_MAX: usize = 512;

impl Residency {
    /// The deepest node of the chain for which `accept` holds, and its depth, see
    /// [`Forest::deepest`](crate::forest::Forest::deepest).
    pub(crate) fn deepest<H: HashSource + ?Sized>(
        &self,
        ns: NsId,
        hashes: &H,
        accept: impl Fn(&crate::forest::Node) -> bool,
    ) -> Option<(NodeId, u32)> {
        let (deepest, depth) = self.forest.deepest(ns, hashes, accept)?;
        if self.removals.subtrees.is_empty() {
            return Some((deepest, depth));
        }
        let ancestors = self.forest.ancestors(deepest);
        let removed = ancestors.filter(|&id| self.node(id).is_detached());
        let Some(first) = removed.last() else {
            return Some((deepest, depth));
        };
        let above = self.parent(first)?;
        Some((above, self.node(above).depth))
    }

    /// Whether a node or one of its ancestors has left the index.
    pub(crate) fn has_left_index(&self, id: NodeId) -> bool {
        let is_below = || {
            let mut ancestors = self.forest.ancestors(id);
            ancestors.any(|id| self.node(id).is_detached())
        };
        self.node(id).is_detached() || !self.removals.subtrees.is_empty() && is_below()
    }

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
    pub(crate) fn is_in_host(&self, id: NodeId) -> bool {
        let node = self.node(id);
        let mut payloads = (0u8..).zip(node.payloads());
        payloads.all(|(group, payload)| !node.requires(group) || payload.is_readable(Tier::Host))
    }

    /// The present reach of a node for lookups. A visible node stays visible while its payloads move.
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
    pub(crate) fn propagate_visible(&mut self, id: NodeId, became_visible: &mut Vec<NodeId>) {
        work::node();
        // Most nodes have no children yet: this path allocates nothing.
        let below = self.look_again(id, became_visible);
        if below != NONE {
            self.show(vec![below], became_visible);
        }
    }

    /// Looks at nodes, each with the siblings behind it. Below each node that becomes visible, looks at its children.
    pub(super) fn show(&mut self, mut siblings: Vec<NodeId>, became_visible: &mut Vec<NodeId>) {
        while let Some(id) = siblings.pop() {
            work::node();
            let next = self.forest.next_sibling(id);
            // In a chain that is saved front to back, the next node has not changed yet.
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

    /// Notes the present reach of a node. Returns its first child if nodes below may become visible, else `NONE`.
    fn look_again(&mut self, id: NodeId, became_visible: &mut Vec<NodeId>) -> NodeId {
        let before = self.node(id).reach();
        // A node that has left the index stays detached while it is in use.
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

    /// Marks nodes below a visible node that has become part of the host chain.
    fn rise_below(&mut self, id: NodeId) {
        // A shared prefix may have any number of branches. A lookup checks for itself a branch whose flag was
        // not updated.
        let mut stack: Vec<NodeId> = self.forest.children(id).take(RISES_MAX).collect();
        let mut rises = stack.len();
        while let Some(id) = stack.pop() {
            work::node();
            let before = self.node(id).reach();
            // A hidden node is marked when it becomes visible.
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

    /// Notes a hit in the arena that ends at `id`. If the node's flag was not updated, the node is part of the host
    /// chain if its parent is.
    pub(crate) fn note_host_chain(&mut self, id: NodeId) {
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

    /// A required payload of a node has left the arena: the node and the nodes below leave the host chain.
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
    /// node may leave the index with its subtree, or be freed, and so may its ancestors. Of a long chain, some follow
    /// in later entries.
    pub(crate) fn reconcile(&mut self, id: NodeId) {
        let mut at = id;
        for _ in 0..self.chain_steps {
            match self.reconcile_one(at) {
                Some(above) => at = above,
                None => return,
            }
        }
        self.reconcile_later(at);
    }

    /// Like [`Residency::reconcile`], for one node. Returns the parent if the parent has to be reconciled next.
    pub(super) fn reconcile_one(&mut self, id: NodeId) -> Option<NodeId> {
        work::node();
        if self.node(id).is_detached() {
            return self.free_detached(id);
        }
        if !self.is_to_go(id) {
            self.refresh(id);
            return None;
        }
        // The parent may have become a leaf.
        self.unlink_subtree(id)
    }

    /// Whether nothing keeps a node in the index.
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

    /// Groups of a node's required payloads that are in no tier.
    pub(crate) fn missing_groups(&self, id: NodeId) -> impl Iterator<Item = u8> {
        let node = self.node(id);
        let missing = (0u8..)
            .zip(node.payloads())
            .filter(move |(group, payload)| {
                node.requires(*group)
                    && payload.host == HostState::Empty
                    && !payload.has_slot(Tier::Disk)
            });
        missing.map(|(group, _)| group)
    }

    /// The first of [`Residency::missing_groups`].
    pub(crate) fn missing_group(&self, id: NodeId) -> Option<u8> {
        self.missing_groups(id).next()
    }

    /// Whether a required payload of a node is in no tier.
    pub(super) fn lacks_payload(&self, id: NodeId) -> bool {
        self.missing_group(id).is_some()
    }

    /// Makes a gap: the node lacks a required payload, and the nodes below keep their payloads. No lookup reaches any
    /// of them until the payload is saved again. Returns the number of nodes that became unreachable.
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

impl Residency {
    /// Allows the entry of the engine that begins now to mark this many nodes.
    pub(crate) fn allow_rest(&mut self, nodes: usize) {
        self.rest.left = nodes;
    }

    /// Whether nodes are left to be marked.
    pub(crate) fn has_rest(&self) -> bool {
        !self.rest.hidden.is_empty()
    }

    /// Marks more nodes. Appends the nodes that became visible.
    pub(crate) fn continue_rest(&mut self, became_visible: &mut Vec<NodeId>) {
        let hidden = std::mem::take(&mut self.rest.hidden);
        self.show(hidden, became_visible);
    }

    /// Leaves nodes, and the siblings behind each, to later entries.
    pub(super) fn show_later(&mut self, siblings: Vec<NodeId>) {
        self.rest.hidden.extend(siblings);
    }

    /// Replaces a node that leaves its parent's list of children by its next sibling.
    pub(super) fn pass_over(&mut self, id: NodeId) {
        let next = self.forest.next_sibling(id);
        self.rest.hidden.retain_mut(|first| {
            if *first == id {
                *first = next;
            }
            *first != NONE
        });
    }
}

impl Residency {
    /// Gives placeholder records to the ancestors that may be without payloads, up to the first that has payloads or a
    /// record: the nodes above it have their records, or get them later.
    pub(crate) fn add_placeholders(&mut self, id: NodeId, device: DeviceIndex) {
        let above = self.node(id).parent();
        self.add_placeholders_from(above, device, self.chain_steps);
    }

    /// Whether nodes wait for their records.
    pub(crate) fn has_placeholders(&self) -> bool {
        !self.placeholders.later.is_empty()
    }

    /// Gives records to about `steps` of the nodes that wait for them.
    pub(crate) fn continue_placeholders(&mut self, steps: usize) {
        let mut left = steps;
        while left > 0
            && let Some((id, epoch, device)) = self.placeholders.later.pop_front()
        {
            let is_alive = self.disk_mut(device).health.is_alive();
            let is_here = self.forest.is_live(id, epoch) && !self.node(id).is_detached();
            left -= 1;
            if is_alive && is_here {
                left = self.add_placeholders_from(id, device, left.max(1));
            }
        }
    }

    /// Gives records to at most `steps` nodes of a chain, from `at` upwards. Returns the number of steps that are left.
    fn add_placeholders_from(
        &mut self,
        mut at: NodeId,
        device: DeviceIndex,
        steps: usize,
    ) -> usize {
        for taken in 0..steps {
            let is_wanted = at != NONE && self.node(at).required() == 0;
            if !is_wanted || !self.disk_mut(device).add_placeholder(at) {
                return steps - taken;
            }
            work::node();
            at = self.node(at).parent();
        }
        if at != NONE && self.node(at).required() == 0 {
            let epoch = self.node(at).epoch;
            self.placeholders.later.push_back((at, epoch, device));
        }
        0
    }
}
