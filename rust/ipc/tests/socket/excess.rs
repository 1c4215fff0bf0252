//! Clients that ask for too much, or for much, delay no other client and take no more than their share.

use std::io::{ErrorKind, Write};
use std::time::Duration;

use rustix::net::{RecvFlags, recv};
use undercroft_contract::namespace::{GroupKind, GroupSpec, NamespaceSpec};
use undercroft_contract::session::{LookupRequest, Priority, Save, SaveRequest, Session, Tokens};
use undercroft_driver::EngineAccess;
use undercroft_ipc::protocol::{
    ClientMessage, HashRun, LookupAnswer, LookupMessage, OFFERS_MAX, SaveMessage, ServerMessage,
};
use undercroft_ipc::{AttachError, attach};

use crate::raw::{Raw, finished, joined, run, status};
use crate::rig::{PATIENCE, Rig, TOKENS, client, hashes, spec, until};

/// Slots of a rig's arena.
const SLOTS: usize = 256;

/// A namespace none of whose blocks must be saved: a chain of nodes without payloads.
fn states() -> NamespaceSpec {
    NamespaceSpec {
        description: "states".to_owned(),
        groups: vec![GroupSpec {
            kind: GroupKind::State,
            ..spec().groups[0]
        }],
        ..spec()
    }
}

fn register(namespace: NamespaceSpec) -> ClientMessage<'static> {
    ClientMessage::Register {
        namespace,
        dropped_tokens: Tokens(0),
        private: false,
        tenant_share: 0,
    }
}

fn lookup(version: u32, hashes: HashRun<'_>) -> ClientMessage<'_> {
    lookup_of(1, version, hashes)
}

fn lookup_of(request: u64, version: u32, hashes: HashRun<'_>) -> ClientMessage<'_> {
    ClientMessage::Lookup(LookupMessage {
        request,
        version,
        label: "",
        computed: Tokens(0),
        max: Tokens::MAX,
        min: Tokens(0),
        priority: Priority::Demand,
        wait: None,
        queued: Tokens(0),
        hashes,
    })
}

/// The server's status.
fn has_answer(raw: &Raw) -> bool {
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    recv(&raw.stream, &mut [0; 1][..], flags).is_ok()
}

#[test]
fn others_are_answered_while_a_long_save_is_carried_out() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("run/s.sock");
    let _rig = Rig::start(&socket, None, 1);
    // Asked first, and first in the server's order.
    let (mut saver, _) = Raw::registered_as(&socket, &register(states()));
    let (mut other, _) = Raw::registered(&socket);
    let count: u32 = 100_000;
    let bytes = joined(&hashes(1, count));
    saver.say(&lookup(1, run(&bytes)));
    assert!(saver.hear().is_some());
    let known = HashRun {
        known: count,
        hash_bytes: 32,
        bytes: &[],
    };
    let mut overtook = false;
    for transfer in 0..20 {
        saver.say(&ClientMessage::BeginSave(SaveMessage {
            request: 1,
            transfer,
            tokens: Tokens(count * TOKENS),
            offers: Vec::new(),
            only_offers: false,
            is_wanted: false,
            hashes: known,
        }));
        assert!(other.is_served());
        overtook |= !has_answer(&saver);
        let granted = saver.hear();
        assert!(
            matches!(granted, Some(ServerMessage::Granted { end, .. }) if end.refused.is_none())
        );
    }
    assert!(overtook, "a save of {count} blocks always came first");
}

#[test]
fn a_client_that_does_not_read_its_answers_is_not_listened_to() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("run/s.sock");
    let rig = Rig::start(&socket, None, 1);
    let (mut greedy, _) = Raw::registered(&socket);
    let (mut other, _) = Raw::registered(&socket);
    let prompt = hashes(1, 100);
    assert_eq!(greedy.save(7, 7, &prompt), 100);
    greedy.say(&ClientMessage::EndTransfer {
        transfer: 7,
        ok: true,
    });
    greedy.say(&lookup(0, run(&joined(&prompt))));
    assert!(greedy.hear().is_some());
    // Each answer has 100 slots: 20,000 of them are 17 MB.
    let mut frames = Vec::new();
    let known = HashRun {
        known: 100,
        hash_bytes: 32,
        bytes: &[],
    };
    for version in 1..=20_000 {
        assert!(lookup(version, known).append_to(&mut frames));
    }
    greedy.stream.set_nonblocking(true).unwrap();
    let (mut sent, mut idle) = (0, 0);
    while sent < frames.len() && idle < 200 {
        match greedy.stream.write(&frames[sent..]) {
            Ok(bytes) => (sent, idle) = (sent + bytes, 0),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                // The server has had its turn.
                assert!(other.is_served());
                idle += 1;
            }
            Err(error) => panic!("{error}"),
        }
    }
    let answered = status(&socket)["server"]["lookups"].as_u64().unwrap();
    assert!(answered < 4000, "{answered} answers for nobody");
    greedy.stream.set_nonblocking(false).unwrap();
    let mut rest = greedy.other_half();
    let frames = &frames[sent..];
    std::thread::scope(|scope| {
        scope.spawn(|| (&greedy.stream).write_all(frames));
        for version in 1..=20_000 {
            let answer = rest.hear();
            assert!(
                matches!(&answer, Some(ServerMessage::Answer { version: of, answer: LookupAnswer::Hit(_), .. }) if *of == version),
                "{answer:?}"
            );
        }
    });
    drop((greedy, rest, other));
    until("nothing is left", || rig.in_use() == [0; 4]);
}

/// Hashes of one byte each.
fn run_of(known: u32, bytes: &[u8]) -> HashRun<'_> {
    HashRun {
        known,
        hash_bytes: 1,
        bytes,
    }
}

#[test]
fn hashes_beyond_a_clients_share_are_not_kept_and_its_lookups_are_misses() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("run/s.sock");
    let rig = Rig::start(&socket, None, 1);
    let (mut greedy, _) = Raw::registered(&socket);
    let (mut other, _) = Raw::registered(&socket);
    let bytes: Vec<u8> = (0..500_000u32).map(|at| at as u8).collect();
    for request in 1..=8 {
        greedy.say(&lookup_of(request, 1, run_of(0, &bytes)));
        let answer = greedy.hear();
        assert!(
            matches!(answer, Some(ServerMessage::Answer { .. })),
            "{answer:?}"
        );
    }
    let sessions = status(&socket)["sessions"].clone();
    let kept = sessions.as_array().unwrap().iter();
    let kept: u64 = kept.map(|of| of["request_bytes"].as_u64().unwrap()).sum();
    assert!(kept < 64 << 20, "{kept} bytes are kept");
    // The last one goes on to be asked about, and the others find room.
    greedy.say(&ClientMessage::BeginSave(SaveMessage {
        request: 8,
        transfer: 1,
        tokens: Tokens(TOKENS),
        offers: Vec::new(),
        only_offers: false,
        is_wanted: false,
        hashes: run_of(500_000, b"x"),
    }));
    let granted = greedy.hear();
    assert!(
        matches!(&granted, Some(ServerMessage::Granted { extents, .. }) if extents.is_empty()),
        "{granted:?}"
    );
    assert_eq!(other.save(1, 1, &hashes(3, 8)), 8);
    drop((greedy, other));
    until("nothing is left", || rig.in_use() == [0; 4]);
}

#[test]
fn a_new_request_beyond_a_clients_share_is_a_miss_until_it_ends() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("run/s.sock");
    let rig = Rig::start(&socket, None, 1);
    let (mut greedy, _) = Raw::registered(&socket);
    let prompt = hashes(1, 4);
    assert_eq!(greedy.save(1, 1, &prompt), 4);
    greedy.say(&ClientMessage::EndTransfer {
        transfer: 1,
        ok: true,
    });
    let bytes = vec![7; 1 << 19];
    // Two requests of each length take the share but for the bytes of the shortest one.
    let sizes = (0..=19).rev().map(|power| 1 << power).chain([0]);
    for (request, len) in (100..).zip(sizes.flat_map(|len| [len, len])) {
        greedy.say(&lookup_of(request, 1, run_of(0, &bytes[..len])));
        assert!(greedy.hear().is_some(), "request {request}");
    }
    let bytes_of_sessions = || {
        let sessions = status(&socket)["sessions"].clone();
        let sessions = sessions.as_array().unwrap().iter();
        sessions
            .map(|of| of["request_bytes"].as_u64().unwrap())
            .sum::<u64>()
    };
    let share = bytes_of_sessions();
    assert!((47 << 20..=48 << 20).contains(&share), "{share}");
    // Now the share of the first client is smaller than its requests.
    let (mut other, _) = Raw::registered(&socket);
    other.lookup(1, &prompt);
    assert!(matches!(
        other.hear(),
        Some(ServerMessage::Answer {
            answer: LookupAnswer::Hit(_),
            ..
        })
    ));
    let before = bytes_of_sessions();
    let known = prompt.len() as u32;
    for request in 200..300 {
        greedy.lookup(request, &prompt);
        let is_miss = |answer: Option<ServerMessage>| {
            let nothing = LookupAnswer::NOTHING;
            matches!(answer, Some(ServerMessage::Answer { answer, .. }) if answer == nothing)
        };
        assert!(is_miss(greedy.hear()), "request {request}");
        // The client counts the hashes as known to the server.
        greedy.say(&lookup_of(request, 2, run_of(known, b"x")));
        assert!(is_miss(greedy.hear()), "request {request}");
    }
    greedy.say(&ClientMessage::EndLookup { request: 200 });
    greedy.say(&ClientMessage::BeginSave(SaveMessage {
        request: 200,
        transfer: 2,
        tokens: Tokens(TOKENS),
        offers: Vec::new(),
        only_offers: false,
        is_wanted: false,
        hashes: run_of(known + 1, b"y"),
    }));
    let granted = greedy.hear();
    assert!(
        matches!(&granted, Some(ServerMessage::Granted { extents, .. }) if extents.is_empty()),
        "{granted:?}"
    );
    assert_eq!(bytes_of_sessions(), before, "they take nothing");
    // With the end of a long request there is room again, also for the number of a request without room.
    for request in [100, 101, 200] {
        greedy.say(&finished(request));
    }
    greedy.lookup(200, &prompt);
    assert!(matches!(
        greedy.hear(),
        Some(ServerMessage::Answer {
            answer: LookupAnswer::Hit(_),
            ..
        })
    ));
    assert_eq!(rig.server.counters().malformed, 0);
    drop((greedy, other));
    until("nothing is left", || rig.in_use() == [0; 4]);
}

#[test]
fn a_client_that_stops_in_its_saves_leaves_slots_to_others() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("run/s.sock");
    let _rig = Rig::start(&socket, None, 1);
    let (mut greedy, _) = Raw::registered(&socket);
    let (mut other, _) = Raw::registered(&socket);
    let mut held = 0;
    for prompt in 1..=8 {
        held += greedy.save(prompt, prompt, &hashes(prompt as u8, 64));
    }
    assert_eq!(held, SLOTS / 2);
    assert_eq!(other.save(1, 1, &hashes(9, 64)), 64);
    let sessions = status(&socket)["sessions"].clone();
    let bytes = sessions.as_array().unwrap().iter();
    let mut bytes: Vec<u64> = bytes.map(|of| of["save_bytes"].as_u64().unwrap()).collect();
    bytes.sort_unstable();
    assert_eq!(bytes, [64 * 4096, 128 * 4096]);
}

/// Saves a prompt, as a request that ends.
fn save_all(raw: &mut Raw, request: u64, prompt: &[undercroft_contract::key::BlockHash]) -> usize {
    let saved = raw.save(request, request, prompt);
    raw.say(&ClientMessage::EndTransfer {
        transfer: request,
        ok: true,
    });
    raw.say(&finished(request));
    saved
}

/// Blocks of the hit that a lookup is answered with; 0 for a miss.
fn hit_blocks(raw: &mut Raw, request: u64, prompt: &[undercroft_contract::key::BlockHash]) -> u32 {
    raw.lookup(request, prompt);
    match raw.hear() {
        Some(ServerMessage::Answer {
            answer: LookupAnswer::Hit(hit),
            ..
        }) => hit.tokens.0 / TOKENS,
        Some(ServerMessage::Answer {
            answer: LookupAnswer::Miss { .. },
            ..
        }) => 0,
        other => panic!("{other:?}"),
    }
}

fn begin_load(request: u64, blocks: u32) -> ClientMessage<'static> {
    ClientMessage::BeginLoad {
        request,
        transfer: 1000 + request,
        computed: Tokens(0),
        external: Tokens(blocks * TOKENS),
    }
}

fn held_bytes(socket: &std::path::Path) -> Vec<u64> {
    let sessions = status(socket)["sessions"].clone();
    let of_sessions = sessions.as_array().unwrap().iter();
    let mut bytes: Vec<u64> = of_sessions
        .map(|of| of["held_bytes"].as_u64().unwrap())
        .collect();
    bytes.sort_unstable();
    bytes
}

#[test]
fn a_client_that_never_ends_its_hits_and_loads_leaves_memory_to_others() {
    for loads in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("run/s.sock");
        let rig = Rig::start(&socket, None, 1);
        let (mut greedy, _) = Raw::registered(&socket);
        let (mut other, _) = Raw::registered(&socket);
        let mut held = 0;
        for request in 1..=16 {
            let prompt = hashes(request as u8, 16);
            save_all(&mut greedy, request, &prompt);
            let blocks = hit_blocks(&mut greedy, 100 + request, &prompt);
            held += blocks as usize;
            if loads && blocks > 0 {
                greedy.say(&begin_load(100 + request, blocks));
            }
        }
        assert_eq!(held, SLOTS / 2, "loads: {loads}");
        until("the status says so", || {
            held_bytes(&socket) == [0, 128 * 4096]
        });
        let own = hashes(99, 16);
        assert_eq!(save_all(&mut other, 1, &own), 16);
        assert_eq!(hit_blocks(&mut other, 2, &own), 16);
        until("the status says so", || {
            held_bytes(&socket) == [16 * 4096, 128 * 4096]
        });
        // Saves count, too: half of the rest.
        assert_eq!(other.save(3, 3, &hashes(98, 64)), (256 - 128 - 16) / 2);
        for request in 101..=116 {
            greedy.say(&ClientMessage::EndTransfer {
                transfer: 1000 + request,
                ok: true,
            });
            greedy.say(&finished(request));
        }
        assert!(greedy.is_served());
        until("the status says so", || {
            held_bytes(&socket) == [0, 16 * 4096]
        });
        drop((greedy, other));
        until("nothing is left", || rig.in_use() == [0; 4]);
    }
}

#[test]
fn requests_with_one_prompt_take_its_memory_once() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("run/s.sock");
    let _rig = Rig::start(&socket, None, 1);
    let (mut first, _) = Raw::registered(&socket);
    let (mut second, _) = Raw::registered(&socket);
    let prompt = hashes(1, 96);
    assert_eq!(save_all(&mut first, 1, &prompt), 96);
    for request in 100..200 {
        for client in [&mut first, &mut second] {
            assert_eq!(hit_blocks(client, request, &prompt), 96);
        }
    }
    until("the status says so", || {
        held_bytes(&socket) == [96 * 4096; 2]
    });
    // A new lookup of a request replaces its hit.
    first.say(&lookup_of(
        100,
        2,
        HashRun {
            known: 96,
            ..run(&[])
        },
    ));
    assert!(first.hear().is_some());
    for request in 100..200 {
        first.say(&ClientMessage::EndLookup { request });
    }
    assert!(first.is_served());
    until("the status says so", || {
        held_bytes(&socket) == [0, 96 * 4096]
    });
}

#[test]
fn a_hit_that_is_longer_than_the_share_of_its_client_is_cut() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("run/s.sock");
    let _rig = Rig::start(&socket, None, 1);
    let (mut raw, _) = Raw::registered(&socket);
    let prompt = hashes(1, 200);
    assert_eq!(save_all(&mut raw, 1, &prompt[..100]), 100);
    assert_eq!(save_all(&mut raw, 2, &prompt), 100);
    let blocks = hit_blocks(&mut raw, 3, &prompt);
    assert_eq!(blocks as usize, SLOTS / 2);
    raw.say(&begin_load(3, blocks));
    assert!(raw.is_served(), "the load is covered");
    assert_eq!(
        hit_blocks(&mut raw, 4, &prompt[..32]),
        32,
        "it is held already"
    );
}

#[test]
fn a_load_that_no_hit_covers_ends_the_connection() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("run/s.sock");
    let rig = Rig::start(&socket, None, 1);
    let (mut raw, _) = Raw::registered(&socket);
    let prompt = hashes(1, 4);
    raw.save(1, 1, &prompt);
    raw.say(&ClientMessage::EndTransfer {
        transfer: 1,
        ok: true,
    });
    raw.lookup(2, &prompt);
    assert!(matches!(raw.hear(), Some(ServerMessage::Answer { .. })));
    let load = |transfer, external| ClientMessage::BeginLoad {
        request: 2,
        transfer,
        computed: Tokens(0),
        external: Tokens(external),
    };
    raw.say(&load(5, 3 * TOKENS));
    assert!(raw.is_served(), "a part of a hit may be loaded");
    raw.say(&load(6, 4 * TOKENS));
    assert_eq!(raw.hear(), None, "the first load has ended the hit");
    until("it is counted", || rig.server.counters().malformed == 1);
}

#[test]
fn a_process_that_attaches_again_and_again_does_not_take_all_descriptors() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("run/s.sock");
    let _rig = Rig::start(&socket, None, 1);
    let (mut raw, token) = Raw::registered(&socket);
    // Without its last word, each is a worker until this process is gone.
    let refused = (0..1100).find_map(|_| attach(&socket, token).err());
    assert!(
        matches!(refused, Some(AttachError::Incomplete { .. })),
        "{refused:?}"
    );
    assert!(raw.is_served());
}

#[test]
fn a_first_message_that_is_too_long_and_too_many_offers_are_not_decoded() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("run/s.sock");
    let _rig = Rig::start(&socket, None, 1);
    let mut raw = Raw::connect(&socket);
    raw.say(&register(NamespaceSpec {
        description: "d".repeat(300 << 10),
        ..spec()
    }));
    assert_eq!(raw.hear(), None);
    let offer = undercroft_contract::session::Offer {
        group: 0,
        first_block: 0,
        end_block: 1,
    };
    for (count, is_taken) in [(OFFERS_MAX, true), (OFFERS_MAX + 1, false)] {
        let (mut raw, _) = Raw::registered(&socket);
        raw.say(&ClientMessage::BeginSave(SaveMessage {
            request: 1,
            transfer: 1,
            tokens: Tokens(TOKENS),
            offers: vec![offer; count],
            only_offers: false,
            is_wanted: false,
            hashes: run(&joined(&hashes(1, 1))),
        }));
        assert_eq!(raw.hear().is_some(), is_taken, "{count} offers");
    }
}

#[test]
fn the_memory_of_frames_whose_connections_end_is_given_back() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("run/s.sock");
    let rig = Rig::start(&socket, None, 1);
    let bytes: Vec<u8> = (0..500_000u32)
        .flat_map(|at| [at.to_le_bytes(); 8].concat())
        .collect();
    let mut long = Vec::new();
    assert!(lookup(1, run(&bytes)).append_to(&mut long));
    assert!(long.len() > 15 << 20);
    let client = || {
        let (raw, _) = Raw::registered(&socket);
        raw.stream.set_write_timeout(Some(PATIENCE)).unwrap();
        raw
    };
    // Each takes its share of the memory for frames as soon as the header has arrived.
    for _ in 0..8 {
        let mut raw = client();
        raw.stream.write_all(&long[..long.len() / 2]).unwrap();
        drop(raw);
        until("the connection has ended", || rig.sessions() == 0);
    }
    let mut raw = client();
    raw.stream.write_all(&long).unwrap();
    assert!(raw.is_served());
}

#[test]
fn a_long_prompt_is_saved_and_loaded_as_a_whole() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("run/s.sock");
    let rig = Rig::with_memory(&socket, None, 1, 64 << 20);
    let client = client(&socket);
    client.wait_for_connection(PATIENCE);
    let prompt = hashes(1, 5000);
    let all = Tokens(5000 * TOKENS);
    let Save::Pending(id) = client.begin_save(&SaveRequest::new("s", &prompt, all)) else {
        panic!("no connection")
    };
    let mut grants = Vec::new();
    until("the grant", || {
        grants.extend(client.poll_saves());
        !grants.is_empty()
    });
    let saved = grants[0].extents.clone();
    assert_eq!((saved.len(), saved[0].offsets.len()), (1, 5000));
    client.end_transfer(id, true);
    let question = LookupRequest::new("r", &prompt);
    until("the hit", || {
        client.wait("r", Duration::from_secs(1));
        client.lookup(&question).tokens() == Some(all)
    });
    let load = client.begin_load("r", Tokens(0), all).unwrap();
    assert_eq!(load.extents, saved);
    until("the server knows of the load", || {
        rig.driver.enter(|engine| engine.gauges().loads) == Some(1)
    });
    client.end_transfer(load.id, true);
    client.finish_request("r".into());
    client.finish_request("s".into());
    until("nothing is left", || rig.in_use() == [0; 4]);
}
