//! The hand-over of the arena between processes.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Resource, getrlimit, setrlimit};
use undercroft_contract::session::SessionToken;
use undercroft_io::arena::Arena;
use undercroft_ipc::frame::{MAGIC, VERSION, arena_answer, attach_request};
use undercroft_ipc::{AttachError, Server, attach};

use crate::rig::{OWN_TOKEN, Rig, until};

fn server() -> (tempfile::TempDir, Arc<Arena>, Server) {
    let root = tempfile::tempdir().unwrap();
    let rig = Rig::start(&root.path().join("run/s.sock"), None, 42);
    (root, rig.arena, rig.server)
}

/// The peer has closed the connection: nothing comes, or it was reset with our bytes unread.
fn is_closed(stream: &mut UnixStream) -> bool {
    stream
        .set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    match stream.read(&mut [0; 64]) {
        Ok(bytes) => bytes == 0,
        Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
    }
}

#[test]
fn a_worker_maps_the_arena_of_the_engine() {
    let (_root, arena, server) = server();
    let worker = attach(server.path(), OWN_TOKEN).unwrap();
    assert_eq!(worker.arena_id, 42);
    assert_eq!(worker.arena.size(), arena.size());
    worker.arena.write(8192, b"from the worker").unwrap();
    assert_eq!(arena.read(8192, 15).unwrap(), b"from the worker");
    until("attached", || server.counters().attached == 1);
    let second = attach(server.path(), OWN_TOKEN).unwrap();
    until("both attached", || server.counters().attached == 2);
    drop(worker);
    until("one has gone", || server.counters().attached == 1);
    drop(second);
    until("both have gone", || server.counters().attached == 0);
    assert_eq!(server.counters().refused, 0);
}

#[test]
fn the_worker_keeps_the_memory_when_the_engine_is_gone() {
    let (_root, arena, server) = server();
    let worker = attach(server.path(), OWN_TOKEN).unwrap();
    arena.write(0, b"still here").unwrap();
    let path = server.path().to_owned();
    drop((server, arena));
    assert_eq!(worker.arena.read(0, 10).unwrap(), b"still here");
    assert!(!path.exists(), "the socket is removed");
    let error = attach(&path, OWN_TOKEN).unwrap_err();
    assert!(error.to_string().contains("still running"), "{error}");
}

#[test]
fn malformed_requests_are_closed_and_counted_and_harm_nobody() {
    let (_root, _arena, server) = server();
    let worker = attach(server.path(), OWN_TOKEN).unwrap();
    let mut wrong_version = attach_request(OWN_TOKEN);
    wrong_version[4] = 99;
    let mut answer_instead = [0; 28];
    answer_instead.copy_from_slice(&arena_answer(1, 1));
    let requests: [&[u8]; 4] = [
        b"GET / HTTP/1.1\r\n\r\n",
        &[0; 12],
        &wrong_version,
        &answer_instead,
    ];
    for (index, request) in requests.iter().enumerate() {
        let mut stream = UnixStream::connect(server.path()).unwrap();
        stream.write_all(request).unwrap();
        if *request == wrong_version {
            // The answer has this version in its header.
            let mut answer = [0; 6];
            stream.read_exact(&mut answer).unwrap();
            assert_eq!(answer[..4], MAGIC);
            assert_eq!(answer[4..], VERSION.to_le_bytes());
            std::io::copy(&mut stream, &mut std::io::sink()).unwrap();
        } else {
            assert!(is_closed(&mut stream), "{request:?}");
        }
        until("counted", || {
            server.counters().malformed == index as u64 + 1
        });
    }
    // Half a request, and one byte too many after a whole one.
    let mut half = UnixStream::connect(server.path()).unwrap();
    half.write_all(&attach_request(OWN_TOKEN)[..5]).unwrap();
    drop(half);
    until("half a request is counted", || {
        server.counters().malformed == 5
    });
    let mut chatty = attach(server.path(), OWN_TOKEN).unwrap();
    chatty.connection.write_all(&[0; 13]).unwrap();
    assert!(is_closed(&mut chatty.connection));
    until("chatter is counted", || server.counters().malformed == 6);
    until("and no longer attached", || server.counters().attached == 1);
    drop(UnixStream::connect(server.path()).unwrap());
    assert!(
        attach(server.path(), OWN_TOKEN).is_ok(),
        "others are served"
    );
    assert_eq!(
        server.counters().malformed,
        6,
        "a connection without a word is no error"
    );
    drop(worker);
}

#[test]
fn a_process_without_a_token_does_not_get_the_arena() {
    let (_root, _arena, server) = server();
    for token in [0, 1, OWN_TOKEN.0 + 1, u128::MAX] {
        let error = attach(server.path(), SessionToken(token)).unwrap_err();
        assert!(matches!(error, AttachError::Incomplete { .. }), "{error}");
    }
    until("counted", || server.counters().refused == 4);
    assert_eq!(server.counters().attached, 0);
}

#[test]
fn a_request_may_come_byte_by_byte() {
    let (_root, _arena, server) = server();
    let mut stream = UnixStream::connect(server.path()).unwrap();
    for byte in attach_request(OWN_TOKEN) {
        stream.write_all(&[byte]).unwrap();
    }
    let mut answer = [0; 28];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(answer, arena_answer(1 << 20, 42));
}

#[test]
fn connections_are_bounded() {
    // Both ends of each are of this process.
    let mut files = getrlimit(Resource::Nofile);
    files.current = files.maximum;
    setrlimit(Resource::Nofile, files).unwrap();
    let (_root, _arena, server) = server();
    let streams: Vec<_> = (0..1100)
        .map(|_| UnixStream::connect(server.path()).unwrap())
        .collect();
    until("the surplus is refused", || {
        server.counters().refused == 1100 - 1024
    });
    drop(streams);
    until("there is room again", || {
        attach(server.path(), OWN_TOKEN).is_ok()
    });
}

/// A server that always sends `answer`.
fn answering(
    dir: &Path,
    answer: &'static [u8],
) -> (std::path::PathBuf, std::thread::JoinHandle<()>) {
    let path = dir.join("false.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let thread = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.read_exact(&mut [0; 28]).unwrap();
        stream.write_all(answer).unwrap();
    });
    (path, thread)
}

#[test]
fn answers_that_are_wrong_are_named() {
    let cases: [(&'static [u8], &str); 4] = [
        (
            b"HTTP/1.1 400 Bad Request\r\n\r\n....",
            "not an undercroft socket",
        ),
        (
            b"UCFT\x13\x00\x02\x00\x10\x00\x00\x000123456789abcdef",
            "protocol version 19",
        ),
        (
            b"UCFT\x12\x00\x02\x00\x10\x00\x00\x000123456789abcdef",
            "without handing over",
        ),
        (b"UCFT", "without handing over"),
    ];
    for (answer, expected) in cases {
        let dir = tempfile::tempdir().unwrap();
        let (path, thread) = answering(dir.path(), answer);
        let error = attach(&path, OWN_TOKEN).unwrap_err();
        assert!(!matches!(error, AttachError::Os { .. }), "{error}");
        assert!(error.to_string().contains(expected), "{error}");
        thread.join().unwrap();
    }
}
