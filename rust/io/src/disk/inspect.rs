//! Reads the contents of a directory without an engine: for operators.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use undercroft_contract::checksum::checksum;
use undercroft_contract::cipher;
use undercroft_contract::cipher::SEAL_BYTES;
use undercroft_contract::format::{
    NAMESPACE_BYTES, NAMESPACES_MAX, NamespaceEntry, NamespaceUse, PLACEHOLDER, RECORD_BYTES,
    Record, namespace_offset,
};
use undercroft_contract::namespace::NamespaceSpec;
use undercroft_contract::pages::SLOT_ALIGN;

use super::open::Contents;

/// A namespace with counts and times from its records.
#[derive(Clone, Debug)]
pub struct NamespaceSummary {
    /// The instance in the namespace's records.
    pub instance: u64,
    /// Description and groups.
    pub spec: NamespaceSpec,
    /// Payloads.
    pub blocks: u64,
    /// Bytes of the payloads.
    pub bytes: u64,
    /// When the first payload was written, in seconds since 1970; 0 if there is none.
    pub oldest_s: u32,
    /// When the last payload was written.
    pub newest_s: u32,
    /// When a session of the namespace was opened or closed last, or a payload was written; 0 if unknown.
    pub used_s: u32,
}

/// The contents of a directory's tables.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// The namespaces, by entry of the namespace table.
    pub namespaces: Vec<NamespaceSummary>,
    /// Valid records whose bytes no later record claims, by slot.
    pub records: Vec<Record>,
    /// Records that are torn or damaged.
    pub damaged: u64,
}

impl Summary {
    /// Reads the tables. An engine that opens the directory may drop some of these records: the records
    /// of blocks with a missing ancestor.
    pub fn of(contents: &Contents) -> Self {
        let mut spaces: BTreeMap<u64, NamespaceSummary> = BTreeMap::new();
        for index in 0..NAMESPACES_MAX {
            let at = namespace_offset(index) as usize;
            let end = contents.super_bytes.len().min(at + NAMESPACE_BYTES);
            let entry = contents.super_bytes.get(at..end);
            if let Some((entry, place)) = entry.and_then(NamespaceEntry::decode).zip(entry) {
                let used = NamespaceUse::decode(place, entry.instance);
                let (blocks, bytes, oldest_s, newest_s) = (0, 0, 0, 0);
                let summary = NamespaceSummary {
                    instance: entry.instance,
                    spec: entry.spec,
                    blocks,
                    bytes,
                    oldest_s,
                    newest_s,
                    used_s: used.map_or(0, |used| used.used_s),
                };
                spaces.insert(entry.instance, summary);
            }
        }
        let mut damaged = 0;
        let mut found = Vec::new();
        for bytes in contents.table_bytes.chunks_exact(RECORD_BYTES) {
            let Some(record) = Record::decode(bytes) else {
                damaged += u64::from(!Record::is_blank(bytes));
                continue;
            };
            if record.group == PLACEHOLDER {
                continue;
            }
            // An engine would not use the others either: they belong to a larger data file, or to no namespace.
            if range(&record).end <= contents.data_bytes && spaces.contains_key(&record.instance) {
                found.push(record);
            }
        }
        let by_slot = latest(found);
        for record in by_slot.values() {
            if let Some(space) = spaces.get_mut(&record.instance) {
                let first = space.blocks == 0 || record.written_s < space.oldest_s;
                space.oldest_s = if first {
                    record.written_s
                } else {
                    space.oldest_s
                };
                space.newest_s = space.newest_s.max(record.written_s);
                space.used_s = space.used_s.max(record.written_s);
                space.blocks += 1;
                space.bytes += u64::from(record.payload_bytes);
            }
        }
        Self {
            namespaces: spaces.into_values().collect(),
            records: by_slot.into_values().collect(),
            damaged,
        }
    }
}

/// The bytes of the data file that a record describes.
fn range(record: &Record) -> Range<u64> {
    let start = u64::from(record.slot) * SLOT_ALIGN;
    start..start + u64::from(record.payload_bytes)
}

/// The latest of the records that claim the same bytes.
fn latest(mut records: Vec<Record>) -> BTreeMap<u64, Record> {
    records.sort_unstable_by_key(|record| std::cmp::Reverse(record.seq));
    let mut by_start: BTreeMap<u64, Record> = BTreeMap::new();
    for record in records {
        let Range { start, end } = range(&record);
        let below = by_start.range(..end.max(start + 1)).next_back();
        if below.is_none_or(|(_, other)| range(other).end <= start) {
            by_start.insert(start, record);
        }
    }
    by_start
}

/// Whether two records describe the same payload in the same place. Their sequence numbers may differ: a block of the
/// table is written whole.
pub fn is_same_payload(one: &Record, other: &Record) -> bool {
    let payload = |record: &Record| {
        let Record {
            slot,
            checksum,
            instance,
            group,
            hash,
            ..
        } = *record;
        (slot, checksum, instance, group, hash)
    };
    payload(one) == payload(other)
}

/// Whether a record's payload has the record's checksum. In an encrypted store: whether the seal behind the payload
/// belongs to the payload, which needs no key to check.
///
/// # Errors
/// If the file cannot be read. A file that ends too early is no error: its last payloads are not intact.
pub fn is_intact(record: &Record, contents: &Contents) -> io::Result<bool> {
    let encrypted = contents.superblock.encrypted;
    let seal_bytes = if encrypted { SEAL_BYTES } else { 0 };
    let mut bytes = vec![0; record.payload_bytes as usize + seal_bytes];
    let offset = u64::from(record.slot) * SLOT_ALIGN;
    match contents.data.read_exact_at(&mut bytes, offset) {
        Ok(()) if encrypted => Ok(cipher::is_intact(&bytes)),
        Ok(()) => Ok(checksum(&bytes) == record.checksum),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}
