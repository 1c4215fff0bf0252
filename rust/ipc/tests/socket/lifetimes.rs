//! Lifetimes of sessions and slots: clients that vanish, workers that still copy, sessions that part.

use std::io::Write;
use std::net::Shutdown;

use rustix::event::{PollFd, PollFlags, poll};
use undercroft_contract::key::BlockHash;
use undercroft_contract::session::{Session, SessionToken, Tokens};
use undercroft_driver::EngineAccess;
use undercroft_ipc::frame::attach_request;
use undercroft_ipc::protocol::{
    ClientMessage, LeasedHit, LookupAnswer, SaveMessage, ServerMessage,
};
use undercroft_ipc::{AttachError, Client, attach, let_go};

use crate::raw::{Raw, finished, joined, register, run};
use crate::rig::{PATIENCE, Rig, TOKENS, client, hashes, lookup, save, until};

fn rig() -> (tempfile::TempDir, std::path::PathBuf, Rig) {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("run/s.sock");
    let rig = Rig::start(&socket, None, 1);
    (dir, socket, rig)
}

/// The next message, which is a hit.
fn hit(raw: &mut Raw) -> LeasedHit {
    match raw.hear() {
        Some(ServerMessage::Answer {
            answer: LookupAnswer::Hit(hit),
            ..
        }) => hit,
        other => panic!("{other:?}"),
    }
}

fn end(transfer: u64) -> ClientMessage<'static> {
    ClientMessage::EndTransfer { transfer, ok: true }
}

/// A saved prompt that the client has looked up and begun to load.
fn loading(rig: &Rig, socket: &std::path::Path, raw: &mut Raw) {
    let prompt = hashes(1, 4);
    let writer = client(socket);
    until("connected", || writer.address().is_some());
    save(rig, &writer, "w", &prompt);
    writer.close();
    let saved = || rig.driver.enter(|engine| engine.counters().saved_blocks);
    until("saved", || saved() >= Some(4) && rig.in_use() == [0; 4]);
    raw.lookup(7, &prompt);
    assert_eq!(hit(raw).tokens, Tokens(4 * TOKENS));
    raw.say(&ClientMessage::BeginLoad {
        request: 7,
        transfer: 70,
        computed: Tokens(0),
        external: Tokens(4 * TOKENS),
    });
    assert!(raw.is_served());
}

#[test]
fn a_client_that_vanishes_frees_its_lookups_at_once() {
    let (_dir, socket, rig) = rig();
    let (mut raw, _) = Raw::registered(&socket);
    let prompt = hashes(1, 4);
    for request in 0..100 {
        raw.lookup(request, &prompt);
    }
    assert!(raw.is_served());
    assert_eq!(rig.in_use()[0], 100);
    drop(raw);
    until("freed", || rig.in_use() == [0; 4]);
}

#[test]
fn the_last_messages_of_a_client_that_ends_at_once_are_carried_out() {
    let (_dir, socket, rig) = rig();
    for round in 1..=20u8 {
        let (mut raw, _) = Raw::registered(&socket);
        assert_eq!(raw.save(8, 80, &hashes(round, 3)), 3);
        // The answers are more than a slice of the server's time, and nobody reads them.
        let mut bytes = Vec::new();
        for _ in 0..500 {
            assert!(ClientMessage::Ping.append_to(&mut bytes));
        }
        assert!(end(80).append_to(&mut bytes));
        raw.stream.write_all(&bytes).unwrap();
        drop(raw);
        until("freed", || rig.in_use() == [0; 4] && rig.sessions() == 0);
        let saved = rig.driver.enter(|engine| engine.counters().saved_blocks);
        assert_eq!(saved, Some(3 * u64::from(round)));
    }
}

#[test]
fn slots_that_workers_may_still_copy_are_kept_until_all_of_them_are_gone() {
    let (_dir, socket, rig) = rig();
    let (mut raw, token) = Raw::registered(&socket);
    loading(&rig, &socket, &mut raw);
    assert_eq!(raw.save(8, 80, &hashes(2, 3)), 3);
    let workers = [0; 2].map(|_| attach(&socket, token).unwrap());
    drop(raw);
    until("the client has gone", || rig.in_use()[0] == 0);
    let [first, second] = workers;
    let_go(first.connection);
    until("one worker is left", || rig.server.counters().attached == 1);
    let [_, loads, saves, pinned] = rig.in_use();
    assert_eq!((loads, saves), (1, 1));
    assert!(pinned > 0);
    let_go(second.connection);
    until("all is freed", || rig.in_use() == [0; 4]);
    assert_eq!(
        rig.driver.enter(|engine| engine.counters().saved_blocks),
        Some(4)
    );
}

const SOCKET: &str = "UNDERCROFT_TEST_SOCKET";
const TOKEN: &str = "UNDERCROFT_TEST_TOKEN";

/// A worker's process whose connection ends before the process does, as when it is killed.
#[test]
#[ignore = "the body of a process of its own"]
fn a_worker_that_loses_its_socket_first() {
    let (Ok(socket), Ok(token)) = (std::env::var(SOCKET), std::env::var(TOKEN)) else {
        return;
    };
    let token = SessionToken(token.parse().unwrap());
    let worker = attach(std::path::Path::new(&socket), token).unwrap();
    drop(worker.connection);
    // Its memory stays mapped until it is killed.
    std::io::stdin().read_line(&mut String::new()).unwrap();
}

#[test]
fn slots_that_a_worker_may_still_copy_are_kept_until_its_process_is_gone() {
    let (_dir, socket, rig) = rig();
    let (mut raw, token) = Raw::registered(&socket);
    assert_eq!(raw.save(8, 80, &hashes(2, 3)), 3);
    let mut worker = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["lifetimes::a_worker_that_loses_its_socket_first"])
        .args(["--exact", "--ignored"])
        .envs([(SOCKET, socket.as_os_str())])
        .env(TOKEN, token.0.to_string())
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    // The session knows of a worker that is no longer connected.
    until("the worker's connection has ended", || {
        Raw::workers(&socket) == 1 && rig.server.counters().attached == 0
    });
    drop(raw);
    let (mut other, _) = Raw::registered(&socket);
    assert!(other.is_served());
    assert_eq!(rig.in_use()[2], 1, "its slots are nobody else's");
    worker.kill().unwrap();
    worker.wait().unwrap();
    until("all is freed", || rig.in_use() == [0; 4]);
}

#[test]
fn a_process_that_does_not_take_the_arena_is_no_worker() {
    let (_dir, socket, rig) = rig();
    let (mut raw, token) = Raw::registered(&socket);
    assert_eq!(raw.save(8, 80, &hashes(2, 3)), 3);
    // The server cannot send its answer.
    let mut deaf = Raw::connect(&socket);
    deaf.stream.shutdown(Shutdown::Read).unwrap();
    deaf.stream.write_all(&attach_request(token)).unwrap();
    // The answer has arrived, and nobody reads it.
    let mut hasty = Raw::connect(&socket);
    hasty.stream.write_all(&attach_request(token)).unwrap();
    poll(&mut [PollFd::new(&hasty.stream, PollFlags::IN)], None).unwrap();
    drop((deaf, hasty, raw));
    until("all is freed", || rig.in_use() == [0; 4]);
    assert_eq!((Raw::workers(&socket), rig.sessions()), (0, 0));
}

#[test]
fn slots_of_a_hit_stay_for_the_workers_although_the_server_got_no_load() {
    let (_dir, socket, rig) = rig();
    let (mut raw, token) = Raw::registered(&socket);
    let writer = client(&socket);
    until("connected", || writer.address().is_some());
    let prompt = hashes(1, 4);
    save(&rig, &writer, "w", &prompt);
    until("saved", || rig.in_use() == [0; 4]);
    raw.lookup(7, &prompt);
    let told = hit(&mut raw).extents[0].offsets.clone();
    // The client begins the load and its worker copies; the frame is lost with the connection.
    let worker = attach(&socket, token).unwrap();
    drop(raw);
    until("lost", || {
        rig.server.counters().attached == 1 && rig.sessions() == 2
    });
    let (mut raw, again) = Raw::registered(&socket);
    assert_ne!(again, token);
    // Others want all of the memory.
    for other in 2..200 {
        let Some(offsets) = raw.try_save(&hashes(other, 4)) else {
            break;
        };
        assert!(!offsets.iter().any(|offset| told.contains(offset)));
    }
    for (index, offset) in (0u8..).zip(&told) {
        let at = offset.get().unwrap();
        assert_eq!(rig.arena.read(at, 8).unwrap(), [index; 8]);
    }
    let_go(worker.connection);
    until("its session has ended", || rig.sessions() == 2);
}

#[test]
fn a_session_that_was_reset_and_the_others_do_not_find_each_others_blocks() {
    let (_dir, socket, rig) = rig();
    let (one, other) = (client(&socket), client(&socket));
    until("connected", || {
        one.address().is_some() && other.address().is_some()
    });
    let ask = |client: &Client, name: &str, prompt: &[BlockHash]| {
        let mut found = None;
        until("an answer", || {
            found = lookup(client, name, prompt);
            found.is_some()
        });
        client.finish_request(name.into());
        found.unwrap()
    };
    let (before, after, theirs) = (hashes(1, 4), hashes(2, 4), hashes(3, 4));
    save(&rig, &one, "before", &before);
    until("shared", || ask(&other, "r", &before) == 64);
    assert!(one.reset(PATIENCE));
    assert_eq!((ask(&one, "r", &before), ask(&other, "r", &before)), (0, 0));
    save(&rig, &one, "after", &after);
    save(&rig, &other, "theirs", &theirs);
    until("each has its own", || {
        ask(&one, "r", &after) == 64 && ask(&other, "r", &theirs) == 64
    });
    assert_eq!((ask(&one, "r", &theirs), ask(&other, "r", &after)), (0, 0));
    // The same prompt, twice.
    save(&rig, &other, "after", &after);
    until("theirs, too", || ask(&other, "r", &after) == 64);
    let blocks = |rig: &Rig| rig.driver.enter(|engine| engine.gauges().host_blocks);
    assert_eq!(blocks(&rig), Some(12));
    one.close();
    until("what was its own has gone", || blocks(&rig) == Some(8));
}

#[test]
fn a_client_that_was_reset_keeps_to_itself_at_the_next_server() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("run/s.sock");
    let prompt = hashes(1, 4);
    let first = Rig::start(&socket, None, 1);
    let one = client(&socket);
    until("connected", || one.address().is_some());
    assert!(one.reset(PATIENCE));
    drop(first);
    let second = Rig::start(&socket, None, 2);
    let other = client(&socket);
    let there = |client: &Client| {
        client
            .address()
            .is_some_and(|address| address.arena_id == 2)
    };
    until("connected again", || there(&one) && there(&other));
    save(&second, &one, "w", &prompt);
    until("saved", || lookup(&one, "r", &prompt) == Some(64));
    let mut found = None;
    until("an answer", || {
        found = lookup(&other, "r", &prompt);
        found.is_some()
    });
    assert_eq!(found, Some(0));
}

#[test]
fn an_unknown_session_has_no_workers() {
    let (_dir, socket, rig) = rig();
    let (raw, token) = Raw::registered(&socket);
    drop(raw);
    until("the session has ended", || {
        matches!(attach(&socket, token), Err(AttachError::Incomplete { .. }))
    });
    assert!(rig.server.counters().refused > 0);
}

#[test]
fn no_session_ends_transfers_of_another() {
    let (_dir, socket, rig) = rig();
    let (mut owner, _) = Raw::registered(&socket);
    loading(&rig, &socket, &mut owner);
    assert_eq!(owner.save(8, 80, &hashes(2, 3)), 3);
    let (mut other, _) = Raw::registered(&socket);
    other.say(&end(70));
    other.say(&end(80));
    other.say(&finished(7));
    assert!(other.is_served());
    assert_eq!(rig.in_use()[1..3], [1, 1]);
    assert_eq!(
        rig.driver.enter(|engine| engine.counters().saved_blocks),
        Some(4)
    );
}

#[test]
fn a_load_continues_although_its_prefix_was_dropped() {
    let (_dir, socket, rig) = rig();
    let (mut raw, _) = Raw::registered(&socket);
    let prompt = hashes(1, 4);
    let writer = client(&socket);
    until("connected", || writer.address().is_some());
    save(&rig, &writer, "w", &prompt);
    until("visible", || {
        raw.lookup(7, &[]);
        raw.hear();
        rig.driver.enter(|engine| engine.counters().saved_blocks) == Some(4)
    });
    raw.say(&finished(7));
    raw.lookup(7, &prompt);
    let told = hit(&mut raw);
    assert!(writer.reset(PATIENCE));
    raw.say(&ClientMessage::BeginLoad {
        request: 7,
        transfer: 70,
        computed: Tokens(0),
        external: Tokens(64),
    });
    raw.say(&finished(7));
    assert!(raw.is_served());
    // The slots that the answer named are not given to another request.
    assert_eq!(rig.in_use()[1], 1);
    let used = |rig: &Rig| rig.driver.enter(|engine| engine.gauges().host_used_bytes);
    assert!(used(&rig) > Some(0));
    assert_eq!(told.extents[0].offsets.len(), 4);
    raw.say(&end(70));
    assert!(raw.is_served());
    // Removed in steps.
    until("all is free", || used(&rig) == Some(0));
}

#[test]
fn a_namespace_that_cannot_be_served_is_refused_with_the_reason() {
    let (_dir, socket, _rig) = rig();
    let mut raw = Raw::connect(&socket);
    let ClientMessage::Register { mut namespace, .. } = register() else {
        unreachable!()
    };
    namespace.groups[0].payload_bytes = 512 << 20;
    raw.say(&ClientMessage::Register {
        namespace,
        dropped_tokens: Tokens(0),
        private: false,
        tenant_share: 0,
    });
    match raw.hear() {
        Some(ServerMessage::Refused { reason }) => {
            assert!(reason.contains("host_memory"), "{reason}")
        }
        other => panic!("{other:?}"),
    }
    // Another one may be.
    raw.say(&register());
    assert!(matches!(raw.hear(), Some(ServerMessage::Registered { .. })));
}

#[test]
fn a_number_in_use_ends_the_connection_and_leaks_nothing() {
    let (_dir, socket, rig) = rig();
    let (mut raw, _) = Raw::registered(&socket);
    assert_eq!(raw.save(8, 80, &hashes(2, 3)), 3);
    let bytes = joined(&hashes(3, 2));
    raw.say(&ClientMessage::BeginSave(SaveMessage {
        request: 9,
        transfer: 80,
        tokens: Tokens(2 * TOKENS),
        offers: Vec::new(),
        only_offers: false,
        is_wanted: false,
        hashes: run(&bytes),
    }));
    assert_eq!(raw.hear(), None);
    until("all is freed", || rig.in_use() == [0; 4]);
    assert_eq!(rig.server.counters().malformed, 1);
}
