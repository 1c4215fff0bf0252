//! Frames that are malformed, oversized, or come out of order end their connection alone, and say nothing.

use std::io::Write;

use undercroft_core::session::{Priority, Tokens};
use undercroft_ipc::frame::{BODY_BYTES_MAX, FrameKind, Header};
use undercroft_ipc::protocol::{ClientMessage, HashRun, LookupMessage, ServerMessage};

use crate::raw::{Raw, joined, register, run};
use crate::rig::{Rig, hashes, until};

fn lookup(hashes: HashRun<'_>) -> ClientMessage<'_> {
    ClientMessage::Lookup(LookupMessage {
        request: 1,
        version: 1,
        label: "",
        computed: Tokens(0),
        max: Tokens(64),
        min: Tokens(0),
        priority: Priority::Demand,
        wait: None,
        queued: Tokens(0),
        hashes,
    })
}

#[test]
fn what_does_not_belong_there_ends_that_connection_alone() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("run/s.sock");
    let rig = Rig::start(&socket, None, 1);
    let (mut good, _) = Raw::registered(&socket);
    let bytes = joined(&hashes(1, 2));
    let gap = HashRun {
        known: 5,
        ..run(&bytes)
    };
    let no_length = HashRun {
        hash_bytes: 0,
        ..run(&bytes)
    };
    let too_long = HashRun {
        hash_bytes: 64,
        ..run(&bytes)
    };
    let ragged = run(&bytes[..40]);
    let begin_load = ClientMessage::BeginLoad {
        request: 99,
        transfer: 1,
        computed: Tokens(0),
        external: Tokens(16),
    };
    // Before there is a session.
    let mut before: Vec<ClientMessage<'_>> = vec![ClientMessage::Ping, lookup(run(&bytes))];
    before.push(ClientMessage::Reset { reset: 1 });
    let mut bad = 0;
    for request in &before {
        let mut raw = Raw::connect(&socket);
        raw.say(request);
        assert_eq!(raw.hear(), None, "{request:?}");
        bad += 1;
    }
    // With one.
    let within = [
        lookup(gap),
        lookup(no_length),
        lookup(too_long),
        lookup(ragged),
        begin_load,
        register(),
        ClientMessage::Status,
    ];
    for request in &within {
        let (mut raw, _) = Raw::registered(&socket);
        raw.say(request);
        assert_eq!(raw.hear(), None, "{request:?}");
        bad += 1;
    }
    // Bodies that are none, and a length over the limit, whose body never comes.
    let header = |kind, body_bytes| Header { kind, body_bytes }.encode();
    let frames: [(FrameKind, u32, &[u8]); 4] = [
        (FrameKind::Request, 3, b"\xff\xff\xff"),
        (FrameKind::Request, 2, b"\x0a\x00"),
        (FrameKind::Reply, 1, b"\x00"),
        (FrameKind::Request, BODY_BYTES_MAX + 1, b""),
    ];
    for (kind, len, body) in frames {
        let (mut raw, _) = Raw::registered(&socket);
        raw.stream.write_all(&header(kind, len)).unwrap();
        raw.stream.write_all(body).unwrap();
        assert_eq!(raw.hear(), None, "{kind:?} {body:?}");
        bad += 1;
    }
    until("all are counted", || rig.server.counters().malformed == bad);
    assert!(good.is_served());
    drop(good);
    until("nothing is left", || rig.in_use() == [0; 4]);
}

#[test]
fn ends_and_releases_of_what_is_not_there_are_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("run/s.sock");
    let rig = Rig::start(&socket, None, 1);
    let (mut raw, _) = Raw::registered(&socket);
    for ok in [false, true] {
        raw.say(&ClientMessage::EndTransfer { transfer: 1, ok });
    }
    raw.say(&ClientMessage::Demand {
        request: 1,
        queued: Tokens(0),
    });
    raw.say(&ClientMessage::EndLookup { request: 1 });
    raw.say(&ClientMessage::FinishRequest { request: 1 });
    assert!(raw.is_served());
    assert_eq!(rig.server.counters().malformed, 0);
}

#[test]
fn requests_of_one_client_are_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("run/s.sock");
    let rig = Rig::start(&socket, None, 1);
    let (mut raw, _) = Raw::registered(&socket);
    let mut reader = raw.other_half();
    let replies = std::thread::spawn(move || {
        let mut replies = 0;
        while let Some(reply) = reader.hear() {
            replies += usize::from(matches!(reply, ServerMessage::Answer { .. }));
        }
        replies
    });
    for request in 0..=(1 << 16) {
        raw.lookup(request, &[]);
    }
    assert!(replies.join().unwrap() <= 1 << 16);
    until("counted", || rig.server.counters().malformed == 1);
}
