//! Taking over the records that a directory holds. No payload is read.

use crate::disk::format::{PLACEHOLDER, Record};
use crate::disk::{DeviceImage, Disk};
use crate::forest::{DeviceIndex, DiskState, NONE, NodeId, NsId, Tier, Touch};
use crate::policy::{HIT_CLASSES, PolicyKind};
use crate::slots::{Class, Owner, Slots, slot_offset};

use super::runs::RunSearch;
use super::state::{Residency, new_policy};

/// A sound record of a namespace that is known.
#[derive(Clone, Copy, Debug)]
pub(in crate::engine) struct FoundRecord {
    pub(in crate::engine) ns: NsId,
    pub(in crate::engine) device: DeviceIndex,
    /// Index of the record in its table.
    pub(in crate::engine) index: u32,
    pub(in crate::engine) record: Record,
}

impl Residency {
    /// Adds a directory, without its records. `instances` is its namespace table.
    pub(in crate::engine) fn add_disk(
        &mut self,
        image: &DeviceImage,
        kind: PolicyKind,
        seed: u64,
        instances: Vec<u64>,
    ) {
        assert!(
            self.disks.len() < DeviceIndex::COUNT_MAX,
            "the number of directories is checked when they are opened"
        );
        assert!(
            self.geometry.is_empty(),
            "directories are attached before namespaces are known"
        );
        let policy = new_policy(kind, image.capacity, seed);
        let slots = Slots::new(image.capacity, image.page_bytes);
        self.disks.push(Disk::new(slots, policy, instances));
        self.searches.push(RunSearch::default());
    }

    /// A record tells of this tick.
    pub(in crate::engine) fn advance_tick(&mut self, tick: u64) {
        self.tick = self.tick.max(tick);
    }

    /// Makes nodes of records. Returns how many payloads and how many placeholders have one.
    pub(in crate::engine) fn adopt_records(&mut self, found: &[FoundRecord]) -> (u64, u64) {
        let claimed = self.claim_slots(found);
        let (mut payloads, mut placeholders) = (0, 0);
        let mut orphans = Vec::new();
        for &at in &claimed {
            let found = &found[at as usize];
            if found.record.group == PLACEHOLDER {
                placeholders += u64::from(self.adopt_placeholder(found));
            } else if self.adopt(found) {
                payloads += 1;
            } else {
                orphans.push(found);
            }
        }
        self.disks.iter_mut().for_each(Disk::finish_claims);
        // Free lists exist only now.
        for found in orphans {
            let slot = self.slot_of(found);
            let (class, offset) = slot.expect("a slot that was claimed makes sense");
            self.disk_mut(found.device).free(class, offset);
        }
        (payloads, placeholders)
    }

    /// The slot that a record describes, if it makes sense. It may lie beyond the capacity of today.
    fn slot_of(&self, found: &FoundRecord) -> Option<(Class, u64)> {
        let record = &found.record;
        let group = usize::from(record.group);
        let spec = self.spec(found.ns);
        if spec.groups.get(group)?.payload_bytes != record.payload_bytes
            || record.depth == 0
            || !spec.ends_block(group, record.depth)
        {
            return None;
        }
        let class = self.class_on_disk(found.ns, found.device, group)?;
        Some((class, slot_offset(record.slot)))
    }

    /// Gives each slot to the latest record that claims its bytes: one that was evicted may still be
    /// in the table, but was written before its slot was used again. Returns the records that have
    /// their slot, parents first.
    fn claim_slots(&mut self, found: &[FoundRecord]) -> Vec<u32> {
        let mut by_age: Vec<(u64, u32)> = (0..)
            .zip(found)
            .map(|(at, found)| (u64::MAX - found.record.seq, at))
            .collect();
        by_age.sort_unstable();
        // By depth, and among equals still by age.
        let mut claimed: Vec<(u32, u32, u32)> = Vec::with_capacity(by_age.len());
        for (rank, (_, at)) in (0..).zip(by_age) {
            let found = &found[at as usize];
            let group = found.record.group;
            // Whose it is follows when its node is known.
            let owner = Owner { node: NONE, group };
            if group == PLACEHOLDER {
                claimed.push((found.record.depth, rank, at));
            } else if let Some((class, offset)) = self.slot_of(found)
                && self
                    .disk_mut(found.device)
                    .claim(class, offset, found.index, owner)
            {
                claimed.push((found.record.depth, rank, at));
            }
        }
        claimed.sort_unstable();
        claimed.into_iter().map(|(_, _, at)| at).collect()
    }

    /// The node of a record, if its parent is there; made if it is new.
    fn node_of(&mut self, found: &FoundRecord) -> Option<NodeId> {
        let (ns, record) = (found.ns, &found.record);
        let parent = match &record.parent {
            None => NONE,
            Some(parent) => self.forest.find(ns, parent)?,
        };
        if self.forest.depth(parent).checked_add(1) != Some(record.depth) {
            return None;
        }
        if let Some(id) = self.forest.find(ns, &record.hash) {
            return (self.node(id).parent() == parent).then_some(id);
        }
        let spec = self.spec(ns);
        let (groups, required) = (spec.groups.len(), spec.required(record.depth));
        let id = self
            .forest
            .insert(ns, parent, record.hash, groups, required);
        let mut node = self.forest.node_mut(id);
        node.device = found.device;
        node.set_touch(Touch {
            last: record.last,
            hit_class: record.hit_class.min(HIT_CLASSES - 1),
        });
        Some(id)
    }

    /// Takes over a record that has its slot, if its parent is there. Of several of one payload, the
    /// latest comes first.
    fn adopt(&mut self, found: &FoundRecord) -> bool {
        let record = &found.record;
        let slot = self.slot_of(found);
        let (class, offset) = slot.expect("a slot that was claimed makes sense");
        let id = self.node_of(found).filter(|&id| {
            let node = self.node(id);
            let elsewhere = node.device != found.device && node.slots(Tier::Disk) > 0;
            !elsewhere && node.payload(record.group).disk == DiskState::Empty
        });
        let Some(id) = id else {
            return false;
        };
        let owner = Owner {
            node: id,
            group: record.group,
        };
        self.disk_mut(found.device)
            .set_owner(class, offset, found.index, owner);
        let mut node = self.forest.node_mut(id);
        node.device = found.device;
        node.change_payload(record.group, |payload| {
            payload.disk = DiskState::Present;
            payload.disk_slot = record.slot;
            payload.checksum = record.checksum;
        });
        self.slot_taken(id, Tier::Disk);
        true
    }

    /// Takes over the record of a node that may be without payloads.
    fn adopt_placeholder(&mut self, found: &FoundRecord) -> bool {
        let depth = found.record.depth;
        if depth == 0 || self.spec(found.ns).required(depth) != 0 {
            return false;
        }
        let id = self.node_of(found);
        id.is_some_and(|id| {
            self.disk_mut(found.device)
                .claim_placeholder(id, found.index)
        })
    }

    /// Removes the nodes of a namespace that no lookup reaches, and renews the placeholders of the others.
    /// Returns how many payloads were lost.
    pub(in crate::engine) fn remove_hidden(&mut self, ns: NsId) -> u64 {
        let before = self.disk_blocks();
        let mut stack: Vec<NodeId> = self.forest.roots(ns).collect();
        let mut order = Vec::new();
        while let Some(id) = stack.pop() {
            if !self.node(id).is_visible() {
                self.remove_subtree(id);
                continue;
            }
            order.push((id, self.node(id).epoch));
            stack.extend(self.forest.children(id));
        }
        self.finish_removals();
        let lost = before - self.disk_blocks();
        // Children first: a placeholder without children goes, and its parent may be one.
        for (id, epoch) in order.into_iter().rev() {
            if !self.forest.is_live(id, epoch) {
                continue;
            }
            let node = self.node(id);
            if node.slots(Tier::Disk) > 0 {
                // Placeholders that were lost are written anew.
                self.add_placeholders(id, node.device);
            }
            self.reconcile(id);
        }
        self.finish_removals();
        lost
    }

    fn disk_blocks(&self) -> u64 {
        let disks = self.disks.iter();
        disks.map(|disk| disk.slots().blocks()).sum()
    }
}
