//! Hosts that share a remote store: each host loads the blocks that another host has computed, whatever the store does.
//!
//! `UNDERCROFT_REMOTE_SEEDS=10000 cargo nextest run -p undercroft-sim --test remote --release`

mod announced;
mod evicted;
mod failures;
mod gaps;
mod hybrid;
mod lives;
mod resets;
mod rig;
mod store;

use rig::{BLOCK, Host, Random, chain, config, model};
use store::{Connection, Objects};
use undercroft_contract::key::BlockHash;
use undercroft_contract::namespace::GroupKind;
use undercroft_contract::remote::RemoteWrite;
use undercroft_contract::session::{
    Brought, LookupRequest, Priority, SaveRequest, SessionSpec, Tokens,
};
use undercroft_engine::{EngineConfig, SessionId};

pub(crate) const FULL: &[GroupKind] = &[GroupKind::Full];
pub(crate) const MODEL: (u64, u64) = (1, 0);

/// A host with a session, whose store is 20 ms away.
pub(crate) fn host(config: EngineConfig) -> (Host, SessionId) {
    host_of(config, FULL)
}

pub(crate) fn host_of(config: EngineConfig, kinds: &[GroupKind]) -> (Host, SessionId) {
    let store = Connection::new(128, 20 * rig::MILLISECOND);
    let mut host = Host::new(config, store, 0);
    let session = host.enter(|engine| engine.open_session(model(1, kinds)));
    (host, session.expect("a payload fits"))
}

/// A store with the segments of a prompt that a host has computed.
pub(crate) fn computed(config: &EngineConfig, hashes: &[BlockHash]) -> Objects {
    let (mut objects, mut random) = (Objects::default(), Random(1));
    let (mut writer, session) = host(config.clone());
    writer.save((session, "w"), hashes, MODEL);
    writer.run(3000, &mut objects, &mut random);
    assert!(!writer.engine.inspect().has_remote_work(), "all is written");
    Objects {
        by_name: objects.by_name,
        ..Objects::default()
    }
}

#[test]
fn one_host_loads_blocks_that_another_has_computed() {
    let hashes = chain(&[(1, 70)]);
    let config = config(256, 8);
    let mut objects = computed(&config, &hashes);
    assert_eq!(objects.by_name.len(), 8, "whole segments");
    let (mut reader, session) = host(config);
    let mut random = Random(2);
    let (tokens, waited) = reader.ask(session, "r", &hashes, &mut objects, &mut random);
    assert_eq!(tokens, 64 * BLOCK);
    assert!(waited <= 70, "{waited} ms for two rounds of 20 ms");
    assert_eq!(reader.load((session, "r"), tokens, &hashes, MODEL), 64);
    let counters = reader.engine.counters();
    assert_eq!(counters.remote_hit_tokens, u64::from(tokens));
    assert_eq!((counters.remote_gets, counters.remote_puts), (8, 0));
    assert_eq!(counters.remote_get_bytes, 64 * u64::from(rig::PAYLOAD));
    // From now on the prompt is in host memory.
    let asked = (objects.probed_keys, objects.gets);
    assert_eq!(
        reader.ask(session, "s", &hashes[..64], &mut objects, &mut random),
        (tokens, 0)
    );
    assert_eq!((objects.probed_keys, objects.gets), asked);
    reader.check();
}

#[test]
fn a_servers_load_counts_the_tokens_that_came_from_the_store() {
    let hashes = chain(&[(1, 70)]);
    let config = config(256, 8);
    let mut objects = computed(&config, &hashes);
    let (mut reader, session) = host(config);
    let (tokens, _) = reader.ask(session, "r", &hashes, &mut objects, &mut Random(2));
    let external = Tokens(tokens);
    let load = reader.enter(|engine| engine.begin_known_load(session, "r", Tokens(0), external));
    assert!(load.is_some());
    assert_eq!(
        reader.engine.counters().remote_hit_tokens,
        u64::from(tokens)
    );
}

#[test]
fn a_hit_begins_in_the_tiers_and_ends_in_the_store() {
    let hashes = chain(&[(1, 64)]);
    let config = config(256, 8);
    let mut objects = computed(&config, &hashes);
    let (mut reader, session) = host(config);
    let mut random = Random(2);
    reader.save((session, "own"), &hashes[..21], MODEL);
    let (tokens, _) = reader.ask(session, "r", &hashes, &mut objects, &mut random);
    assert_eq!(tokens, 64 * BLOCK);
    // The host has no disk. Of a segment that it has in part, only the rest came from the store.
    let brought = Brought {
        disk: None,
        remote: Some((Tokens(21 * BLOCK), Tokens(64 * BLOCK))),
    };
    assert_eq!(reader.engine.brought(session, "r"), brought);
    assert_eq!(reader.load((session, "r"), tokens, &hashes, MODEL), 64);
    // The host had two segments and five blocks of the third, which is fetched for its last three blocks.
    assert_eq!(objects.gets, 6);
    assert_eq!(reader.engine.gauges().host_blocks, 64);
    assert_eq!(
        reader.engine.counters().remote_hit_tokens,
        43 * u64::from(BLOCK)
    );
}

#[test]
fn the_end_among_a_thousand_segments_takes_seventy_requests_and_two_rounds() {
    let hashes = chain(&[(1, 1024)]);
    let mut config = config(1400, 1);
    config.promotion_bytes = config.host_bytes;
    let all = computed(&config, &hashes).by_name;
    assert_eq!(all.len(), 1024);
    for there in [1024, 1023, 700, 33, 2, 1, 0] {
        let has = |name: &str| hashes[..there].iter().any(|hash| name.contains(&hex(hash)));
        let mut objects = Objects::default();
        let kept = all.iter().filter(|(name, _)| has(name));
        objects.by_name = kept.map(|(name, of)| (name.clone(), of.clone())).collect();
        let (mut reader, session) = host(config.clone());
        let question = LookupRequest::new("r", &hashes).prefetch();
        assert!(reader.look(session, &question).is_pending());
        let mut random = Random(there as u64);
        // After two rounds of at most 30 ms and the turns between them, all segments there are requested.
        reader.run(64, &mut objects, &mut random);
        let requests = objects.probed_keys + 2;
        assert!(
            requests <= 70 && objects.probes <= 2,
            "{there}: {requests} requests"
        );
        reader.run(3000, &mut objects, &mut random);
        let (tokens, _) = reader.ask(session, "r", &hashes, &mut objects, &mut random);
        assert_eq!(tokens, there as u32 * BLOCK);
        assert!(
            objects.gets <= there + 2,
            "{} gets for {there}",
            objects.gets
        );
        let units = reader.most_work.units();
        assert!(
            units <= 2_000 + 40 * 1024,
            "an entry took {:?}",
            reader.most_work
        );
        reader.check();
    }
}

pub(crate) fn hex(hash: &BlockHash) -> String {
    let digits = hash.as_bytes().iter().map(|byte| format!("{byte:02x}"));
    digits.collect()
}

#[test]
fn absent_objects_are_not_requested_again_for_five_seconds() {
    let hashes = chain(&[(1, 64)]);
    let (mut objects, mut random) = (Objects::default(), Random(3));
    let (mut reader, session) = host(config(256, 8));
    assert_eq!(
        reader
            .ask(session, "a", &hashes, &mut objects, &mut random)
            .0,
        0
    );
    let asked = (objects.probed_keys, objects.gets);
    assert_eq!(
        asked,
        (3, 2),
        "three of eight segments, and the first two at once"
    );
    assert_eq!(
        reader.ask(session, "b", &hashes, &mut objects, &mut random),
        (0, 0)
    );
    assert_eq!((objects.probed_keys, objects.gets), asked);
    reader.run(6000, &mut objects, &mut random);
    reader.ask(session, "c", &hashes, &mut objects, &mut random);
    assert!(objects.gets > asked.1);
}

#[test]
fn requests_for_the_same_segments_share_one_flight() {
    let hashes = chain(&[(1, 64)]);
    let config = config(512, 8);
    let mut objects = computed(&config, &hashes);
    let (mut reader, session) = host(config);
    let mut random = Random(4);
    for name in ["a", "b", "c"] {
        let question = LookupRequest::new(name, &hashes);
        assert!(reader.look(session, &question).is_pending());
    }
    // Another end of the same prefix.
    let other = chain(&[(1, 40), (2, 8)]);
    let question = LookupRequest::new("d", &other);
    assert!(reader.look(session, &question).is_pending());
    reader.check();
    reader.run(200, &mut objects, &mut random);
    for name in ["a", "b", "c"] {
        let (tokens, waited) = reader.ask(session, name, &hashes, &mut objects, &mut random);
        assert_eq!((tokens, waited), (64 * BLOCK, 0));
        assert_eq!(reader.load((session, name), tokens, &hashes, MODEL), 64);
    }
    let (tokens, _) = reader.ask(session, "d", &other, &mut objects, &mut random);
    assert_eq!(tokens, 40 * BLOCK);
    assert_eq!(
        objects.gets,
        8 + 1,
        "each once, and the one that only the other prompt has"
    );
    reader.check();
}

#[test]
fn an_aborted_request_stops_the_gets_that_only_it_waits_for() {
    let hashes = chain(&[(1, 512)]);
    let mut config = config(1024, 8);
    let mut objects = computed(&config, &hashes);
    config.remote.as_mut().expect("it is set").window_bytes = 16 * rig::SLOT;
    let (mut reader, session) = host(config);
    let mut random = Random(4);
    let question = LookupRequest::new("a", &hashes);
    assert!(reader.look(session, &question).is_pending());
    reader.run(5, &mut objects, &mut random);
    reader.enter(|engine| engine.finish_request(session, "a"));
    reader.check();
    reader.run(500, &mut objects, &mut random);
    assert_eq!(objects.gets, 2);
    assert!(!reader.engine.inspect().has_remote_work());
    reader.check();
}

#[test]
fn segments_on_their_way_serve_the_next_request() {
    let hashes = chain(&[(1, 64)]);
    let config = config(256, 8);
    let mut objects = computed(&config, &hashes);
    let (mut reader, session) = host(config);
    let mut random = Random(4);
    let question = LookupRequest::new("a", &hashes);
    assert!(reader.look(session, &question).is_pending());
    reader.run(2, &mut objects, &mut random);
    reader.enter(|engine| engine.finish_request(session, "a"));
    assert_eq!(objects.gets, 2, "they are on their way");
    let (tokens, _) = reader.ask(session, "b", &hashes, &mut objects, &mut random);
    assert_eq!(tokens, 64 * BLOCK);
    assert_eq!(reader.load((session, "b"), tokens, &hashes, MODEL), 64);
    assert_eq!(objects.gets, 8);
    reader.check();
}

#[test]
fn writes_keep_to_their_rate_and_to_a_quarter_of_the_arena() {
    let hashes = chain(&[(1, 512)]);
    let (mut objects, mut random) = (Objects::default(), Random(5));
    let mut fast = config(1024, 8);
    let (mut writer, session) = host(fast.clone());
    writer.save((session, "w"), &hashes, MODEL);
    writer.run(2000, &mut objects, &mut random);
    assert_eq!(objects.puts, 64);
    assert!(writer.store.most_put_bytes <= 256 * rig::SLOT);
    // 8 segments a second. At most the segments of a quarter of a second at once.
    fast.remote.as_mut().expect("it is set").write_rate = 8 * 8 * rig::SLOT;
    let (mut writer, session) = host(fast);
    let mut objects = Objects::default();
    writer.save((session, "w"), &hashes, MODEL);
    writer.run(4000, &mut objects, &mut random);
    assert!(
        (30..=35).contains(&objects.puts),
        "{} segments in 4 s",
        objects.puts
    );
    writer.check();
}

#[test]
fn segments_are_written_front_to_back() {
    let hashes = chain(&[(1, 64)]);
    let (mut objects, mut random) = (Objects::default(), Random(5));
    // Writes hold a quarter of the arena, so one write runs at a time.
    let (mut writer, session) = host(config(64, 16));
    writer.save((session, "w"), &hashes, MODEL);
    let mut seen = 0;
    while objects.by_name.len() < 4 {
        writer.run(1, &mut objects, &mut random);
        let is_there = |end: &BlockHash| {
            let end = hex(end);
            objects.by_name.keys().any(|name| name.contains(&end))
        };
        let there: Vec<bool> = hashes.chunks(16).map(|of| is_there(&of[15])).collect();
        assert!(there.is_sorted_by_key(|&is| !is), "{there:?}");
        seen += u32::from(there[0] && !there[3]);
    }
    assert!(seen > 0, "one after the other");
}

#[test]
fn segments_that_are_evicted_before_their_turn_are_dropped_and_counted() {
    let (mut objects, mut random) = (Objects::default(), Random(5));
    let mut slow = config(128, 8);
    slow.remote.as_mut().expect("it is set").write_rate = 8 * rig::SLOT;
    let (mut writer, session) = host(slow);
    for prompt in 0..20 {
        let hashes = chain(&[(prompt, 64)]);
        assert_eq!(
            writer.save((session, "w"), &hashes, MODEL),
            64,
            "nothing waits"
        );
        writer.run(10, &mut objects, &mut random);
    }
    writer.run(20_000, &mut objects, &mut random);
    let counters = writer.engine.counters();
    assert!(counters.remote_puts_dropped_gone >= 140, "{counters:?}");
    assert_eq!(
        counters.remote_puts + counters.remote_puts_dropped_gone,
        160
    );
    writer.check();
}

#[test]
fn segments_that_are_being_written_count_as_not_written() {
    let mut objects = Objects::default();
    let mut random = Random(7);
    let (mut writer, session) = host(config(256, 8));
    writer.save((session, "w"), &chain(&[(1, 64)]), MODEL);
    for _ in 0..1000 {
        writer.run(1, &mut objects, &mut random);
        let written = writer.engine.counters().remote_puts;
        let gauges = writer.engine.gauges();
        assert_eq!(gauges.remote_put_queue_segments + written, 8);
    }
    assert_eq!(objects.puts, 8);
}

#[test]
fn objects_that_the_store_has_are_not_written_again() {
    let hashes = chain(&[(1, 64)]);
    let config = config(256, 8);
    let mut objects = computed(&config, &hashes);
    let mut random = Random(6);
    let (mut reader, session) = host(config.clone());
    reader.ask(session, "r", &hashes, &mut objects, &mut random);
    reader.run(1000, &mut objects, &mut random);
    assert_eq!(objects.puts, 0, "what came from there");
    let (mut writer, session) = host(config);
    writer.save((session, "w"), &hashes, MODEL);
    writer.run(1000, &mut objects, &mut random);
    assert_eq!(writer.engine.counters().remote_puts_known, 8);
    assert_eq!(objects.puts, 8);
    // A hit searches for dropped segments, and finds none.
    writer.ask(session, "r", &hashes, &mut objects, &mut random);
    writer.run(1000, &mut objects, &mut random);
    assert_eq!(objects.puts, 8);
}

#[test]
fn modes_of_writing() {
    let hashes = chain(&[(1, 64)]);
    let mut random = Random(7);
    for (mode, at_first, after_a_hit) in [
        (RemoteWrite::All, 8, 8),
        (RemoteWrite::SecondTouch, 0, 8),
        (RemoteWrite::None, 0, 0),
    ] {
        let mut config = config(256, 8);
        config.remote.as_mut().expect("it is set").write = mode;
        let mut objects = Objects::default();
        let (mut writer, session) = host(config);
        writer.save((session, "w"), &hashes, MODEL);
        writer.run(1000, &mut objects, &mut random);
        assert_eq!(objects.puts, at_first, "{mode:?}");
        writer.ask(session, "r", &hashes, &mut objects, &mut random);
        writer.run(1000, &mut objects, &mut random);
        assert_eq!(objects.puts, after_a_hit, "{mode:?}");
        writer.check();
    }
}

#[test]
fn private_sessions_never_touch_the_store() {
    let hashes = chain(&[(1, 64)]);
    let config = config(256, 8);
    let mut objects = computed(&config, &hashes);
    let before = objects.by_name.clone();
    let mut random = Random(8);
    let (mut host, session) = host(config.clone());
    assert!(host.enter(|engine| engine.reset(session)));
    let private = SessionSpec {
        private: true,
        ..SessionSpec::from(model(1, FULL))
    };
    let other = host.enter(|engine| engine.open_session(private));
    for session in [session, other.expect("a payload fits")] {
        // The session has other weights.
        assert_eq!(
            host.ask(session, "r", &hashes, &mut objects, &mut random),
            (0, 0)
        );
        host.save((session, "w"), &hashes, (1, 5));
        host.run(1000, &mut objects, &mut random);
        let (tokens, _) = host.ask(session, "s", &hashes, &mut objects, &mut random);
        assert_eq!(host.load((session, "s"), tokens, &hashes, (1, 5)), 64);
    }
    host.run(1000, &mut objects, &mut random);
    assert_eq!((objects.probed_keys, objects.gets, objects.puts), (0, 0, 0));
    assert_eq!(objects.by_name, before);
    host.check();
}

#[test]
fn several_groups_of_full_attention_share_an_object() {
    let hashes = chain(&[(1, 64)]);
    let kinds = &[GroupKind::Full, GroupKind::Ignored, GroupKind::Full];
    let (mut objects, mut random) = (Objects::default(), Random(9));
    let (mut writer, session) = host_of(config(512, 8), kinds);
    writer.save((session, "w"), &hashes, MODEL);
    writer.run(1000, &mut objects, &mut random);
    assert_eq!(objects.by_name.len(), 16, "of four hash blocks each");
    let (mut reader, session) = host_of(config(512, 8), kinds);
    let (tokens, _) = reader.ask(session, "r", &hashes, &mut objects, &mut random);
    assert_eq!(reader.load((session, "r"), tokens, &hashes, MODEL), 128);
    reader.check();
}

#[test]
fn without_a_store_nothing_is_ever_sent() {
    let hashes = chain(&[(1, 64)]);
    let (mut objects, mut random) = (Objects::default(), Random(9));
    let mut without = config(256, 8);
    without.remote = None;
    let (mut host, session) = host(without);
    host.save((session, "w"), &hashes, MODEL);
    let other = chain(&[(2, 64)]);
    assert_eq!(
        host.ask(session, "r", &other, &mut objects, &mut random),
        (0, 0)
    );
    host.run(100, &mut objects, &mut random);
    assert_eq!((objects.probed_keys, objects.gets, objects.puts), (0, 0, 0));
    assert!(!host.engine.inspect().has_remote_work());
}

#[test]
fn a_prefetch_brings_the_segments_before_the_scheduler_asks() {
    let hashes = chain(&[(1, 64)]);
    let config = config(256, 8);
    let mut objects = computed(&config, &hashes);
    let (mut reader, session) = host(config);
    let mut random = Random(10);
    let question = LookupRequest::new("r", &hashes).priority(Priority::Prefetch);
    assert!(reader.look(session, &question).is_pending());
    reader.run(200, &mut objects, &mut random);
    // Meanwhile other prompts take all memory, except the leased memory of the prefetch.
    for prompt in 10..20 {
        let other = chain(&[(prompt, 64)]);
        let all = SaveRequest::new("w", &other, Tokens(64 * BLOCK));
        let granted = reader.enter(|engine| engine.begin_save(session, &all));
        reader.enter(|engine| engine.end_transfer(granted.transfer.expect("room").id, true));
    }
    let (tokens, waited) = reader.ask(session, "r", &hashes, &mut objects, &mut random);
    assert_eq!((tokens, waited), (64 * BLOCK, 0));
    assert_eq!(reader.load((session, "r"), tokens, &hashes, MODEL), 64);
    reader.check();
}
