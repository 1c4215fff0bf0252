//! The blocks that were used last are kept longest, also across restarts.

use undercroft_io::fault_hook::Direct;

use crate::rig::{DISK, Io, Model, Open, Rig, SECOND, dir};

/// Few blocks fill the disk.
const LARGE: Model = Model {
    id: 4,
    payload_bytes: 60_000,
};
const PROMPTS: u64 = 4 * DISK / 60_000;

/// The prompts that are still on disk.
fn found(rig: &mut Rig, prompts: impl Iterator<Item = u64>) -> Vec<u64> {
    prompts
        .filter(|&prompt| rig.hit_of(&LARGE, prompt, 1) == 1)
        .collect()
}

fn saved(rig: &mut Rig, prompts: impl Iterator<Item = u64>) {
    prompts.for_each(|prompt| rig.save_of(&LARGE, prompt, 1));
}

#[test]
fn blocks_with_hits_are_evicted_last_after_a_restart() {
    for io in Io::all() {
        for ends in ["lazily", "at once"] {
            let (_guard, store) = dir();
            let dirs = [store];
            let mut rig = Open::new(&dirs).with(io, Direct);
            let room = 150;
            saved(&mut rig, 0..room);
            // The oldest ones are used every day.
            let daily: Vec<u64> = (0..20).collect();
            assert_eq!(found(&mut rig, daily.iter().copied()), daily);
            if ends == "lazily" {
                for _ in 0..3 {
                    rig.pass(SECOND);
                    rig.pump();
                }
            } else {
                rig.engine.write_touched();
                rig.pump();
            }
            drop(rig);
            let mut rig = Open::new(&dirs).with(io, Direct);
            assert_eq!(rig.recovery.blocks, room);
            // Another 200: half of the kept prompts must be evicted.
            saved(&mut rig, PROMPTS..PROMPTS + 200);
            assert!(rig.engine.counters().disk_evictions > 60, "{io:?}");
            assert_eq!(
                found(&mut rig, daily.iter().copied()),
                daily,
                "{io:?} {ends}"
            );
        }
    }
}

#[test]
fn hits_write_little() {
    let (_guard, store) = dir();
    let dirs = [store];
    let mut rig = Open::new(&dirs).plain();
    let small = Model {
        id: 5,
        payload_bytes: 4096,
    };
    // 32 records to a block of the table: about 60 of them.
    (0..2_000).for_each(|prompt| rig.save_of(&small, prompt, 1));
    let mut seconds = 0;
    let mut blocks = 0;
    for round in 0..10 {
        for prompt in (round..2_000).step_by(10) {
            assert_eq!(rig.hit_of(&small, prompt, 1), 1);
        }
        rig.pass(SECOND);
        seconds += 1;
        loop {
            let started = rig.start_io();
            blocks += started;
            rig.pump();
            if started == 0 {
                break;
            }
        }
    }
    assert!(
        blocks > 0 && blocks <= 16 * (seconds + 1),
        "{blocks} blocks in {seconds} s"
    );
}
