//! Stores that lose, change and delay objects, and that do not answer.

use undercroft_contract::remote::RemoteConfig;
use undercroft_contract::session::{LookupRequest, PromotionWait, Tokens};

use crate::rig::{BLOCK, MILLISECOND, Random, SECOND, SLOT, chain, config};
use crate::{computed, host};

const MODEL: (u64, u64) = (1, 0);

/// The names of a prompt's objects of eight hash blocks, front to back.
fn names(objects: &crate::store::Objects, branch: u64) -> Vec<String> {
    let hashes = chain(&[(branch, 64)]);
    let ends = hashes.chunks(8).map(|segment| crate::hex(&segment[7]));
    let name = |end: String| {
        objects
            .by_name
            .keys()
            .find(|name| name.contains(&end))
            .cloned()
    };
    ends.filter_map(name).collect()
}

#[test]
fn a_hit_ends_before_the_first_object_that_is_not_there() {
    let hashes = chain(&[(1, 64)]);
    let config = config(256, 8);
    for hole in 0..8 {
        let mut objects = computed(&config, &hashes);
        let name = names(&objects, 1)[hole].clone();
        objects.by_name.remove(&name);
        let (mut reader, session) = host(config.clone());
        let mut random = Random(hole as u64);
        let (tokens, _) = reader.ask(session, "r", &hashes, &mut objects, &mut random);
        assert_eq!(tokens, hole as u32 * 8 * BLOCK);
        if hole > 0 {
            reader.load((session, "r"), tokens, &hashes, MODEL);
        }
        reader.run(500, &mut objects, &mut random);
        reader.check();
        assert!(!reader.engine.inspect().has_remote_work());
    }
}

#[test]
fn an_object_that_is_removed_between_probe_and_get_ends_the_hit() {
    let hashes = chain(&[(1, 64)]);
    let config = config(256, 8);
    let mut objects = computed(&config, &hashes);
    let (mut reader, session) = host(config);
    let mut random = Random(2);
    let question = LookupRequest::new("r", &hashes);
    assert!(reader.look(session, &question).is_pending());
    while objects.gets < 6 {
        reader.run(1, &mut objects, &mut random);
    }
    let name = names(&objects, 1)[5].clone();
    objects.by_name.remove(&name);
    let (tokens, _) = reader.ask(session, "r", &hashes, &mut objects, &mut random);
    assert!(tokens == 5 * 8 * BLOCK || tokens == 64 * BLOCK, "{tokens}");
    reader.load((session, "r"), tokens, &hashes, MODEL);
    reader.check();
}

#[test]
fn objects_that_do_not_match_their_names_are_misses_and_are_replaced() {
    let hashes = chain(&[(1, 64)]);
    let config = config(256, 8);
    let all = computed(&config, &hashes);
    let names = names(&all, 1);
    let third = &all.by_name[&names[2]];
    let with = |at: usize, bit: u8| {
        let mut object = third.clone();
        object[at] ^= bit;
        object
    };
    let mut other_model = rename(&config, &hashes);
    let kinds = [
        ("a bit of a payload", with(4096 + 5000, 1)),
        ("a bit of the header", with(20, 64)),
        ("another segment", all.by_name[&names[3]].clone()),
        ("another model's", other_model.remove(2)),
        ("the beginning", third[..5000].to_vec()),
        ("nothing", Vec::new()),
        ("of another version", with(8, 2)),
    ];
    for (what, object) in kinds {
        let mut objects = computed(&config, &hashes);
        objects.by_name.insert(names[2].clone(), object);
        let (mut reader, session) = host(config.clone());
        let mut random = Random(3);
        let (tokens, _) = reader.ask(session, "r", &hashes, &mut objects, &mut random);
        assert_eq!(tokens, 2 * 8 * BLOCK, "{what}");
        assert_eq!(
            reader.load((session, "r"), tokens, &hashes, MODEL),
            16,
            "{what}"
        );
        assert_eq!(reader.engine.counters().remote_corrupt, 1, "{what}");
        // The rest is computed, and the object is replaced.
        reader.save((session, "w"), &hashes, MODEL);
        reader.run(1000, &mut objects, &mut random);
        assert_eq!(objects.replacing, 1, "{what}");
        let (mut next, session) = host(config.clone());
        let (tokens, _) = next.ask(session, "r", &hashes, &mut objects, &mut random);
        assert_eq!(
            next.load((session, "r"), tokens, &hashes, MODEL),
            64,
            "{what}"
        );
    }
}

/// The objects of another model for the same block hashes, front to back.
fn rename(
    config: &undercroft_engine::EngineConfig,
    hashes: &[undercroft_contract::key::BlockHash],
) -> Vec<Vec<u8>> {
    let (mut objects, mut random) = (crate::store::Objects::default(), Random(1));
    let (mut writer, _) = host(config.clone());
    let session = writer.enter(|engine| engine.open_session(crate::rig::model(2, crate::FULL)));
    writer.save((session.expect("a payload fits"), "w"), hashes, (2, 0));
    writer.run(3000, &mut objects, &mut random);
    let names = names(&objects, 1);
    names
        .iter()
        .map(|name| objects.by_name[name].clone())
        .collect()
}

#[test]
fn a_frozen_store_costs_a_second_once_and_every_slot_comes_back() {
    let hashes = chain(&[(1, 64)]);
    let config = config(256, 8);
    let mut objects = computed(&config, &hashes);
    let (mut reader, session) = host(config);
    let mut random = Random(4);
    reader.store.is_frozen = true;
    let mut longest = 0;
    for request in 0..6 {
        let hashes = chain(&[(request, 64)]);
        let name = format!("r{request}");
        let (tokens, waited) = reader.ask(session, &name, &hashes, &mut objects, &mut random);
        assert_eq!(tokens, 0);
        longest = longest.max(waited);
        if request >= 3 {
            assert_eq!(waited, 0, "the store is left alone");
        }
        reader.enter(|engine| engine.finish_request(session, &name));
    }
    assert!(longest <= 1300, "{longest} ms");
    let gauges = reader.engine.gauges();
    assert_eq!(gauges.remote_breaker_open, 1);
    assert!(
        gauges.host_used_bytes > 0,
        "the store may still write there"
    );
    let in_flight = reader.store.in_flight();
    // One request is tried after each pause.
    reader.run(900, &mut objects, &mut random);
    let (_, waited) = reader.ask(session, "early", &hashes, &mut objects, &mut random);
    assert_eq!((waited, reader.store.in_flight()), (0, in_flight));
    reader.run(1000, &mut objects, &mut random);
    reader.ask(
        session,
        "trial",
        &chain(&[(9, 64)]),
        &mut objects,
        &mut random,
    );
    assert_eq!(reader.store.in_flight(), in_flight + 1);
    reader.check();
    // The store recovers.
    let now_ns = reader.now_ns;
    reader.store.wake(now_ns);
    reader.run(3000, &mut objects, &mut random);
    assert_eq!(reader.store.in_flight(), 0);
    let hashes = chain(&[(1, 64)]);
    reader.ask(
        session,
        "again",
        &chain(&[(8, 64)]),
        &mut objects,
        &mut random,
    );
    assert_eq!(reader.engine.gauges().remote_breaker_open, 0);
    let (tokens, _) = reader.ask(session, "last", &hashes, &mut objects, &mut random);
    assert_eq!(reader.load((session, "last"), tokens, &hashes, MODEL), 64);
    reader.run(100, &mut objects, &mut random);
    assert!(!reader.engine.inspect().has_remote_work());
    // The whole arena can be used again.
    assert_eq!(
        reader.save((session, "w"), &chain(&[(20, 256)]), MODEL),
        256
    );
    reader.check();
}

#[test]
fn a_wait_ends_when_a_quarter_of_the_computing_is_lost() {
    let hashes = chain(&[(1, 64)]);
    let mut config = config(256, 8);
    let mut objects = computed(&config, &hashes);
    config.promotion_wait = PromotionWait::Planned;
    config.min_load_tokens = None;
    let (mut reader, session) = host(config);
    let step = undercroft_contract::session::Step {
        tokens: 1024,
        positions: 512 * 1024,
        decodes: 0,
        duration_ns: 400 * MILLISECOND,
    };
    reader.enter(|engine| engine.report_steps(session, &[step; 40]));
    reader.store.is_frozen = true;
    let mut random = Random(5);
    let (tokens, waited) = reader.ask(session, "r", &hashes, &mut objects, &mut random);
    assert_eq!(tokens, 0);
    assert!((80..=120).contains(&waited), "{waited} ms of 400");
    reader.check();
}

#[test]
fn a_configured_limit_ends_the_wait() {
    let hashes = chain(&[(1, 64)]);
    let mut config = config(256, 8);
    let mut objects = computed(&config, &hashes);
    config.promotion_wait = PromotionWait::Limit {
        base_ns: 10 * MILLISECOND,
        per_1k_tokens_ns: 10 * MILLISECOND,
    };
    let (mut reader, session) = host(config);
    let mut random = Random(5);
    reader.store.is_frozen = true;
    let (tokens, waited) = reader.ask(session, "r", &hashes, &mut objects, &mut random);
    assert_eq!((tokens, waited), (0, 21));
}

#[test]
fn a_wait_that_ends_early_hits_the_segments_that_have_come() {
    let hashes = chain(&[(1, 64)]);
    let mut config = config(256, 8);
    let mut objects = computed(&config, &hashes);
    config.promotion_wait = PromotionWait::Limit {
        base_ns: 70 * MILLISECOND,
        per_1k_tokens_ns: 0,
    };
    // Two segments at a time.
    config.remote.as_mut().expect("it is set").window_bytes = 16 * SLOT;
    let (mut reader, session) = host(config);
    let mut random = Random(5);
    let (tokens, waited) = reader.ask(session, "r", &hashes, &mut objects, &mut random);
    assert!((70..=71).contains(&waited), "{waited} ms");
    let segments = tokens / (8 * BLOCK);
    assert!((2..8).contains(&segments) && tokens.is_multiple_of(8 * BLOCK));
    let loaded = reader.load((session, "r"), tokens, &hashes, MODEL);
    assert_eq!(loaded, 8 * segments);
    reader.check();
}

#[test]
fn throttling_halves_the_window() {
    let hashes = chain(&[(1, 64)]);
    let mut config = config(256, 8);
    let window = 32 * SLOT;
    config.remote = Some(RemoteConfig {
        window_bytes: window,
        ..config.remote.expect("it is set")
    });
    let mut objects = computed(&config, &hashes);
    let (mut reader, session) = host(config);
    let mut random = Random(6);
    reader.store.faults.throttled = 1000;
    let (tokens, _) = reader.ask(session, "r", &hashes, &mut objects, &mut random);
    assert_eq!(tokens, 0);
    reader.run(100, &mut objects, &mut random);
    let gauges = reader.engine.gauges();
    assert!(gauges.remote_window_bytes <= window / 2, "{gauges:?}");
    assert_eq!(gauges.remote_breaker_open, 0, "it answers");
    reader.store.faults.throttled = 0;
    let (tokens, _) = reader.ask(session, "s", &hashes, &mut objects, &mut random);
    assert_eq!(reader.load((session, "s"), tokens, &hashes, MODEL), 64);
    assert!(reader.engine.gauges().remote_window_bytes > gauges.remote_window_bytes);
}

#[test]
fn a_store_that_takes_nothing_ends_the_wait() {
    let hashes = chain(&[(1, 64)]);
    let (mut objects, mut random) = (crate::store::Objects::default(), Random(6));
    let (mut reader, session) = host(config(256, 8));
    // The connection has no room, as if other operations took all of it.
    reader.store = crate::store::Connection::new(0, MILLISECOND);
    let (tokens, waited) = reader.ask(session, "r", &hashes, &mut objects, &mut random);
    assert_eq!(tokens, 0);
    assert!(waited <= 1100, "{waited} ms");
}

#[test]
fn a_failed_read_is_a_miss_that_may_be_saved_again() {
    let hashes = chain(&[(1, 64)]);
    let config = config(256, 8);
    let mut objects = computed(&config, &hashes);
    let (mut reader, session) = host(config);
    let mut random = Random(7);
    reader.store.faults.failed = 1000;
    let (tokens, _) = reader.ask(session, "r", &hashes, &mut objects, &mut random);
    assert_eq!(tokens, 0);
    assert_eq!(reader.save((session, "r"), &hashes, MODEL), 64);
    let (tokens, waited) = reader.ask(session, "s", &hashes, &mut objects, &mut random);
    assert_eq!((tokens, waited), (64 * BLOCK, 0));
    assert_eq!(reader.load((session, "s"), tokens, &hashes, MODEL), 64);
    reader.check();
}

#[test]
fn an_answer_without_the_checksums_of_all_payloads_is_a_miss_and_every_slot_comes_back() {
    let hashes = chain(&[(1, 64)]);
    let config = config(256, 8);
    let mut objects = computed(&config, &hashes);
    let (mut reader, session) = host(config);
    let mut random = Random(7);
    reader.store.faults.short = true;
    let (tokens, _) = reader.ask(session, "r", &hashes, &mut objects, &mut random);
    assert_eq!(tokens, 0);
    reader.enter(|engine| engine.finish_request(session, "r"));
    reader.run(100, &mut objects, &mut random);
    reader.check();
    assert_eq!(
        reader.save((session, "w"), &chain(&[(20, 256)]), MODEL),
        256
    );
}

#[test]
fn a_put_may_take_ten_times_as_long_as_a_get() {
    let (mut objects, mut random) = (crate::store::Objects::default(), Random(8));
    let (mut writer, session) = host(config(256, 8));
    writer.save((session, "w"), &chain(&[(1, 64)]), MODEL);
    writer.store.is_frozen = true;
    writer.run(9_000, &mut objects, &mut random);
    assert!(objects.puts > 0);
    assert_eq!(writer.engine.counters().remote_failures, 0);
    writer.run(2_000, &mut objects, &mut random);
    assert!(writer.engine.counters().remote_failures > 0);
    writer.check();
}

#[test]
fn a_full_store_is_left_alone_for_half_a_minute() {
    let hashes = chain(&[(1, 64)]);
    let (mut objects, mut random) = (crate::store::Objects::default(), Random(8));
    let (mut writer, session) = host(config(256, 1));
    writer.store.faults.full = 1000;
    writer.save((session, "w"), &hashes, MODEL);
    writer.run(1000, &mut objects, &mut random);
    let first = objects.puts;
    assert!(first <= 64, "{first}");
    writer.save((session, "x"), &chain(&[(2, 64)]), MODEL);
    writer.run(28_000, &mut objects, &mut random);
    assert_eq!(objects.puts, first);
    writer.store.faults.full = 0;
    writer.run(4_000, &mut objects, &mut random);
    assert_eq!(objects.by_name.len(), 128 - first);
    let question = LookupRequest::new("r", &hashes).max(Tokens(u32::MAX));
    assert!(!writer.look(session, &question).is_pending(), "reads go on");
    assert!(writer.now_ns > 30 * SECOND);
}

#[test]
fn a_host_that_may_not_write_continues_to_read() {
    let hashes = chain(&[(1, 64)]);
    let (mut objects, mut random) = (crate::store::Objects::default(), Random(8));
    let (mut other, of_other) = host(config(256, 1));
    other.save((of_other, "w"), &hashes, MODEL);
    other.run(2000, &mut objects, &mut random);
    let there = objects.by_name.len();
    assert!(there > 0);
    let (mut reader, session) = host(config(256, 1));
    reader.store.faults.read_only = true;
    reader.save((session, "x"), &chain(&[(2, 64)]), MODEL);
    reader.run(1000, &mut objects, &mut random);
    assert_eq!(objects.by_name.len(), there);
    assert_eq!(reader.engine.gauges().remote_breaker_open, 0);
    let question = LookupRequest::new("r", &hashes).max(Tokens(u32::MAX));
    assert!(reader.look(session, &question).is_pending());
    reader.run(2000, &mut objects, &mut random);
    assert!(reader.look(session, &question).tokens() > Some(Tokens(0)));
}
