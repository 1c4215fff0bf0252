//! No entry of the engine does more than a bounded number of units of work, however many blocks the engine holds.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod branches;
mod crowd;
mod embedded;
mod orphans;
mod pins;
mod returns;
mod rig;
mod states;

use rig::{Fault, Rig, chain, hash, hybrid, namespace};
use undercroft_contract::key::BlockHash;
use undercroft_contract::namespace::{GroupKind, NamespaceSpec};
use undercroft_contract::session::{Offer, SessionSpec};
use undercroft_engine::{ClearOrder, ClearWhat, Due, ResizeOrder, SessionId};

/// Many times as many blocks as one entry may visit.
const BLOCKS: u64 = 40_000;
const CHAIN: u64 = 200;

/// A rig with `BLOCKS` blocks on disk, as chains.
fn full() -> (Rig, undercroft_engine::SessionId) {
    let mut rig = Rig::new(2 * CHAIN, BLOCKS + BLOCKS / 8);
    let session = rig.open(namespace("model"));
    for at in 0..BLOCKS / CHAIN {
        assert_eq!(rig.save(session, &chain(at, CHAIN)), CHAIN as usize);
        rig.pump();
    }
    assert_eq!(rig.engine().gauges().disk_blocks, BLOCKS);
    (rig, session)
}

#[test]
fn a_reset_is_done_in_steps_and_nothing_is_found_from_the_first_on() {
    let (mut rig, session) = full();
    rig.enter(0, |engine| engine.reset(session));
    let other = rig.open(namespace("model"));
    for session in [session, other] {
        assert_eq!(rig.lookup(session, &chain(7, CHAIN)), 0);
    }
    assert!(
        rig.engine().gauges().disk_blocks > BLOCKS / 2,
        "it was removed at once"
    );
    assert_eq!(rig.save(other, &chain(7, CHAIN)), CHAIN as usize);
    rig.pump();
    let gauges = rig.engine().gauges();
    assert_eq!((gauges.disk_blocks, gauges.nodes), (CHAIN, CHAIN));
    rig.engine().inspect().check().unwrap();
    rig.restart(2 * CHAIN);
    assert_eq!(rig.engine().gauges().disk_blocks, CHAIN);
}

#[test]
fn a_reset_that_a_crash_cuts_short_lets_nothing_come_back() {
    let (mut rig, session) = full();
    rig.enter(0, |engine| engine.reset(session));
    while rig.engine().reset_pending() {
        rig.step();
    }
    assert!(rig.engine().gauges().disk_blocks > BLOCKS / 2);
    rig.restart(2 * CHAIN);
    assert_eq!(rig.engine().gauges().disk_blocks, 0);
}

#[test]
fn cleared_blocks_are_removed_in_steps_with_their_bytes_and_records() {
    for (what, erase) in [
        (ClearWhat::OlderThan(0), false),
        (ClearWhat::OlderThan(0), true),
        (ClearWhat::All, true),
    ] {
        let (mut rig, session) = full();
        let order = ClearOrder { what, erase };
        let begun = rig.enter(0, |engine| engine.clear(&order)).unwrap();
        assert!(
            begun.removing && begun.disk_blocks < BLOCKS / 2,
            "{begun:?}"
        );
        rig.pump();
        let cleared = rig.engine().cleared();
        assert_eq!((cleared.pending, cleared.removing), (0, false));
        assert_eq!(cleared.disk_blocks, BLOCKS);
        let erased = if erase { cleared.disk_bytes } else { 0 };
        assert_eq!(cleared.erased_bytes, erased);
        assert_eq!(rig.lookup(session, &chain(7, CHAIN)), 0);
        rig.engine().inspect().check().unwrap();
        rig.restart(2 * CHAIN);
        assert_eq!(rig.engine().gauges().disk_blocks, 0);
    }
}

#[test]
fn a_tier_that_an_operator_makes_smaller_loses_its_pages_in_steps() {
    let (mut rig, session) = full();
    let all = rig.engine().resized().disk;
    let half = ResizeOrder {
        disk_bytes: Some(all.maximum_bytes / 2),
        ..ResizeOrder::default()
    };
    rig.enter(0, |engine| engine.resize(&half, None)).unwrap();
    rig.step();
    assert!(rig.engine().gauges().disk_blocks > BLOCKS * 9 / 10);
    rig.pump();
    let half = rig.engine().resized().disk;
    assert!(!half.resizing && half.kept_bytes == 0, "{half:?}");
    assert!(half.capacity_bytes <= all.maximum_bytes / 2);
    // Only some pages are emptied, not the whole tier.
    let kept = rig.engine().gauges().disk_blocks;
    assert!(kept > BLOCKS * 35 / 100, "{kept} of {BLOCKS}");
    rig.engine().inspect().check().unwrap();
    let whole = ResizeOrder {
        disk_bytes: Some(all.maximum_bytes * 30 / 29 + 2),
        ..ResizeOrder::default()
    };
    rig.enter(0, |engine| engine.resize(&whole, None)).unwrap();
    rig.pump();
    assert_eq!(rig.engine().resized().disk, all);
    assert_eq!(rig.save(session, &chain(900, CHAIN)), CHAIN as usize);
    rig.pump();
    assert_eq!(rig.engine().gauges().disk_blocks, kept + CHAIN);
}

#[test]
fn a_private_session_is_closed_in_steps() {
    let mut rig = Rig::new(BLOCKS, 0);
    let spec = SessionSpec {
        private: true,
        ..SessionSpec::from(namespace("model"))
    };
    let session = rig.enter(0, |engine| engine.open_session(spec)).unwrap();
    for at in 0..BLOCKS / CHAIN {
        rig.save(session, &chain(at, CHAIN));
    }
    rig.enter(0, |engine| engine.close_session(session));
    assert!(rig.engine().wake() == Due::Now);
    rig.pump();
    assert_eq!(rig.engine().gauges().nodes, 0);
    rig.engine().inspect().check().unwrap();
}

#[test]
fn a_directory_that_fails_is_given_up_in_steps() {
    let (mut rig, session) = full();
    rig.fault = Fault::Reads;
    // Each failed read loses a chain; the eighth in a row ends the directory.
    for at in 0..12 {
        assert_eq!(rig.lookup(session, &chain(at, CHAIN)), 0);
    }
    rig.pump();
    let gauges = rig.engine().gauges();
    assert_eq!(gauges.disk_blocks, 0);
    rig.engine().inspect().check().unwrap();
}

#[test]
fn a_queue_of_writes_is_refused_in_steps() {
    let mut rig = Rig::new(BLOCKS * 2 + CHAIN, BLOCKS);
    let session = rig.open(namespace("model"));
    rig.fault = Fault::Writes;
    for at in 0..(BLOCKS - CHAIN) / CHAIN {
        rig.save(session, &chain(at, CHAIN));
    }
    rig.pump();
    let refused = rig.engine().counters().refused_disk_degraded;
    assert!(refused > BLOCKS / 2, "{refused} writes were refused");
    rig.engine().inspect().check().unwrap();
}

#[test]
fn a_prefix_with_many_branches_is_promoted_in_steps() {
    let mut rig = Rig::new(64, BLOCKS / 2);
    let session = rig.open(namespace("model"));
    let stem = chain(0, 16);
    let with = |branch: u64| -> Vec<BlockHash> {
        let last = hash(1 + branch, 99);
        stem.iter().copied().chain([last]).collect()
    };
    for branch in 0..BLOCKS / 4 {
        rig.save(session, &with(branch));
        rig.pump();
    }
    rig.restart(64);
    let session = rig.open(namespace("model"));
    for branch in [0, BLOCKS / 8, BLOCKS / 4 - 1] {
        assert_eq!(rig.lookup(session, &with(branch)), 17 * rig::BLOCK);
    }
    rig.engine().inspect().check().unwrap();
}

#[test]
fn a_subtree_that_is_lost_is_removed_in_steps() {
    let mut rig = Rig::new(64, BLOCKS / 2);
    let session = rig.open(namespace("model"));
    let stem = chain(0, 4);
    for branch in 0..BLOCKS / 4 {
        let last = hash(1 + branch, 99);
        let prompt: Vec<BlockHash> = stem.iter().copied().chain([last]).collect();
        rig.save(session, &prompt);
        rig.pump();
    }
    rig.restart(64);
    let session = rig.open(namespace("model"));
    rig.fault = Fault::Reads;
    let prompt: Vec<BlockHash> = stem.iter().copied().chain([hash(5, 99)]).collect();
    assert_eq!(rig.lookup(session, &prompt), 0);
    rig.pump();
    assert_eq!(rig.engine().gauges().nodes, 0);
    rig.engine().inspect().check().unwrap();
}

#[test]
fn hashes_with_equal_beginnings_cost_no_more_than_others() {
    let mut rig = Rig::new(13_000, 0);
    let session = rig.open(namespace("model"));
    let hashes: Vec<BlockHash> = (0..12_000)
        .map(|at| {
            let mut bytes = [7; 32];
            bytes[8..].copy_from_slice(&hash(1, at).as_bytes()[8..]);
            BlockHash::new(&bytes).unwrap()
        })
        .collect();
    assert_eq!(rig.save(session, &hashes), 12_000);
}

#[test]
fn a_lookup_that_finds_no_state_for_a_long_way_up_takes_several_entries() {
    for kind in [GroupKind::State, GroupKind::SlidingWindow { tokens: 1024 }] {
        let mut rig = Rig::new(20_000, 0);
        let session = rig.open(hybrid("model", kind));
        let prompt = chain(0, 16_000);
        // Only the states and windows of the beginning were saved.
        let offer = Offer {
            group: 1,
            first_block: 0,
            end_block: 64,
        };
        rig.save_with(session, &prompt[..64], &[offer]);
        rig.save_with(session, &prompt, &[]);
        // An entry does no more work although the prompt is long.
        let hit = rig.lookup_within(64, session, &prompt);
        assert_eq!(hit, 64 * rig::BLOCK);
        rig.engine().inspect().check().unwrap();
    }
}

/// A model whose blocks have another size than the blocks of [`namespace`].
fn other_size(bytes: u32) -> NamespaceSpec {
    let mut spec = namespace("of another size");
    spec.groups[0].payload_bytes = bytes;
    spec
}

/// Chats that grow in turns fill a tier several times: each page holds parts of many chains.
fn chats(rig: &mut Rig, session: SessionId, turns: u64) {
    for turn in 0..turns {
        let (user, length) = (turn * 7919 % 100, (turn / 100 % 25 + 1) * 8);
        rig.save(session, &chain(turn / 2500 * 100 + user, length));
        rig.pump();
    }
}

#[test]
fn a_page_moves_to_another_size_class_in_steps() {
    // The larger the blocks, the more other blocks are evicted for a page.
    for bytes in [rig::PAYLOAD / 4 * 3, 16 * rig::PAYLOAD] {
        for disk in [0, BLOCKS / 4] {
            let mut rig = Rig::new(BLOCKS / 4, disk);
            let session = rig.open(namespace("model"));
            chats(&mut rig, session, 4_000);
            let other = rig.open(other_size(bytes));
            let before = rig.engine().inspect().moves().runs;
            let mut steps = 0;
            while rig.save(other, &chain(1 << 20, 1)) == 0 {
                rig.pump();
                steps += 1;
                assert!(steps < 100, "{bytes} bytes find no room");
            }
            rig.pump();
            assert!(rig.engine().inspect().moves().runs > before);
            assert_eq!(rig.lookup(other, &chain(1 << 20, 1)), rig::BLOCK);
            rig.engine().inspect().check().unwrap();
        }
    }
}
