//! Space: capacities, models and directories.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use rustix::io::Errno;
use undercroft_contract::error::RegisterError;
use undercroft_contract::format::ENTRY_BYTES;
use undercroft_contract::namespace::NamespaceSpec;
use undercroft_engine::disk::Health;
use undercroft_io::disk::inspect::Summary;
use undercroft_io::disk::open;
use undercroft_io::fault_hook::{CallKind, Direct};

use crate::child;
use crate::faults::Broken;
use crate::rig::{DISK, HOST, Io, MODEL, Model, Open, Rig, SECOND, dir};

/// Bytes that all files of a directory take on the filesystem.
fn disk_usage(store: &Path) -> u64 {
    let files = std::fs::read_dir(store).unwrap();
    files
        .map(|file| file.unwrap().metadata().unwrap().blocks() * 512)
        .sum()
}

#[test]
fn capacity_is_never_exceeded_and_can_be_changed_between_lives() {
    let (_guard, store) = dir();
    let dirs = [store];
    // The least slot needs the most records.
    let small = Model {
        id: 2,
        payload_bytes: 4096,
    };
    let (prompts, len) = (80, 100);
    let mut last = 0;
    for capacity in [DISK, 2 * DISK, DISK, 3 * DISK, DISK] {
        let open = || Open {
            capacity,
            ..Open::new(&dirs)
        };
        let mut rig = open().plain();
        let kept = rig.recovery.blocks;
        let fits = capacity / 4096;
        assert!(kept <= fits, "{kept} blocks in {capacity} bytes");
        // Payloads that fit are kept, if the chains are whole: a lost record takes its descendants.
        let least = last.min(fits) / 4;
        assert!(
            kept >= least,
            "{kept} blocks kept of {last}, capacity {capacity}"
        );
        assert!(disk_usage(&dirs[0]) <= capacity);
        for prompt in 0..prompts {
            rig.save_of(&small, prompt, len);
        }
        assert!(
            disk_usage(&dirs[0]) <= capacity,
            "{} of {capacity}",
            disk_usage(&dirs[0])
        );
        let gauges = rig.engine.gauges();
        assert!(gauges.disk_used_bytes <= gauges.disk_capacity_bytes);
        if prompts * u64::from(len) > fits {
            assert!(rig.engine.counters().disk_evictions > 0);
            assert!(gauges.disk_used_bytes > gauges.disk_capacity_bytes * 9 / 10);
        }
        drop(rig);
        let mut rig = open().plain();
        last = rig.recovery.blocks;
        let hits: u32 = (0..prompts)
            .map(|prompt| rig.hit_of(&small, prompt, len))
            .sum();
        assert_eq!(
            u64::from(hits),
            last,
            "what is recovered is there and right"
        );
    }
}

#[test]
fn a_capacity_that_would_fill_the_filesystem_is_refused() {
    let (_guard, store) = dir();
    let refused = open::open(&store, 1 << 60, 1).unwrap_err().to_string();
    assert!(
        refused.contains("percentage") && refused.contains("disk_capacity"),
        "{refused}"
    );
    // The message names the usable capacity, and that capacity can be used: it is less than all
    // free space.
    let dirs = [store];
    assert_eq!(Open::new(&dirs).plain().hit(1, 5), 0);
}

#[test]
fn space_moves_between_models_by_use() {
    let (_guard, store) = dir();
    let dirs = [store];
    let models = [(7, 12_000), (8, 200_000), (9, 4096)]
        .map(|(id, payload_bytes)| Model { id, payload_bytes });
    let mut rig = Open::new(&dirs).plain();
    let len = 10;
    for model in &models {
        let prompts = 3 * DISK / u64::from(model.payload_bytes) / u64::from(len);
        for prompt in 0..prompts {
            rig.save_of(model, prompt, len);
        }
        // The newest blocks of this model are all on disk, whichever model had the space before. That one keeps some of its
        // blocks for a while, since they came back.
        let used = rig.engine.gauges().disk_used_bytes;
        assert!(used > DISK * 7 / 10, "{model:?}: {used}");
        drop(rig);
        rig = Open::new(&dirs).plain();
        let hits: Vec<u32> = (0..prompts)
            .map(|prompt| rig.hit_of(model, prompt, len))
            .collect();
        let recent = &hits[hits.len() - hits.len() / 6..];
        assert!(
            recent.iter().all(|&hit| hit == len),
            "{model:?}: {recent:?}"
        );
    }
    assert_eq!(rig.engine.inspect().shared_namespaces().count(), 4);
}

/// One block of a model in a session of its own, as each restart of a client has it; how many blocks
/// of it were there before.
fn visit(rig: &mut Rig, model: &Model) -> u32 {
    let session = rig.engine.open_session(model.spec()).unwrap();
    let found = rig.hit_in(session, model, 1, 1);
    rig.save_in(session, model, 1, 1);
    rig.engine.close_session(session);
    rig.pump();
    found
}

#[test]
fn a_directory_never_stops_remembering() {
    let (_guard, store) = dir();
    let dirs = [store];
    let model = |id: u64| Model {
        id,
        payload_bytes: 4096,
    };
    let first = 100;
    let mut last = first;
    // Many identities in one life, then lives with some each.
    for (lives, each) in [(1, 9_000), (10, 100)] {
        for _ in 0..lives {
            let mut rig = Open::new(&dirs).plain();
            for _ in 0..each {
                assert_eq!(visit(&mut rig, &model(last)), 0);
                last += 1;
            }
            assert!(rig.engine.inspect().shared_namespaces().count() <= 1024);
            drop(rig);
            let mut rig = Open::new(&dirs).plain();
            assert_eq!(visit(&mut rig, &model(last - 1)), 1, "identity {last}");
        }
    }
    let mut rig = Open::new(&dirs).plain();
    // The identities used last are there, the others made room for them.
    for id in last - 100..last {
        assert_eq!(visit(&mut rig, &model(id)), 1, "identity {id} of {last}");
    }
    assert_eq!(visit(&mut rig, &model(first)), 0);
}

#[test]
fn a_namespace_in_use_does_not_make_room_for_others() {
    let (_guard, store) = dir();
    let dirs = [store];
    let mut rig = Open::new(&dirs).plain();
    rig.save(1, 4);
    for id in 100..400 {
        let model = Model {
            id,
            payload_bytes: 4096,
        };
        visit(&mut rig, &model);
    }
    assert_eq!(rig.hit(1, 4), 4);
    drop(rig);
    assert_eq!(Open::new(&dirs).plain().hit(1, 4), 4);
}

#[test]
fn a_namespace_that_found_no_room_is_kept_once_there_is_some() {
    let guards = [dir(), dir()];
    let dirs = guards.each_ref().map(|(_, store)| store.clone());
    let mut rig = Open::new(&dirs).plain();
    let model = |id: u64| Model {
        id,
        payload_bytes: 4096,
    };
    // The rig's own session uses an entry too.
    let others: Vec<_> = (100..227)
        .map(|id| rig.engine.open_session(model(id).spec()).unwrap())
        .collect();
    assert_eq!(rig.engine.gauges().volatile_namespaces, 0);
    let late = model(500);
    assert_eq!(visit(&mut rig, &late), 0);
    assert_eq!(
        rig.engine.gauges().volatile_namespaces,
        1,
        "sessions use all entries"
    );
    assert_eq!(visit(&mut rig, &late), 1);
    rig.engine.close_session(others[0]);
    assert_eq!(visit(&mut rig, &late), 1);
    assert_eq!(rig.engine.gauges().volatile_namespaces, 0);
    drop(rig);
    let mut rig = Open::new(&dirs).plain();
    assert_eq!(
        visit(&mut rig, &late),
        1,
        "also what was saved before it was kept"
    );
}

#[test]
fn the_last_use_is_remembered_without_a_write_of_blocks() {
    let (_guard, store) = dir();
    let dirs = [store.clone()];
    let model = |id: u64| Model {
        id,
        payload_bytes: 4096,
    };
    let lives = |ids: std::ops::Range<u64>, at_s: u64| {
        let mut open = Open::new(&dirs);
        open.config.unix_at_zero_s = at_s;
        let mut rig = open.plain();
        ids.map(|id| visit(&mut rig, &model(id))).sum::<u32>()
    };
    assert_eq!(lives(100..227, 1_000), 0);
    // In the second life of its session it asks for nothing.
    let mut open = Open::new(&dirs);
    open.config.unix_at_zero_s = 2_000;
    let mut rig = open.plain();
    let session = rig.engine.open_session(model(100).spec()).unwrap();
    rig.engine.close_session(session);
    rig.pump();
    drop(rig);
    let summary = Summary::of(&open::read(&store).unwrap());
    let last_use = |id: u64| {
        let mut spaces = summary.namespaces.iter();
        let space = spaces.find(|space| space.spec == model(id).spec()).unwrap();
        (space.newest_s, space.used_s)
    };
    assert_eq!(last_use(100), (1_000, 2_000));
    assert_eq!(last_use(101), (1_000, 1_000));
    // So others make room before it.
    assert_eq!(lives(300..400, 3_000), 0);
    assert_eq!(lives(100..102, 4_000), 1);
}

#[test]
fn a_description_that_fits_no_entry_is_refused() {
    let (_guard, store) = dir();
    let mut rig = Open::new(&[store]).plain();
    let spec = NamespaceSpec {
        description: "x".repeat(ENTRY_BYTES),
        ..MODEL.spec()
    };
    let refused = rig.engine.open_session(spec).unwrap_err();
    assert_eq!(
        refused,
        RegisterError::DescriptionTooLong {
            bytes: ENTRY_BYTES,
            entry_bytes: ENTRY_BYTES,
        }
    );
    assert!(refused.to_string().contains("by a digest"), "{refused}");
}

#[test]
fn a_directory_that_fails_takes_only_its_own_blocks_with_it() {
    for io in Io::all() {
        let guards = [dir(), dir()];
        let dirs = guards.each_ref().map(|(_, store)| store.clone());
        let (prompts, len) = (40, 10);
        let mut rig = Open::new(&dirs).with(io, Direct);
        (0..prompts).for_each(|prompt| rig.save(prompt, len));
        let spread = rig.blocks();
        assert!(spread.iter().all(|&blocks| blocks > 100), "{spread:?}");
        drop(rig);
        let broken = Broken {
            device: 1,
            kind: CallKind::Read,
            errno: Errno::IO,
        };
        let mut rig = Open::new(&dirs).with(io, broken);
        let found: u32 = (0..prompts).map(|prompt| rig.hit(prompt, len)).sum();
        assert_eq!(
            u64::from(found),
            spread[0],
            "{io:?}: all of the other one is there"
        );
        let [first, second] = rig.engine.devices()[..] else {
            panic!("there are two devices");
        };
        assert_eq!(first.health, Health::Good);
        assert!(matches!(second.health, Health::Failed { .. }), "{second:?}");
        // The lost blocks are saved again, where they can be.
        (0..prompts).for_each(|prompt| rig.save(prompt, len));
        assert_eq!(rig.blocks(), [u64::from(len) * prompts, 0]);
    }
}

#[test]
fn the_write_budget_holds() {
    let (_guard, store) = dir();
    let dirs = [store];
    let mut open = Open::new(&dirs);
    let rate = 100_000;
    open.config.write_rate = rate;
    let mut rig = open.plain();
    for second in 1..=20 {
        rig.save(second, 20);
        for _ in 0..100 {
            rig.pass(SECOND / 100);
            rig.pump();
        }
        let written = rig.engine.counters().disk_write_bytes;
        // A burst of a quarter of a second may have been saved up.
        assert!(
            written <= rate * second + rate / 4 + 12_000,
            "{written} after {second} s"
        );
    }
    let written = rig.engine.counters().disk_write_bytes;
    assert!(
        written >= 15 * rate,
        "{written} bytes in 20 s: the budget is used"
    );
}

#[test]
fn second_touch_writes_only_blocks_with_a_hit() {
    let (_guard, store) = dir();
    let dirs = [store];
    let mut open = Open::new(&dirs);
    open.config.second_touch = true;
    let mut rig = open.plain();
    rig.save(1, 10);
    rig.save(2, 10);
    assert_eq!(rig.engine.counters().disk_writes, 0);
    assert_eq!(rig.hit(1, 10), 10);
    assert_eq!(rig.engine.counters().disk_writes, 10, "only what was hit");
    drop(rig);
    let mut rig = Open::new(&dirs).plain();
    assert_eq!((rig.hit(1, 10), rig.hit(2, 10)), (10, 0));
}

#[test]
fn files_are_private_with_any_umask() {
    for umask in ["000", "077", "777"] {
        let (_guard, store) = dir();
        child::run("stores::child_saves", &store, umask);
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o7777;
        assert_eq!(mode(&store), 0o700, "umask {umask}");
        let mut names = Vec::new();
        for file in std::fs::read_dir(&store).unwrap() {
            let file = file.unwrap();
            assert_eq!(
                mode(&file.path()),
                0o600,
                "{:?}, umask {umask}",
                file.file_name()
            );
            names.push(file.file_name());
        }
        names.sort();
        assert_eq!(names, ["data", "lock", "super", "table"]);
    }
}

#[test]
#[ignore = "run by another test in a process of its own"]
fn child_saves() {
    let Some(store) = child::store() else { return };
    Open::new(&[store]).plain().save(1, 10);
}

#[test]
fn the_host_tier_may_be_larger_than_the_disk() {
    let (_guard, store) = dir();
    let dirs = [store];
    let mut open = Open::new(&dirs);
    open.config.host_bytes = 8 * HOST;
    open.config.promotion_bytes = 8 * HOST;
    let mut rig = open.plain();
    let (prompts, len) = (20, 100);
    (0..prompts).for_each(|prompt| rig.save(prompt, len));
    let hits: u32 = (0..prompts).map(|prompt| rig.hit(prompt, len)).sum();
    assert_eq!(hits, prompts as u32 * len);
    assert!(rig.engine.gauges().disk_blocks < u64::from(hits));
}

/// Opens directories again and again, each time with other random choices.
fn lives() -> impl FnMut(&[std::path::PathBuf]) -> Rig {
    let mut life = 0;
    move |dirs| {
        let mut open = Open::new(dirs);
        life += 1;
        open.config.seed = life;
        open.plain()
    }
}

#[test]
fn a_directory_that_a_running_engine_begins_to_use_keeps_nothing_of_before() {
    let (_guard, store) = dir();
    let dirs = [store];
    Open::new(&dirs).plain().save(1, 10);
    let before = open::read(&dirs[0]).unwrap();
    assert!(!before.table_bytes.is_empty());
    let emptied = open::open(&dirs[0], DISK, 2).unwrap().empty().unwrap();
    assert_eq!(emptied.image.table.bytes().unwrap(), 0);
    drop(emptied);
    let after = open::read(&dirs[0]).unwrap();
    assert_eq!(after.superblock, before.superblock);
    assert!(after.table_bytes.is_empty());
    assert_eq!(
        open::read_descriptions(&dirs[0]).unwrap(),
        [] as [String; 0]
    );
    assert_eq!(Open::new(&dirs).plain().hit(1, 10), 0);
}

#[test]
fn a_directory_that_was_away_during_a_reset_is_not_believed() {
    for last in [[0, 1], [1, 0]] {
        let ((_one, one), (_other, other)) = (dir(), dir());
        let both = [one.clone(), other.clone()];
        let mut open = lives();
        let mut rig = open(&both);
        for prompt in 0..8 {
            rig.save(prompt, 10);
        }
        drop(rig);
        let mut rig = open(&both[1..]);
        let session = rig.session(&MODEL);
        rig.engine.reset(session);
        rig.pump();
        assert!(!rig.engine.reset_pending() && !rig.engine.reset_failed());
        drop(rig);
        open(&both[1..]).save(20, 10);
        let mut rig = open(&last.map(|at| both[at].clone()));
        for prompt in 0..8 {
            assert_eq!(rig.hit(prompt, 10), 0, "{prompt}");
        }
        // The store works as usual, also after the next start.
        rig.save(30, 10);
        drop(rig);
        let mut rig = open(&both);
        assert_eq!((rig.hit(0, 10), rig.hit(30, 10)), (0, 10));
    }
}

#[test]
fn a_directory_that_was_away_brings_nothing_from_before_a_reset() {
    for last in [[0, 1], [1, 0]] {
        let ((_one, one), (_other, other)) = (dir(), dir());
        let both = [one.clone(), other.clone()];
        let mut open = lives();
        open(&both[1..]).save(1, 10);
        open(&both[..1]).save(2, 10);
        let mut rig = open(&both);
        let session = rig.session(&MODEL);
        rig.engine.reset(session);
        rig.pump();
        assert!(!rig.engine.reset_pending() && !rig.engine.reset_failed());
        drop(rig);
        let mut rig = open(&last.map(|at| both[at].clone()));
        assert_eq!((rig.hit(1, 10), rig.hit(2, 10)), (0, 0));
        drop(rig);
        for at in 0..2 {
            let mut rig = open(&both[at..=at]);
            assert_eq!((rig.hit(1, 10), rig.hit(2, 10)), (0, 0));
        }
    }
}
