//! Recovery: from the table of each directory to the forest. No payload is read.

use std::collections::HashMap;

use crate::disk::format::{
    LINK, NAMESPACE_BYTES, NamespaceEntry, RECORD_BYTES, Record, namespace_offset,
};
use crate::disk::{DeviceImage, Disk};
use crate::forest::{DiskState, NONE, NodeId, NsId, Tier};
use crate::policy::{HIT_CLASSES, Policy};
use crate::slots::{Class, Owner, Slots};

use super::Engine;
use super::places::bytes;

/// What recovery found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recovery {
    /// Payloads that can be found again.
    pub blocks: u64,
    /// Records that were torn or damaged.
    pub damaged: u64,
    /// Sound records that lead nowhere: of a namespace that was reset, overwritten, beyond the
    /// capacity, or below a block that is not there.
    pub dropped: u64,
    /// Namespaces found.
    pub namespaces: u64,
}

#[derive(Clone, Copy)]
struct Found {
    ns: NsId,
    device: u8,
    index: u32,
    record: Record,
}

impl Engine {
    /// Adds directories and what they hold. Called once, before the first session.
    pub fn attach_disks(&mut self, images: Vec<DeviceImage>) -> Recovery {
        let mut recovery = Recovery::default();
        let mut entries: Vec<Vec<Option<NamespaceEntry>>> = Vec::new();
        for (device, image) in (0u64..).zip(&images) {
            let of_device: Vec<Option<NamespaceEntry>> = (0..crate::disk::format::NAMESPACES_MAX)
                .map_while(|index| {
                    let at = usize::try_from(namespace_offset(index)).ok()?;
                    let end = image.super_bytes.len().min(at + NAMESPACE_BYTES);
                    (at < end).then(|| NamespaceEntry::decode(&image.super_bytes[at..end]))
                })
                .collect();
            let blocks = usize::try_from(image.capacity >> 16)
                .unwrap_or(usize::MAX)
                .max(64);
            let policy = Policy::new(self.config.policy, blocks, self.config.seed ^ (device + 1));
            let instances = of_device
                .iter()
                .map(|entry| entry.as_ref().map_or(0, |e| e.instance))
                .collect();
            let slots = Slots::new(image.capacity, image.page_bytes);
            self.disks.push(Disk::new(slots, policy, instances));
            entries.push(of_device);
        }
        self.recover_namespaces(&entries, &mut recovery);
        let found = self.read_tables(&images, &mut recovery);
        drop(images);
        let claimed = self.claim_slots(&found);
        self.forest.reserve(claimed.len());
        let (mut orphans, mut links) = (Vec::new(), 0);
        for &at in &claimed {
            let found = &found[at as usize];
            if found.record.group == LINK {
                links += u64::from(self.adopt_link(found));
            } else if self.adopt(found) {
                recovery.blocks += 1
            } else {
                orphans.push(at);
            }
        }
        recovery.dropped += found.len() as u64 - recovery.blocks - links;
        self.disks.iter_mut().for_each(Disk::finish_claims);
        for at in orphans {
            let Found { device, record, .. } = &found[at as usize];
            if let Some((class, offset)) = self.slot_of(&found[at as usize]) {
                debug_assert_eq!(offset, bytes(record.slot));
                self.disks[usize::from(*device)].free(class, offset);
            }
        }
        self.finish_recovery(&mut recovery);
        recovery
    }

    fn recover_namespaces(
        &mut self,
        entries: &[Vec<Option<NamespaceEntry>>],
        recovery: &mut Recovery,
    ) {
        let places = entries.iter().enumerate().flat_map(|(device, entries)| {
            let found = entries.iter().enumerate();
            found.filter_map(move |(index, entry)| Some((device, index, entry.as_ref()?)))
        });
        let mut lives = HashMap::new();
        for (_, _, entry) in places.clone() {
            let (instance, several) = lives
                .entry(entry.spec.digest())
                .or_insert((entry.instance, false));
            *several |= *instance != entry.instance;
        }
        for (device, index, entry) in places {
            self.instances.insert(entry.instance);
            let digest = entry.spec.digest();
            if lives.get(&digest).is_some_and(|&(_, several)| several) {
                // A directory was not here for a while. One of its lives may be from before a reset, and
                // nothing says which.
                self.clear_entry(device, index);
                continue;
            }
            if self.namespaces.iter().any(|ns| ns.digest == digest) {
                continue;
            }
            // One that does not fit the arena of today stays on disk, unused.
            if self
                .add_namespace(entry.spec.clone(), entry.instance, false)
                .is_ok()
            {
                recovery.namespaces += 1;
            }
        }
        for ns in 0..NsId::try_from(self.namespaces.len()).unwrap_or(NsId::MAX) {
            self.save_namespace(ns);
        }
    }

    fn read_tables(&mut self, images: &[DeviceImage], recovery: &mut Recovery) -> Vec<Found> {
        let records = images
            .iter()
            .map(|image| image.table_bytes.len() / RECORD_BYTES);
        let mut found = Vec::with_capacity(records.sum());
        for (device, image) in (0u8..).zip(images) {
            for (index, bytes) in (0u32..).zip(image.table_bytes.chunks_exact(RECORD_BYTES)) {
                let Some(record) = Record::decode(bytes) else {
                    recovery.damaged += u64::from(!Record::is_blank(bytes));
                    continue;
                };
                self.instances.insert(record.instance);
                self.record_generation = self.record_generation.max(record.generation);
                self.tick = self.tick.max(record.last);
                let ns = self
                    .namespaces
                    .iter()
                    .position(|ns| ns.instance == record.instance);
                match ns.and_then(|ns| NsId::try_from(ns).ok()) {
                    Some(ns) => found.push(Found {
                        ns,
                        device,
                        index,
                        record,
                    }),
                    None => recovery.dropped += 1,
                }
            }
        }
        found
    }

    /// The slot that a record describes, if it makes sense. It may lie beyond the capacity of today.
    fn slot_of(&self, found: &Found) -> Option<(Class, u64)> {
        let Found { device, record, .. } = found;
        let (group, at) = (usize::from(record.group), usize::from(*device));
        let namespace = &self.namespaces[usize::from(found.ns)];
        let spec = namespace.spec.groups.get(group)?;
        if spec.payload_bytes != record.payload_bytes
            || record.depth == 0
            || !namespace.spec.ends_block(group, record.depth)
        {
            return None;
        }
        let class = namespace.disk_class[at][group]?;
        Some((class, bytes(record.slot)))
    }

    /// Gives each slot to the latest record that claims its bytes: one that was evicted may still be
    /// in the table, but was written before its slot was used again. Returns the records that have
    /// their slot, parents first.
    fn claim_slots(&mut self, found: &[Found]) -> Vec<u32> {
        let mut by_age: Vec<(u64, u32)> = (0..)
            .zip(found)
            .map(|(at, found)| (u64::MAX - found.record.generation, at))
            .collect();
        by_age.sort_unstable();
        // By depth, and among equals still by age.
        let mut claimed: Vec<(u32, u32, u32)> = Vec::with_capacity(by_age.len());
        for (rank, (_, at)) in (0..).zip(by_age) {
            let Found {
                device,
                index,
                record,
                ..
            } = &found[at as usize];
            // Whose it is follows when its node is known.
            let owner = Owner {
                node: NONE,
                group: record.group,
            };
            if record.group == LINK {
                claimed.push((record.depth, rank, at));
            } else if let Some((class, offset)) = self.slot_of(&found[at as usize])
                && self.disks[usize::from(*device)].claim(class, offset, *index, owner)
            {
                claimed.push((record.depth, rank, at));
            }
        }
        claimed.sort_unstable();
        claimed.into_iter().map(|(_, _, at)| at).collect()
    }

    /// The node of a record, if its parent is there; made if it is new.
    fn node_of(&mut self, found: &Found) -> Option<NodeId> {
        let (ns, record) = (found.ns, &found.record);
        let parent = match &record.parent {
            None => NONE,
            Some(parent) => self.forest.find(ns, parent)?,
        };
        let above = match parent {
            NONE => 0,
            parent => self.forest.node(parent).depth,
        };
        if above + 1 != record.depth {
            return None;
        }
        if let Some(id) = self.forest.find(ns, &record.hash) {
            return (self.forest.node(id).parent == parent).then_some(id);
        }
        let spec = &self.namespaces[usize::from(ns)].spec;
        let (groups, required) = (spec.groups.len(), spec.required(record.depth));
        let id = self
            .forest
            .insert(ns, parent, record.hash, groups, required);
        let node = self.forest.node_mut(id);
        node.device = found.device;
        node.last = record.last;
        node.hit_class = record.hit_class.min(HIT_CLASSES - 1);
        Some(id)
    }

    /// Takes over a record that has its slot, if its parent is there. Of several of one payload, the
    /// latest comes first.
    fn adopt(&mut self, found: &Found) -> bool {
        let record = &found.record;
        let Some((class, offset)) = self.slot_of(found) else {
            return false;
        };
        let id = self.node_of(found).filter(|&id| {
            let node = self.forest.node(id);
            let elsewhere =
                node.device != found.device && node.places_used[Tier::Disk as usize] > 0;
            !elsewhere && node.place(record.group).disk == DiskState::Empty
        });
        let Some(id) = id else {
            return false;
        };
        let owner = Owner {
            node: id,
            group: record.group,
        };
        self.disks[usize::from(found.device)].set_owner(class, offset, found.index, owner);
        let node = self.forest.node_mut(id);
        node.device = found.device;
        let place = node.place_mut(record.group);
        place.disk = DiskState::Present;
        place.disk_at = record.slot;
        place.checksum = record.checksum;
        self.place_taken(id, Tier::Disk);
        true
    }

    /// Takes over the record of a node that may be without payloads.
    fn adopt_link(&mut self, found: &Found) -> bool {
        let namespace = &self.namespaces[usize::from(found.ns)];
        if found.record.depth == 0 || namespace.spec.required(found.record.depth) != 0 {
            return false;
        }
        let id = self.node_of(found);
        id.is_some_and(|id| self.disks[usize::from(found.device)].claim_link(id, found.index))
    }

    /// Makes visible what stands on complete ground, and lets go of the rest.
    fn finish_recovery(&mut self, recovery: &mut Recovery) {
        for ns in 0..NsId::try_from(self.namespaces.len()).unwrap_or(NsId::MAX) {
            let mut stack = Vec::new();
            let mut root = self.forest.first_root(ns);
            while root != NONE {
                stack.push(root);
                root = self.forest.next_sibling(root);
            }
            for &root in &stack {
                self.rise(root);
            }
            let mut order = Vec::new();
            while let Some(id) = stack.pop() {
                if !self.forest.node(id).visible {
                    let before = self.disk_blocks();
                    self.detach(id);
                    let lost = before - self.disk_blocks();
                    recovery.blocks -= lost;
                    recovery.dropped += lost;
                    continue;
                }
                order.push((id, self.forest.node(id).generation));
                let mut child = self.forest.first_child(id);
                while child != NONE {
                    stack.push(child);
                    child = self.forest.next_sibling(child);
                }
            }
            // Children first: a link to nothing goes, and its parent may be one.
            for (id, generation) in order.into_iter().rev() {
                if !self.forest.is_live(id, generation) {
                    continue;
                }
                let node = self.forest.node(id);
                if node.places_used[Tier::Disk as usize] > 0 {
                    // Links that were lost are written anew.
                    self.add_links(id, usize::from(node.device));
                }
                self.settle(id);
            }
        }
    }

    fn disk_blocks(&self) -> u64 {
        self.disks.iter().map(|disk| disk.slots.blocks()).sum()
    }
}
