//! Eviction: which payloads may be evicted, and which are evicted when a region is full.
//!
//! A leaf is evicted with all its payloads. A node above other payloads of the tier loses only its optional
//! payloads: blocks that have left their window, and states between boundaries.

use smallvec::SmallVec;

use crate::forest::{DiskState, Evictability, HostState, NodeId, Payload, Tier};
use crate::metrics::Counters;
use crate::policy::{Leaf, Policy};
use crate::slots::Class;
use crate::work;

use super::geometry::Region;
use super::slots::Loss;
use super::state::Residency;

/// Size classes of one node's payloads. Each lease needs them, so the usual few take no allocation.
type Classes = SmallVec<[Class; 4]>;

impl Residency {
    /// Size classes of the node's payloads for which `wanted` holds, each class once.
    fn classes_where(
        &self,
        id: NodeId,
        tier: Tier,
        wanted: impl Fn(u8, &Payload) -> bool,
    ) -> Classes {
        let (node, region) = (self.node(id), self.region(id, tier));
        let mut classes = Classes::new();
        for (group, payload) in (0u8..).zip(node.payloads()) {
            if !wanted(group, &payload) {
                continue;
            }
            let class = self.class(id, region, group);
            if !classes.contains(&class) {
                classes.push(class);
            }
        }
        classes
    }

    /// Size classes in which a node is a candidate of a tier's policy, by its present evictability.
    pub(super) fn candidate_classes(
        &self,
        id: NodeId,
        tier: Tier,
        evictability: Evictability,
    ) -> Classes {
        let node = self.node(id);
        match evictability {
            Evictability::Kept => Classes::new(),
            Evictability::Leaf => self.classes_where(id, tier, |_, payload| payload.has_slot(tier)),
            Evictability::OptionalPayloads => self.classes_where(id, tier, |group, payload| {
                !node.requires(group) && payload.is_readable(tier)
            }),
        }
    }

    fn candidates(&mut self, id: NodeId, tier: Tier, evictability: Evictability) -> &mut Policy {
        let region = self.region(id, tier);
        let policies = self.policies(region);
        match evictability {
            Evictability::OptionalPayloads => &mut policies.optional,
            Evictability::Leaf | Evictability::Kept => &mut policies.leaves,
        }
    }

    /// Removes a node from the candidates of both tiers. Called before a change of anything that
    /// [`Residency::evictability`] depends on.
    pub(super) fn withdraw(&mut self, id: NodeId) {
        self.withdraw_from(id, Tier::Host);
        self.withdraw_from(id, Tier::Disk);
    }

    fn withdraw_from(&mut self, id: NodeId, tier: Tier) {
        let node = self.node(id);
        let (evictability, last) = (node.evictability(tier), node.touch().last);
        if evictability == Evictability::Kept {
            return;
        }
        let classes = self.candidate_classes(id, tier, evictability);
        let policy = self.candidates(id, tier, evictability);
        for class in classes {
            let found = policy.remove_leaf(class, id, last);
            assert!(
                found,
                "node {id} is a candidate that the policy does not know"
            );
        }
        let mut node = self.forest.node_mut(id);
        node.set_evictability(tier, Evictability::Kept);
    }

    /// Which of a node's payloads of a tier may be evicted.
    pub(super) fn evictability(&self, id: NodeId, tier: Tier) -> Evictability {
        let node = self.node(id);
        if node.is_detached() || node.uses().pins > 0 || node.uses().holds > 0 {
            return Evictability::Kept;
        }
        let (mut last_copy, mut optional) = (false, false);
        for (group, payload) in (0u8..).zip(node.payloads()) {
            if payload.is_in_flight() {
                return Evictability::Kept;
            }
            if node.requires(group) {
                last_copy |= match tier {
                    Tier::Host => payload.disk != DiskState::Present,
                    Tier::Disk => payload.host != HostState::Present,
                };
            } else {
                optional |= payload.is_readable(tier);
            }
        }
        let is_leaf = node.slots(tier) > 0
            && node.active_children(tier) == 0
            // A child in the other tier needs the last copy of its parent's payload.
            && (!last_copy || node.children() == 0);
        if is_leaf {
            Evictability::Leaf
        } else if optional {
            Evictability::OptionalPayloads
        } else {
            Evictability::Kept
        }
    }

    /// Adds a node to the candidates of both tiers, or removes it, by its present evictability.
    pub(in crate::engine) fn refresh(&mut self, id: NodeId) {
        for tier in Tier::ALL {
            let evictability = self.evictability(id, tier);
            if self.node(id).evictability(tier) == evictability {
                continue;
            }
            self.withdraw_from(id, tier);
            if evictability == Evictability::Kept {
                continue;
            }
            let classes = self.candidate_classes(id, tier, evictability);
            let mut node = self.forest.node_mut(id);
            node.set_evictability(tier, evictability);
            let leaf = Leaf {
                node: id,
                last: node.touch().last,
                hit_class: node.touch().hit_class,
            };
            let policy = self.candidates(id, tier, evictability);
            for class in classes {
                policy.insert_leaf(class, leaf);
            }
        }
    }

    /// Makes room in a region for one slot of a size class, or more. False if nothing may be evicted, or if the caller
    /// `waits` for a run of pages that is being emptied for the class.
    ///
    /// Space moves between models by use: the class's own first candidate is evicted, unless a run of other
    /// classes' pages is worth less.
    pub(super) fn make_room(
        &mut self,
        region: Region,
        class: Class,
        waits: bool,
        counters: &mut Counters,
    ) -> bool {
        let own = self.victim(region, class);
        let has_room = self.take_run(region, class, own, counters)
            || !(waits && self.is_emptying_for(region, class))
                && self.evict_own(region, class, counters);
        self.note_refusal(region, class, !has_room);
        has_room
    }

    /// Evicts the next candidate of a size class. False if there is none: the candidate may have been evicted with the
    /// payloads of a run.
    fn evict_own(&mut self, region: Region, class: Class, counters: &mut Counters) -> bool {
        let own = self.victim(region, class);
        if let Some(own) = own {
            self.evict(own.node, region.tier(), counters);
        }
        own.is_some()
    }

    pub(super) fn victim(&mut self, region: Region, class: Class) -> Option<Leaf> {
        let tick = self.tick;
        self.policies(region).victim(class, tick)
    }

    /// Whether a node is a leaf of the arena that may be evicted.
    pub(super) fn is_host_leaf(&self, id: NodeId) -> bool {
        self.node(id).evictability(Tier::Host) == Evictability::Leaf
    }

    /// Evicts a candidate's payloads of a tier, as far as they may be evicted.
    pub(super) fn evict(&mut self, id: NodeId, tier: Tier, counters: &mut Counters) {
        work::eviction();
        let (parent, last) = (self.parent(id), self.node(id).touch().last);
        let evictability = self.node(id).evictability(tier);
        assert_ne!(
            evictability,
            Evictability::Kept,
            "node {id} is evicted and no candidate"
        );
        let is_leaf = evictability == Evictability::Leaf;
        self.evict_payloads(id, tier, is_leaf, counters);
        if is_leaf && let Some(parent) = parent {
            self.inherit_touch(parent, tier, last);
        }
        self.reconcile(id);
    }

    /// Under LRU a hit touches only its deepest block: when this block is evicted, its parent inherits the touch.
    pub(super) fn inherit_touch(&mut self, parent: NodeId, tier: Tier, last: u64) {
        let leaves = &self.policies(self.region(parent, tier)).leaves;
        if leaves.touches_every_block() || self.node(parent).touch().last >= last {
            return;
        }
        self.withdraw(parent);
        self.forest.node_mut(parent).set_last(last);
        self.refresh(parent);
    }

    fn evict_payloads(&mut self, id: NodeId, tier: Tier, all: bool, counters: &mut Counters) {
        for group in self.node(id).groups() {
            let node = self.node(id);
            if !all && node.requires(group) || !node.payload(group).is_readable(tier) {
                continue;
            }
            match tier {
                Tier::Host => {
                    counters.host_evictions += 1;
                    self.free_host(id, group, Loss::Evicted);
                }
                Tier::Disk => {
                    counters.disk_evictions += 1;
                    self.free_disk(id, group, Loss::Evicted);
                }
            }
        }
    }
}
