//! Opening directories that others have touched, or that another undercroft has written.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use undercroft_contract::format::{BLOCK_BYTES, ENCRYPTED_VERSION, RECORD_BYTES, Record};
use undercroft_engine::Engine;
use undercroft_io::disk::open::{Capacity, OnOtherVersion, StoreOptions};
use undercroft_io::disk::{StoreError, open};

use crate::rig::{DISK, Model, Open, SECOND, dir, patch};

fn options(on_other_version: OnOtherVersion) -> StoreOptions {
    StoreOptions {
        capacity: Capacity::Bytes(DISK),
        on_other_version,
        encrypted: false,
    }
}

fn refused(store: &Path) -> StoreError {
    open::open(store, DISK, 1).unwrap_err()
}

/// Files of a directory with their lengths and modes, and that of the directory.
fn look(store: &Path) -> Vec<(String, u64, u32)> {
    let mut seen = vec![(String::new(), 0, fs::metadata(store).unwrap().mode())];
    for file in fs::read_dir(store).unwrap() {
        let file = file.unwrap();
        let found = file.metadata().unwrap();
        let name = file.file_name().to_string_lossy().into_owned();
        seen.push((name, found.len(), found.mode()));
    }
    seen.sort();
    seen
}

#[test]
fn a_link_in_a_directory_leads_nowhere_and_stops_only_the_directory() {
    for name in ["lock", "super", "table", "data", "super.new"] {
        for is_symbolic in [true, false] {
            let (guard, store) = dir();
            let target = guard.path().join("precious");
            fs::write(&target, "precious").unwrap();
            fs::set_permissions(&target, fs::Permissions::from_mode(0o644)).unwrap();
            if name == "super.new" {
                fs::create_dir(&store).unwrap();
                fs::set_permissions(&store, fs::Permissions::from_mode(0o700)).unwrap();
            } else {
                drop(open::open(&store, DISK, 1).unwrap());
                fs::remove_file(store.join(name)).unwrap();
            }
            if is_symbolic {
                symlink(&target, store.join(name)).unwrap();
            } else {
                fs::hard_link(&target, store.join(name)).unwrap();
            }
            let opened = open::open(&store, DISK, 1);
            if name == "super.new" {
                // Its name is taken back.
                opened.unwrap();
            } else {
                let error = opened.unwrap_err();
                assert!(error.may_pass(), "{error}");
                let text = error.to_string();
                assert!(text.contains(&format!("its file {name} ")), "{text}");
                assert!(
                    text.contains("symbolic link") || text.contains("2 names"),
                    "{text}"
                );
                assert!(open::drop_namespace(&store, "0").is_err());
            }
            assert_eq!(fs::read(&target).unwrap(), b"precious", "{name}");
            let mode = fs::metadata(&target).unwrap().mode() & 0o777;
            assert_eq!(mode, 0o644, "{name}");
        }
    }
}

#[test]
fn a_directory_that_others_may_write_to_is_refused_as_it_is() {
    for mode in [0o777, 0o770, 0o2775, 0o1777, 0o702] {
        let (_guard, store) = dir();
        fs::create_dir(&store).unwrap();
        fs::set_permissions(&store, fs::Permissions::from_mode(mode)).unwrap();
        let error = refused(&store);
        assert!(matches!(error, StoreError::Mode { .. }), "{error}");
        assert!(!error.may_pass() && error.to_string().contains("chmod 700"));
        assert_eq!(look(&store), [(String::new(), 0, mode | 0o40_000)]);
    }
    let (_guard, store) = dir();
    fs::create_dir(&store).unwrap();
    fs::set_permissions(&store, fs::Permissions::from_mode(0o755)).unwrap();
    open::open(&store, DISK, 1).unwrap();
    assert_eq!(fs::metadata(&store).unwrap().mode() & 0o777, 0o700);
}

#[test]
fn a_directory_of_another_user_is_refused_by_root_too() {
    if !rustix::process::geteuid().is_root() {
        // Only root can give a directory away.
        return;
    }
    let (_guard, store) = dir();
    fs::create_dir(&store).unwrap();
    std::os::unix::fs::chown(&store, Some(65_534), None).unwrap();
    let text = refused(&store).to_string();
    assert!(text.contains("belongs to uid 65534"), "{text}");
    // A file that its former owner holds open is not used either.
    std::os::unix::fs::chown(&store, Some(0), None).unwrap();
    drop(open::open(&store, DISK, 1).unwrap());
    std::os::unix::fs::chown(store.join("data"), Some(65_534), None).unwrap();
    let text = refused(&store).to_string();
    assert!(
        text.contains("its file data") && text.contains("uid 65534"),
        "{text}"
    );
}

#[test]
fn a_store_of_another_version_is_discarded_set_aside_or_refused() {
    let other = |store: &Path| patch(&store.join("super"), 8, |bytes| bytes[0] += 2, 1);
    let aside = format!("format-{}", ENCRYPTED_VERSION + 1);
    for choice in [
        OnOtherVersion::Refuse,
        OnOtherVersion::Discard,
        OnOtherVersion::SetAside,
    ] {
        let (_guard, store) = dir();
        let dirs = [store.clone()];
        Open::new(&dirs).plain().save(1, 10);
        other(&store);
        let before = look(&store);
        let examined = open::examine(&store, options(choice));
        assert_eq!(look(&store), before, "looking changes nothing");
        let opened = open::open(&store, options(choice), 2);
        assert_eq!(examined.is_ok(), opened.is_ok());
        if choice == OnOtherVersion::Refuse {
            let error = opened.unwrap_err();
            assert!(error.may_pass() && error.to_string().contains("disk_on_other_version"));
            assert_eq!(look(&store), before);
            continue;
        }
        let opened = opened.unwrap();
        assert_eq!(opened.notes, examined.unwrap().notes);
        assert!(opened.notes[0].contains(&format!("format version {}", ENCRYPTED_VERSION + 1)));
        drop(opened);
        let mut rig = Open::new(&dirs).plain();
        assert_eq!((rig.hit(1, 10), rig.recovery.blocks), (0, 0));
        rig.save(2, 10);
        drop(rig);
        assert_eq!(Open::new(&dirs).plain().hit(2, 10), 10);
        let kept = store.join(&aside);
        assert_eq!(kept.exists(), choice == OnOtherVersion::SetAside);
        if choice == OnOtherVersion::SetAside {
            // Whole, for the undercroft that reads it; of two, the later one.
            patch(&kept.join("super"), 8, |bytes| bytes[0] -= 2, 1);
            assert_eq!(
                Open::new(std::slice::from_ref(&kept)).plain().hit(1, 10),
                10
            );
            other(&store);
            drop(open::open(&store, options(choice), 3).unwrap());
            patch(&kept.join("super"), 8, |bytes| bytes[0] -= 2, 1);
            assert_eq!(Open::new(&[kept]).plain().hit(2, 10), 10);
        }
    }
}

#[test]
fn pages_grow_with_the_capacity() {
    let (_guard, store) = dir();
    let dirs = [store];
    let large = Model {
        id: 3,
        payload_bytes: 2 << 20,
    };
    let open = |capacity| {
        let mut open = Open::new(&dirs);
        open.capacity = capacity;
        open.config.host_bytes = 512 << 20;
        open
    };
    let mut rig = open(DISK).plain();
    rig.save(1, 10);
    let error = rig
        .engine
        .open_session(large.spec())
        .unwrap_err()
        .to_string();
    let (_, advised) = error.rsplit_once("set disk_capacity to at least ").unwrap();
    let advised: u64 = advised.strip_suffix(" MiB").unwrap().parse().unwrap();
    drop(rig);
    let mut rig = open(advised << 20).plain();
    rig.save_of(&large, 1, 2);
    assert_eq!(
        rig.hit(1, 10),
        10,
        "what has its place in the pages of today is kept"
    );
    drop(rig);
    let mut rig = open(advised << 20).plain();
    assert_eq!(rig.hit_of(&large, 1, 2), 2);
    drop(rig);
    let mut engine = Engine::new(undercroft_engine::EngineConfig::new(1 << 40));
    let payload_bytes = 80 << 20;
    let huge = Model {
        payload_bytes,
        ..large
    };
    let error = engine.open_session(huge.spec()).unwrap_err().to_string();
    assert!(error.contains("no slot has more than 64 MiB"), "{error}");
}

#[test]
fn a_store_with_a_lower_capacity_shrinks_and_reports_it() {
    let (_guard, store) = dir();
    drop(open::open(&store, 4 * DISK, 1).unwrap());
    let opened = open::open(&store, DISK, 1).unwrap();
    assert!(
        opened.notes[0].contains("shrinks from"),
        "{:?}",
        opened.notes
    );
    drop(opened);
    assert!(open::open(&store, DISK, 1).unwrap().notes.is_empty());
}

#[test]
fn records_that_a_lower_capacity_has_moved_are_found_by_each_later_start() {
    let (_guard, store) = dir();
    let dirs = [store.clone()];
    let small = Model {
        id: 2,
        payload_bytes: 4096,
    };
    let open = |capacity| {
        let mut open = Open::new(&dirs);
        open.capacity = capacity;
        open.plain()
    };
    let mut rig = open(2 * DISK);
    let (prompts, len) = (70, 100);
    (0..prompts).for_each(|prompt| rig.save_of(&small, prompt, len));
    drop(rig);
    // Gaps between the slots in use: the packed records no longer follow each other as the slots do.
    let path = store.join("table");
    let mut table = fs::read(&path).unwrap();
    for bytes in table.chunks_exact_mut(RECORD_BYTES) {
        if Record::decode(bytes).is_some_and(|record| record.depth == len) {
            bytes.fill(0);
        }
    }
    fs::write(&path, &table).unwrap();
    let mut rig = open(DISK);
    let kept = rig.recovery.blocks;
    assert!(kept > 1000, "{kept}");
    assert!(fs::metadata(&path).unwrap().len() < table.len() as u64 * 2 / 3);
    rig.pass(2 * SECOND);
    rig.pump();
    drop(rig);
    let mut rig = open(DISK);
    assert_eq!(rig.recovery.blocks, kept);
    let hits = (0..prompts).map(|prompt| rig.hit_of(&small, prompt, len));
    assert_eq!(u64::from(hits.sum::<u32>()), kept);
}

#[test]
fn examine_predicts_the_result_of_open_and_changes_nothing() {
    let (guard, store) = dir();
    let examine = |path: &Path, capacity| {
        let options = StoreOptions::from(capacity);
        open::examine(path, options)
    };
    let found = examine(&store, DISK).unwrap();
    assert!(!found.is_kept && !store.exists());
    let opened = open::open(&store, DISK, 1).unwrap();
    assert_eq!(found.capacity, opened.image.capacity);
    let in_use = examine(&store, DISK).unwrap_err();
    assert!(matches!(in_use, StoreError::InUse { .. }), "{in_use}");
    drop(opened);
    assert!(examine(&store, DISK).unwrap().is_kept);
    let foreign = guard.path().join("foreign");
    fs::create_dir(&foreign).unwrap();
    fs::set_permissions(&foreign, fs::Permissions::from_mode(0o700)).unwrap();
    fs::write(foreign.join("data"), "mine").unwrap();
    fs::write(foreign.join("readme.txt"), "mine").unwrap();
    for path in [&store, &foreign] {
        for capacity in [1, DISK, 1 << 60] {
            let said = examine(path, capacity).map_err(|error| error.to_string());
            let does = open::open(path, capacity, 1).map_err(|error| error.to_string());
            assert_eq!(said.map(drop), does.map(drop), "{path:?} {capacity}");
        }
    }
}

/// A child process that inherited the lock would keep the directory in use after the engine's end.
#[test]
fn no_child_process_inherits_a_file_of_a_directory() {
    const CLOEXEC: u32 = 0o2_000_000;
    let (_guard, store) = dir();
    let rig = Open::new(std::slice::from_ref(&store)).plain();
    let mut names = Vec::new();
    for entry in std::fs::read_dir("/proc/self/fd").unwrap() {
        let entry = entry.unwrap();
        let Ok(target) = std::fs::read_link(entry.path()) else {
            continue;
        };
        let is_arena = target.to_string_lossy().contains("undercroft-arena");
        if !target.starts_with(&store) && !is_arena {
            continue;
        }
        let info = Path::new("/proc/self/fdinfo").join(entry.file_name());
        let info = std::fs::read_to_string(info).unwrap();
        let line = info.lines().find_map(|line| line.strip_prefix("flags:"));
        let flags = u32::from_str_radix(line.unwrap().trim(), 8).unwrap();
        assert_ne!(flags & CLOEXEC, 0, "{target:?}");
        names.push(target);
    }
    for name in ["super", "table", "data", "lock", "arena"] {
        let is_it = |target: &std::path::PathBuf| target.to_string_lossy().contains(name);
        assert!(names.iter().any(is_it), "{name}: {names:?}");
    }
    drop(rig);
}

#[test]
fn records_have_ever_higher_sequence_numbers_also_after_a_restart() {
    let (_guard, store) = dir();
    let dirs = [store.clone()];
    let numbers = || {
        let table = fs::read(store.join("table")).unwrap();
        let blocks = table.chunks_exact(BLOCK_BYTES);
        let first = |block: &[u8]| {
            let mut records = block.chunks_exact(RECORD_BYTES).filter_map(Record::decode);
            records.next().map(|record| record.seq)
        };
        blocks.filter_map(first).collect::<Vec<u64>>()
    };
    let mut last = 0;
    for life in 0..3 {
        let mut rig = Open::new(&dirs).plain();
        // The records of each prompt fill blocks of the table.
        for prompt in 0..2 {
            rig.save(10 * life + prompt, 32);
            let highest = numbers().into_iter().max().unwrap();
            assert!(highest > last, "life {life}: {highest} after {last}");
            last = highest;
        }
    }
    let distinct: std::collections::BTreeSet<u64> = numbers().into_iter().collect();
    assert!(distinct.len() >= 6, "{distinct:?}");
}

#[test]
fn a_store_that_is_emptied_has_the_descriptors_of_its_present_files() {
    let (_guard, store) = dir();
    Open::new(std::slice::from_ref(&store)).plain().save(1, 3);
    let emptied = open::open(&store, DISK, 1).unwrap().empty().unwrap();
    for (name, file) in [
        ("super", &emptied.files.superblock),
        ("table", &emptied.files.table),
        ("data", &emptied.files.data),
    ] {
        let open = rustix::fs::fstat(file).unwrap();
        let named = fs::metadata(store.join(name)).unwrap();
        assert_eq!((open.st_ino, open.st_nlink), (named.ino(), 1), "{name}");
    }
    let (_, _, lock) = emptied.into_parts();
    assert_eq!(lock.missing_file(), None);
    drop(lock);
    assert_eq!(Open::new(&[store]).plain().recovery.blocks, 0);
}
