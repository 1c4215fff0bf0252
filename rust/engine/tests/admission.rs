//! Which payloads the engine keeps and refuses when a tier is full: ages, admission, writes without
//! room.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use undercroft_contract::explain::Reason;
use undercroft_contract::image::DeviceImage;
use undercroft_contract::io::{IoCompletion, IoFault, IoRequest};
use undercroft_contract::key::BlockHash;
use undercroft_contract::namespace::{GroupKind, NamespaceSpec};
use undercroft_contract::session::{LookupRequest, SaveRequest, Tokens};
use undercroft_engine::policy::PolicyKind;
use undercroft_engine::{Due, Engine, EngineConfig, Room, SessionId, Started};

const HASH_BLOCK: u32 = 16;
const PAYLOAD: u64 = 64 << 10;
const PAGE: u64 = 256 << 10;
/// Blocks that the arena holds.
const HOST: u8 = 16;

fn engine(policy: PolicyKind, disk_blocks: u64) -> (Engine, SessionId) {
    engine_of(policy, u64::from(HOST), disk_blocks)
}

fn engine_of(policy: PolicyKind, host_blocks: u64, disk_blocks: u64) -> (Engine, SessionId) {
    let mut engine = Engine::new(EngineConfig {
        policy,
        ..EngineConfig::new(host_blocks * PAYLOAD)
    });
    if disk_blocks > 0 {
        engine.attach_disks(vec![DeviceImage {
            capacity: disk_blocks * PAYLOAD,
            page_bytes: PAGE,
            holes: Vec::new(),
            super_bytes: Vec::new(),
            table: Vec::new().into(),
        }]);
    }
    let spec = NamespaceSpec::uniform(
        "admission",
        HASH_BLOCK,
        &[(GroupKind::Full, u32::try_from(PAYLOAD).unwrap())],
    );
    let session = engine.open_session(spec).unwrap();
    (engine, session)
}

/// A prompt of `len` blocks that shares nothing with another of another name.
fn prompt(name: u8, len: u8) -> Vec<BlockHash> {
    (0..len)
        .map(|block| BlockHash::new(&[name, block, 1, 1, 1, name, block, 1]).unwrap())
        .collect()
}

/// A prompt of `len` blocks.
fn chain(len: u32) -> Vec<BlockHash> {
    (0..len)
        .map(|block| BlockHash::new(&[block.to_le_bytes(), [1; 4]].concat()).unwrap())
        .collect()
}

fn hit(engine: &mut Engine, session: SessionId, request: &str, prompt: &Vec<BlockHash>) -> u32 {
    let tokens = prompt.len() as u32 * HASH_BLOCK;
    loop {
        match engine
            .lookup(
                session,
                &LookupRequest::new(request, &prompt).max(Tokens(tokens)),
            )
            .tokens()
        {
            Some(Tokens(tokens)) => return tokens / HASH_BLOCK,
            None => settle(engine),
        }
    }
}

fn save(engine: &mut Engine, session: SessionId, request: &str, prompt: &Vec<BlockHash>) -> u32 {
    let tokens = prompt.len() as u32 * HASH_BLOCK;
    let Some(save) = engine
        .begin_save(session, &SaveRequest::new(request, &prompt, Tokens(tokens)))
        .transfer
    else {
        return 0;
    };
    engine.end_transfer(save.id, true);
    save.extents
        .iter()
        .map(|extent| extent.offsets.len() as u32)
        .sum()
}

#[test]
fn without_a_single_hit_the_oldest_prompts_go() {
    let (mut engine, session) = engine(PolicyKind::Lru, 0);
    for name in 1..=20 {
        let prompt = prompt(name, 4);
        assert_eq!(hit(&mut engine, session, "r", &prompt), 0);
        assert_eq!(save(&mut engine, session, "r", &prompt), 4);
        engine.finish_request(session, "r");
    }
    let kept: Vec<u8> = (1..=20)
        .filter(|&name| hit(&mut engine, session, "probe", &prompt(name, 4)) == 4)
        .collect();
    assert_eq!(kept, [17, 18, 19, 20]);
}

/// Programs that save without lookups have a time, too.
#[test]
fn saves_without_lookups_advance_the_order() {
    for policy in [PolicyKind::Lru, PolicyKind::LeafHd] {
        let (mut engine, session) = engine(policy, 0);
        for name in [1, 2, 3, 4, 1, 5, 6, 7] {
            save(&mut engine, session, &format!("r{name}"), &prompt(name, 4));
            engine.finish_request(session, &format!("r{name}"));
        }
        let kept: Vec<u8> = (1..=7)
            .filter(|&name| hit(&mut engine, session, "probe", &prompt(name, 4)) == 4)
            .collect();
        assert_eq!(kept, [1, 5, 6, 7], "{policy:?}");
    }
}

/// Carries out the operations that the engine asks of the disk.
fn settle(engine: &mut Engine) {
    let mut started = Started::default();
    loop {
        engine.turn(Room::io(64), &mut started);
        if started.io.is_empty() && engine.wake() != Due::Now {
            return;
        }
        for request in started.io.drain(..) {
            let result = match request {
                IoRequest::ReadPayload { checksum, .. } => Ok(checksum),
                _ => Ok(0),
            };
            engine.complete(IoCompletion {
                token: request.token(),
                result,
            });
        }
    }
}

/// Prompts that come back all the time, and others that come once: new blocks are worth less.
fn teach(engine: &mut Engine, session: SessionId) {
    for round in 0..200_u8 {
        for name in 1..=4 {
            let prompt = prompt(name, 4);
            hit(engine, session, "r", &prompt);
            save(engine, session, "r", &prompt);
            engine.finish_request(session, "r");
            settle(engine);
        }
        let once = prompt(55 + round, 4);
        hit(engine, session, "r", &once);
        save(engine, session, "r", &once);
        engine.finish_request(session, "r");
        settle(engine);
    }
}

#[test]
fn a_block_is_weighed_once_however_often_its_save_is_tried() {
    let (mut engine, session) = engine(PolicyKind::LeafHd, 0);
    teach(&mut engine, session);
    let before = engine.counters().refused_admission;
    let prompt = prompt(50, 4);
    hit(&mut engine, session, "r", &prompt);
    for other in 0..100 {
        assert_eq!(save(&mut engine, session, "r", &prompt), 0);
        let again = SaveRequest::new("r", &prompt, Tokens(4 * HASH_BLOCK));
        let refused = engine.begin_save(session, &again).end.refused;
        assert_eq!(refused, None, "not worth another try");
        // Time passes: other requests come and end.
        hit(&mut engine, session, &format!("other {other}"), &prompt);
        engine.finish_request(session, &format!("other {other}"));
    }
    assert_eq!(engine.counters().refused_admission, before + 1);
}

#[test]
fn a_block_that_was_not_admitted_is_explained() {
    let (mut engine, session) = engine(PolicyKind::LeafHd, 0);
    teach(&mut engine, session);
    let prompt = prompt(50, 4);
    let reason = |engine: &mut Engine| {
        hit(engine, session, "r", &prompt);
        let rest = engine.inspect().explained(session, "r").unwrap().rest;
        (rest.reason, rest.ago_s)
    };
    assert_eq!(reason(&mut engine), (Reason::NeverSeen, None));
    assert_eq!(save(&mut engine, session, "r", &prompt), 0);
    engine.finish_request(session, "r");
    engine.set_now(7_000_000_000);
    let before = engine.counters().misses_not_admitted;
    assert_eq!(reason(&mut engine), (Reason::NotAdmitted, Some(7)));
    assert_eq!(engine.counters().misses_not_admitted, before + 1);
    assert!(before > 0, "the taught prompts came back at first");
}

#[test]
fn with_a_disk_the_arena_takes_every_block() {
    let (mut engine, session) = engine(PolicyKind::LeafHd, 4096);
    teach(&mut engine, session);
    let prompt = prompt(50, 4);
    assert_eq!(hit(&mut engine, session, "r", &prompt), 0);
    assert_eq!(save(&mut engine, session, "r", &prompt), 4);
    settle(&mut engine);
    assert_eq!(engine.counters().refused_admission, 0);
    assert_eq!(
        engine.counters().disk_writes,
        engine.counters().saved_blocks
    );
}

#[test]
fn a_full_disk_of_writes_in_flight_leaves_the_rest_in_the_arena() {
    let disk_blocks = 4;
    let (mut engine, session) = engine(PolicyKind::Lru, disk_blocks);
    let prompt = prompt(1, 8);
    hit(&mut engine, session, "r", &prompt);
    assert_eq!(save(&mut engine, session, "r", &prompt), 8);
    engine.finish_request(session, "r");
    let mut started = Started::default();
    engine.turn(Room::io(64), &mut started);
    let writes = started
        .io
        .iter()
        .filter(|io| matches!(io, IoRequest::WritePayload { .. }))
        .count();
    assert_eq!(writes as u64, disk_blocks);
    assert!(engine.counters().refused_disk_full >= 4);
    assert_eq!(hit(&mut engine, session, "again", &prompt), 8);
}

#[test]
fn a_prompt_longer_than_the_disk_asks_for_room_once() {
    // If each block asked for all above it again, this would take minutes.
    let (blocks, disk) = (40_000_u32, 16);
    let (mut engine, session) = engine_of(PolicyKind::Lru, 100_000, disk);
    let prompt = chain(blocks);
    assert_eq!(save(&mut engine, session, "r", &prompt), blocks);
    settle(&mut engine);
    let counters = engine.counters();
    assert_eq!(counters.disk_writes, disk);
    assert_eq!(counters.refused_disk_full, u64::from(blocks) - disk);
}

#[test]
fn a_prompt_saved_block_by_block_asks_a_disk_that_takes_no_writes_for_each_block_once() {
    // If each step asked for all blocks that were refused before, this would take minutes.
    let blocks = 40_000_u32;
    let (mut engine, session) = engine_of(PolicyKind::Lru, 100_000, 100_000);
    let prompt = chain(blocks);
    save(&mut engine, session, "r", &prompt[..1].to_vec());
    let mut started = Started::default();
    engine.turn(Room::io(64), &mut started);
    for request in started.io.drain(..) {
        engine.complete(IoCompletion {
            token: request.token(),
            result: Err(IoFault::Os(30)),
        });
    }
    for tokens in 2..=blocks {
        let save = engine
            .begin_save(
                session,
                &SaveRequest::new("r", &prompt, Tokens(tokens * HASH_BLOCK)),
            )
            .transfer;
        engine.end_transfer(save.unwrap().id, true);
        engine.turn(Room::io(64), &mut started);
        assert!(started.io.is_empty());
    }
    let counters = engine.counters();
    assert_eq!(counters.refused_disk_degraded, u64::from(blocks) - 1);
    // Its own blocks are no duplicates.
    assert_eq!(
        (counters.deduplicated_blocks, counters.saved_blocks),
        (0, u64::from(blocks))
    );
}

#[test]
fn a_block_that_is_wanted_is_admitted_whatever_it_is_worth() {
    let (mut engine, session) = engine(PolicyKind::LeafHd, 0);
    teach(&mut engine, session);
    let prompt = prompt(50, 4);
    hit(&mut engine, session, "r", &prompt);
    let tokens = Tokens(prompt.len() as u32 * HASH_BLOCK);
    let wanted = SaveRequest::new("r", &prompt, tokens).wanted(true);
    let save = engine.begin_save(session, &wanted).transfer.unwrap();
    engine.end_transfer(save.id, true);
    assert_eq!(hit(&mut engine, session, "again", &prompt), 4);
}
