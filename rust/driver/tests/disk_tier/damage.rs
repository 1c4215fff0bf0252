//! The files are damaged while the engine does not notice, between two lives or during one.

use std::fs::File;
use std::path::Path;

use undercroft_contract::format::{
    BLOCK_BYTES, NAMESPACE_BYTES, NamespaceEntry, NamespaceUse, RECORD_BYTES, Record, TICK_MAX,
    namespace_offset, use_offset,
};
use undercroft_io::disk::open;

use crate::rig::{DISK, Model, Open, Random, Rig, SECOND, dir, patch};

const PROMPTS: u64 = 6;
const LEN: u32 = 20;

fn save_all(rig: &mut Rig) {
    (0..PROMPTS).for_each(|prompt| rig.save(prompt, LEN));
}

/// Blocks of all prompts that are found, every byte compared.
fn hit_all(rig: &mut Rig) -> u32 {
    (0..PROMPTS).map(|prompt| rig.hit(prompt, LEN)).sum()
}

const ALL: u32 = PROMPTS as u32 * LEN;

/// Saves, damages, opens again: the hit is right and has at least `least` blocks; lost blocks can
/// be saved again and are there in the life after.
fn survives(least: u32, damage: impl Fn(&Path, &mut Random)) {
    for seed in 0..12 {
        let (_guard, store) = dir();
        let dirs = [store];
        save_all(&mut Open::new(&dirs).plain());
        damage(&dirs[0], &mut Random(seed * 1000));
        let mut rig = Open::new(&dirs).plain();
        let found = hit_all(&mut rig);
        assert!(found >= least, "seed {seed}: {found} blocks of {ALL} found");
        save_all(&mut rig);
        assert_eq!(hit_all(&mut rig), ALL, "seed {seed}");
        drop(rig);
        assert_eq!(hit_all(&mut Open::new(&dirs).plain()), ALL, "seed {seed}");
    }
}

fn used_slots(store: &Path) -> Vec<Record> {
    let contents = open::read(store).unwrap();
    let records = contents.table_bytes.chunks_exact(RECORD_BYTES);
    let slots: Vec<Record> = records.filter_map(Record::decode).collect();
    assert_eq!(slots.len(), ALL as usize);
    slots
}

#[test]
fn a_bit_flipped_in_a_payload() {
    // A bit hits one block, and at most the chain on it.
    survives(ALL - LEN, |store, random| {
        let slots = used_slots(store);
        let record = slots[random.below(slots.len() as u64) as usize];
        let at = u64::from(record.slot) * 4096 + random.below(u64::from(record.payload_bytes));
        let bit = random.below(8);
        patch(&store.join("data"), at, |bytes| bytes[0] ^= 1 << bit, 1);
    });
}

#[test]
fn the_record_of_a_payload_that_was_found_damaged_is_overwritten() {
    let (_guard, store) = dir();
    let dirs = [store];
    save_all(&mut Open::new(&dirs).plain());
    let first = Model::hashes(0, 1)[0];
    let slots = used_slots(&dirs[0]);
    let record = slots.iter().find(|record| record.hash == first).unwrap();
    let at = u64::from(record.slot) * 4096;
    patch(&dirs[0].join("data"), at, |bytes| bytes[0] ^= 1, 1);
    let mut rig = Open::new(&dirs).plain();
    assert_eq!(rig.hit(0, LEN), 0);
    rig.pass(2 * SECOND);
    rig.pump();
    drop(rig);
    let rig = Open::new(&dirs).plain();
    assert_eq!(rig.recovery.blocks, u64::from(ALL - LEN));
}

#[test]
fn payloads_in_each_others_place() {
    survives(ALL - 2 * LEN, |store, random| {
        let slots = used_slots(store);
        let mut pick = || slots[random.below(slots.len() as u64) as usize];
        let (one, other) = (pick(), pick());
        let data = std::fs::read(store.join("data")).unwrap();
        for (from, to) in [(one, other), (other, one)] {
            let from = from.slot as usize * 4096;
            let bytes = &data[from..from + 12_000];
            let to = u64::from(to.slot) * 4096;
            patch(
                &store.join("data"),
                to,
                |place| place.copy_from_slice(bytes),
                12_000,
            );
        }
    });
}

#[test]
fn a_bit_flipped_in_a_record() {
    survives(ALL - LEN, |store, random| {
        let at = random.below(u64::from(ALL) * RECORD_BYTES as u64);
        let bit = random.below(8);
        patch(&store.join("table"), at, |bytes| bytes[0] ^= 1 << bit, 1);
    });
}

#[test]
fn torn_blocks_of_records() {
    survives(0, |store, random| {
        let blocks = u64::from(ALL) * RECORD_BYTES as u64 / BLOCK_BYTES as u64;
        let at = random.below(blocks) * BLOCK_BYTES as u64;
        // Some of the eight sectors hold their earlier bytes, or bytes that belong elsewhere.
        let pattern = random.below(255) + 1;
        let tear = |bytes: &mut [u8]| {
            let elsewhere = bytes[..512].to_vec();
            for (sector, bytes) in bytes.chunks_exact_mut(512).enumerate() {
                match pattern >> sector & 1 {
                    1 if sector % 2 == 0 => bytes.fill(0),
                    1 => bytes.copy_from_slice(&elsewhere),
                    _ => {}
                }
            }
        };
        patch(&store.join("table"), at, tear, BLOCK_BYTES);
    });
}

#[test]
fn a_truncated_or_overwritten_table() {
    survives(0, |store, random| {
        let path = store.join("table");
        let len = std::fs::metadata(&path).unwrap().len();
        let file = File::options().write(true).open(&path).unwrap();
        file.set_len(random.below(len)).unwrap();
    });
    survives(0, |store, random| {
        let garbage = |bytes: &mut [u8]| bytes.fill_with(|| random.below(256) as u8);
        patch(&store.join("table"), 0, garbage, 2 * BLOCK_BYTES);
    });
}

#[test]
fn a_truncated_data_file() {
    survives(0, |store, random| {
        let file = File::options()
            .write(true)
            .open(store.join("data"))
            .unwrap();
        file.set_len(random.below(2 << 20)).unwrap();
    });
}

#[test]
fn a_damaged_entry_of_a_namespace_is_a_cold_start() {
    for at in [4, 9, 20, 60] {
        let (_guard, store) = dir();
        let dirs = [store];
        save_all(&mut Open::new(&dirs).plain());
        patch(&dirs[0].join("super"), 4096 + at, |bytes| bytes[0] ^= 1, 1);
        let mut rig = Open::new(&dirs).plain();
        assert_eq!(hit_all(&mut rig), 0);
        save_all(&mut rig);
        drop(rig);
        assert_eq!(hit_all(&mut Open::new(&dirs).plain()), ALL);
    }
}

#[test]
fn a_data_file_truncated_during_a_life() {
    let (_guard, store) = dir();
    let dirs = [store];
    save_all(&mut Open::new(&dirs).plain());
    let mut rig = Open::new(&dirs).plain();
    assert_eq!(rig.hit(0, LEN), LEN);
    let data = File::options()
        .write(true)
        .open(dirs[0].join("data"))
        .unwrap();
    data.set_len(0).unwrap();
    assert_eq!(rig.hit(0, LEN), LEN, "the host tier has it");
    assert_eq!(rig.hit(1, LEN), 0);
    assert!(rig.engine.counters().read_failures > 0);
    assert_eq!(hit_all(&mut rig), LEN);
    save_all(&mut rig);
    drop(rig);
    let mut rig = Open::new(&dirs).plain();
    (1..PROMPTS).for_each(|prompt| assert_eq!(rig.hit(prompt, LEN), LEN));
}

#[test]
fn a_lock_file_deleted_during_a_life_is_reported() {
    let (_guard, store) = dir();
    let dirs = [store];
    let rig = Open::new(&dirs).plain();
    assert_eq!(rig.missing_files(), [] as [String; 0]);
    // From now on another process may lock a new file of this name, and use the directory.
    std::fs::remove_file(dirs[0].join("lock")).unwrap();
    let said = rig.missing_files();
    assert!(said.iter().any(|said| said.contains("lock")), "{said:?}");
}

#[test]
fn files_deleted_during_a_life() {
    for name in ["data", "table", "super"] {
        let (_guard, store) = dir();
        let dirs = [store];
        let mut rig = Open::new(&dirs).plain();
        save_all(&mut rig);
        std::fs::remove_file(dirs[0].join(name)).unwrap();
        save_all(&mut rig);
        assert_eq!(hit_all(&mut rig), ALL, "the open files live on");
        let said = rig.missing_files();
        assert!(said.iter().any(|said| said.contains(name)), "{said:?}");
        drop(rig);
        // The store is not overwritten silently: the operator is told the fault.
        let refused = open::open(&dirs[0], DISK, 1).unwrap_err().to_string();
        assert!(
            refused.contains(name) && refused.contains("delete"),
            "{refused}"
        );
    }
}

/// Somebody with the files has written a record that is sound but for this change.
fn forge(store: &Path, change: impl Fn(&mut Record)) {
    let table = open::read(store).unwrap().table_bytes;
    let mut records = table.chunks_exact(RECORD_BYTES).map(Record::decode);
    let at = records.position(|record| record.is_some()).unwrap();
    let put = |bytes: &mut [u8]| {
        let mut record = Record::decode(bytes).unwrap();
        change(&mut record);
        record.encode(bytes);
    };
    let offset = (at * RECORD_BYTES) as u64;
    patch(&store.join("table"), offset, put, RECORD_BYTES);
}

#[test]
fn a_record_with_the_last_tick() {
    survives(ALL, |store, _| {
        forge(store, |record| record.last = TICK_MAX)
    });
}

#[test]
fn a_record_with_the_last_sequence_number() {
    survives(ALL, |store, _| forge(store, |record| record.seq = u64::MAX));
}

#[test]
fn a_record_with_the_last_second() {
    survives(ALL, |store, _| {
        forge(store, |record| record.written_s = u32::MAX)
    });
}

#[test]
fn a_namespace_that_was_used_at_the_last_tick() {
    survives(ALL, |store, _| {
        let bytes = std::fs::read(store.join("super")).unwrap();
        let entry = NamespaceEntry::decode(&bytes[namespace_offset(0) as usize..]).unwrap();
        let last_use = NamespaceUse {
            instance: entry.instance,
            tick: TICK_MAX,
            used_s: u32::MAX,
        };
        let put = |bytes: &mut [u8]| bytes.copy_from_slice(&last_use.encode());
        patch(&store.join("super"), use_offset(0), put, BLOCK_BYTES);
    });
}

#[test]
fn an_engine_with_the_seed_of_before_does_not_take_records_of_a_life_whose_entry_is_lost() {
    let (_guard, store) = dir();
    let dirs = [store];
    Open::new(&dirs).plain().save(1, 5);
    assert_eq!(Open::new(&dirs).plain().recovery.blocks, 5);
    // Only the records name the life. The seed draws the same name first.
    let wipe = |bytes: &mut [u8]| bytes.fill(0);
    let super_file = dirs[0].join("super");
    patch(&super_file, namespace_offset(0), wipe, NAMESPACE_BYTES);
    let mut rig = Open::new(&dirs).plain();
    assert_eq!(rig.recovery.blocks, 0);
    rig.pump();
    drop(rig);
    assert_eq!(Open::new(&dirs).plain().recovery.blocks, 0);
}
