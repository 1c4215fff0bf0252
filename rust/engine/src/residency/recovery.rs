//! Taking over the records that a directory holds, and which of their nodes lookups find. No payload is read.

use smallvec::SmallVec;
use undercroft_contract::format::{PLACEHOLDER, RECORD_BYTES, Record};
use undercroft_contract::image::DeviceImage;
use undercroft_contract::key::BlockHash;
use undercroft_contract::tier::Tier;

use crate::disk::Disk;
use crate::forest::{DeviceIndex, DiskState, FoundNode, NONE, NodeId, NsId, Tag, Touch};
use crate::policy::{HIT_CLASSES, PolicyKind};
use crate::slots::{Owner, Place, slot_offset};

use super::progress::PageMove;
use super::state::{Region, Residency, new_policy};

/// A sound record of a known namespace.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FoundRecord<'a> {
    pub(crate) ns: NsId,
    pub(crate) device: DeviceIndex,
    /// Index of the record in its table.
    pub(crate) index: u32,
    pub(crate) tag: Tag,
    pub(crate) record: &'a Record,
}

/// State of a takeover of records: known cells and the last node.
#[derive(Debug, Default)]
pub(crate) struct Adoption {
    /// Sequence number of the record of each cell, by directory.
    seqs: Vec<Vec<u64>>,
    /// Node of the last record: mostly the parent of the next record's node.
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
    /// Adds a directory without its records. `instances` is the directory's namespace table.
    pub(crate) fn add_disk(&mut self, image: &DeviceImage, kind: PolicyKind, instances: Vec<u64>) {
        assert!(
            self.disks.len() < DeviceIndex::COUNT_MAX,
            "the number of directories is checked when they are opened"
        );
        assert!(
            self.geometry.is_empty(),
            "directories are attached before namespaces are known"
        );
        let policy = new_policy(kind, image.capacity);
        self.disks.push(Disk::new(image, policy, instances));
        self.page_moves.push(PageMove::default());
    }

    /// Advances the tick to the tick of a record.
    pub(crate) fn advance_tick(&mut self, tick: u64) {
        self.tick = self.tick.max(tick);
    }

    /// Begins to take records over: one by one, in any order, until [`Residency::finish_adoption`].
    pub(crate) fn begin_adoption(&mut self, images: &[DeviceImage]) -> Adoption {
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
    pub(crate) fn adopt(&mut self, found: &FoundRecord<'_>, adoption: &mut Adoption) -> bool {
        if found.record.group == PLACEHOLDER {
            return self.adopt_placeholder(found, adoption);
        }
        if self.adopt_payload(found, adoption).is_none() {
            self.disk_mut(found.device).mark_stale(found.index);
        }
        false
    }

    /// The place of the slot that a record describes, if the record makes sense. The slot may lie beyond the present
    /// capacity.
    fn place_of(&self, found: &FoundRecord<'_>) -> Option<Place> {
        let record = found.record;
        let group = usize::from(record.group);
        let spec = self.spec(found.ns);
        if spec.groups.get(group)?.payload_bytes != record.payload_bytes
            || record.depth == 0
            || !spec.ends_block(group, record.depth)
        {
            return None;
        }
        let class = self.class_on_disk(found.ns, found.device, group)?;
        let slots = self.disks[found.device.index()].slots();
        slots.place(class, slot_offset(record.slot))
    }

    /// The node of a record, if the record's place in the forest makes sense, and whether the node is new. The record
    /// of the parent may follow later.
    fn node_of(
        &mut self,
        found: &FoundRecord<'_>,
        adoption: &mut Adoption,
    ) -> Option<(NodeId, bool)> {
        let (ns, record) = (found.ns, found.record);
        let above = record.depth.checked_sub(1)?;
        let parent = match &record.parent {
            None => NONE,
            Some(hash) => match adoption.last.filter(|last| last.is(ns, hash)) {
                Some(last) => last.node,
                // A chain's first block has no parent, so the record contradicts itself.
                None if above == 0 => return None,
                None => {
                    let tag = self.forest.tag(ns, hash);
                    self.find_or_insert(ns, NONE, above, *hash, tag).0
                }
            },
        };
        if self.forest.depth(parent) != above {
            return None;
        }
        let (id, is_new) = self.find_or_insert(ns, parent, record.depth, record.hash, found.tag);
        if !is_new && !self.is_below(id, parent, record.depth) {
            return None;
        }
        adoption.last = Some(LastNode {
            ns,
            hash: record.hash,
            node: id,
        });
        let mut node = self.forest.node_mut(id);
        // Each group of a block has a record of its own, and the latest use counts.
        if record.last >= node.touch().last {
            node.set_touch(Touch {
                last: record.last,
                hit_class: record.hit_class.min(HIT_CLASSES - 1),
            });
        }
        Some((id, is_new))
    }

    fn find_or_insert(
        &mut self,
        ns: NsId,
        parent: NodeId,
        depth: u32,
        hash: BlockHash,
        tag: Tag,
    ) -> (NodeId, bool) {
        let spec = self.spec(ns);
        let (groups, required) = (spec.groups.len(), spec.required(depth));
        let found = FoundNode {
            ns,
            parent,
            depth,
            tag,
            hash,
        };
        self.forest.find_or_insert(&found, groups, required)
    }

    /// Whether a known node fits a record's parent and depth. Sets the node's parent if it was unknown.
    fn is_below(&mut self, id: NodeId, parent: NodeId, depth: u32) -> bool {
        let node = self.node(id);
        if node.depth != depth {
            return false;
        }
        if node.parent() == NONE && parent != NONE {
            self.forest.set_parent(id, parent);
        }
        self.node(id).parent() == parent
    }

    fn adopt_payload(&mut self, found: &FoundRecord<'_>, adoption: &mut Adoption) -> Option<()> {
        let (device, record) = (found.device, found.record);
        let place = self.place_of(found)?;
        let rivals = self.disks[device.index()].slots().rivals(place);
        let is_later = |cell: u32| adoption.seq(device, cell) >= record.seq;
        if rivals.iter().any(|&(_, cell)| is_later(cell)) {
            return None;
        }
        let (id, is_new) = self.node_of(found, adoption)?;
        let group = record.group;
        if !is_new {
            self.lose_older(id, found, adoption)?;
        }
        // Payloads that claim the same bytes have older records.
        for (owner, _) in rivals {
            self.lose_claim(owner);
        }
        let owner = Owner { node: id, group };
        let class = self.class(id, Region::Disk(device), group);
        let cell = self.disk_mut(device).claim(place, found.index, owner);
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
        self.count_bytes(id, Tier::Disk, class);
        Some(())
    }

    /// Drops an older copy of a record's payload, and payloads of its node in another directory. `None` if one of these
    /// payloads has a later record.
    fn lose_older(
        &mut self,
        id: NodeId,
        found: &FoundRecord<'_>,
        adoption: &Adoption,
    ) -> Option<()> {
        let node = self.node(id);
        if node.slots(Tier::Disk) == 0 {
            return Some(());
        }
        let is_old = |at: &u8| node.device != found.device || *at == found.record.group;
        let there = node.groups().filter(is_old);
        let there: SmallVec<[u8; 4]> = there
            .filter(|&at| node.payload(at).disk == DiskState::Present)
            .collect();
        let device = node.device;
        for &at in &there {
            if adoption.seq(device, self.cell_of(id, at)) >= found.record.seq {
                return None;
            }
        }
        for group in there {
            self.lose_claim(Owner { node: id, group });
        }
        Some(())
    }

    /// Cell of a payload that has been taken over.
    fn cell_of(&self, id: NodeId, group: u8) -> u32 {
        let region = self.region(id, Tier::Disk);
        let offset = slot_offset(self.node(id).payload(group).disk_slot);
        let class = self.class(id, region, group);
        self.slots(region).cell_of(class, offset)
    }

    /// Drops a payload that was taken over.
    fn lose_claim(&mut self, Owner { node: id, group }: Owner) {
        let device = self.node(id).device;
        let class = self.class(id, Region::Disk(device), group);
        let mut node = self.forest.node_mut(id);
        let slot = node.change_payload(group, |payload| {
            // The payload may lose its claim twice: as a rival for the slot, and as an older copy.
            let before = std::mem::replace(&mut payload.disk, DiskState::Empty);
            (before == DiskState::Present).then_some(payload.disk_slot)
        });
        if let Some(slot) = slot {
            let slots = node.slots(Tier::Disk) - 1;
            node.set_slots(Tier::Disk, slots);
            self.uncount_bytes(id, Tier::Disk, class);
            self.disk_mut(device).unclaim(class, slot_offset(slot));
        }
    }

    /// Takes over the record of a node that may be without payloads.
    fn adopt_placeholder(&mut self, found: &FoundRecord<'_>, adoption: &mut Adoption) -> bool {
        let depth = found.record.depth;
        if depth == 0 || self.spec(found.ns).required(depth) != 0 {
            return false;
        }
        let id = self.node_of(found, adoption);
        id.is_some_and(|(id, _)| {
            self.disk_mut(found.device)
                .claim_placeholder(id, found.index)
        })
    }

    pub(crate) fn disk_blocks(&self) -> u64 {
        let disks = self.disks.iter();
        disks.map(|disk| disk.slots().blocks()).sum()
    }
}

impl Residency {
    /// Finishes the takeover after the last record: nodes whose chain is complete become visible, each disk's policy
    /// gets the nodes with payloads there, and their parents count them. Returns the number of payloads.
    pub(crate) fn finish_adoption(&mut self) -> u64 {
        self.disks.iter_mut().for_each(Disk::finish_claims);
        // Most records lie behind their parents' records. For them one pass is enough, in the order of memory.
        let mut before_parent = Vec::new();
        for id in 0..self.forest.ids_given() as NodeId {
            let parent = self.parent(id);
            if parent.is_some_and(|parent| parent > id) {
                before_parent.push(id);
            } else if self.may_be_visible(id, parent) {
                let reach = self.reach(id);
                self.forest.node_mut(id).set_reach(reach);
            }
            let node = self.node(id);
            if node.slots(Tier::Disk) == 0 {
                continue;
            }
            let (touch, fingerprint, depth) = (node.touch(), node.hash.fingerprint(), node.depth);
            let policy = &mut self.disk_mut(node.device).policies.leaves;
            policy.on_insert(fingerprint, depth, touch.hit_class, touch.last);
            self.count_active(parent);
        }
        self.allow_rest(usize::MAX);
        let mut visible = Vec::new();
        for id in before_parent {
            let parent = self.parent(id);
            if self.may_be_visible(id, parent) {
                self.propagate_visible(id, &mut visible);
                visible.clear();
            }
        }
        self.disk_blocks()
    }

    /// Whether a node is the first of a chain, or its parent is visible.
    fn may_be_visible(&self, id: NodeId, parent: Option<NodeId>) -> bool {
        match parent {
            Some(parent) => self.node(parent).is_visible(),
            // The parent of a deeper node is unknown.
            None => self.node(id).depth == 1,
        }
    }

    /// Counts an active node at its parent, and each ancestor that becomes active by this at the ancestor's parent.
    fn count_active(&mut self, mut parent: Option<NodeId>) {
        while let Some(id) = parent {
            let was_active = self.forest.is_active(id, Tier::Disk);
            let mut node = self.forest.node_mut(id);
            node.change_active_children(Tier::Disk, |count| *count += 1);
            if was_active == self.forest.is_active(id, Tier::Disk) {
                return;
            }
            parent = self.parent(id);
        }
    }

    /// Removes the nodes whose chain is not complete, tells the policies of the others, and renews the placeholders.
    /// Returns how many payloads were lost.
    pub(crate) fn remove_hidden(&mut self) -> u64 {
        let before = self.disk_blocks();
        let (mut hidden, mut others) = (Vec::new(), Vec::new());
        for id in 0..self.forest.ids_given() as NodeId {
            let (node, parent) = (self.node(id), self.parent(id));
            if node.is_visible() {
                if self.may_change(id, parent) {
                    others.push((id, node.epoch));
                }
            } else if parent.is_none_or(|parent| self.node(parent).is_visible()) {
                hidden.push((id, node.epoch));
            }
        }
        for (id, epoch) in hidden {
            if self.forest.is_live(id, epoch) {
                self.remove_subtree(id);
            }
        }
        self.finish_removals();
        let lost = before - self.disk_blocks();
        // Children first: a placeholder without children is removed, and its parent may then be such a placeholder.
        for (id, epoch) in others.into_iter().rev() {
            if !self.forest.is_live(id, epoch) {
                continue;
            }
            let node = self.node(id);
            if node.slots(Tier::Disk) > 0 {
                // Lost placeholders are written again.
                self.add_placeholders(id, node.device);
            }
            self.reconcile(id);
        }
        self.finish_removals();
        self.continue_placeholders(usize::MAX);
        lost
    }

    /// Whether a node that was found may be removed or evicted, or lacks a placeholder above. Few nodes do.
    fn may_change(&self, id: NodeId, parent: Option<NodeId>) -> bool {
        let node = self.node(id);
        node.groups().len() > 1
            || node.required() == 0
            || node.active_children(Tier::Disk) == 0
            || parent.is_some_and(|parent| self.node(parent).required() == 0)
    }
}
