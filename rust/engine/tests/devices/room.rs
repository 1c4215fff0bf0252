//! How long a write waits for room on the directories.

use undercroft_contract::namespace::{GroupKind, NamespaceSpec};
use undercroft_contract::session::{LookupRequest, SaveRequest, Tokens};
use undercroft_engine::policy::PolicyKind;
use undercroft_engine::{Due, EngineConfig};

use crate::rig::{HASH_BLOCK, Rig, prompt};

const PAYLOAD: u32 = 64 << 10;
/// Blocks of a directory, which has one page.
const BLOCKS: u64 = 4;

/// Two directories that are full of blocks in use. A search for pages takes many entries.
fn full() -> Rig {
    let config = EngineConfig {
        seed: 42,
        visits: 2,
        ..EngineConfig::new(4 << 20)
    };
    let mut rig = Rig::new(config, &[BLOCKS * u64::from(PAYLOAD); 2], PAYLOAD);
    let mut number = 0;
    while rig.blocks() != [BLOCKS; 2] {
        rig.save(number, 1);
        rig.settle();
        assert_eq!(rig.ask(number, 1), Some(1), "the lease keeps it there");
        number += 1;
    }
    rig
}

fn another_model(payload_bytes: u32) -> NamespaceSpec {
    NamespaceSpec::uniform(
        "another model",
        HASH_BLOCK,
        &[(GroupKind::Full, payload_bytes)],
    )
}

/// A block of another size is saved, while one directory has no room for operations for so many entries. Returns how
/// many writes were refused.
fn refused(held_up: usize, entries: usize) -> u64 {
    let mut rig = full();
    let session = rig.engine.open_session(another_model(2 * PAYLOAD)).unwrap();
    rig.settle();
    let hashes = prompt(1000, 1);
    let save = SaveRequest::new("save", &hashes, Tokens(HASH_BLOCK));
    let granted = rig.engine.begin_save(session, &save).transfer.unwrap();
    rig.engine.end_transfer(granted.id, true);
    let mut rooms = [64; 2];
    rooms[held_up] = 0;
    for _ in 0..entries {
        let requests = rig.start(&rooms[..]);
        requests.into_iter().for_each(|request| rig.end(request));
    }
    for _ in 0..5000 {
        if rig.engine.is_quiet() && rig.engine.wake() != Due::Now {
            return rig.engine.counters().refused_disk_full;
        }
        let requests = rig.start(64);
        requests.into_iter().for_each(|request| rig.end(request));
    }
    panic!("the write still waits; one directory came {entries} entries later");
}

#[test]
fn a_write_does_not_wait_for_searches_in_vain_of_one_directory_after_the_other() {
    for held_up in 0..2 {
        for entries in 0..24 {
            assert_eq!(refused(held_up, entries), 1);
        }
    }
}

#[test]
fn a_block_that_found_no_room_is_written_with_the_next_one_when_slots_were_freed() {
    for policy in [PolicyKind::Lru, PolicyKind::LeafHd] {
        writes_both(policy);
    }
}

fn writes_both(policy: PolicyKind) {
    let config = EngineConfig {
        seed: 42,
        policy,
        ..EngineConfig::new(4 << 20)
    };
    let mut rig = Rig::new(config, &[BLOCKS * u64::from(PAYLOAD)], PAYLOAD);
    let other = rig.engine.open_session(another_model(PAYLOAD)).unwrap();
    rig.settle();
    let hashes = prompt(1000, 2);
    let save = SaveRequest::new("save", &hashes, Tokens(2 * HASH_BLOCK));
    let granted = rig.engine.begin_save(other, &save).transfer.unwrap();
    rig.engine.end_transfer(granted.id, true);
    let question = LookupRequest::new("keep", &hashes);
    assert!(rig.engine.lookup(other, &question).tokens() > Some(Tokens(0)));
    for number in 0..BLOCKS - 2 {
        rig.save(number, 1);
        rig.settle();
        assert_eq!(rig.ask(number, 1), Some(1), "the lease keeps it there");
    }
    rig.save(7, 1);
    rig.settle();
    assert_eq!(rig.engine.counters().refused_disk_full, 1);
    rig.engine.finish_request(other, "keep");
    rig.engine.reset(other);
    rig.settle();
    assert_eq!(rig.blocks(), [BLOCKS - 2]);
    rig.save(7, 2);
    rig.settle();
    assert_eq!(rig.blocks(), [BLOCKS]);
}
