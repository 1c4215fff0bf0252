//! Recovery: from the table of each directory to the forest. No payload is read.

use crate::disk::format::{
    NAMESPACE_BYTES, NamespaceEntry, RECORD_BYTES, Record, namespace_offset,
};
use crate::disk::{DeviceImage, Disk};
use crate::forest::{DiskState, NONE, NsId, Tier};
use crate::policy::Policy;
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
        let mut orphans = Vec::new();
        for &at in &claimed {
            if self.adopt(&found[at as usize]) {
                recovery.blocks += 1
            } else {
                orphans.push(at);
            }
        }
        recovery.dropped += found.len() as u64 - recovery.blocks;
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
        for entry in entries.iter().flatten().flatten() {
            self.instances.insert(entry.instance);
            let digest = entry.spec.digest();
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

    /// The slot that a record describes, if it makes sense.
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
        let slots = &self.disks[at].slots;
        let offset = bytes(record.slot);
        (offset + slots.slot_bytes(class) <= slots.capacity()).then_some((class, offset))
    }

    /// Gives each slot to the latest record that claims its bytes: one that was evicted may still be
    /// in the table, but was written before its slot was used again. Returns the records that have
    /// their slot, parents first.
    fn claim_slots(&mut self, found: &[Found]) -> Vec<u32> {
        let mut order: Vec<(u64, u32)> = (0..)
            .zip(found)
            .map(|(at, found)| (u64::MAX - found.record.generation, at))
            .collect();
        order.sort_unstable();
        let mut claimed = Vec::with_capacity(order.len());
        for (_, at) in order {
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
            if let Some((class, offset)) = self.slot_of(&found[at as usize])
                && self.disks[usize::from(*device)].claim(class, offset, *index, owner)
            {
                claimed.push(at);
            }
        }
        claimed.sort_by_key(|&at| found[at as usize].record.depth);
        claimed
    }

    /// Takes over a record that has its slot, if its parent is there. Of several of one payload, the
    /// latest comes first.
    fn adopt(&mut self, found: &Found) -> bool {
        let Found {
            ns, device, record, ..
        } = found;
        let (ns, at) = (*ns, usize::from(*device));
        let Some((class, offset)) = self.slot_of(found) else {
            return false;
        };
        let spec = &self.namespaces[usize::from(ns)].spec;
        let (groups, required) = (spec.groups.len(), spec.required(record.depth));
        let parent = match &record.parent {
            None if record.depth == 1 => NONE,
            None => return false,
            Some(parent) => match self.forest.find(ns, parent) {
                Some(id) if self.forest.node(id).depth + 1 == record.depth => id,
                _ => return false,
            },
        };
        let existing = self.forest.find(ns, &record.hash);
        if let Some(id) = existing {
            let node = self.forest.node(id);
            if node.device != *device
                || node.parent != parent
                || node.place(record.group).disk != DiskState::Empty
            {
                return false;
            }
        }
        let id = existing.unwrap_or_else(|| {
            self.forest
                .insert(ns, parent, record.hash, groups, required)
        });
        let owner = Owner {
            node: id,
            group: record.group,
        };
        self.disks[at].set_owner(class, offset, owner);
        let node = self.forest.node_mut(id);
        node.device = *device;
        node.last = node.last.max(record.last);
        node.hit_class = record.hit_class;
        let place = node.place_mut(record.group);
        place.disk = DiskState::Present;
        place.disk_at = record.slot;
        place.checksum = record.checksum;
        self.place_taken(id, Tier::Disk);
        true
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
            while let Some(id) = stack.pop() {
                if !self.forest.node(id).visible {
                    let before = self.disk_blocks();
                    self.detach(id);
                    let lost = before - self.disk_blocks();
                    recovery.blocks -= lost;
                    recovery.dropped += lost;
                    continue;
                }
                self.refresh(id);
                let mut child = self.forest.first_child(id);
                while child != NONE {
                    stack.push(child);
                    child = self.forest.next_sibling(child);
                }
            }
        }
    }

    fn disk_blocks(&self) -> u64 {
        self.disks.iter().map(|disk| disk.slots.blocks()).sum()
    }
}
