//! Shortening a table after the capacity was lowered.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use undercroft_contract::format::{
    BLOCK_BYTES, PLACEHOLDER, PLACEHOLDERS_SHARE, RECORD_BYTES, Record,
};
use undercroft_contract::pages::SLOT_ALIGN;

use super::files::{open_to_write, put_in_place};
use super::names::{TABLE, TABLE_NEW, failed};
use crate::disk::StoreError;

/// Packs the records of payloads that still fit, if the table is longer than a data file of this
/// size can need, because the capacity was lowered. A crash leaves the old table or the new table.
pub(super) fn fit_table(path: &Path, data_bytes: u64) -> Result<(), StoreError> {
    let slots = data_bytes / SLOT_ALIGN;
    let most = (slots + slots / PLACEHOLDERS_SHARE) * RECORD_BYTES as u64;
    let action = failed;
    let table = fs::metadata(path.join(TABLE)).map_err(action(path, "measure the table"))?;
    if table.len() <= most {
        return Ok(());
    }
    let old = fs::read(path.join(TABLE)).map_err(action(path, "read the table"))?;
    // Of two records of the same slot, the later record counts.
    let mut kept: BTreeMap<u32, (u64, &[u8])> = BTreeMap::new();
    let mut placeholders: Vec<&[u8]> = Vec::new();
    for bytes in old.chunks_exact(RECORD_BYTES) {
        let Some(record) = Record::decode(bytes) else {
            continue;
        };
        if record.group == PLACEHOLDER {
            placeholders.push(bytes);
            continue;
        }
        let end = u64::from(record.slot) * SLOT_ALIGN + u64::from(record.payload_bytes);
        let later = kept
            .get(&record.slot)
            .is_none_or(|(seq, _)| *seq < record.seq);
        if end <= data_bytes && later {
            kept.insert(record.slot, (record.seq, bytes));
        }
    }
    let mut new: Vec<u8> = kept
        .values()
        .map(|(_, bytes)| *bytes)
        .chain(placeholders)
        .flatten()
        .copied()
        .collect();
    new.resize(new.len().next_multiple_of(BLOCK_BYTES), 0);
    let at = path.join(TABLE_NEW);
    // A crash may have left a longer file behind.
    let _ = fs::remove_file(&at);
    let file = File::from(open_to_write(path, TABLE_NEW, true)?);
    file.write_all_at(&new, 0)
        .map_err(action(path, "write the packed table"))?;
    put_in_place(path, &file, (TABLE_NEW, TABLE))
}

#[cfg(test)]
mod tests {
    use undercroft_contract::key::BlockHash;

    use super::super::files::tests::CALLS;
    use super::*;

    fn record(hash: u8, seq: u64, slot: u32) -> Record {
        Record {
            group: 0,
            hit_class: 0,
            seq,
            instance: 1,
            slot,
            payload_bytes: 8192,
            checksum: 0,
            depth: 1,
            last: 0,
            written_s: 0,
            hash: BlockHash::new(&[hash; 32]).unwrap(),
            parent: None,
        }
    }

    #[test]
    fn a_packed_table_has_the_later_record_of_each_slot_that_fits_and_all_placeholders() {
        let dir = tempfile::tempdir().unwrap();
        let placeholder = Record {
            group: PLACEHOLDER,
            payload_bytes: 0,
            ..record(6, 1, 0)
        };
        let records = [
            record(1, 5, 2),
            record(2, 9, 2),
            record(3, 9, 6),
            record(4, 5, 6),
            record(5, 9, 15),
            placeholder,
        ];
        let mut table = vec![0; 2 * BLOCK_BYTES];
        // The records are not next to each other, and one of them is damaged.
        for (at, record) in (1..).zip(&records) {
            record.encode(&mut table[at * 3 * RECORD_BYTES..][..RECORD_BYTES]);
        }
        table[0] = 1;
        let path = dir.path().join(TABLE);
        fs::write(&path, &table).unwrap();
        // The slot 15 ends behind the 16 units of the data file.
        fit_table(dir.path(), 64 * SLOT_ALIGN).unwrap();
        assert_eq!(fs::read(&path).unwrap(), table, "it is short enough");
        // A start that was killed has left more.
        fs::write(dir.path().join(TABLE_NEW), vec![7; 3 * BLOCK_BYTES]).unwrap();
        CALLS.take();
        fit_table(dir.path(), 16 * SLOT_ALIGN).unwrap();
        let expected = [("sync", TABLE_NEW), ("rename", TABLE), ("sync", "")];
        assert_eq!(CALLS.take(), expected, "durable before it has its name");
        let packed = fs::read(&path).unwrap();
        assert_eq!(packed.len(), BLOCK_BYTES);
        let kept: Vec<Record> = packed
            .chunks_exact(RECORD_BYTES)
            .filter_map(Record::decode)
            .collect();
        assert_eq!(kept, [record(2, 9, 2), record(3, 9, 6), placeholder]);
    }
}
