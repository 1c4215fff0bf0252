//! Groups that a hit can do without: windows and states come to nodes that are there already, decide where a hit ends,
//! and are evicted before the chain that they belong to.

#![expect(clippy::unwrap_used, reason = "tests")]

use undercroft_contract::error::RegisterError;
use undercroft_contract::key::BlockHash;
use undercroft_contract::namespace::{GroupKind, GroupSpec, NamespaceSpec};
use undercroft_contract::session::{
    ArenaOffset, Lookup, LookupRequest, Offer, SaveRequest, SessionSpec, Tokens,
};
use undercroft_engine::{Due, Engine, EngineConfig, Room, SessionId, Started};

const HASH_BLOCK: u32 = 16;
const FULL: usize = 0;
const OPTIONAL: u8 = 1;

fn spec(kind: GroupKind) -> NamespaceSpec {
    let groups = [(GroupKind::Full, 1 << 16), (kind, 1 << 16)];
    NamespaceSpec::uniform(format!("{kind:?}"), HASH_BLOCK, &groups)
}

fn chain(seed: u8, len: u32) -> Vec<BlockHash> {
    (0..len)
        .map(|depth| {
            let mut hash = [seed; 32];
            hash[..4].copy_from_slice(&depth.to_le_bytes());
            hash[4..8].copy_from_slice(&(u32::from(seed) * 7919 + depth).to_le_bytes());
            BlockHash::new(&hash).unwrap()
        })
        .collect()
}

fn offer(first_block: u32, end_block: u32) -> Offer {
    Offer {
        group: OPTIONAL,
        first_block,
        end_block,
    }
}

/// Saves; how many payloads of (full attention, the other group) were asked for.
fn save(
    engine: &mut Engine,
    session: SessionId,
    hashes: &Vec<BlockHash>,
    offers: &[Offer],
) -> (usize, usize) {
    let tokens = hashes.len() as u32 * HASH_BLOCK;
    let Some(job) = engine
        .begin_save(
            session,
            &SaveRequest::new("save", &hashes, Tokens(tokens)).offers(offers),
        )
        .transfer
    else {
        return (0, 0);
    };
    let count = |group: usize| {
        let extents = job
            .extents
            .iter()
            .filter(|extent| usize::from(extent.group) == group);
        extents
            .flat_map(|extent| &extent.offsets)
            .filter(|offset| offset.get().is_some())
            .count()
    };
    let counts = (count(FULL), count(usize::from(OPTIONAL)));
    engine.end_transfer(job.id, true);
    counts
}

fn hit(engine: &mut Engine, session: SessionId, hashes: &Vec<BlockHash>, local: u32) -> u32 {
    let most = hashes.len() as u32 * HASH_BLOCK;
    let answer = engine
        .lookup(
            session,
            &LookupRequest::new("ask", &hashes)
                .computed(Tokens(local * HASH_BLOCK))
                .max(Tokens(most)),
        )
        .tokens();
    engine.finish_request(session, "ask");
    match answer {
        Some(Tokens(tokens)) => tokens / HASH_BLOCK,
        None => panic!("there is no disk"),
    }
}

fn engine(bytes: u64, kind: GroupKind) -> (Engine, SessionId) {
    let mut engine = Engine::new(EngineConfig::new(bytes));
    let session = engine.open_session(spec(kind)).unwrap();
    (engine, session)
}

#[test]
fn a_state_is_added_to_a_chain_that_is_there_and_counts_only_at_its_boundary() {
    let (mut engine, session) = engine(64 << 20, GroupKind::State);
    let hashes = chain(1, 8);
    assert_eq!(save(&mut engine, session, &hashes, &[offer(7, 8)]), (8, 1));
    assert_eq!(hit(&mut engine, session, &hashes, 0), 8);
    assert_eq!(hit(&mut engine, session, &chain(1, 5), 0), 0);
    let shorter = chain(1, 5);
    assert_eq!(save(&mut engine, session, &shorter, &[offer(3, 4)]), (0, 1));
    assert_eq!(save(&mut engine, session, &shorter, &[offer(3, 4)]), (0, 0));
    assert_eq!(hit(&mut engine, session, &chain(1, 5), 0), 4);
    assert_eq!(hit(&mut engine, session, &chain(1, 5), 4), 0);
}

#[test]
fn a_miss_reports_the_shared_prefix_although_no_hit_can_end_there() {
    let (mut engine, session) = engine(64 << 20, GroupKind::State);
    save(&mut engine, session, &chain(1, 8), &[offer(7, 8)]);
    let other: Vec<BlockHash> = chain(1, 5).into_iter().chain(chain(2, 3)).collect();
    let most = 8 * HASH_BLOCK;
    assert_eq!(
        engine.lookup(session, &LookupRequest::new("r", &other).max(Tokens(most))),
        Lookup::Miss {
            shared: Tokens(5 * HASH_BLOCK)
        }
    );
}

#[test]
fn a_draft_group_keeps_hits_away_from_the_end() {
    let (mut engine, _) = engine(64 << 20, GroupKind::State);
    let dropping = SessionSpec {
        dropped_tokens: Tokens(HASH_BLOCK),
        ..SessionSpec::from(spec(GroupKind::State))
    };
    let session = engine.open_session(dropping).unwrap();
    let hashes = chain(1, 8);
    save(&mut engine, session, &hashes, &[offer(6, 8)]);
    assert_eq!(hit(&mut engine, session, &hashes, 0), 7);
}

#[test]
fn a_load_takes_a_window_but_no_blocks_before_it() {
    let tokens = 2 * HASH_BLOCK + 1;
    let (mut engine, session) = engine(64 << 20, GroupKind::SlidingWindow { tokens });
    let hashes = chain(1, 8);
    save(&mut engine, session, &hashes, &[offer(2, 4), offer(6, 8)]);
    assert_eq!(hit(&mut engine, session, &hashes, 0), 8);
    assert_eq!(hit(&mut engine, session, &chain(1, 7), 0), 4);
    let most = 8 * HASH_BLOCK;
    engine
        .lookup(session, &LookupRequest::new("r", &hashes).max(Tokens(most)))
        .tokens();
    let load = engine
        .begin_load(session, "r", Tokens(0), Tokens(most))
        .unwrap();
    let of = |group: u8| load.extents.iter().find(|extent| extent.group == group);
    assert_eq!(
        (of(0).unwrap().first_block, of(0).unwrap().offsets.len()),
        (0, 8)
    );
    assert_eq!(
        (of(1).unwrap().first_block, of(1).unwrap().offsets.len()),
        (6, 2)
    );
}

#[test]
fn old_windows_go_before_the_chains_that_they_stand_on() {
    let tokens = 2 * HASH_BLOCK + 1;
    // Room for 64 payloads.
    let (mut engine, session) = engine(4 << 20, GroupKind::SlidingWindow { tokens });
    let long = chain(1, 20);
    let windows: Vec<Offer> = (0..4)
        .map(|turn| offer(4 * turn + 2, 4 * turn + 4))
        .collect();
    assert_eq!(save(&mut engine, session, &long, &windows), (20, 8));
    let kept = [offer(18, 20)];
    assert_eq!(save(&mut engine, session, &long, &kept), (0, 2));
    // It is used again and again at its end, never between.
    let mut seed = 2;
    while engine.counters().host_evictions < 8 {
        assert_eq!(
            hit(&mut engine, session, &long, 0),
            20,
            "after {seed} others"
        );
        save(&mut engine, session, &chain(seed, 2), &[]);
        seed += 1;
    }
    assert_eq!(hit(&mut engine, session, &long, 0), 20);
    assert_eq!(hit(&mut engine, session, &chain(1, 17), 0), 0);
    // The chain that they belong to is still there.
    assert_eq!(save(&mut engine, session, &long, &windows), (0, 8));
}

#[test]
fn slots_of_a_load_stay_under_memory_pressure() {
    let tokens = 4 * HASH_BLOCK + 1;
    let (mut engine, session) = engine(4 << 20, GroupKind::SlidingWindow { tokens });
    let hashes = chain(1, 16);
    save(&mut engine, session, &hashes, &[offer(8, 12)]);
    let most = 12 * HASH_BLOCK;
    assert_eq!(
        engine
            .lookup(session, &LookupRequest::new("r", &hashes).max(Tokens(most)))
            .tokens(),
        Some(Tokens(most))
    );
    let press = |engine: &mut Engine, seeds: std::ops::Range<u8>| {
        for seed in seeds {
            let len = 30;
            save(engine, session, &chain(seed, len), &[offer(0, len)]);
        }
    };
    // The answer holds them, then the load does.
    press(&mut engine, 2..12);
    let load = engine
        .begin_load(session, "r", Tokens(0), Tokens(most))
        .unwrap();
    press(&mut engine, 12..22);
    let read: Vec<ArenaOffset> = load
        .extents
        .iter()
        .flat_map(|extent| extent.offsets.clone())
        .collect();
    assert_eq!(read.len(), 16);
    let tokens = 30 * HASH_BLOCK;
    let busy = chain(30, 30);
    let other = engine
        .begin_save(session, &SaveRequest::new("other", &busy, Tokens(tokens)))
        .transfer;
    for extent in other.iter().flat_map(|job| &job.extents) {
        assert!(extent.offsets.iter().all(|slot| !read.contains(slot)));
    }
    engine.end_transfer(load.id, true);
    engine.finish_request(session, "r");
    press(&mut engine, 40..50);
    assert_eq!(hit(&mut engine, session, &hashes, 0), 0);
}

/// A namespace with one group alone.
fn alone(kind: GroupKind) -> (Engine, SessionId) {
    let mut spec = spec(kind);
    spec.groups.remove(FULL);
    let mut engine = Engine::new(EngineConfig::new(4 << 20));
    let session = engine.open_session(spec).unwrap();
    (engine, session)
}

#[test]
fn a_long_chain_of_nodes_without_payloads_is_freed_on_a_small_stack() {
    let small = std::thread::Builder::new().stack_size(1 << 20);
    let thread = small.spawn(|| {
        let (mut engine, session) = alone(GroupKind::State);
        let depth = 65_536;
        let hashes = chain(1, depth);
        let last = Offer {
            group: 0,
            first_block: depth - 1,
            end_block: depth,
        };
        let job = engine
            .begin_save(
                session,
                &SaveRequest::new("r", &hashes, Tokens(depth * HASH_BLOCK)).offers(&[last]),
            )
            .transfer
            .unwrap();
        assert_eq!(engine.gauges().nodes, u64::from(depth));
        engine.end_transfer(job.id, false);
        while engine.wake() == Due::Now {
            engine.turn(Room::io(0), &mut Started::default());
        }
        assert_eq!(engine.gauges().nodes, 0);
    });
    thread.unwrap().join().unwrap();
}

#[test]
fn hashes_that_are_no_chain_are_misses_and_save_nothing_twice() {
    for kind in [
        GroupKind::Full,
        GroupKind::State,
        GroupKind::SlidingWindow { tokens: 64 },
    ] {
        let (mut engine, session) = alone(kind);
        let [x, y, z] = [1, 2, 3].map(|seed| chain(seed, 1)[0]);
        let all = [Offer {
            group: 0,
            first_block: 0,
            end_block: 9,
        }];
        let save = |engine: &mut Engine, hashes: &Vec<BlockHash>| {
            let job = engine
                .begin_save(
                    session,
                    &SaveRequest::new("s", &hashes, Tokens(3 * HASH_BLOCK)).offers(&all),
                )
                .transfer;
            let slots = job.as_ref().map_or(0, |job| job.extents[0].offsets.len());
            if let Some(job) = job {
                engine.end_transfer(job.id, true);
            }
            slots
        };
        assert_eq!(save(&mut engine, &vec![x]), 1);
        // Below another one.
        assert_eq!(hit(&mut engine, session, &vec![y, x], 0), 0, "{kind:?}");
        assert_eq!(save(&mut engine, &vec![y, x]), 1, "the other one");
        // Twice.
        assert_eq!(save(&mut engine, &vec![z, z, z]), 1);
        assert_eq!(hit(&mut engine, session, &vec![z, z, z], 0), 1);
    }
}

#[test]
fn each_session_has_an_alignment_of_its_own() {
    let mut engine = Engine::new(EngineConfig::new(64 << 20));
    let aligned = |blocks: u32| NamespaceSpec {
        alignment_tokens: blocks * HASH_BLOCK,
        groups: spec(GroupKind::Full).groups[..1].to_vec(),
        ..spec(GroupKind::Full)
    };
    let fine = engine.open_session(aligned(1)).unwrap();
    let hashes = chain(1, 5);
    assert_eq!(save(&mut engine, fine, &hashes, &[]), (5, 0));
    let coarse = engine.open_session(aligned(2)).unwrap();
    let coarser = engine.open_session(aligned(3)).unwrap();
    for (session, blocks) in [(fine, 5), (coarse, 4), (coarser, 3), (fine, 5)] {
        let answer = engine.lookup(session, &LookupRequest::new("request", &hashes));
        assert_eq!(answer.tokens(), Some(Tokens(blocks * HASH_BLOCK)));
        engine.finish_request(session, "request");
    }
}

/// A group that is neither saved nor needed, as the connector registers it.
const IGNORED: GroupSpec = GroupSpec {
    kind: GroupKind::Ignored,
    block_tokens: 0,
    payload_bytes: 0,
};

#[test]
fn an_ignored_group_may_come_first() {
    let mut engine = Engine::new(EngineConfig::new(64 << 20));
    let mut groups = spec(GroupKind::State).groups;
    groups.insert(0, IGNORED);
    let session = engine.open_session(NamespaceSpec {
        groups,
        ..spec(GroupKind::Ignored)
    });
    let (session, hashes) = (session.unwrap(), chain(1, 8));
    let offers = [0, 2].map(|group| Offer {
        group,
        first_block: 7,
        end_block: 8,
    });
    let save = SaveRequest::new("save", &hashes, Tokens(8 * HASH_BLOCK)).offers(&offers);
    let granted = engine.begin_save(session, &save).transfer.unwrap();
    let of_groups = granted.extents.iter();
    let slots: Vec<_> = of_groups.map(|of| (of.group, of.offsets.len())).collect();
    assert_eq!(slots, [(1, 8), (2, 1)]);
    engine.end_transfer(granted.id, true);
    assert_eq!(hit(&mut engine, session, &hashes, 0), 8);
}

#[test]
fn a_namespace_of_ignored_groups_only_is_refused() {
    let mut engine = Engine::new(EngineConfig::new(64 << 20));
    let groups = vec![IGNORED; 2];
    let opened = engine.open_session(NamespaceSpec {
        groups,
        ..spec(GroupKind::Ignored)
    });
    let refused = opened.unwrap_err();
    assert!(
        matches!(refused, RegisterError::Value { key: "groups", .. }),
        "{refused}"
    );
}

#[test]
fn a_window_of_any_width_needs_all_blocks_that_it_covers() {
    for tokens in [u32::MAX, u32::MAX - 1, 8 * HASH_BLOCK + 2] {
        let (mut engine, session) = engine(64 << 20, GroupKind::SlidingWindow { tokens });
        let hashes = chain(1, 8);
        save(&mut engine, session, &hashes, &[offer(1, 8)]);
        assert_eq!(hit(&mut engine, session, &hashes, 0), 0, "the first lacks");
        save(&mut engine, session, &hashes, &[offer(0, 1)]);
        assert_eq!(hit(&mut engine, session, &hashes, 0), 8);
    }
}

#[test]
fn a_state_offered_at_a_node_of_another_chain_outlasts_the_eviction_of_its_child() {
    // A slot of the arena for each of four states.
    let mut engine = Engine::new(EngineConfig::new(1 << 20));
    let state = GroupSpec {
        kind: GroupKind::State,
        block_tokens: HASH_BLOCK,
        payload_bytes: 256 << 10,
    };
    let session = engine.open_session(NamespaceSpec {
        groups: vec![state],
        ..spec(GroupKind::State)
    });
    let session = session.unwrap();
    let mut save = |hashes: &Vec<BlockHash>, block: u32| {
        let offers = [Offer {
            group: 0,
            first_block: block,
            end_block: block + 1,
        }];
        let request = SaveRequest::new("save", &hashes, Tokens(2 * HASH_BLOCK)).offers(&offers);
        let granted = engine.begin_save(session, &request).transfer.unwrap();
        engine.end_transfer(granted.id, true);
    };
    for seed in 1..=4 {
        save(&chain(seed, 2), 1);
    }
    // These hashes are no chain: the first node is in the index only for the sake of the state below it, which is the
    // next to be evicted.
    save(&vec![chain(1, 2)[0], chain(2, 2)[1]], 0);
    assert_eq!(hit(&mut engine, session, &chain(1, 2), 0), 1);
    for seed in 2..=4 {
        assert_eq!(hit(&mut engine, session, &chain(seed, 2), 0), 2);
    }
}
