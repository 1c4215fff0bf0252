//! Recovery: from the table of each directory to the forest. No payload is read.

use std::collections::HashMap;

use crate::disk::DeviceImage;
use crate::disk::format::{
    NAMESPACE_BYTES, NAMESPACES_MAX, NamespaceEntry, NamespaceUse, RECORD_BYTES, Record,
    namespace_offset,
};
use crate::forest::{DeviceIndex, NodeId};

use super::coordinator::Engine;
use super::residency::FoundRecord;

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

/// A namespace table: each entry, if it is sound.
type Entries = Vec<Option<NamespaceEntry>>;

impl Engine {
    /// Adds directories and what they hold. Called once, before the first session.
    pub fn attach_disks(&mut self, images: Vec<DeviceImage>) -> Recovery {
        let mut recovery = Recovery::default();
        let mut entries = Vec::new();
        for (device, image) in (0u64..).zip(&images) {
            let of_device = decode_entries(&image.super_bytes);
            let instances = of_device.iter();
            let instances = instances.map(|entry| entry.as_ref().map_or(0, |of| of.instance));
            // Each directory's policy draws other samples.
            let seed = self.config.seed ^ (device + 1);
            self.residency
                .add_disk(image, self.config.policy, seed, instances.collect());
            entries.push(of_device);
        }
        self.operations.set_devices(self.residency.disks().len());
        self.recover_namespaces(&entries, &mut recovery);
        self.recover_uses(&images);
        let found = self.read_tables(&images, &mut recovery);
        // The tables may take gigabytes.
        drop(images);
        let (blocks, placeholders) = self.residency.adopt_records(&found);
        recovery.blocks = blocks;
        recovery.dropped += found.len() as u64 - blocks - placeholders;
        self.finish_recovery(&mut recovery);
        recovery
    }

    fn recover_namespaces(&mut self, entries: &[Entries], recovery: &mut Recovery) {
        let all = (0..).zip(entries).flat_map(|(device, entries)| {
            let found = entries.iter().enumerate();
            found.filter_map(move |(index, entry)| Some((device, index, entry.as_ref()?)))
        });
        let mut lives = HashMap::new();
        for (_, _, entry) in all.clone() {
            let (instance, several) = lives
                .entry(entry.spec.digest())
                .or_insert((entry.instance, false));
            *several |= *instance != entry.instance;
        }
        for (device, index, entry) in all {
            self.namespaces.note_instance(entry.instance);
            let digest = entry.spec.digest();
            if lives[&digest].1 {
                // A directory was not here for a while. One of its lives may be from before a reset, and
                // nothing says which.
                let device = DeviceIndex::new(device);
                self.namespaces
                    .clear_entry(device, index, &mut self.residency);
                continue;
            }
            if self.namespaces.knows(&digest) {
                continue;
            }
            // One that does not fit the arena of today stays on disk, unused.
            let spec = entry.spec.clone();
            let residency = &mut self.residency;
            let added = self.namespaces.add(spec, entry.instance, false, residency);
            recovery.namespaces += u64::from(added.is_ok());
        }
        for ns in self.residency.forest().namespaces() {
            self.namespaces.enter(ns, &mut self.residency);
        }
    }

    /// When sessions used the namespaces last, also those that found all that they asked for.
    fn recover_uses(&mut self, images: &[DeviceImage]) {
        let places = images.iter().flat_map(|image| places(&image.super_bytes));
        for place in places {
            let Some(entry) = NamespaceEntry::decode(place) else {
                continue;
            };
            let used = NamespaceUse::decode(place, entry.instance);
            let (Some(ns), Some(used)) = (self.namespaces.of_instance(entry.instance), used) else {
                continue;
            };
            self.residency.advance_tick(used.tick);
            self.namespaces.note_use(ns, used.tick);
        }
    }

    fn read_tables(&mut self, images: &[DeviceImage], recovery: &mut Recovery) -> Vec<FoundRecord> {
        let records = images
            .iter()
            .map(|image| image.table_bytes.len() / RECORD_BYTES);
        let mut found = Vec::with_capacity(records.sum());
        for (device, image) in self.residency.devices().zip(images) {
            for (index, bytes) in (0u32..).zip(image.table_bytes.chunks_exact(RECORD_BYTES)) {
                let Some(record) = Record::decode(bytes) else {
                    recovery.damaged += u64::from(!Record::is_blank(bytes));
                    continue;
                };
                self.namespaces.note_instance(record.instance);
                self.writeback.advance_record_seq(record.seq);
                self.residency.advance_tick(record.last);
                match self.namespaces.of_instance(record.instance) {
                    Some(ns) => {
                        self.namespaces.note_use(ns, record.last);
                        found.push(FoundRecord {
                            ns,
                            device,
                            index,
                            record,
                        });
                    }
                    None => recovery.dropped += 1,
                }
            }
        }
        found
    }

    /// Makes nodes visible whose chain is complete, and removes the others.
    fn finish_recovery(&mut self, recovery: &mut Recovery) {
        for ns in self.residency.forest().namespaces() {
            let roots: Vec<NodeId> = self.residency.forest().roots(ns).collect();
            for root in roots {
                let mut visible = Vec::new();
                self.residency.propagate_visible(root, &mut visible);
                self.writeback
                    .offer_new(&visible, &mut self.residency, &mut self.counters);
            }
            let lost = self.residency.remove_hidden(ns);
            recovery.blocks -= lost;
            recovery.dropped += lost;
        }
    }
}

fn decode_entries(super_bytes: &[u8]) -> Entries {
    places(super_bytes).map(NamespaceEntry::decode).collect()
}

/// The place of each entry, as far as the file goes.
fn places(super_bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    (0..NAMESPACES_MAX).map_while(|index| {
        let at = namespace_offset(index) as usize;
        let end = super_bytes.len().min(at + NAMESPACE_BYTES);
        (at < end).then(|| &super_bytes[at..end])
    })
}
