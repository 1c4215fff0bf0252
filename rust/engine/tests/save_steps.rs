//! Saves in steps: others enter the engine between two steps.

use undercroft_contract::key::BlockHash;
use undercroft_contract::namespace::{GroupKind, NamespaceSpec};
use undercroft_contract::session::{Lookup, LookupRequest, SaveRequest, Tokens, TransferId};
use undercroft_engine::{
    Due, Engine, EngineConfig, Room, SaveLimit, SaveProgress, SessionId, Started,
};

const TOKENS: u32 = 16;
const STEP: SaveLimit = SaveLimit {
    blocks: 1,
    bytes: u64::MAX,
};

fn engine() -> Engine {
    Engine::new(EngineConfig::new(1 << 20))
}

fn open(engine: &mut Engine) -> SessionId {
    let spec = NamespaceSpec::uniform("weights", TOKENS, &[(GroupKind::Full, 4096)]);
    engine.open_session(spec).expect("a payload fits")
}

fn hashes(blocks: u8) -> Vec<BlockHash> {
    (1..=blocks)
        .map(|block| BlockHash::new(&[block; 32]).expect("32 bytes"))
        .collect()
}

/// Whether a step has ended a save without another slot.
fn ends(engine: &mut Engine, id: TransferId, save: &SaveRequest<'_>) -> bool {
    let step = engine.step_save(id, save, STEP);
    matches!(step, SaveProgress::Ended { extents, .. } if extents.is_empty())
}

fn is_unused(engine: &mut Engine) -> bool {
    let gauges = engine.gauges();
    (gauges.saves, gauges.host_pinned_bytes, gauges.host_blocks) == (0, 0, 0)
}

#[test]
fn a_save_ends_when_its_namespace_begins_another_life_though_its_index_is_the_same() {
    let mut engine = engine();
    let session = open(&mut engine);
    let hashes = hashes(3);
    let save = SaveRequest::new("a", &hashes, Tokens(3 * TOKENS));
    let id = engine.start_save(session, &save).unwrap();
    // Each reset moves the namespace to a vacant index: the second one to the first.
    for _ in 0..2 {
        let other = open(&mut engine);
        assert!(engine.reset(other));
        engine.close_session(other);
    }
    assert!(ends(&mut engine, id, &save));
    let lookup = LookupRequest::new("b", &hashes);
    assert_eq!(engine.lookup(session, &lookup), Lookup::NOTHING);
    engine.finish_request(session, "b");
    assert!(is_unused(&mut engine));
}

#[test]
fn a_save_ends_when_a_block_far_above_its_end_has_left_the_index() {
    // A removal reaches the end of the chain after as many entries as there are blocks.
    let mut engine = Engine::new(EngineConfig {
        removals: 1,
        ..EngineConfig::new(1 << 20)
    });
    let session = open(&mut engine);
    let hashes = hashes(8);
    let first = SaveRequest::new("a", &hashes, Tokens(TOKENS));
    let above = engine.begin_save(session, &first).transfer.unwrap();
    let save = SaveRequest::new("a", &hashes, Tokens(8 * TOKENS));
    let id = engine.start_save(session, &save).unwrap();
    for _ in 0..5 {
        let step = engine.step_save(id, &save, STEP);
        assert!(matches!(step, SaveProgress::More(_)));
    }
    engine.end_transfer(above.id, false);
    assert!(ends(&mut engine, id, &save));
    engine.end_transfer(id, false);
    while engine.wake() == Due::Now {
        engine.turn(Room::io(1), &mut Started::default());
    }
    assert!(is_unused(&mut engine));
}

#[test]
fn a_save_ends_when_the_end_of_its_chain_has_left_the_index() {
    let mut engine = engine();
    let session = open(&mut engine);
    let hashes = hashes(3);
    let first = SaveRequest::new("a", &hashes, Tokens(TOKENS));
    let above = engine.begin_save(session, &first).transfer.unwrap();
    let save = SaveRequest::new("a", &hashes, Tokens(3 * TOKENS));
    let id = engine.start_save(session, &save).unwrap();
    // The block above, which the save goes on below, is not saved after all.
    engine.end_transfer(above.id, false);
    assert!(ends(&mut engine, id, &save));
    assert!(is_unused(&mut engine));
}

#[test]
fn a_save_that_ends_after_its_request_leaves_nothing_of_it() {
    let mut engine = engine();
    let session = open(&mut engine);
    let hashes = hashes(3);
    let save = SaveRequest::new("a", &hashes, Tokens(3 * TOKENS));
    let id = engine.start_save(session, &save).unwrap();
    engine.finish_request(session, "a");
    while let SaveProgress::More(_) = engine.step_save(id, &save, STEP) {}
    engine.end_transfer(id, true);
    // The next request of this name finds the blocks of the first one.
    let found = engine.counters().deduplicated_blocks;
    assert!(engine.begin_save(session, &save).transfer.is_none());
    assert_eq!(engine.counters().deduplicated_blocks, found + 3);
}
