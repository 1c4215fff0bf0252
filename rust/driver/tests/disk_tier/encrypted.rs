//! Stores whose payloads are encrypted.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use undercroft_cipher::{AesGcm, Keys};
use undercroft_contract::cipher::PayloadCipher;
use undercroft_contract::format::{BLOCK_BYTES, RECORD_BYTES, Record};
use undercroft_io::disk::inspect::{Summary, is_intact};
use undercroft_io::disk::open;
use undercroft_io::disk::open::{Capacity, OnOtherVersion, StoreOptions};
use undercroft_io::fault_hook::Direct;
use undercroft_io::pool::ThreadPool;

use crate::rig::{DEPTH, DISK, MODEL, Model, Open, Rig, dir, patch};

/// A cipher with keys of these bytes; the first one writes.
fn cipher(keys: &[u8]) -> Arc<dyn PayloadCipher> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("keys");
    let lines = keys
        .iter()
        .map(|key| format!("{key:02x}").repeat(32) + "\n");
    fs::write(&path, lines.collect::<String>()).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    Arc::new(AesGcm::new(Keys::read(&path).unwrap()))
}

fn start(dirs: &[PathBuf], keys: &[u8]) -> Rig {
    let mut open = Open::new(dirs);
    open.encrypted = true;
    // A record holds the number of its payload's write: the time.
    open.config.unix_at_zero_s = 0;
    open.open(|arena, devices| {
        let parts = (Direct, Some(cipher(keys)));
        Box::new(ThreadPool::open(DEPTH, arena, devices, parts).unwrap())
    })
    .unwrap()
}

fn failures(rig: &Rig) -> (u64, u64) {
    let counters = rig.engine.counters();
    (counters.decryption_failures, counters.checksum_failures)
}

fn records(store: &Path) -> Vec<Record> {
    let contents = open::read(store).unwrap();
    let records = contents.table_bytes.chunks_exact(RECORD_BYTES);
    records.filter_map(Record::decode).collect()
}

/// Whether a file has a piece of the first payload of a prompt as it is, or its checksum.
fn shows(store: &Path, prompt: u64) -> bool {
    let payload = MODEL.payload(&Model::hashes(prompt, 1)[0]);
    let sum = undercroft_contract::checksum::checksum(&payload).to_le_bytes();
    ["data", "table", "super"].iter().any(|name| {
        let bytes = fs::read(store.join(name)).unwrap();
        let has = |part: &[u8]| bytes.windows(part.len()).any(|found| found == part);
        has(&payload[4096..4128]) || has(&sum)
    })
}

#[test]
fn payloads_survive_a_restart_and_the_files_show_nothing_of_them() {
    let (_guard, store) = dir();
    let dirs = [store.clone()];
    start(&dirs, &[1]).save(1, 10);
    assert!(!shows(&store, 1));
    let mut rig = start(&dirs, &[1]);
    assert_eq!((rig.hit(1, 10), failures(&rig)), (10, (0, 0)));
    drop(rig);
    let (_guard, plain) = dir();
    Open::new(std::slice::from_ref(&plain)).plain().save(1, 10);
    assert!(shows(&plain, 1), "the search finds what is there");
}

#[test]
fn payloads_that_were_read_are_compared_in_the_arena_and_written_nowhere_twice() {
    let (_guard, store) = dir();
    let dirs = [store];
    start(&dirs, &[1]).save(1, 10);
    let mut open = Open::new(&dirs);
    (open.encrypted, open.config.verify_host) = (true, true);
    let mut rig = open
        .open(|arena, devices| {
            let parts = (Direct, Some(cipher(&[1])));
            Box::new(ThreadPool::open(DEPTH, arena, devices, parts).unwrap())
        })
        .unwrap();
    assert_eq!(rig.hit(1, 10), 10);
    assert_eq!(rig.engine.counters().host_checksum_failures, 0);
}

#[test]
fn another_key_misses_and_is_counted_and_its_blocks_take_the_place() {
    let (_guard, store) = dir();
    let dirs = [store];
    start(&dirs, &[1]).save(1, 10);
    let mut rig = start(&dirs, &[2]);
    assert_eq!(rig.recovery.blocks, 10);
    assert_eq!(rig.hit(1, 10), 0);
    assert!(failures(&rig).0 > 0 && failures(&rig).1 == 0);
    rig.save(1, 10);
    drop(rig);
    assert_eq!(start(&dirs, &[2]).hit(1, 10), 10);
    assert_eq!(start(&dirs, &[1]).hit(1, 10), 0);
}

#[test]
fn keys_are_rotated_without_losing_a_block() {
    let (_guard, store) = dir();
    let dirs = [store];
    start(&dirs, &[1]).save(1, 10);
    let mut rig = start(&dirs, &[2, 1]);
    assert_eq!(rig.hit(1, 10), 10);
    rig.save(2, 10);
    drop(rig);
    let mut rig = start(&dirs, &[2]);
    assert_eq!(rig.hit(2, 10), 10, "the first key writes");
    assert_eq!(rig.hit(1, 10), 0);
}

#[test]
fn a_store_of_the_other_kind_is_discarded_set_aside_or_refused() {
    let options = |encrypted, on_other_version| StoreOptions {
        capacity: Capacity::Bytes(DISK),
        on_other_version,
        encrypted,
    };
    for encrypted in [false, true] {
        for choice in [
            OnOtherVersion::Refuse,
            OnOtherVersion::Discard,
            OnOtherVersion::SetAside,
        ] {
            let (_guard, store) = dir();
            let dirs = [store.clone()];
            if encrypted {
                start(&dirs, &[1]).save(1, 10);
            } else {
                Open::new(&dirs).plain().save(1, 10);
            }
            let examined = open::examine(&store, options(!encrypted, choice));
            let opened = open::open(&store, options(!encrypted, choice), 2);
            let said = match (&opened, choice) {
                (Err(error), OnOtherVersion::Refuse) => {
                    assert!(error.may_pass(), "a vLLM starts without the directory");
                    assert!(error.to_string().contains("disk_on_other_version"));
                    error.to_string()
                }
                (Ok(opened), _) => {
                    assert_eq!(opened.notes, examined.unwrap().notes);
                    opened.notes[0].clone()
                }
                (Err(error), _) => panic!("{error}"),
            };
            let reason = if encrypted {
                "is encrypted, and key_file is not set"
            } else {
                "is not encrypted, and key_file is set"
            };
            assert!(said.contains(reason), "{said}");
            drop(opened);
            let aside = store.join(if encrypted { "format-2" } else { "format-1" });
            let kept = match choice {
                OnOtherVersion::Refuse => Some(store),
                OnOtherVersion::SetAside => Some(aside),
                OnOtherVersion::Discard => None,
            };
            if let Some(kept) = kept {
                let dirs = [kept];
                let mut rig = if encrypted {
                    start(&dirs, &[1])
                } else {
                    Open::new(&dirs).plain()
                };
                assert_eq!(rig.hit(1, 10), 10);
            }
        }
    }
}

#[test]
fn a_start_that_was_killed_while_it_set_a_store_of_the_other_kind_aside_is_continued() {
    for moved in [&["table"][..], &["table", "data"]] {
        let (_guard, store) = dir();
        start(std::slice::from_ref(&store), &[1]).save(1, 10);
        let aside = store.join("format-2");
        std::fs::create_dir(&aside).unwrap();
        for name in moved {
            std::fs::rename(store.join(name), aside.join(name)).unwrap();
        }
        let options = StoreOptions {
            capacity: Capacity::Bytes(DISK),
            on_other_version: OnOtherVersion::SetAside,
            encrypted: false,
        };
        drop(open::open(&store, options, 2).unwrap());
        assert_eq!(Open::new(&[store]).plain().hit(1, 10), 0);
        assert_eq!(start(&[aside], &[1]).hit(1, 10), 10);
    }
}

/// Saves, lets somebody with the files but without the key change them, and opens again: whatever is found is
/// right (the rig compares every byte). Returns the blocks that are found, and the failures.
fn changed(change: impl FnOnce(&Path)) -> (u32, (u64, u64)) {
    let (_guard, store) = dir();
    let dirs = [store];
    let mut rig = start(&dirs, &[1]);
    (0..6).for_each(|prompt| rig.save(prompt, 1));
    drop(rig);
    change(&dirs[0]);
    let mut rig = start(&dirs, &[1]);
    let found = (0..6).map(|prompt| rig.hit(prompt, 1)).sum();
    (found, failures(&rig))
}

#[test]
fn a_payload_that_was_moved_is_a_miss() {
    let (found, failures) = changed(|store| {
        let records = records(store);
        let data = fs::read(store.join("data")).unwrap();
        let (from, to) = (
            records[0].slot as usize * 4096,
            records[1].slot as usize * 4096,
        );
        let slot = |at: usize| data[at..at + 12_288].to_vec();
        for (bytes, at) in [(slot(from), to), (slot(to), from)] {
            let put = |place: &mut [u8]| place.copy_from_slice(&bytes);
            patch(&store.join("data"), at as u64, put, 12_288);
        }
    });
    assert_eq!((found, failures), (4, (2, 0)));
}

#[test]
fn a_record_that_names_another_payloads_slot_is_a_miss() {
    let (found, failures) = changed(|store| {
        let swap = |table: &mut [u8]| {
            let find = |table: &[u8]| {
                let records = table.chunks_exact(RECORD_BYTES).map(Record::decode);
                let found = records.enumerate();
                found
                    .filter_map(|(at, record)| Some((at, record?)))
                    .collect::<Vec<_>>()
            };
            let found = find(table);
            let ((one_at, one), (other_at, other)) = (found[0], found[1]);
            for (at, record, slot) in [(one_at, one, other.slot), (other_at, other, one.slot)] {
                Record { slot, ..record }.encode(&mut table[at * RECORD_BYTES..][..RECORD_BYTES]);
            }
        };
        patch(&store.join("table"), 0, swap, BLOCK_BYTES);
    });
    assert_eq!((found, failures), (4, (2, 0)));
}

/// After a loss of power a slot may hold the bytes of an earlier write of the same payload.
#[test]
fn bytes_of_another_write_of_the_slot_are_a_miss() {
    let (found, failures) = changed(|store| {
        let another = |table: &mut [u8]| {
            let mut records = table.chunks_exact_mut(RECORD_BYTES);
            let bytes = records.find(|bytes| Record::decode(bytes).is_some());
            let bytes = bytes.expect("the table has records");
            let record = Record::decode(bytes).unwrap();
            let checksum = record.checksum + 1;
            Record { checksum, ..record }.encode(bytes);
        };
        patch(&store.join("table"), 0, another, BLOCK_BYTES);
    });
    assert_eq!((found, failures), (5, (1, 0)));
}

#[test]
fn damage_is_found_without_the_key() {
    let (_guard, store) = dir();
    let dirs = [store.clone()];
    start(&dirs, &[1]).save(1, 10);
    let intact = || {
        let contents = open::read(&store).unwrap();
        let records = Summary::of(&contents).records;
        let intact = records
            .iter()
            .filter(|record| is_intact(record, &contents).unwrap());
        (intact.count(), records.len())
    };
    assert_eq!(intact(), (10, 10));
    let records = records(&store);
    for (record, at) in records.iter().zip([0, 7000, 12_000, 12_063]) {
        let place = u64::from(record.slot) * 4096 + at;
        patch(&store.join("data"), place, |bytes| bytes[0] ^= 1, 1);
    }
    assert_eq!(intact(), (6, 10));
    assert!(records.iter().all(|record| record.checksum == 0));
}

#[test]
fn a_bit_flipped_in_an_encrypted_payload_is_a_checksum_failure() {
    let (found, failures) = changed(|store| {
        let record = records(store)[0];
        let place = u64::from(record.slot) * 4096 + 77;
        patch(&store.join("data"), place, |bytes| bytes[0] ^= 1, 1);
    });
    assert_eq!((found, failures), (5, (0, 1)));
}

#[test]
fn payloads_that_somebody_has_moved_to_another_store_are_misses() {
    let ((_one, one), (_other, other)) = (dir(), dir());
    let both = [one.clone(), other.clone()];
    let mut rig = start(&both, &[1]);
    (0..8).for_each(|prompt| rig.save(prompt, 3));
    drop(rig);
    let before = [&one, &other].map(|store| records(store).len());
    assert!(before.iter().all(|&count| count > 0), "{before:?}");
    // Both stores have the namespace in the same life, and keep their superblocks.
    for name in ["table", "data"] {
        let parked = one.join("parked");
        fs::rename(one.join(name), &parked).unwrap();
        fs::rename(other.join(name), one.join(name)).unwrap();
        fs::rename(parked, other.join(name)).unwrap();
    }
    for store in [one, other] {
        let mut rig = start(&[store], &[1]);
        let found = rig.recovery.blocks;
        let hits: u32 = (0..8).map(|prompt| rig.hit(prompt, 3)).sum();
        assert!(found > 0 && hits == 0, "{hits} of {found}");
        assert!(failures(&rig).1 + failures(&rig).0 > 0);
    }
}
