//! Models with windows and states: a hit ends only at a boundary whose objects are all in the store.

use undercroft_contract::key::BlockHash;
use undercroft_contract::namespace::GroupKind;
use undercroft_contract::remote::RemoteWrite;
use undercroft_contract::session::{LookupRequest, Tokens};
use undercroft_engine::{EngineConfig, SessionId};

use crate::rig::{BLOCK, Host, MILLISECOND, Random, assert_complete, chain, config, model, offers};
use crate::store::{Connection, Objects};
use crate::{MODEL, hex, host_of};

const WINDOW: &[GroupKind] = &[GroupKind::Full, GroupKind::SlidingWindow { tokens: 200 }];
const STATE: &[GroupKind] = &[GroupKind::Full, GroupKind::State];
const CHUNK: &[GroupKind] = &[GroupKind::ChunkedLocal { tokens: 512 }, GroupKind::Full];
const ALL: &[GroupKind] = &[
    GroupKind::State,
    GroupKind::Full,
    GroupKind::SlidingWindow { tokens: 40 },
    GroupKind::SlidingWindow { tokens: 200 },
];
const MODELS: [&[GroupKind]; 4] = [WINDOW, STATE, CHUNK, ALL];

/// A store with the objects of a prompt that a host has computed and saved with these boundaries.
fn computed(
    config: &EngineConfig,
    kinds: &[GroupKind],
    hashes: &[BlockHash],
    boundaries: &[u32],
) -> Objects {
    let (mut objects, mut random) = (Objects::default(), Random(1));
    let (mut writer, session) = host_of(config.clone(), kinds);
    save(&mut writer, session, kinds, hashes, boundaries);
    writer.run(3000, &mut objects, &mut random);
    assert!(!writer.engine.inspect().has_remote_work(), "all is written");
    writer.check();
    Objects {
        by_name: objects.by_name,
        ..Objects::default()
    }
}

fn save(
    host: &mut Host,
    session: SessionId,
    kinds: &[GroupKind],
    hashes: &[BlockHash],
    boundaries: &[u32],
) {
    let offers = offers(&model(1, kinds), boundaries);
    host.save_with((session, "w"), hashes, &offers, MODEL);
}

/// Loads a whole hit, and checks its bytes.
fn load(
    host: &mut Host,
    (session, name): (SessionId, &str),
    kinds: &[GroupKind],
    hashes: &[BlockHash],
    tokens: u32,
) {
    let load = host.enter(|engine| engine.begin_load(session, name, Tokens(0), Tokens(tokens)));
    let load = load.expect("a hit can be loaded");
    assert_complete(&load, &model(1, kinds), tokens);
    host.compare(&load, hashes, MODEL);
    host.enter(|engine| engine.end_transfer(load.id, true));
    host.enter(|engine| engine.finish_request(session, name));
}

/// Asks a new host for a prompt, and loads the hit. Returns the hit's hash blocks.
fn hit(
    config: &EngineConfig,
    kinds: &[GroupKind],
    hashes: &[BlockHash],
    objects: &mut Objects,
) -> u32 {
    let (mut reader, session) = host_of(config.clone(), kinds);
    let mut random = Random(2);
    let (tokens, _) = reader.ask(session, "r", hashes, objects, &mut random);
    if tokens > 0 {
        load(&mut reader, (session, "r"), kinds, hashes, tokens);
    }
    reader.run(500, objects, &mut random);
    reader.check();
    assert!(!reader.engine.inspect().has_remote_work());
    tokens / BLOCK
}

#[test]
fn one_host_loads_blocks_that_another_has_computed() {
    for kinds in MODELS {
        let hashes = chain(&[(1, 70)]);
        let config = config(512, 8);
        let mut objects = computed(&config, kinds, &hashes, &[70]);
        let (mut reader, session) = host_of(config, kinds);
        let mut random = Random(2);
        let (tokens, waited) = reader.ask(session, "r", &hashes, &mut objects, &mut random);
        assert_eq!(tokens, 70 * BLOCK, "{kinds:?}");
        assert!(waited <= 70, "{waited} ms for two rounds of 20 ms");
        load(&mut reader, (session, "r"), kinds, &hashes, tokens);
        assert_eq!(objects.gets, objects.by_name.len(), "{kinds:?}");
        let counters = reader.engine.counters();
        assert_eq!(counters.remote_hit_tokens, u64::from(tokens));
        // From now on the prompt is in host memory, and is not written again.
        let asked = (objects.probes, objects.gets);
        let again = reader.ask(session, "s", &hashes, &mut objects, &mut random);
        assert_eq!(again, (tokens, 0));
        reader.run(1000, &mut objects, &mut random);
        assert_eq!((objects.probes, objects.gets), asked);
        assert_eq!(objects.puts, 0, "{kinds:?}");
        reader.check();
    }
}

#[test]
fn windows_and_states_from_the_store_are_written_to_disk() {
    for kinds in MODELS {
        let hashes = chain(&[(1, 70)]);
        let config = config(512, 8);
        let mut objects = computed(&config, kinds, &hashes, &[70]);
        let store = Connection::new(128, 20 * MILLISECOND);
        let mut reader = Host::new(config, store, 1024);
        let session = reader.enter(|engine| engine.open_session(model(1, kinds)));
        let session = session.expect("a payload fits");
        let mut random = Random(2);
        let (tokens, _) = reader.ask(session, "r", &hashes, &mut objects, &mut random);
        assert_eq!(tokens, 70 * BLOCK, "{kinds:?}");
        reader.run(500, &mut objects, &mut random);
        let gauges = reader.engine.gauges();
        assert!(gauges.host_blocks > 70, "{kinds:?}");
        assert_eq!(gauges.disk_blocks, gauges.host_blocks, "{kinds:?}");
        reader.check();
    }
}

#[test]
fn a_longer_prompt_hits_where_the_other_host_ended() {
    for kinds in MODELS {
        let first = chain(&[(1, 70)]);
        let longer = chain(&[(1, 70), (2, 50)]);
        let config = config(512, 8);
        let mut objects = computed(&config, kinds, &first, &[70]);
        assert_eq!(hit(&config, kinds, &longer, &mut objects), 70, "{kinds:?}");
    }
}

#[test]
fn a_hit_never_ends_where_anything_of_it_is_missing() {
    for kinds in MODELS {
        let hashes = chain(&[(1, 70)]);
        let config = config(512, 4);
        let all = computed(&config, kinds, &hashes, &[30, 70]).by_name;
        let mut ends = [0; 71];
        for gone in all.keys() {
            let kept = all.iter().filter(|&(name, _)| name != gone);
            let mut objects = Objects {
                by_name: kept.map(|(name, of)| (name.clone(), of.clone())).collect(),
                ..Objects::default()
            };
            let found = hit(&config, kinds, &hashes, &mut objects);
            ends[found as usize] += 1;
            // The place of the missing object determines which boundaries are left.
            let at = hashes.iter().position(|hash| gone.contains(&hex(hash)));
            let at = at.expect("an object of the prompt") as u32 + 1;
            let is_segment = at.is_multiple_of(4) && gone.ends_with("-4");
            let expected = match (at > 30, is_segment) {
                (true, _) => 30,
                (false, true) => 0,
                // Only the shorter hit would need the object.
                (false, false) => 70,
            };
            // A hit may end inside a chunk. At the start of a chunk a hit needs only segments.
            let is_right = match kinds == CHUNK && at > 30 {
                true => (expected..70).contains(&found),
                false => found == expected,
            };
            assert!(
                is_right,
                "{kinds:?}: {found} without {gone}, which ends at {at}"
            );
        }
        assert!(
            ends[30..70].iter().sum::<i32>() > 5 && ends[0] + ends[70] > 3,
            "{kinds:?}: {ends:?}"
        );
    }
}

#[test]
fn objects_that_do_not_match_their_names_are_misses_and_are_replaced() {
    for kinds in MODELS {
        let hashes = chain(&[(1, 37)]);
        let config = config(512, 4);
        let all = computed(&config, kinds, &hashes, &[20, 37]).by_name;
        let names: Vec<&String> = all.keys().collect();
        for (at, &name) in names.iter().enumerate() {
            let swapped = all[names[(at + 1) % names.len()]].clone();
            let mut damaged = all[name].clone();
            let last = damaged.len() - 200;
            damaged[last] ^= 1;
            for object in [swapped, damaged] {
                let mut objects = Objects {
                    by_name: all.clone(),
                    ..Objects::default()
                };
                objects.by_name.insert(name.clone(), object);
                let (mut reader, session) = host_of(config.clone(), kinds);
                let mut random = Random(3);
                let (tokens, _) = reader.ask(session, "r", &hashes, &mut objects, &mut random);
                let found = tokens / BLOCK;
                let is_whole = [0, 20, 37].contains(&found) || kinds == CHUNK;
                assert!(is_whole, "{kinds:?}: {found}");
                if found > 0 {
                    load(&mut reader, (session, "r"), kinds, &hashes, tokens);
                }
                let corrupt = reader.engine.counters().remote_corrupt;
                assert_eq!(corrupt, u64::from(found < 37), "{kinds:?}: {name} {found}");
                // The rest is computed. The object is replaced at the next hit at the latest.
                save(&mut reader, session, kinds, &hashes, &[20, 37]);
                let (tokens, _) = reader.ask(session, "s", &hashes, &mut objects, &mut random);
                assert_eq!(tokens, 37 * BLOCK);
                load(&mut reader, (session, "s"), kinds, &hashes, tokens);
                reader.run(2000, &mut objects, &mut random);
                assert_eq!(objects.replacing as u64, corrupt, "{kinds:?}: {name}");
                reader.check();
                let is_right = |(name, object)| objects.by_name.get(name) == Some(object);
                assert!(
                    corrupt == 0 || all.iter().all(is_right),
                    "{kinds:?}: {name}"
                );
            }
        }
    }
}

#[test]
fn a_state_that_the_tiers_lack_comes_alone() {
    let hashes = chain(&[(1, 70)]);
    let config = config(512, 8);
    let mut objects = computed(&config, STATE, &hashes, &[70]);
    let (mut reader, session) = host_of(config, STATE);
    let mut random = Random(2);
    save(&mut reader, session, STATE, &hashes, &[]);
    let (tokens, _) = reader.ask(session, "r", &hashes, &mut objects, &mut random);
    assert_eq!(tokens, 70 * BLOCK);
    load(&mut reader, (session, "r"), STATE, &hashes, tokens);
    assert_eq!(objects.gets, 1);
}

#[test]
fn a_boundary_that_the_tiers_have_is_kept_if_the_store_has_no_deeper_one() {
    let hashes = chain(&[(1, 70)]);
    let config = config(512, 8);
    let mut objects = computed(&config, WINDOW, &hashes, &[40]);
    let (mut reader, session) = host_of(config, WINDOW);
    let mut random = Random(2);
    save(&mut reader, session, WINDOW, &hashes[..50], &[50]);
    let (tokens, _) = reader.ask(session, "r", &hashes, &mut objects, &mut random);
    assert_eq!((tokens, objects.gets), (50 * BLOCK, 0));
    load(&mut reader, (session, "r"), WINDOW, &hashes, tokens);
}

#[test]
fn a_long_prompt_asks_for_at_most_256_boundaries_in_four_rounds() {
    for there in [None, Some(2999), Some(2880), Some(1024), Some(64)] {
        let hashes = chain(&[(1, 3000)]);
        let mut config = config(3600, 64);
        config.promotion_bytes = config.host_bytes;
        let boundaries: Vec<u32> = there.into_iter().collect();
        let prompt = &hashes[..there.unwrap_or(10) as usize];
        let mut objects = computed(&config, STATE, prompt, &boundaries);
        let (mut reader, session) = host_of(config, STATE);
        let mut random = Random(2);
        let (tokens, _) = reader.ask(session, "r", &hashes, &mut objects, &mut random);
        assert_eq!(tokens, there.unwrap_or(0) * BLOCK);
        assert!(
            objects.probed_keys <= 256 && objects.probes <= 4,
            "{} keys in {} rounds",
            objects.probed_keys,
            objects.probes
        );
        let most = reader.most_work;
        assert!(most.units() <= 2_000 + 40 * 3000, "an entry took {most:?}");
        // The absence of deeper boundaries is remembered for five seconds.
        let asked = objects.probes;
        reader.ask(session, "s", &hashes, &mut objects, &mut random);
        assert_eq!(objects.probes, asked);
        reader.check();
    }
}

#[test]
fn requests_for_the_same_boundary_share_one_flight() {
    let hashes = chain(&[(1, 70)]);
    let config = config(512, 8);
    for kinds in MODELS {
        let asked_by = |names: &[&str]| {
            let mut objects = computed(&config, kinds, &hashes, &[70]);
            let (mut reader, session) = host_of(config.clone(), kinds);
            let mut random = Random(4);
            for name in names {
                let question = LookupRequest::new(name, &hashes);
                assert!(reader.look(session, &question).is_pending());
            }
            let before = (objects.probes, objects.probed_keys);
            for name in names {
                let (tokens, _) = reader.ask(session, name, &hashes, &mut objects, &mut random);
                assert_eq!(tokens, 70 * BLOCK);
            }
            reader.check();
            let (probes, keys) = (objects.probes - before.0, objects.probed_keys - before.1);
            (probes, keys, objects.gets)
        };
        assert_eq!(asked_by(&["a", "b", "c"]), asked_by(&["a"]), "{kinds:?}");
    }
}

#[test]
fn flights_that_need_the_same_objects_get_each_once() {
    let hashes = chain(&[(1, 70)]);
    let longer = chain(&[(1, 70), (2, 3)]);
    let config = config(512, 8);
    for kinds in MODELS {
        let mut objects = computed(&config, kinds, &hashes, &[70]);
        let (mut reader, session) = host_of(config.clone(), kinds);
        let mut random = Random(4);
        let requests = [("a", &hashes), ("b", &longer)];
        for (name, hashes) in requests {
            let question = LookupRequest::new(name, hashes);
            assert!(reader.look(session, &question).is_pending());
        }
        reader.check();
        for (name, hashes) in requests {
            let (tokens, _) = reader.ask(session, name, hashes, &mut objects, &mut random);
            assert_eq!(tokens, 70 * BLOCK);
            load(&mut reader, (session, name), kinds, hashes, tokens);
        }
        assert_eq!(objects.gets, objects.by_name.len(), "{kinds:?}: each once");
        reader.check();
    }
}

#[test]
fn modes_of_writing() {
    let hashes = chain(&[(1, 20)]);
    let mut random = Random(7);
    for (mode, at_first, after_a_hit) in [
        // Two segments of eight blocks, the four blocks after them, and the state.
        (RemoteWrite::All, 4, 4),
        (RemoteWrite::SecondTouch, 0, 4),
        (RemoteWrite::None, 0, 0),
    ] {
        let mut config = config(256, 8);
        config.remote.as_mut().expect("it is set").write = mode;
        let mut objects = Objects::default();
        let (mut writer, session) = host_of(config, STATE);
        save(&mut writer, session, STATE, &hashes, &[20]);
        writer.run(1000, &mut objects, &mut random);
        assert_eq!(objects.puts, at_first, "{mode:?}");
        writer.ask(session, "r", &hashes, &mut objects, &mut random);
        writer.run(1000, &mut objects, &mut random);
        assert_eq!(objects.puts, after_a_hit, "{mode:?}");
        writer.check();
    }
}

#[test]
fn the_object_that_others_look_for_is_written_last() {
    for kinds in MODELS {
        let hashes = chain(&[(1, 70)]);
        let config = config(512, 8);
        let all = computed(&config, kinds, &hashes, &[70]).by_name.len();
        let (mut writer, session) = host_of(config.clone(), kinds);
        let (mut objects, mut random) = (Objects::default(), Random(1));
        save(&mut writer, session, kinds, &hashes, &[70]);
        let last = hex(&hashes[69]);
        let mut is_there = false;
        for _ in 0..1000 {
            writer.run(1, &mut objects, &mut random);
            // The objects at the end: one of the required payloads, and one of each group.
            let of_end = objects.by_name.keys().filter(|name| name.contains(&last));
            let optional = of_end.filter(|name| name.contains("-g")).count();
            let complete = optional == kinds.len() - 1;
            if complete && !is_there {
                is_there = true;
                let of_boundary = |name: &&String| name.contains("-g");
                let found = objects.by_name.keys().filter(of_boundary).count();
                let expected = computed(&config, kinds, &hashes, &[70]);
                assert_eq!(found, expected.by_name.keys().filter(of_boundary).count());
            }
        }
        assert!(is_there && objects.by_name.len() == all, "{kinds:?}");
    }
}

#[test]
fn a_question_for_less_than_a_block_asks_the_store_for_nothing() {
    let hashes = chain(&[(1, 70)]);
    let (mut objects, mut random) = (Objects::default(), Random(1));
    let (mut reader, session) = host_of(config(512, 8), STATE);
    save(&mut reader, session, STATE, &hashes, &[]);
    let question = LookupRequest::new("r", &hashes).max(Tokens(BLOCK - 2));
    assert!(!reader.look(session, &question).is_pending());
    reader.run(100, &mut objects, &mut random);
    assert_eq!((objects.probes, objects.gets), (0, 0));
}

#[test]
fn a_prefetch_keeps_all_that_its_hit_needs() {
    for kinds in [WINDOW, STATE] {
        let hashes = chain(&[(1, 70)]);
        let config = config(512, 8);
        let mut objects = computed(&config, kinds, &hashes, &[70]);
        let (mut reader, session) = host_of(config, kinds);
        let mut random = Random(10);
        let question = LookupRequest::new("r", &hashes).prefetch();
        assert!(reader.look(session, &question).is_pending());
        reader.run(200, &mut objects, &mut random);
        // Other prompts take all idle memory.
        for prompt in 10..20 {
            let other = chain(&[(prompt, 256)]);
            assert_eq!(reader.save((session, "w"), &other, MODEL), 256);
        }
        let answer = reader.ask(session, "r", &hashes, &mut objects, &mut random);
        assert_eq!(answer, (70 * BLOCK, 0), "{kinds:?}");
        load(&mut reader, (session, "r"), kinds, &hashes, answer.0);
        reader.check();
    }
}

#[test]
fn a_part_of_a_hit_is_not_kept() {
    let hashes = chain(&[(1, 70)]);
    let config = config(512, 8);
    let mut objects = computed(&config, STATE, &hashes, &[70]);
    let third = hex(&hashes[23]);
    objects.by_name.retain(|name, _| !name.contains(&third));
    let (mut reader, session) = host_of(config, STATE);
    let mut random = Random(10);
    let question = LookupRequest::new("r", &hashes).prefetch();
    assert!(reader.look(session, &question).is_pending());
    reader.run(200, &mut objects, &mut random);
    assert!(objects.gets > 2 && reader.engine.gauges().host_blocks > 0);
    // The request may still ask, but all memory is free.
    let other = chain(&[(2, 512)]);
    assert_eq!(reader.save((session, "w"), &other, MODEL), 512);
    let answer = reader.ask(session, "r", &hashes, &mut objects, &mut random);
    assert_eq!(answer.0, 0);
    reader.check();
}
