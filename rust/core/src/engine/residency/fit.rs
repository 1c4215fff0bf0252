//! Namespaces of the index: whether their payloads fit, and which slots they take.

use crate::disk::{DeviceImage, Disk, capacity_for_payload};
use crate::error::RegisterError;
use crate::forest::{DeviceIndex, NodeId, NsId};
use crate::namespace::{GroupKind, GroupSpec, NamespaceSpec};
use crate::policy::PolicyKind;
use crate::slots::{Class, region_for};

use super::geometry::{Geometry, Region};
use super::state::{Residency, new_policy};

impl Residency {
    /// The size classes of a namespace's payloads in every region.
    ///
    /// # Errors
    /// If a payload does not fit a page of a region.
    pub(in crate::engine) fn fit(
        &mut self,
        spec: NamespaceSpec,
    ) -> Result<Geometry, RegisterError> {
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
    pub(in crate::engine) fn open_disk(
        &mut self,
        device: DeviceIndex,
        image: &DeviceImage,
        kind: PolicyKind,
        seed: u64,
    ) {
        let disk = &mut self.disks[device.index()];
        assert!(disk.is_absent(), "directory {device:?} is opened once");
        *disk = Disk::new(image, new_policy(kind, image.capacity, seed), Vec::new());
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
    pub(in crate::engine) fn add_namespace(&mut self, geometry: Geometry) -> NsId {
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
    pub(in crate::engine) fn replace_namespace(&mut self, ns: NsId, geometry: Geometry) {
        self.forest.replace_namespace(ns, geometry.spec.has_full());
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
    pub(in crate::engine) fn slot_bytes(&self, id: NodeId, group: u8) -> u64 {
        self.host.slot_bytes(self.class(id, Region::Host, group))
    }

    /// Bytes of the smallest slot of a namespace's payloads in the arena.
    pub(in crate::engine) fn least_slot_bytes(&self, ns: NsId) -> u64 {
        let classes = self.geometry[usize::from(ns)].host_class.iter().flatten();
        let bytes = classes.map(|&class| self.host.slot_bytes(class));
        bytes
            .min()
            .expect("a namespace has a group that is not ignored")
    }

    /// Bytes of the slot of a node's payload on disk.
    pub(in crate::engine) fn disk_slot_bytes(&self, id: NodeId, group: u8) -> u64 {
        let region = Region::Disk(self.node(id).device);
        self.slots(region).slot_bytes(self.class(id, region, group))
    }

    /// Slot bytes in the arena of several payloads.
    pub(in crate::engine) fn slot_bytes_of(&self, payloads: &[(NodeId, u8)]) -> u64 {
        let slots = payloads.iter();
        slots.map(|&(id, group)| self.slot_bytes(id, group)).sum()
    }

    /// Blocks of all groups that end after the depths `after`, one for each group, up to `depth`.
    pub(in crate::engine) fn blocks_of(&self, ns: NsId, depth: u32, after: &[u32]) -> u64 {
        self.counts(ns, depth, after).map(|(_, count)| count).sum()
    }

    /// Slot bytes in the arena of the blocks that [`Residency::blocks_of`] counts.
    pub(in crate::engine) fn bytes_of(&self, ns: NsId, depth: u32, after: &[u32]) -> u64 {
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
    pub(in crate::engine) fn payload_bytes(&self, id: NodeId, group: u8) -> u32 {
        self.spec_of(id).groups[usize::from(group)].payload_bytes
    }
}
