//! Taking over the records that a directory holds. No payload is read.

use crate::disk::format::{PLACEHOLDER, RECORD_BYTES, Record};
use crate::disk::{DeviceImage, Disk};
use crate::forest::{DeviceIndex, DiskState, NONE, NodeId, NsId, Tier, Touch};
use crate::key::BlockHash;
use crate::policy::{HIT_CLASSES, PolicyKind};
use crate::slots::{Class, Owner, slot_offset};

use super::geometry::Region;
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

/// State of a takeover of records: known cells and the last node.
#[derive(Debug, Default)]
pub(in crate::engine) struct Adoption {
    /// Order of writing of the record of each cell, by directory.
    seqs: Vec<Vec<u64>>,
    /// Node of the last record: mostly the parent of the next one.
    last: Option<LastNode>,
}

#[derive(Clone, Copy, Debug)]
struct LastNode {
    ns: NsId,
    hash: BlockHash,
    node: NodeId,
}

impl LastNode {
    fn is(&self, ns: NsId, hash: &BlockHash) -> bool {
        self.ns == ns && self.hash == *hash
    }
}

impl Adoption {
    fn seq(&self, device: DeviceIndex, cell: u32) -> u64 {
        self.seqs[device.index()][cell as usize]
    }

    fn set_seq(&mut self, device: DeviceIndex, cell: u32, seq: u64) {
        let seqs = &mut self.seqs[device.index()];
        if seqs.len() <= cell as usize {
            seqs.resize(cell as usize + 1, 0);
        }
        seqs[cell as usize] = seq;
    }
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
        self.disks.push(Disk::new(image, policy, instances));
        self.searches.push(RunSearch::default());
    }

    /// A record tells of this tick.
    pub(in crate::engine) fn advance_tick(&mut self, tick: u64) {
        self.tick = self.tick.max(tick);
    }

    /// Records are taken over one by one, in any order, and then finished.
    pub(in crate::engine) fn begin_adoption(&mut self, images: &[DeviceImage]) -> Adoption {
        let mut adoption = Adoption::default();
        let nodes = images.iter().map(|image| image.table.estimate());
        self.forest.reserve(nodes.sum());
        for (disk, image) in self.disks.iter_mut().zip(images) {
            let records = image.table.bytes().unwrap_or(0) / RECORD_BYTES as u64;
            let records = u32::try_from(records).expect("a table has fewer than 2^32 records");
            disk.begin_claims(records);
            adoption.seqs.push(vec![0; records as usize]);
        }
        adoption
    }

    /// Takes a record over, unless a later one claims the same bytes or describes the same payload. Returns
    /// whether it is a placeholder's.
    pub(in crate::engine) fn adopt(
        &mut self,
        found: &FoundRecord,
        adoption: &mut Adoption,
    ) -> bool {
        if found.record.group == PLACEHOLDER {
            return self.adopt_placeholder(found, adoption);
        }
        self.adopt_payload(found, adoption);
        false
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

    /// The node of a record, if its place in the tree makes sense; made if it is new. Its parent may come later.
    fn node_of(&mut self, found: &FoundRecord, adoption: &mut Adoption) -> Option<NodeId> {
        let (ns, record) = (found.ns, &found.record);
        let above = record.depth.checked_sub(1)?;
        let parent = match &record.parent {
            None => NONE,
            Some(hash) => match adoption.last.filter(|last| last.is(ns, hash)) {
                Some(last) => last.node,
                None => {
                    let found = self.forest.find(ns, hash);
                    found.or_else(|| self.make_parent(ns, above, *hash))?
                }
            },
        };
        if self.forest.depth(parent) != above {
            return None;
        }
        let id = self.node_below(found, parent)?;
        adoption.last = Some(LastNode {
            ns,
            hash: record.hash,
            node: id,
        });
        let mut node = self.forest.node_mut(id);
        if record.last >= node.touch().last {
            node.set_touch(Touch {
                last: record.last,
                hit_class: record.hit_class.min(HIT_CLASSES - 1),
            });
        }
        Some(id)
    }

    /// A node that a record names as its parent, made if it is not known yet.
    fn make_parent(&mut self, ns: NsId, depth: u32, hash: BlockHash) -> Option<NodeId> {
        if depth == 0 {
            return None;
        }
        let spec = self.spec(ns);
        let (groups, required) = (spec.groups.len(), spec.required(depth));
        let forest = &mut self.forest;
        Some(forest.insert_without_parent(ns, depth, hash, groups, required))
    }

    fn node_below(&mut self, found: &FoundRecord, parent: NodeId) -> Option<NodeId> {
        let (ns, record) = (found.ns, &found.record);
        let Some(id) = self.forest.find(ns, &record.hash) else {
            let spec = self.spec(ns);
            let (groups, required) = (spec.groups.len(), spec.required(record.depth));
            let forest = &mut self.forest;
            return Some(forest.insert(ns, parent, record.hash, groups, required));
        };
        let node = self.node(id);
        if node.depth != record.depth {
            return None;
        }
        if node.parent() == NONE && parent != NONE {
            self.forest.set_parent(id, parent);
        }
        (self.node(id).parent() == parent).then_some(id)
    }

    fn adopt_payload(&mut self, found: &FoundRecord, adoption: &mut Adoption) -> Option<()> {
        let (device, record) = (found.device, &found.record);
        let (class, offset) = self.slot_of(found)?;
        let rivals = self.disks[device.index()].rivals(class, offset)?;
        let is_later = |cell: u32| adoption.seq(device, cell) >= record.seq;
        if rivals.iter().any(|&(_, cell)| is_later(cell)) {
            return None;
        }
        let id = self.node_of(found, adoption)?;
        // Drops an older copy of the same payload, and payloads that claim the same bytes.
        let group = record.group;
        let mut older: Vec<Owner> = Vec::new();
        let node = self.node(id);
        if node.slots(Tier::Disk) > 0 {
            let is_old = |at: &u8| node.device != device || *at == group;
            for at in node.groups().filter(is_old) {
                if node.payload(at).disk == DiskState::Present {
                    let cell = self.cell_of(id, at);
                    if adoption.seq(node.device, cell) >= record.seq {
                        return None;
                    }
                    older.push(Owner {
                        node: id,
                        group: at,
                    });
                }
            }
        }
        older.extend(rivals.into_iter().map(|(owner, _)| owner));
        for owner in older {
            self.lose_claim(owner);
        }
        let owner = Owner { node: id, group };
        let cell = self
            .disk_mut(device)
            .claim(class, offset, found.index, owner);
        adoption.set_seq(device, cell, record.seq);
        let mut node = self.forest.node_mut(id);
        node.device = device;
        node.change_payload(group, |payload| {
            payload.disk = DiskState::Present;
            payload.disk_slot = record.slot;
            payload.checksum = record.checksum;
        });
        let slots = node.slots(Tier::Disk) + 1;
        node.set_slots(Tier::Disk, slots);
        Some(())
    }

    /// Cell of a payload that has been taken over.
    fn cell_of(&self, id: NodeId, group: u8) -> u32 {
        let region = self.region(id, Tier::Disk);
        let offset = slot_offset(self.node(id).payload(group).disk_slot);
        let class = self.class(id, region, group);
        self.slots(region).cell_of(class, offset)
    }

    /// A payload that was taken over is not there after all.
    fn lose_claim(&mut self, Owner { node: id, group }: Owner) {
        let device = self.node(id).device;
        let class = self.class(id, Region::Disk(device), group);
        let mut node = self.forest.node_mut(id);
        let slot = node.change_payload(group, |payload| {
            // Its bytes may be claimed twice over: by the slot, and as the same payload.
            let before = std::mem::replace(&mut payload.disk, DiskState::Empty);
            (before == DiskState::Present).then_some(payload.disk_slot)
        });
        if let Some(slot) = slot {
            let slots = node.slots(Tier::Disk) - 1;
            node.set_slots(Tier::Disk, slots);
            self.disk_mut(device).unclaim(class, slot_offset(slot));
        }
    }

    /// Takes over the record of a node that may be without payloads.
    fn adopt_placeholder(&mut self, found: &FoundRecord, adoption: &mut Adoption) -> bool {
        let depth = found.record.depth;
        if depth == 0 || self.spec(found.ns).required(depth) != 0 {
            return false;
        }
        let id = self.node_of(found, adoption);
        id.is_some_and(|id| {
            self.disk_mut(found.device)
                .claim_placeholder(id, found.index)
        })
    }

    /// All records are taken over: tells the policies, and the nodes above. Returns how many payloads there are.
    pub(in crate::engine) fn finish_adoption(&mut self) -> u64 {
        self.disks.iter_mut().for_each(Disk::finish_claims);
        for id in 0..self.forest.ids_given() as NodeId {
            let node = self.node(id);
            if node.slots(Tier::Disk) == 0 {
                continue;
            }
            let (touch, fingerprint) = (node.touch(), node.hash.fingerprint());
            let policy = &mut self.disk_mut(node.device).policies.leaves;
            policy.on_insert(fingerprint, touch.hit_class, touch.last);
            self.count_active(id);
        }
        self.disk_blocks()
    }

    /// Counts an active node at its parent, and at those above that become active by it.
    fn count_active(&mut self, id: NodeId) {
        let mut child = id;
        while let Some(parent) = self.parent(child) {
            let was_active = self.forest.is_active(parent, Tier::Disk);
            let mut node = self.forest.node_mut(parent);
            node.change_active_children(Tier::Disk, |count| *count += 1);
            if was_active == self.forest.is_active(parent, Tier::Disk) {
                return;
            }
            child = parent;
        }
    }

    /// Makes the nodes of a namespace visible whose chain is complete, removes the others, and renews the
    /// placeholders. Returns how many payloads were lost.
    pub(in crate::engine) fn remove_hidden(&mut self, ns: NsId) -> u64 {
        self.allow_rest(usize::MAX);
        let before = self.disk_blocks();
        let mut stack: Vec<NodeId> = self.forest.roots(ns).collect();
        let mut visible = Vec::new();
        // Others have no known parent.
        for &root in &stack {
            if self.node(root).depth == 1 {
                self.propagate_visible(root, &mut visible);
                visible.clear();
            }
        }
        drop(visible);
        let mut order = Vec::new();
        while let Some(id) = stack.pop() {
            if !self.node(id).is_visible() {
                self.remove_subtree(id);
                continue;
            }
            if self.may_change(id) {
                order.push((id, self.node(id).epoch));
            }
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

    /// Whether a node that was found may go, or be evicted, or lacks a placeholder above: few do.
    fn may_change(&self, id: NodeId) -> bool {
        let node = self.node(id);
        let above = self.parent(id).map(|parent| self.node(parent).required());
        node.groups().len() > 1
            || node.required() == 0
            || node.active_children(Tier::Disk) == 0
            || above == Some(0)
    }

    pub(in crate::engine) fn disk_blocks(&self) -> u64 {
        let disks = self.disks.iter();
        disks.map(|disk| disk.slots().blocks()).sum()
    }
}
