//! Eviction: what may go, and what goes when a tier is full.
//!
//! Leaves go with all they hold. Of a node with others below it in the tier, what a hit can do without
//! may go alone: blocks that have left their window, and states between boundaries.

use crate::forest::{DiskState, HostState, NONE, NodeId, Place, Tier};
use crate::policy::{Leaf, Policy};
use crate::slots::Class;

use super::Engine;
use super::places::{Loss, bytes};

/// Pages of other size classes that one allocation may drain: bounds its work.
const DRAINS_MAX: u32 = 4;

/// What of a node may be dropped for space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// Nothing.
    Kept,
    /// What a hit can do without.
    Spare,
    /// Everything.
    Leaf,
}

fn is_readable(place: &Place, tier: Tier) -> bool {
    match tier {
        Tier::Host => place.host == HostState::Present,
        Tier::Disk => place.disk == DiskState::Present,
    }
}

impl Engine {
    /// Size classes in which a node's payloads of a tier lie, without repetition.
    pub(super) fn classes(&self, id: NodeId, tier: Tier) -> Vec<Class> {
        let node = self.forest.node(id);
        let mut classes = Vec::with_capacity(1);
        for (group, place) in (0u8..).zip(node.places()) {
            let class = match tier {
                Tier::Host if place.host != HostState::Empty => self.host_class(id, group),
                Tier::Disk if matches!(place.disk, DiskState::Writing | DiskState::Present) => {
                    self.disk_class(id, usize::from(node.device), group)
                }
                _ => continue,
            };
            if !classes.contains(&class) {
                classes.push(class);
            }
        }
        classes
    }

    /// Size classes in which payloads of a tier lie that a hit can do without, without repetition.
    pub(super) fn spare_classes(&self, id: NodeId, tier: Tier) -> Vec<Class> {
        let node = self.forest.node(id);
        let mut classes = Vec::new();
        for (group, place) in (0u8..).zip(node.places()) {
            if node.requires(usize::from(group)) || !is_readable(place, tier) {
                continue;
            }
            let class = match tier {
                Tier::Host => self.host_class(id, group),
                Tier::Disk => self.disk_class(id, usize::from(node.device), group),
            };
            if !classes.contains(&class) {
                classes.push(class);
            }
        }
        classes
    }

    /// Takes a node out of a tier's leaves. Called before anything that leaf-hood depends on changes.
    pub(super) fn unleaf(&mut self, id: NodeId, tier: Tier) {
        let at = tier as usize;
        let node = self.forest.node(id);
        let (leaf, last) = (node.leaf[at], node.last);
        if !leaf && !node.spare[at] {
            return;
        }
        let classes = if leaf {
            self.classes(id, tier)
        } else {
            self.spare_classes(id, tier)
        };
        let policy = if leaf {
            self.policy(id, tier)
        } else {
            self.spares(id, tier)
        };
        for class in classes {
            let found = policy.remove_leaf(class, id, last);
            debug_assert!(found, "leaf unknown to the policy");
        }
        let node = self.forest.node_mut(id);
        node.leaf[at] = false;
        node.spare[at] = false;
    }

    pub(super) fn unleaf_both(&mut self, id: NodeId) {
        self.unleaf(id, Tier::Host);
        self.unleaf(id, Tier::Disk);
    }

    /// Whether a node's payloads of a tier may be dropped for space.
    fn evictable(&self, id: NodeId, tier: Tier) -> bool {
        let node = self.forest.node(id);
        if node.detached
            || node.pins > 0
            || node.holds > 0
            || node.places_used[tier as usize] == 0
            || node.tier_children[tier as usize] > 0
        {
            return false;
        }
        let mut last_copy = false;
        for (group, place) in node.places().iter().enumerate() {
            let in_flight = matches!(place.host, HostState::Filling | HostState::Reading)
                || matches!(place.disk, DiskState::Queued | DiskState::Writing);
            if in_flight {
                return false;
            }
            last_copy |= node.requires(group)
                && match tier {
                    Tier::Host => place.disk != DiskState::Present,
                    Tier::Disk => place.host != HostState::Present,
                };
        }
        !last_copy || node.children == 0
    }

    pub(super) fn standing(&self, id: NodeId, tier: Tier) -> Standing {
        if self.evictable(id, tier) {
            return Standing::Leaf;
        }
        let node = self.forest.node(id);
        let used = node.detached || node.pins > 0 || node.holds > 0;
        let spare =
            |(group, place): (usize, &Place)| !node.requires(group) && is_readable(place, tier);
        let in_flight = node.places().iter().any(|place| {
            matches!(place.host, HostState::Filling | HostState::Reading)
                || matches!(place.disk, DiskState::Queued | DiskState::Writing)
        });
        if used || in_flight || !node.places().iter().enumerate().any(spare) {
            Standing::Kept
        } else {
            Standing::Spare
        }
    }

    fn spares(&mut self, id: NodeId, tier: Tier) -> &mut Policy {
        match tier {
            Tier::Host => &mut self.host_spares,
            Tier::Disk => &mut self.disks[usize::from(self.forest.node(id).device)].spares,
        }
    }

    /// Puts a node into, or takes it out of, the leaves of both tiers, as it now deserves.
    pub(super) fn refresh(&mut self, id: NodeId) {
        for tier in [Tier::Host, Tier::Disk] {
            let at = tier as usize;
            let wanted = self.standing(id, tier);
            let node = self.forest.node(id);
            let (leaf, spare) = (wanted == Standing::Leaf, wanted == Standing::Spare);
            if node.leaf[at] == leaf && node.spare[at] == spare {
                continue;
            }
            self.unleaf(id, tier);
            if wanted == Standing::Kept {
                continue;
            }
            let classes = if leaf {
                self.classes(id, tier)
            } else {
                self.spare_classes(id, tier)
            };
            let node = self.forest.node_mut(id);
            node.leaf[at] = leaf;
            node.spare[at] = spare;
            let entry = Leaf {
                node: id,
                last: node.last,
                hit_class: node.hit_class,
            };
            let policy = if leaf {
                self.policy(id, tier)
            } else {
                self.spares(id, tier)
            };
            for class in classes {
                policy.insert_leaf(class, entry);
            }
        }
    }

    /// Makes one slot's worth of room in a tier, or more. False if everything is in use.
    ///
    /// The oldest leaf goes, of whatever size class: so space moves between models by use.
    pub(super) fn make_room(
        &mut self,
        tier: Tier,
        device: usize,
        class: Class,
        drains: &mut u32,
    ) -> bool {
        let own = self.victim(tier, device, class);
        let slots = match tier {
            Tier::Host => &self.host,
            Tier::Disk => &self.disks[device].slots,
        };
        let classes = Class::try_from(slots.class_count()).unwrap_or(Class::MAX);
        let other = (0..classes)
            .filter(|&other| other != class)
            .filter_map(|other| Some((self.victim(tier, device, other)?, other)))
            .min_by_key(|(leaf, _)| leaf.last);
        if let Some((leaf, other)) = other {
            let older = own.as_ref().is_none_or(|own| leaf.last < own.last);
            if older && (own.is_none() || *drains < DRAINS_MAX) {
                *drains += 1;
                if self.drain_page(tier, device, leaf.node, other) {
                    return true;
                }
            }
        }
        let Some(own) = own else { return false };
        self.evict(own.node, tier);
        true
    }

    /// What goes first among the payloads of a size class: the policy's leaf, or what a hit can do
    /// without of a node touched no later.
    fn victim(&mut self, tier: Tier, device: usize, class: Class) -> Option<Leaf> {
        let tick = self.tick;
        let (policy, spares) = match tier {
            Tier::Host => (&mut self.host_policy, &mut self.host_spares),
            Tier::Disk => {
                let disk = &mut self.disks[device];
                (&mut disk.policy, &mut disk.spares)
            }
        };
        let leaf = policy.victim(class, tick);
        let spare = spares.victim(class, tick);
        match (leaf, spare) {
            (Some(leaf), Some(spare)) if leaf.last < spare.last => Some(leaf),
            (leaf, spare) => spare.or(leaf),
        }
    }

    /// Whether the policy would rather keep every leaf of `class` than store a new block.
    pub(super) fn refuses(
        &mut self,
        tier: Tier,
        device: usize,
        class: Class,
        hit_class: u8,
    ) -> bool {
        let tick = self.tick;
        let (policy, spares) = match tier {
            Tier::Host => (&mut self.host_policy, &mut self.host_spares),
            Tier::Disk => {
                let disk = &mut self.disks[device];
                (&mut disk.policy, &mut disk.spares)
            }
        };
        spares.victim(class, tick).is_none()
            && policy.touches_every_block()
            && policy
                .victim(class, tick)
                .is_some_and(|victim| !policy.admit(hit_class, &victim, tick))
    }

    /// Drops a leaf's payloads of a tier, or what a hit can do without of another node.
    fn evict(&mut self, id: NodeId, tier: Tier) {
        let node = self.forest.node(id);
        let (parent, last, leaf) = (node.parent, node.last, node.leaf[tier as usize]);
        self.drop_tier(id, tier, leaf);
        if !leaf {
            self.settle(id);
            return;
        }
        // Under LRU only the deepest block of a hit is touched: its parent inherits that.
        if parent != NONE
            && self.forest.node(parent).last < last
            && !self.policy(id, tier).touches_every_block()
        {
            self.unleaf_both(parent);
            self.forest.node_mut(parent).last = last;
            self.refresh(parent);
        }
        self.settle(id);
    }

    fn drop_tier(&mut self, id: NodeId, tier: Tier, all: bool) {
        for group in 0..u8::try_from(self.forest.node(id).places().len()).unwrap_or(0) {
            let node = self.forest.node(id);
            let place = *node.place(group);
            if !all && node.requires(usize::from(group)) {
                continue;
            }
            match tier {
                Tier::Host if place.host == HostState::Present => {
                    self.counters.host_evictions += 1;
                    self.drop_host(id, group, Loss::Evicted);
                }
                Tier::Disk if place.disk == DiskState::Present => {
                    self.counters.disk_evictions += 1;
                    self.drop_disk(id, group, Loss::Evicted);
                }
                _ => {}
            }
        }
    }

    /// Evicts what can be of the page that holds a leaf's payload of size class `class`.
    fn drain_page(&mut self, tier: Tier, device: usize, leaf: NodeId, class: Class) -> bool {
        let node = self.forest.node(leaf);
        let whole = node.leaf[tier as usize];
        let at = (0u8..).zip(node.places()).find_map(|(group, place)| {
            if !is_readable(place, tier) || !whole && node.requires(usize::from(group)) {
                return None;
            }
            let (of, at) = match tier {
                Tier::Host => (self.host_class(leaf, group), place.host_at),
                Tier::Disk => (self.disk_class(leaf, device, group), place.disk_at),
            };
            (of == class).then_some(at)
        });
        let Some(offset) = at.map(bytes) else {
            return false;
        };
        let slots = match tier {
            Tier::Host => &self.host,
            Tier::Disk => &self.disks[device].slots,
        };
        let mut owners: Vec<NodeId> = slots
            .owners(slots.page_of(offset))
            .map(|owner| owner.node)
            .collect();
        owners.dedup();
        // Deepest first, so that each is a leaf when its turn comes, unless it is in use.
        owners.sort_by_key(|&id| std::cmp::Reverse(self.forest.node(id).depth));
        let generations: Vec<u32> = owners
            .iter()
            .map(|&id| self.forest.node(id).generation)
            .collect();
        let mut freed = false;
        for (id, generation) in owners.into_iter().zip(generations) {
            if self.forest.is_live(id, generation) && self.standing(id, tier) != Standing::Kept {
                self.evict(id, tier);
                freed = true;
            }
        }
        freed
    }
}
