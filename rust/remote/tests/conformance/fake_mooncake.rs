//! A program that takes the place of Mooncake's helper: objects pass through it, and some requests fail. It needs Python,
//! but not Mooncake's wheel.

use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use undercroft_contract::remote::RemoteError;
use undercroft_remote::{Location, ObjectBody, Objects, Receiver, RemoteOptions, set_python};

use crate::child::child;

const PATIENCE: Duration = Duration::from_secs(30);
/// Least limit of a get that gets no answer.
const LATE: Duration = Duration::from_secs(2);
/// A helper that does not end by itself is ended after this time.
const CLOSE_LIMIT: Duration = Duration::from_secs(3);

/// Keeps objects in its own memory. A key decides how a request for it fails.
const PROGRAM: &str = r#"#!/usr/bin/env python3
import json, mmap, os, socket, time
connection = socket.socket(fileno=os.dup(0))
line, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, 1)
settings = json.loads(line)
memory = mmap.mmap(descriptors[0], settings["bytes"])

def say(number, **fields):
    connection.sendall(json.dumps({"id": number, **fields}).encode() + b"\n")

objects = {}
time.sleep(float(settings["device"] or 0))
say(0)
for line in connection.makefile("rb"):
    request = json.loads(line)
    number, key, at = request["id"], request.get("key", ""), request.get("at", 0)
    if "ends" in key:
        os._exit(1)
    elif "lies" in key:
        kinds = {"endless": b"x", "nested": b"[", "numbers": b"1,"}
        start = b'{"id": %d, "values": [' % number if "numbers" in key else b""
        connection.sendall(start)
        while True:
            connection.sendall(next(kinds[kind] for kind in kinds if kind in key) * (1 << 20))
    elif "type" in key:
        connection.sendall(b'{"id": "x", "values": {}}\n')
    elif "talks" in key:
        os.write(2, b"x" * (64 << 20))
        os._exit(1)
    elif "master" in key:
        say(number, error="unreachable", settled=True)
    elif "transfer" in key:
        say(number, error="unreachable")
    elif request["op"] == "put":
        objects[key] = memory[at : at + request["bytes"]]
        say(number, values=[1])
    elif request["op"] == "get":
        found = objects[key][: request["bytes"]]
        memory[at : at + len(found)] = found
        say(number, values=[len(found)])
    else:
        say(number, values=[int(key in objects) for key in request["keys"]])
"#;

/// Runs a test below in a process of its own, whose helpers are the program.
fn with_program(test: &str) {
    let place = tempfile::tempdir().unwrap();
    let program = place.path().join("python");
    std::fs::write(&program, PROGRAM).unwrap();
    let mode = std::fs::Permissions::from_mode(0o700);
    std::fs::set_permissions(&program, mode).unwrap();
    let variables = [("UNDERCROFT_TEST_PROGRAM", program.to_str().unwrap())];
    child(&format!("fake_mooncake::{test}"), "", &variables);
}

fn open(parameters: &str) -> Arc<dyn Objects> {
    set_python(std::env::var_os("UNDERCROFT_TEST_PROGRAM").unwrap().into());
    let location = Location::parse(&format!("mooncake://127.0.0.1:1/x{parameters}")).unwrap();
    undercroft_remote::open(&location, RemoteOptions::default()).unwrap()
}

fn get(objects: &dyn Objects, path: &str, bytes: usize) -> Result<Vec<u8>, RemoteError> {
    let mut receiver = Receiver::bytes(bytes as u64);
    let got = objects.get(path, &mut receiver);
    got.map_err(|error| error.kind)?;
    Ok(receiver.into_bytes())
}

fn is_there(objects: &dyn Objects, path: &str) -> bool {
    objects
        .probe(&[path.to_owned()])
        .is_ok_and(|bits| bits == 1)
}

#[test]
fn objects_pass_through_the_memory_and_the_end_of_the_helper_is_reported() {
    with_program("over_a_helper");
}

/// Run by the test above.
#[test]
#[ignore = "a part of another test"]
fn over_a_helper() {
    let objects = open("");
    objects.greet().unwrap();
    // Several pieces, and a rest.
    let bytes: Vec<u8> = (0..(3 << 20) + 5).map(|at| (at / 4099) as u8).collect();
    assert_eq!(
        objects.put("1/a", &ObjectBody::bytes(&bytes), false),
        Ok(true)
    );
    assert!(get(&*objects, "1/a", bytes.len()).unwrap() == bytes);
    let started = Instant::now();
    let ended = get(&*objects, "1/ends", 1);
    assert_eq!(ended, Err(RemoteError::Unreachable));
    assert!(started.elapsed() < LATE, "{:?}", started.elapsed());
    let end = Instant::now() + PATIENCE;
    while objects.put("1/b", &ObjectBody::bytes(b"b"), false) != Ok(true) {
        assert!(Instant::now() < end, "another helper serves");
        std::thread::sleep(Duration::from_millis(20));
    }
    let closing = Instant::now();
    drop(objects);
    assert!(closing.elapsed() < CLOSE_LIMIT, "{:?}", closing.elapsed());
}

#[test]
fn only_failures_with_a_transfer_that_may_still_run_end_the_helper() {
    with_program("over_failures");
}

/// Run by the test above.
#[test]
#[ignore = "a part of another test"]
fn over_failures() {
    let objects = open("");
    objects.greet().unwrap();
    objects.put("1/a", &ObjectBody::bytes(b"a"), false).unwrap();
    let fail = |path, times| {
        for _ in 0..times {
            let failed = get(&*objects, path, 16 << 20);
            assert_eq!(failed, Err(RemoteError::Unreachable));
        }
    };
    // Together they are larger than the memory.
    fail("1/master", 20);
    assert!(is_there(&*objects, "1/a"), "the first helper serves");
    // More than half of the memory.
    fail("1/transfer", 9);
    let end = Instant::now() + PATIENCE;
    while is_there(&*objects, "1/a") {
        assert!(Instant::now() < end, "another helper has no object");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn no_call_waits_while_the_helper_starts() {
    with_program("over_a_slow_start");
}

/// Run by the test above.
#[test]
#[ignore = "a part of another test"]
fn over_a_slow_start() {
    let objects = open("?device=3");
    let (started, mut failed) = (Instant::now(), 0);
    let mut is_started = false;
    while !is_started {
        let call = Instant::now();
        is_started = objects.probe(&["1/a".to_owned()]).is_ok();
        failed += 1;
        // The first call starts the process.
        assert!(call.elapsed() < Duration::from_millis(900));
        assert!(started.elapsed() < PATIENCE);
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(failed > 10, "{failed} calls");
    assert!(started.elapsed() >= Duration::from_secs(3), "one process");
}

#[test]
fn no_answer_of_the_helper_fills_the_memory() {
    with_program("before_a_liar");
}

/// Run by the test above.
#[test]
#[ignore = "a part of another test"]
fn before_a_liar() {
    let objects = open("");
    objects.greet().unwrap();
    for key in [
        "lies-endless",
        "lies-nested",
        "lies-numbers",
        "type",
        "talks",
    ] {
        let end = Instant::now() + PATIENCE;
        while objects.put("1/b", &ObjectBody::bytes(b"b"), false) != Ok(true) {
            assert!(Instant::now() < end, "a helper serves");
            std::thread::sleep(Duration::from_millis(20));
        }
        crate::liars::grows_little(key, || {
            let lied = get(&*objects, &format!("1/{key}"), 1 << 20);
            assert_eq!(lied, Err(RemoteError::Unreachable), "{key}");
        });
    }
}
