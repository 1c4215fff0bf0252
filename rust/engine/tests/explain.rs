//! Why a lookup found no more: the reason for each way in which that happens.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use undercroft_contract::explain::{ExplainQuery, Explained, Reason};
use undercroft_contract::image::DeviceImage;
use undercroft_contract::io::{IoCompletion, IoFault, IoRequest};
use undercroft_contract::key::BlockHash;
use undercroft_contract::namespace::{GroupKind, NamespaceSpec};
use undercroft_contract::session::{
    LookupRequest, Priority, PromotionWait, SaveRequest, SessionSpec, Tokens,
};
use undercroft_engine::metrics::Counters;
use undercroft_engine::{Due, Engine, EngineConfig, Room, SessionId, Started};

const SIZE: u32 = 16;
const PAYLOAD: u64 = 64 << 10;
const PAGE: u64 = 256 << 10;
const SECOND: u64 = 1_000_000_000;
/// Blocks that the arena holds.
const HOST: u64 = 16;

fn config() -> EngineConfig {
    EngineConfig::new(HOST * PAYLOAD)
}

fn engine(config: EngineConfig, disk_blocks: u64) -> (Engine, SessionId) {
    let mut engine = Engine::new(config);
    if disk_blocks > 0 {
        engine.attach_disks(vec![DeviceImage {
            capacity: disk_blocks * PAYLOAD,
            page_bytes: PAGE,
            holes: Vec::new(),
            super_bytes: Vec::new(),
            table: Vec::new().into(),
        }]);
    }
    let session = engine.open_session(spec("one", GroupKind::Full)).unwrap();
    (engine, session)
}

fn spec(description: &str, kind: GroupKind) -> NamespaceSpec {
    let mut groups = vec![(GroupKind::Full, PAYLOAD as u32)];
    if kind != GroupKind::Full {
        groups.push((kind, PAYLOAD as u32));
    }
    NamespaceSpec::uniform(description, SIZE, &groups)
}

fn prompt(name: u8, len: u8) -> Vec<BlockHash> {
    (0..len)
        .map(|block| BlockHash::new(&[name, block, 1, 1, 1, name, block, 1]).unwrap())
        .collect()
}

fn save(engine: &mut Engine, session: SessionId, prompt: &Vec<BlockHash>) {
    let tokens = Tokens(prompt.len() as u32 * SIZE);
    let granted = engine.begin_save(session, &SaveRequest::new("saves", &prompt, tokens));
    engine.end_transfer(granted.transfer.unwrap().id, true);
    engine.finish_request(session, "saves");
    settle(engine, Ok(0));
}

/// Carries out the operations that the engine asks of the disk; reads end with `read`, if they do
/// not fit their checksum.
fn settle(engine: &mut Engine, read: Result<u64, IoFault>) {
    let mut started = Started::default();
    loop {
        engine.turn(Room::io(64), &mut started);
        if started.io.is_empty() && engine.wake() != Due::Now {
            return;
        }
        for request in started.io.drain(..) {
            let result = match request {
                IoRequest::ReadPayload { checksum, .. } => read.map(|_| checksum),
                _ => Ok(0),
            };
            let token = request.token();
            engine.complete(IoCompletion { token, result });
        }
    }
}

/// Looks a prompt up until it is answered.
fn ask(
    engine: &mut Engine,
    session: SessionId,
    request: &LookupRequest<'_>,
    read: Result<u64, IoFault>,
) -> Explained {
    while engine.lookup(session, request).is_pending() {
        settle(engine, read);
    }
    let explained = engine
        .inspect()
        .explained(session, request.request)
        .unwrap();
    engine.finish_request(session, request.request);
    explained
}

fn reason(engine: &mut Engine, session: SessionId, prompt: &[BlockHash]) -> Reason {
    let request = LookupRequest::new("asks", &prompt);
    ask(engine, session, &request, Ok(0)).rest.reason
}

#[test]
fn a_prompt_that_nobody_saved_was_never_seen_and_a_cached_one_is_complete() {
    let (mut engine, session) = engine(config(), 0);
    save(&mut engine, session, &prompt(1, 4));
    assert_eq!(
        reason(&mut engine, session, &prompt(2, 4)),
        Reason::NeverSeen
    );
    assert_eq!(
        reason(&mut engine, session, &prompt(1, 4)),
        Reason::Complete
    );
    let longer: Vec<BlockHash> = [prompt(1, 4), prompt(3, 2)].concat();
    let request = LookupRequest::new("longer", &longer).computed(Tokens(20));
    let told = ask(&mut engine, session, &request, Ok(0));
    assert_eq!(told.rest.reason, Reason::NeverSeen);
    assert_eq!((told.asked_tokens, told.device_tokens), (96, 20));
    assert_eq!((told.found_tokens, told.hit_tokens), (64, 64));
    assert_eq!(told.missing_block, "0300010101030001");
    // Everything is on the device.
    let request = LookupRequest::new("device", &longer).computed(Tokens(96));
    assert_eq!(
        ask(&mut engine, session, &request, Ok(0)).rest.reason,
        Reason::Complete
    );
    let counters = engine.counters();
    assert_eq!(
        (counters.misses_never_seen, counters.misses_evicted_host),
        (1, 0)
    );
}

#[test]
fn an_evicted_prompt_was_evicted_from_the_tier_that_had_it_last_and_so_long_ago() {
    let (mut only_host, session) = engine(config(), 0);
    save(&mut only_host, session, &prompt(1, 8));
    only_host.set_now(60 * SECOND);
    save(&mut only_host, session, &prompt(2, 16));
    only_host.set_now(100 * SECOND);
    let first = prompt(1, 8);
    let told = ask(
        &mut only_host,
        session,
        &LookupRequest::new("r", &first),
        Ok(0),
    );
    assert_eq!(
        (told.rest.reason, told.rest.ago_s),
        (Reason::EvictedHost, Some(40))
    );
    assert_eq!(only_host.counters().misses_evicted_host, 1);

    let (mut engine, session) = engine(config(), 16);
    save(&mut engine, session, &prompt(1, 8));
    save(&mut engine, session, &prompt(2, 16));
    save(&mut engine, session, &prompt(3, 16));
    assert_eq!(
        reason(&mut engine, session, &prompt(1, 8)),
        Reason::EvictedDisk
    );
    assert_eq!(engine.counters().misses_evicted_disk, 1);
}

#[test]
fn a_part_that_was_evicted_is_the_reason_for_the_end_of_a_hit_and_no_miss() {
    let (mut engine, session) = engine(config(), 0);
    save(&mut engine, session, &prompt(1, 12));
    save(&mut engine, session, &prompt(2, 8));
    let first = prompt(1, 12);
    let told = ask(
        &mut engine,
        session,
        &LookupRequest::new("r", &first),
        Ok(0),
    );
    assert_eq!(
        (told.rest.reason, told.hit_tokens),
        (Reason::EvictedHost, 8 * SIZE)
    );
    assert_eq!(engine.counters().misses_evicted_host, 0);
}

#[test]
fn blocks_of_another_model_give_the_reason_other_identity() {
    let (mut engine, session) = engine(config(), 0);
    save(&mut engine, session, &prompt(1, 4));
    let other = engine.open_session(spec("two", GroupKind::Full)).unwrap();
    assert_eq!(
        reason(&mut engine, other, &prompt(1, 4)),
        Reason::OtherIdentity
    );
    assert_eq!(reason(&mut engine, other, &prompt(2, 4)), Reason::NeverSeen);
}

#[test]
fn a_save_under_way_is_incomplete_and_a_payload_that_cannot_be_read_is_lost() {
    let (mut engine, session) = engine(config(), 64);
    let first = prompt(1, 4);
    let request = SaveRequest::new("saves", &first, Tokens(4 * SIZE));
    let granted = engine.begin_save(session, &request).transfer.unwrap();
    assert_eq!(reason(&mut engine, session, &first), Reason::Incomplete);
    engine.end_transfer(granted.id, true);
    settle(&mut engine, Ok(0));
    save(&mut engine, session, &prompt(2, 16));
    let request = LookupRequest::new("r", &first);
    let told = ask(&mut engine, session, &request, Err(IoFault::Corrupt));
    assert_eq!((told.rest.reason, told.hit_tokens), (Reason::Lost, 0));
}

#[test]
fn too_few_tokens_and_the_threshold_are_different_reasons() {
    let least = EngineConfig {
        min_load_tokens: Some(100),
        ..config()
    };
    let (mut engine, session) = engine(least, 0);
    save(&mut engine, session, &prompt(1, 4));
    assert_eq!(reason(&mut engine, session, &prompt(1, 4)), Reason::TooFew);
    save(&mut engine, session, &prompt(2, 8));
    let second = prompt(2, 8);
    let request = LookupRequest::new("r", &second).min(Tokens(200));
    let told = ask(&mut engine, session, &request, Ok(0));
    assert_eq!((told.rest.reason, told.hit_tokens), (Reason::Threshold, 0));
}

#[test]
fn without_its_window_a_chain_is_no_hit() {
    let (mut engine, _) = engine(config(), 0);
    let window = GroupKind::SlidingWindow { tokens: 2 * SIZE };
    let session = engine.open_session(spec("window", window)).unwrap();
    // The window's blocks are not offered.
    save(&mut engine, session, &prompt(1, 4));
    assert_eq!(
        reason(&mut engine, session, &prompt(1, 4)),
        Reason::NoBoundary
    );
}

#[test]
fn blocks_on_disk_that_are_not_loaded_have_their_own_reasons() {
    let of = |config: EngineConfig| {
        let (mut engine, session) = engine(config, 64);
        save(&mut engine, session, &prompt(1, 8));
        save(&mut engine, session, &prompt(2, 16));
        (engine, session)
    };
    let first = prompt(1, 8);
    let wait = PromotionWait::Limit {
        base_ns: SECOND,
        per_1k_tokens_ns: 0,
    };
    // The wait is over, or the disk does not answer.
    for (promotion_wait, stall_ns, reason) in [
        (wait, 100 * SECOND, Reason::TimedOut),
        (PromotionWait::Complete, SECOND, Reason::DiskSilent),
    ] {
        let (mut engine, session) = of(EngineConfig {
            promotion_wait,
            stall_ns,
            ..config()
        });
        let request = LookupRequest::new("r", &first);
        assert!(engine.lookup(session, &request).is_pending());
        engine.turn(Room::io(64), &mut Started::default());
        engine.set_now(2 * SECOND);
        engine.turn(Room::io(64), &mut Started::default());
        let told = ask(&mut engine, session, &request, Ok(0));
        assert_eq!((told.rest.reason, told.hit_tokens), (reason, 0));
        let counters = engine.counters();
        assert_eq!(counters.misses_timed_out + counters.misses_disk_silent, 1);
    }
    // Another request holds the whole budget of reads.
    let (mut engine, session) = of(EngineConfig {
        promotion_bytes: 8 * PAYLOAD,
        ..config()
    });
    let held = LookupRequest::new("held", &first);
    while engine.lookup(session, &held).is_pending() {
        settle(&mut engine, Ok(0));
    }
    let told = engine.inspect().explained(session, "held").unwrap();
    assert_eq!(
        (told.rest.reason, told.disk_tokens),
        (Reason::Complete, 8 * SIZE)
    );
    // A payload that fails again and again is lost in the end; a payload whose load failed is not offered again.
    let load = engine.begin_load(session, "held", Tokens(0), Tokens(8 * SIZE));
    assert!(engine.inspect().explained(session, "held").unwrap().loaded);
    engine.end_transfer(load.unwrap().id, false);
    let told = ask(&mut engine, session, &held, Ok(0));
    assert_eq!(told.rest.reason, Reason::LoadFailed);
}

#[test]
fn explain_lists_the_last_lookups_latest_first_in_parts_and_by_request() {
    let (mut engine, session) = engine(
        EngineConfig {
            explained_lookups: 300,
            ..config()
        },
        0,
    );
    save(&mut engine, session, &prompt(1, 4));
    let (known, unknown) = (prompt(1, 4), prompt(2, 4));
    for number in 0..400 {
        let hashes = if number % 2 == 0 { &known } else { &unknown };
        let label = format!("cmpl-{number}-{}", "x".repeat(100));
        let request = LookupRequest::new("r", hashes).label(&label);
        // Asked again, it is the same lookup.
        engine.lookup(session, &request);
        ask(&mut engine, session, &request, Ok(0));
    }
    let all = |engine: &Engine, query: ExplainQuery| {
        let (mut query, mut all) = (query, Vec::new());
        loop {
            let (some, before) = engine.explain(&query);
            assert!(some.len() <= 128);
            all.extend(some);
            match before {
                Some(_) => query.before = before,
                None => return all,
            }
        }
    };
    let told = all(&engine, ExplainQuery::default());
    assert_eq!(told.len(), 300);
    assert!(told[0].request.starts_with("cmpl-399-") && told[0].request.len() == 72);
    assert!(
        told.windows(2)
            .all(|pair| pair[0].position > pair[1].position)
    );
    let misses = ExplainQuery {
        misses: true,
        ..ExplainQuery::default()
    };
    let misses = all(&engine, misses);
    assert_eq!(misses.len(), 150);
    assert!(misses.iter().all(|of| of.rest.reason == Reason::NeverSeen));
    let one = ExplainQuery {
        request: "cmpl-222-".to_owned(),
        ..ExplainQuery::default()
    };
    assert_eq!(all(&engine, one).len(), 1);
    assert_eq!(engine.counters().misses_never_seen, 200);
}

#[test]
fn a_prefetch_is_no_answer_unless_its_client_takes_it_for_one() {
    let (mut engine, session) = engine(config(), 0);
    let unknown = prompt(2, 4);
    let request = LookupRequest::new("r", &unknown).priority(Priority::Prefetch);
    engine.lookup(session, &request);
    assert_eq!(engine.inspect().explained(session, "r"), None);
    let served = SessionSpec {
        leases_prefetches: true,
        ..spec("one", GroupKind::Full).into()
    };
    let served = engine.open_session(served).unwrap();
    engine.lookup(served, &request);
    let told = engine.inspect().explained(served, "r").unwrap();
    assert_eq!(told.rest.reason, Reason::NeverSeen);
    // The lookup of a hint is no request's.
    let of_hint = LookupRequest::new("\0hint 1", &unknown).prefetch();
    engine.lookup(served, &of_hint);
    assert_eq!(engine.inspect().explained(served, "\0hint 1"), None);
    assert_eq!(engine.counters().misses_never_seen, 1);
}

#[test]
fn repeated_lookups_count_the_tokens_of_a_request_once() {
    let (mut engine, session) = engine(config(), 0);
    save(&mut engine, session, &prompt(1, 4));
    let longer: Vec<BlockHash> = [prompt(1, 4), prompt(3, 2)].concat();
    let request = LookupRequest::new("longer", &longer).computed(Tokens(20));
    let before = *engine.counters();
    for _ in 0..3 {
        assert!(!engine.lookup(session, &request).is_pending());
    }
    let held = LookupRequest::new("held", &longer).computed(Tokens(80));
    ask(&mut engine, session, &held, Ok(0));
    let now = *engine.counters();
    let counted = |of: fn(&Counters) -> u64| of(&now) - of(&before);
    assert_eq!(counted(|one| one.answered_lookups), 2);
    assert_eq!(counted(|one| one.answered_tokens), 2 * 96);
    assert_eq!(counted(|one| one.answered_device_tokens), 20 + 80);
    assert_eq!(counted(|one| one.answered_hit_tokens), 64 - 20);
}
