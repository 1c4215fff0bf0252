//! A node together with its fields outside the node.

use undercroft_contract::tier::Tier;

use std::ops::{Deref, DerefMut};

use super::counts::Counts;
use super::node::{Node, Payload, Uses};
use super::payloads::{Entry, Payloads};
use super::slab::Slab;

/// Fields that few nodes have, or only nodes with several groups.
#[derive(Debug)]
pub(super) struct Side {
    pub(super) counts: Slab<Counts>,
    pub(super) entries: Slab<Entry>,
}

/// A node.
#[derive(Clone, Copy, Debug)]
pub struct NodeRef<'a> {
    pub(super) node: &'a Node,
    pub(super) side: &'a Side,
}

impl Deref for NodeRef<'_> {
    type Target = Node;

    fn deref(&self) -> &Node {
        self.node
    }
}

impl<'a> NodeRef<'a> {
    fn counts(self) -> Counts {
        Counts::of(self.node, &self.side.counts)
    }

    /// Number of children, detached ones included.
    pub fn children(self) -> u32 {
        self.counts().children
    }

    /// Children that are active in a tier (see [`super::Forest::is_active`]).
    pub fn active_children(self, tier: Tier) -> u32 {
        self.counts().active[tier as usize]
    }

    /// Uses that keep the node and its payloads.
    pub fn uses(self) -> Uses {
        self.counts().uses
    }

    /// Whether nothing except its children refers to the node.
    pub fn is_idle(self) -> bool {
        let uses = self.uses();
        uses.pins == 0 && uses.busy == 0
    }

    /// Payload of one group.
    pub fn payload(self, group: u8) -> Payload {
        self.node.payload_of(&self.side.entries, group)
    }

    /// Payload of each group.
    pub fn payloads(self) -> Payloads<'a> {
        Payloads::of(self.node, &self.side.entries)
    }
}

/// A node that may be changed.
#[derive(Debug)]
pub struct NodeMut<'a> {
    pub(super) node: &'a mut Node,
    pub(super) side: &'a mut Side,
}

impl Deref for NodeMut<'_> {
    type Target = Node;

    fn deref(&self) -> &Node {
        self.node
    }
}

impl DerefMut for NodeMut<'_> {
    fn deref_mut(&mut self) -> &mut Node {
        self.node
    }
}

impl NodeMut<'_> {
    pub(super) fn change_counts<R>(&mut self, change: impl FnOnce(&mut Counts) -> R) -> R {
        let mut counts = Counts::of(self.node, &self.side.counts);
        let result = change(&mut counts);
        counts.store(self.node, &mut self.side.counts);
        result
    }

    /// Changes the number of active children of a tier.
    pub fn change_active_children(&mut self, tier: Tier, change: impl FnOnce(&mut u32)) {
        self.change_counts(|counts| change(&mut counts.active[tier as usize]));
    }

    /// Changes the uses.
    pub fn change_uses(&mut self, change: impl FnOnce(&mut Uses)) {
        self.change_counts(|counts| change(&mut counts.uses));
    }

    /// Changes the payload of one group; returns the result of the change.
    pub fn change_payload<R>(&mut self, group: u8, change: impl FnOnce(&mut Payload) -> R) -> R {
        let mut payload = self.node.payload_of(&self.side.entries, group);
        let result = change(&mut payload);
        self.node
            .set_payload(&mut self.side.entries, group, &payload);
        result
    }
}
