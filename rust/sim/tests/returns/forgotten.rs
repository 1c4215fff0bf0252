//! Not read are conversations that are gone, those of another namespace, and those for which something would be lost.

use undercroft_contract::key::BlockHash;
use undercroft_contract::session::LookupRequest;
use undercroft_engine::policy::PolicyKind;
use undercroft_engine::{EngineConfig, SessionId};

use super::{BLOCK, FIRST, Life, PAYLOAD, SECOND, chain};

const PAUSE: u64 = 20 * SECOND;
/// Blocks of the arena.
const HOST: u64 = 192;

/// A life with a regular conversation that is on disk alone, and its blocks. It would be read within the next pause.
fn regular(disk_blocks: u64) -> (Life, SessionId, u64) {
    regular_in(Life::new(HOST, disk_blocks, true))
}

fn regular_in(mut life: Life) -> (Life, SessionId, u64) {
    let session = life.open("model");
    let mut known = FIRST - 1;
    for _ in 0..5 {
        life.request(session, 0, known);
        known += 1;
        life.until(life.now_ns + PAUSE);
    }
    life.request(session, 0, known);
    flood(&mut life, session, 1);
    (life, session, known + 1)
}

/// Other prompts take the arena.
fn flood(life: &mut Life, session: SessionId, first: u64) {
    for of in first..first + 8 {
        life.request(session, of, FIRST - 1);
    }
}

fn reads(life: &Life) -> u64 {
    life.engine.counters().disk_reads
}

#[test]
fn it_is_read() {
    let (mut life, session, known) = regular(4096);
    let before = reads(&life);
    life.until(life.now_ns + PAUSE - 3 * SECOND / 2);
    assert!(reads(&life) > before);
    let done = life.request(session, 0, known);
    assert_eq!((done.at_once, done.waited_ns), (known, 0));
    assert_eq!(life.engine.counters().return_reads_used, 1);
    life.check();
}

#[test]
fn one_that_does_not_come_is_wasted_once() {
    let (mut life, session, _) = regular(4096);
    life.until(life.now_ns + 2 * PAUSE);
    assert_eq!(life.engine.counters().return_reads_wasted, 1);
    flood(&mut life, session, 100);
    let before = reads(&life);
    life.until(life.now_ns + 20 * PAUSE);
    assert_eq!(reads(&life), before);
    assert_eq!(life.engine.counters().return_reads_used, 0);
    life.check();
}

#[test]
fn a_reset_forgets() {
    let (mut life, session, _) = regular(4096);
    life.engine.reset(session);
    let before = reads(&life);
    life.until(life.now_ns + 3 * PAUSE);
    assert_eq!(reads(&life), before);
    life.check();
}

#[test]
fn an_eviction_from_disk_forgets() {
    let (mut life, session, _) = regular(400);
    for of in 0..4 {
        flood(&mut life, session, 200 + 8 * of);
    }
    let before = reads(&life);
    life.until(life.now_ns + 3 * PAUSE);
    assert_eq!(reads(&life), before);
    life.check();
}

#[test]
fn a_session_that_has_ended_reads_nothing() {
    let (mut life, session, _) = regular(4096);
    let other = life.open("model");
    life.engine.close_session(session);
    let before = reads(&life);
    life.until(life.now_ns + 3 * PAUSE);
    assert_eq!(reads(&life), before);
    life.engine.close_session(other);
    life.check();
}

#[test]
fn a_session_that_ends_within_a_read_ends_it() {
    let (mut life, session, known) = regular(4096);
    let before = reads(&life);
    while life.reads.is_empty() {
        life.now_ns = life.wakes_ns();
        life.turn();
    }
    life.engine.close_session(session);
    life.until(life.now_ns + 3 * PAUSE);
    assert!(reads(&life) < before + known, "the first piece alone");
    life.check();
}

#[test]
fn another_namespace_is_not_read() {
    let (mut life, session, known) = regular(4096);
    let other = life.open("other");
    // The same hashes, once.
    let hashes: Vec<BlockHash> = chain(0, known);
    life.request(other, 0, known - 1);
    assert_eq!(hashes.len() as u64, known);
    flood(&mut life, other, 1000);
    let before = reads(&life);
    life.until(life.now_ns + PAUSE - 3 * SECOND / 2);
    let read = reads(&life) - before;
    assert!(read <= known, "{read} of {known}");
    let done = life.request(session, 0, known);
    assert_eq!(done.at_once, known);
    life.check();
}

#[test]
fn the_last_copies_of_blocks_do_not_make_way() {
    let config = EngineConfig {
        policy: PolicyKind::Lru,
        ..EngineConfig::new(HOST * u64::from(PAYLOAD))
    };
    let (mut life, session, _) = regular_in(Life::with(config, 4096));
    // The first candidates are on disk, and those behind them in memory alone.
    const SHORT: u64 = 50_000;
    life.request(session, SHORT, 1);
    life.is_full = true;
    let blocks = [FIRST, FIRST, FIRST, FIRST, FIRST, HOST - 5 * FIRST - 2];
    for (of, blocks) in (300..).zip(blocks) {
        life.request(session, of, blocks - 1);
    }
    let before = reads(&life);
    life.until(life.now_ns + PAUSE - 3 * SECOND / 2);
    assert_eq!(reads(&life), before);
    for (of, blocks) in (300..).zip(blocks) {
        let asked = chain(of, blocks);
        let found = life
            .engine
            .lookup(session, &LookupRequest::new("again", &asked));
        assert_eq!(
            found.tokens().map(|of| of.0),
            Some(blocks as u32 * BLOCK),
            "{of}"
        );
        life.engine.finish_request(session, "again");
    }
    life.check();
}

#[test]
fn a_prediction_whose_read_had_no_room_is_not_wrong() {
    let config = EngineConfig {
        policy: PolicyKind::Lru,
        promotion_bytes: 40 * u64::from(PAYLOAD),
        ..EngineConfig::new(HOST * u64::from(PAYLOAD))
    };
    let (mut life, session, known) = regular_in(Life::with(config, 4096));
    let before = reads(&life);
    life.until(life.now_ns + PAUSE - 3 * SECOND / 2);
    let read = reads(&life) - before;
    assert!(0 < read && read < known, "{read} of {known}");
    life.request(session, 0, known);
    let counters = life.engine.counters();
    assert_eq!(
        (counters.return_reads_used, counters.return_reads_wasted),
        (0, 0)
    );
    life.check();
}
