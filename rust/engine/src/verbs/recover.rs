//! Recovery: from the table of each directory to the forest. No payload is read.

use std::collections::HashMap;

use smallvec::SmallVec;
use undercroft_contract::format::{
    NAMESPACE_BYTES, NAMESPACES_MAX, NamespaceEntry, NamespaceUse, Record, namespace_offset,
};
use undercroft_contract::image::{DeviceImage, RecordTable};

use crate::forest::{DeviceIndex, NsId};

use super::super::residency::{Adoption, FoundRecord};
use super::engine::Engine;

/// Records that are looked at before the first of them is taken over.
const RECORDS_AHEAD: usize = 32;

/// The result of recovery.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recovery {
    /// Payloads that can be found again.
    pub blocks: u64,
    /// Records that were torn or damaged.
    pub damaged: u64,
    /// Sound records that are of no use: of a namespace that was reset, of overwritten bytes, of a slot beyond the
    /// capacity, or of a block whose parent was not found.
    pub dropped: u64,
    /// Namespaces found.
    pub namespaces: u64,
}

/// A namespace table: each entry, if it is sound.
type Entries = Vec<Option<NamespaceEntry>>;

impl Engine {
    /// Adds directories and their payloads. Called once, before the first session.
    pub fn attach_disks(&mut self, images: Vec<DeviceImage>) -> Recovery {
        let mut recovery = Recovery::default();
        let mut entries = Vec::new();
        for image in &images {
            let of_device = decode_entries(&image.super_bytes);
            let instances = of_device.iter();
            let instances = instances.map(|entry| entry.as_ref().map_or(0, |of| of.instance));
            self.residency
                .add_disk(image, self.config.policy, instances.collect());
            entries.push(of_device);
        }
        self.operations.set_devices(self.residency.disks().len());
        self.recover_namespaces(&entries, &mut recovery);
        self.recover_uses(&images);
        let mut adoption = self.residency.begin_adoption(&images);
        for (device, image) in self.residency.devices().zip(&images) {
            let (sound, placeholders) =
                self.read_table(device, &*image.table, &mut adoption, &mut recovery);
            recovery.dropped += sound - placeholders;
        }
        drop((images, adoption));
        recovery.blocks = self.residency.finish_adoption();
        recovery.dropped -= recovery.blocks;
        let lost = self.residency.remove_hidden();
        recovery.blocks -= lost;
        recovery.dropped += lost;
        let now_s = self.unix_s();
        self.ages.finish_learning(now_s);
        let kept = self.residency.disk_blocks();
        self.end_retention_found();
        let unused = kept - self.residency.disk_blocks();
        recovery.blocks -= unused;
        recovery.dropped += unused;
        self.tell_listeners();
        recovery
    }

    /// Begins to use a directory that was absent ([`DeviceImage::absent`]) and holds no blocks.
    pub fn open_disk(&mut self, device: u16, image: &DeviceImage) {
        let device = DeviceIndex::new(usize::from(device));
        self.residency.open_disk(device, image, self.config.policy);
        for ns in self.residency.forest().namespaces() {
            self.namespaces.enter(ns, &mut self.residency);
        }
        self.namespaces.note_reach(&self.residency);
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
                // A directory was missing for a while. A life of one of its namespaces may be from before a reset, and
                // no record shows which life.
                let device = DeviceIndex::new(device);
                self.namespaces
                    .clear_entry(device, index, &mut self.residency);
                continue;
            }
            if self.namespaces.knows(&digest) {
                continue;
            }
            // A namespace that does not fit the present arena stays on disk, unused.
            let spec = entry.spec.clone();
            let residency = &mut self.residency;
            let added = self.namespaces.add(spec, entry.instance, false, residency);
            recovery.namespaces += u64::from(added.is_ok());
            if added.is_err() {
                self.namespaces.note_stranger(entry.instance, digest);
            }
        }
        for ns in self.residency.forest().namespaces() {
            self.namespaces.enter(ns, &mut self.residency);
        }
    }

    /// Restores the last use of each namespace. A session that only found blocks, and wrote no record, counts as a
    /// use, too.
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

    /// Takes over the records of a directory. Returns the number of sound records of known namespaces, and the number
    /// of placeholders taken over.
    fn read_table(
        &mut self,
        device: DeviceIndex,
        table: &dyn RecordTable,
        adoption: &mut Adoption,
        recovery: &mut Recovery,
    ) -> (u64, u64) {
        let mut taken = (0, 0);
        // Most records have the namespace of the record before.
        let mut of_last: Option<(u64, Option<NsId>)> = None;
        table.read(&mut |piece| {
            recovery.damaged += piece.damaged;
            for records in piece.records.chunks(RECORDS_AHEAD) {
                let mut found = SmallVec::<[FoundRecord<'_>; RECORDS_AHEAD]>::new();
                for (index, record) in records {
                    let known = of_last.filter(|&(instance, _)| instance == record.instance);
                    let (_, ns) = known.unwrap_or_else(|| (record.instance, self.life_of(record)));
                    of_last = Some((record.instance, ns));
                    self.learn(record);
                    let Some(ns) = ns else {
                        recovery.dropped += 1;
                        continue;
                    };
                    self.namespaces.note_use(ns, record.last);
                    let tag = self.residency.forest().tag(ns, &record.hash);
                    // The processor has loaded the places in the index when these records are taken over.
                    self.residency.forest().prefetch(tag);
                    found.push(FoundRecord {
                        ns,
                        device,
                        index: *index,
                        tag,
                        record,
                    });
                }
                for found in &found {
                    taken.0 += 1;
                    taken.1 += u64::from(self.residency.adopt(found, adoption));
                }
            }
        });
        taken
    }

    /// The namespace of a record, if the record's instance is known.
    fn life_of(&mut self, record: &Record) -> Option<NsId> {
        self.namespaces.note_instance(record.instance);
        self.namespaces.of_instance(record.instance)
    }

    /// Notes the numbers and times in a record of any namespace.
    fn learn(&mut self, record: &Record) {
        self.writeback.advance_record_seq(record.seq);
        self.residency.advance_tick(record.last);
        self.ages.learn(record.last, record.written_s);
    }
}

fn decode_entries(super_bytes: &[u8]) -> Entries {
    places(super_bytes).map(NamespaceEntry::decode).collect()
}

/// The bytes of each entry, as far as the file reaches.
fn places(super_bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    (0..NAMESPACES_MAX).map_while(|index| {
        let at = namespace_offset(index) as usize;
        let end = super_bytes.len().min(at + NAMESPACE_BYTES);
        (at < end).then(|| &super_bytes[at..end])
    })
}
