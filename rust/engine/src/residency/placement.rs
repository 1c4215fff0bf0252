//! Room for new payloads: which namespaces fit, which blocks the policies admit, and which payloads are evicted when a
//! region is full.
//!
//! A leaf is evicted with all its payloads. A node above other payloads of the tier loses only its optional
//! payloads: blocks that have left their window, and states between boundaries.

use smallvec::SmallVec;
use undercroft_contract::error::RegisterError;
use undercroft_contract::image::DeviceImage;
use undercroft_contract::key::BlockHash;
use undercroft_contract::namespace::{GroupKind, GroupSpec, NamespaceSpec};
use undercroft_contract::pages::{capacity_for_payload, region_for};
use undercroft_contract::tier::Tier;

use crate::disk::Disk;
use crate::forest::{
    DeviceIndex, DiskState, Evictability, HostState, NONE, NodeId, NsId, Payload, Touch, Uses,
};
use crate::metrics::Counters;
use crate::policy::{Leaf, PolicyKind, Tenant, Tenants};
use crate::slots::Class;
use crate::work;

use super::slots::Loss;
use super::state::{Geometry, Region, Residency, new_policy};

/// Size classes of one node's payloads. Each lease needs them, so the usual few take no allocation.
type Classes = SmallVec<[Class; 4]>;

/// Candidates that one search moves to the sets of the tenants that they belong to by now. Beyond them, a candidate may
/// be evicted although its tenant keeps it: the first evictions after a session has come or gone lose one in so many.
const STRAYS_MAX: usize = 64;

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

    /// The node as a candidate of the policies, whose it is, and whether as a leaf.
    fn candidate(&self, id: NodeId, evictability: Evictability) -> (bool, Tenant, Leaf) {
        let node = self.node(id);
        let Touch { last, hit_class } = node.touch();
        let leaf = Leaf {
            node: id,
            last,
            hit_class,
        };
        let is_leaf = evictability == Evictability::Leaf;
        (is_leaf, self.shares.of(node.ns), leaf)
    }

    /// Removes a node from the candidates of both tiers. Called before a change of anything that
    /// [`Residency::evictability`] depends on.
    pub(super) fn withdraw(&mut self, id: NodeId) {
        self.withdraw_from(id, Tier::Host);
        self.withdraw_from(id, Tier::Disk);
    }

    fn withdraw_from(&mut self, id: NodeId, tier: Tier) {
        let evictability = self.node(id).evictability(tier);
        if evictability == Evictability::Kept {
            return;
        }
        let classes = self.candidate_classes(id, tier, evictability);
        let (is_leaf, tenant, leaf) = self.candidate(id, evictability);
        let region = self.region(id, tier);
        for class in classes {
            let policies = self.policies(region);
            let found = policies.remove(is_leaf, class, tenant, leaf);
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
    pub(crate) fn refresh(&mut self, id: NodeId) {
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
            let (is_leaf, tenant, leaf) = self.candidate(id, evictability);
            let region = self.region(id, tier);
            for class in classes {
                let policies = self.policies(region);
                policies.insert(is_leaf, class, tenant, leaf);
            }
        }
    }

    /// Makes room in a region for one slot of a size class, or more, for a payload of `ns`. False if nothing may be
    /// evicted, or if the caller `waits` for a run of pages that is being emptied for the class.
    ///
    /// Space moves between models by use: the class's own first candidate is evicted, unless a run of other
    /// classes' pages is worth less. A tenant that has no more than its share loses payloads only to its own.
    pub(super) fn make_room(
        &mut self,
        region: Region,
        class: Class,
        ns: NsId,
        waits: bool,
        counters: &mut Counters,
    ) -> bool {
        let (kept, tenant) = (self.kept(region), self.shares.of(ns));
        let first = self.victim(region, class, kept);
        let freed = self.freed[region.tier() as usize];
        let has_room = self.take_run(region, class, first, kept.without(tenant), counters)
            || !(waits && self.is_emptying_for(region, class)) && {
                // The candidate may have been evicted with the payloads of a run.
                let first = match self.freed[region.tier() as usize] == freed {
                    true => first,
                    false => self.victim(region, class, kept),
                };
                let own = Tenants::all_but(tenant);
                let first = first.or_else(|| match kept.has(tenant) {
                    true => self.victim(region, class, own),
                    false => None,
                });
                if let Some(first) = first {
                    self.evict(first.node, region.tier(), counters);
                }
                first.is_some()
            };
        self.note_refusal(region, class, !has_room);
        has_room
    }

    /// The tenants that have no more than their shares of a region.
    fn kept(&self, region: Region) -> Tenants {
        match self.shares.has_any() {
            true => {
                let capacity = self.slots(region).capacity();
                self.shares.kept(region.index(), capacity)
            }
            false => Tenants::default(),
        }
    }

    /// The candidate of a size class to evict next, of the tenants that are not `kept`.
    pub(super) fn victim(&mut self, region: Region, class: Class, kept: Tenants) -> Option<Leaf> {
        let tick = self.tick;
        if !self.shares.has_any() {
            return self.policies(region).only_victim(class, tick);
        }
        for _ in 0..STRAYS_MAX {
            let (tenant, leaf) = self.policies(region).victim(class, tick, kept)?;
            let evictability = self.node(leaf.node).evictability(region.tier());
            let (is_leaf, home, leaf) = self.candidate(leaf.node, evictability);
            if home == tenant {
                return Some(leaf);
            }
            // The namespace has got its share, or lost it, since the node became a candidate.
            let policies = self.policies(region);
            policies.remove(is_leaf, class, tenant, leaf);
            policies.insert(is_leaf, class, home, leaf);
        }
        let first = self.policies(region).victim(class, tick, kept);
        first.map(|(_, leaf)| leaf)
    }

    /// The candidate that reads of `count` payloads like a node's would evict first from the arena, `NONE` if there is room.
    /// `None`: nothing may be evicted, or perhaps the last copy of a payload.
    pub(crate) fn gives_way_to(&mut self, id: NodeId, group: u8, count: u32) -> Option<NodeId> {
        let class = self.class(id, Region::Host, group);
        if !self.host.is_full(class) {
            return Some(NONE);
        }
        let kept = self.kept(Region::Host);
        let victim = self.victim(Region::Host, class, kept)?.node;
        let policies = self.policies(Region::Host);
        let mut soon = policies.victims(class, count as usize, kept);
        soon.sort_unstable_by_key(|leaf| (leaf.last, leaf.node));
        soon.truncate(count as usize);
        let of_soon = soon.iter().map(|leaf| leaf.node);
        let mut may_go = of_soon.chain([victim]);
        may_go.all(|node| self.is_copied(node)).then_some(victim)
    }

    /// Whether all that a node has in the arena is on disk, too.
    fn is_copied(&self, id: NodeId) -> bool {
        work::node();
        let mut payloads = self.node(id).payloads();
        payloads
            .all(|payload| !payload.is_readable(Tier::Host) || payload.disk == DiskState::Present)
    }

    /// Whether a node is a leaf of the arena that may be evicted.
    pub(super) fn is_host_leaf(&self, id: NodeId) -> bool {
        self.node(id).evictability(Tier::Host) == Evictability::Leaf
    }

    /// Evicts a candidate's payloads of a tier, as far as they may be evicted.
    pub(super) fn evict(&mut self, id: NodeId, tier: Tier, counters: &mut Counters) {
        work::eviction();
        let (parent, touch) = (self.parent(id), self.node(id).touch());
        let evictability = self.node(id).evictability(tier);
        assert_ne!(
            evictability,
            Evictability::Kept,
            "node {id} is evicted and no candidate"
        );
        let is_leaf = evictability == Evictability::Leaf;
        self.evict_payloads(id, tier, is_leaf, counters);
        if is_leaf && let Some(parent) = parent {
            self.inherit_touch(parent, touch);
        }
        self.reconcile(id);
    }

    /// Evicts the payloads that a node has in the arena although it is leased, if it would be a leaf without that lease.
    /// Returns whether it was.
    pub(super) fn evict_leased(&mut self, id: NodeId, counters: &mut Counters) -> bool {
        let once = Uses {
            pins: 1,
            ..Uses::default()
        };
        if id == NONE || self.node(id).uses() != once || self.node(id).slots(Tier::Host) == 0 {
            return false;
        }
        // The save below needs the node.
        let is_written = |(group, payload): (u8, Payload)| {
            !payload.is_in_flight()
                && (payload.disk == DiskState::Present || !self.node(id).requires(group))
        };
        let node = self.node(id);
        if node.is_detached()
            || node.active_children(Tier::Host) > 0
            || !(0u8..).zip(node.payloads()).all(is_written)
        {
            return false;
        }
        let (parent, touch) = (self.parent(id), node.touch());
        self.evict_payloads(id, Tier::Host, true, counters);
        if let Some(parent) = parent {
            self.inherit_touch(parent, touch);
        }
        true
    }

    /// A hit touches only its deepest block at once: when this block is evicted, its parent inherits the touch.
    pub(super) fn inherit_touch(&mut self, parent: NodeId, child: Touch) {
        let own = self.node(parent).touch();
        let inherited = Touch {
            last: own.last.max(child.last),
            hit_class: own.hit_class.max(child.hit_class),
        };
        if inherited != own {
            self.set_touch(parent, inherited);
        }
    }

    fn evict_payloads(&mut self, id: NodeId, tier: Tier, all: bool, counters: &mut Counters) {
        for group in self.node(id).groups() {
            let node = self.node(id);
            if !all && node.requires(group) || !node.payload(group).is_readable(tier) {
                continue;
            }
            self.evict_payload((id, group), tier, counters);
        }
    }

    /// Evicts a payload from a tier, and counts that.
    pub(super) fn evict_payload(
        &mut self,
        (id, group): (NodeId, u8),
        tier: Tier,
        counters: &mut Counters,
    ) {
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

impl Residency {
    /// The size classes of a namespace's payloads in every region.
    ///
    /// # Errors
    /// If a payload does not fit a page of a region.
    pub(crate) fn fit(&mut self, spec: NamespaceSpec) -> Result<Geometry, RegisterError> {
        let mut host_class = Vec::new();
        let mut disk_class = vec![Vec::new(); self.disks.len()];
        for (index, group) in spec.groups.iter().enumerate() {
            if group.kind == GroupKind::Ignored {
                host_class.push(None);
                disk_class.iter_mut().for_each(|classes| classes.push(None));
                continue;
            }
            let payload_bytes = u64::from(group.payload_bytes);
            let too_large = |region, page_bytes, option, needed| RegisterError::PayloadTooLarge {
                group: index,
                payload_bytes,
                region,
                page_bytes,
                option,
                needed,
            };
            let class = self.host.class_for(payload_bytes);
            if class.is_none() {
                let page_bytes = self.host.page_bytes();
                let needed = region_for(payload_bytes);
                return Err(too_large("the arena", page_bytes, "host_memory", needed));
            }
            host_class.push(class);
            for (disk, classes) in self.disks.iter_mut().zip(&mut disk_class) {
                let class = disk.class_for(payload_bytes);
                // A directory that could not be opened yet has no pages, and takes no payloads.
                if class.is_none() && !disk.is_absent() {
                    let page_bytes = disk.slots().page_bytes();
                    let needed = capacity_for_payload(disk.sealed_bytes(payload_bytes));
                    return Err(too_large(
                        "the data file",
                        page_bytes,
                        "disk_capacity",
                        needed,
                    ));
                }
                classes.push(class);
            }
        }
        Ok(Geometry {
            spec,
            host_class,
            disk_class,
            leaving: None,
        })
    }

    /// Adds the slots of a directory that was absent. A namespace whose payloads do not fit the directory's pages
    /// is not written there.
    pub(crate) fn open_disk(&mut self, device: DeviceIndex, image: &DeviceImage, kind: PolicyKind) {
        let disk = &mut self.disks[device.index()];
        assert!(disk.is_absent(), "directory {device:?} is opened once");
        *disk = Disk::new(image, new_policy(kind, image.capacity), Vec::new());
        for geometry in &mut self.geometry {
            let groups = geometry.spec.groups.iter();
            let class = |group: &GroupSpec| match group.kind {
                GroupKind::Ignored => None,
                _ => disk.class_for(u64::from(group.payload_bytes)),
            };
            geometry.disk_class[device.index()] = groups.map(class).collect();
        }
    }

    /// Adds a namespace.
    pub(crate) fn add_namespace(&mut self, geometry: Geometry) -> NsId {
        let ns = self.forest.add_namespace(geometry.spec.has_full());
        assert_eq!(
            usize::from(ns),
            self.geometry.len(),
            "one geometry for each namespace"
        );
        self.geometry.push(geometry);
        ns
    }

    /// Gives the index of a namespace without nodes to another namespace.
    pub(crate) fn replace_namespace(&mut self, ns: NsId, geometry: Geometry) {
        self.forest.replace_namespace(ns, geometry.spec.has_full());
        self.shares.forget(ns);
        // The last nodes of the old namespace may have been freed before the removal reached them.
        self.forget_removal(ns);
        self.geometry[usize::from(ns)] = geometry;
    }

    /// Size class of a group's payloads on a directory; `None` for an ignored or unknown group.
    pub(super) fn class_on_disk(
        &self,
        ns: NsId,
        device: DeviceIndex,
        group: usize,
    ) -> Option<Class> {
        self.geometry[usize::from(ns)].class(Region::Disk(device), group)
    }

    /// Size class of a node's payload in a region.
    pub(super) fn class(&self, id: NodeId, region: Region, group: u8) -> Class {
        self.geometry[usize::from(self.node(id).ns)]
            .class(region, usize::from(group))
            .expect("an ignored group has no payloads")
    }

    /// Bytes of the slot of a node's payload in the arena.
    pub(crate) fn slot_bytes(&self, id: NodeId, group: u8) -> u64 {
        self.host.slot_bytes(self.class(id, Region::Host, group))
    }

    /// Bytes of the smallest slot of a namespace's payloads in the arena.
    pub(crate) fn least_slot_bytes(&self, ns: NsId) -> u64 {
        let classes = self.geometry[usize::from(ns)].host_class.iter().flatten();
        let bytes = classes.map(|&class| self.host.slot_bytes(class));
        bytes
            .min()
            .expect("a namespace has a group that is not ignored")
    }

    /// Bytes of the slot of a node's payload on disk.
    pub(crate) fn disk_slot_bytes(&self, id: NodeId, group: u8) -> u64 {
        let region = Region::Disk(self.node(id).device);
        self.slots(region).slot_bytes(self.class(id, region, group))
    }

    /// Slot bytes in the arena of several payloads.
    pub(crate) fn slot_bytes_of(&self, payloads: &[(NodeId, u8)]) -> u64 {
        let slots = payloads.iter();
        slots.map(|&(id, group)| self.slot_bytes(id, group)).sum()
    }

    /// Blocks of all groups that end after the depths `after`, one for each group, up to `depth`.
    pub(crate) fn blocks_of(&self, ns: NsId, depth: u32, after: &[u32]) -> u64 {
        self.counts(ns, depth, after).map(|(_, count)| count).sum()
    }

    /// Slot bytes in the arena of the blocks that [`Residency::blocks_of`] counts.
    pub(crate) fn bytes_of(&self, ns: NsId, depth: u32, after: &[u32]) -> u64 {
        let classes = &self.geometry[usize::from(ns)].host_class;
        let bytes = |(group, count): (usize, u64)| {
            classes[group].map_or(0, |class| self.host.slot_bytes(class)) * count
        };
        self.counts(ns, depth, after).map(bytes).sum()
    }

    fn counts<'a>(
        &'a self,
        ns: NsId,
        depth: u32,
        after: &'a [u32],
    ) -> impl Iterator<Item = (usize, u64)> + 'a {
        let spec = self.spec(ns);
        let groups = after.iter().enumerate();
        let used = groups.filter(|&(group, _)| spec.groups[group].kind != GroupKind::Ignored);
        used.map(move |(group, &after)| {
            let hash_blocks = spec.hash_blocks(group);
            let count = (depth / hash_blocks).saturating_sub(after / hash_blocks);
            (group, u64::from(count))
        })
    }

    /// Bytes of a node's payload.
    pub(crate) fn payload_bytes(&self, id: NodeId, group: u8) -> u32 {
        self.spec_of(id).groups[usize::from(group)].payload_bytes
    }
}

impl Residency {
    /// Offers a block that is in no tier to the policies. Returns the hit class with which the block enters.
    pub(crate) fn offer_block(&mut self, fingerprint: u64) -> u8 {
        let tick = self.tick;
        let mut hit_class = self.host_policies.leaves.on_offer(fingerprint, tick);
        for disk in &mut self.disks {
            hit_class = hit_class.max(disk.policies.leaves.on_offer(fingerprint, tick));
        }
        hit_class
    }

    /// Lets the policy of the arena remember a block that was offered and is not saved.
    pub(crate) fn refuse_block(&mut self, fingerprint: u64, depth: u32, hit_class: u8) {
        let policy = &mut self.host_policies.leaves;
        policy.on_refuse(fingerprint, depth, hit_class, self.tick);
    }

    /// Whether a region is full and its policy keeps every leaf of a new payload's size class.
    pub(crate) fn refuses_new(
        &mut self,
        id: NodeId,
        group: u8,
        region: Region,
        hit_class: u8,
    ) -> bool {
        let (class, tick) = (self.class(id, region, group), self.tick);
        let (kept, classes) = (self.kept(region), self.slots(region).classes());
        // A tenant may have its share, whatever others' blocks are worth.
        !kept.has(self.shares.of(self.node(id).ns))
            && self.slots(region).is_full(class)
            && (self.policies(region)).refuses(class, classes, hit_class, tick, kept)
    }

    /// Adds a block below `parent` (`NONE`: a root), without payloads.
    pub(crate) fn insert(
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
