//! Frames that are malformed, oversized, or come out of order end their connection alone, and say nothing.

use std::io::Write;

use undercroft_wire::frame::{BODY_BYTES_MAX, Header, Kind};
use undercroft_wire::protocol::{Hashes, Reply, Request};

use crate::raw::{Raw, joined, register, run};
use crate::rig::{Rig, hashes, until};

fn submit(hashes: Hashes<'_>) -> Request<'_> {
    Request::Submit {
        request: 1,
        version: 1,
        hashes,
        local_tokens: 0,
        max_tokens: 64,
        asked: true,
        wait_ns: None,
    }
}

#[test]
fn what_does_not_belong_there_ends_that_connection_alone() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("run/s.sock");
    let rig = Rig::start(&socket, None, 1);
    let (mut good, _) = Raw::registered(&socket);
    let bytes = joined(&hashes(1, 2));
    let gap = Hashes {
        known: 5,
        ..run(&bytes)
    };
    let no_length = Hashes {
        hash_bytes: 0,
        ..run(&bytes)
    };
    let too_long = Hashes {
        hash_bytes: 64,
        ..run(&bytes)
    };
    let ragged = run(&bytes[..40]);
    let begin_load = Request::BeginLoad {
        request: 99,
        load: 1,
        local_tokens: 0,
        external_tokens: 16,
    };
    // Before there is a session.
    let mut before: Vec<Request<'_>> = vec![Request::Ping, submit(run(&bytes))];
    before.push(Request::Reset { ticket: 1 });
    let mut bad = 0;
    for request in &before {
        let mut raw = Raw::connect(&socket);
        raw.say(request);
        assert_eq!(raw.hear(), None, "{request:?}");
        bad += 1;
    }
    // With one.
    let within = [
        submit(gap),
        submit(no_length),
        submit(too_long),
        submit(ragged),
        begin_load,
        register(),
        Request::Status,
    ];
    for request in &within {
        let (mut raw, _) = Raw::registered(&socket);
        raw.say(request);
        assert_eq!(raw.hear(), None, "{request:?}");
        bad += 1;
    }
    // Bodies that are none, and a length over the limit, whose body never comes.
    let header = |kind, body_bytes| Header { kind, body_bytes }.encode();
    let frames: [(Kind, u32, &[u8]); 4] = [
        (Kind::Request, 3, b"\xff\xff\xff"),
        (Kind::Request, 2, b"\x0a\x00"),
        (Kind::Reply, 1, b"\x00"),
        (Kind::Request, BODY_BYTES_MAX + 1, b""),
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
        raw.say(&Request::EndLoad { load: 1, ok });
        raw.say(&Request::EndSave { save: 1, ok });
    }
    raw.say(&Request::Ask { request: 1 });
    raw.say(&Request::Release { request: 1 });
    raw.say(&Request::Forget { request: 1 });
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
            replies += usize::from(matches!(reply, Reply::Answer { .. }));
        }
        replies
    });
    for request in 0..=(1 << 16) {
        raw.submit(request, &[]);
    }
    assert!(replies.join().unwrap() <= 1 << 16);
    until("counted", || rig.server.counters().malformed == 1);
}
