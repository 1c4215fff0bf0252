//! A server that speaks an older version of the protocol, too, and one that waits less long.

use std::collections::HashSet;
use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use undercroft_contract::namespace::{GroupKind, NamespaceSpec};
use undercroft_contract::session::{SessionToken, Tokens};
use undercroft_driver::Driver;
use undercroft_engine::{Engine, EngineConfig};
use undercroft_io::arena::Arena;
use undercroft_io::{IoEngineChoice, open_io_engine};

use super::connection::End;
use super::service::{Service, Terms};
use super::{Served, Server, ServerControl, SocketLocation};
use crate::descriptors::Closer;
use crate::descriptors::tests::lingering;
use crate::dialect::Dialect;
use crate::frame::{self, FrameKind, HEADER_BYTES, Header, VERSION};
use crate::protocol::{ClientMessage, ServerMessage};
use crate::stats::StatsSource;

const PATIENCE: Duration = Duration::from_secs(60);

/// In the words of the version before, every message began with one byte more.
static BEFORE: &[Dialect] = &[Dialect {
    version: VERSION - 1,
    request: |body| match body.split_first() {
        Some((b'>', body)) => Some(body.to_vec()),
        _ => None,
    },
    reply: |body| Some([b"<", body].concat()),
}];

fn serve(path: &std::path::Path, dialects: &'static [Dialect]) -> Server {
    serve_on(
        path,
        Terms {
            dialects,
            ..Terms::USUAL
        },
    )
}

fn served() -> Served {
    let arena = Arc::new(Arena::create(1 << 20).unwrap());
    let pool = IoEngineChoice::ThreadPool;
    let (io, _) = open_io_engine(pool, 4, Arc::clone(&arena), Vec::new()).unwrap();
    let driver = Driver::start(Engine::new(EngineConfig::new(1 << 20)), io).unwrap();
    Served {
        driver: Arc::new(driver),
        arena,
        arena_id: 7,
        own_token: SessionToken(7),
        info: Box::new(|| serde_json::json!({})),
        stats: StatsSource::new(|| serde_json::json!({"of": "all"})),
    }
}

fn serve_on(path: &std::path::Path, terms: Terms) -> Server {
    Server::start_on(SocketLocation::At(path), served(), terms).unwrap()
}

/// A message as the version before has it.
fn older(message: &ClientMessage<'_>) -> Vec<u8> {
    let mut bytes = Vec::new();
    assert!(message.append_to(&mut bytes));
    let body = [b">", &bytes[HEADER_BYTES..]].concat();
    let header = Header {
        kind: FrameKind::Request,
        body_bytes: u32::try_from(body.len()).unwrap(),
    };
    [&header.encode_as(VERSION - 1)[..], &body].concat()
}

/// The next answer: the version of its header, and its body.
fn hear(stream: &mut UnixStream) -> (u16, Vec<u8>) {
    let mut head = [0; HEADER_BYTES];
    stream.read_exact(&mut head).unwrap();
    let version = u16::from_le_bytes([head[4], head[5]]);
    let len = Header::decode_as(version, &head).unwrap().body_bytes;
    let mut body = vec![0; len as usize];
    stream.read_exact(&mut body).unwrap();
    (version, body)
}

fn connect(path: &std::path::Path) -> UnixStream {
    let stream = UnixStream::connect(path).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

#[test]
fn a_client_of_the_version_before_is_served_in_its_own_words() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run/s.sock");
    let server = serve(&path, BEFORE);
    let mut stream = connect(&path);
    stream.write_all(&older(&ClientMessage::Status)).unwrap();
    let (version, body) = hear(&mut stream);
    assert_eq!((version, body[0]), (VERSION - 1, b'<'));
    let reply = ServerMessage::decode(&body[1..]).unwrap();
    assert!(matches!(reply, ServerMessage::Status { json } if json.contains("all")));
    // One of this version beside it.
    let mut of_today = connect(&path);
    let mut bytes = Vec::new();
    assert!(ClientMessage::Status.append_to(&mut bytes));
    of_today.write_all(&bytes).unwrap();
    let (version, body) = hear(&mut of_today);
    assert_eq!(version, VERSION);
    assert!(matches!(
        ServerMessage::decode(&body),
        Ok(ServerMessage::Status { .. })
    ));
    assert_eq!(server.counters().malformed, 0);
}

#[test]
fn a_client_of_an_unknown_version_gets_the_version_of_the_server() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run/s.sock");
    let _server = serve(&path, &[]);
    let mut stream = connect(&path);
    stream.write_all(&older(&ClientMessage::Ping)).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    let (_, body, len) = frame::first(&answer).unwrap().unwrap();
    assert_eq!(len, answer.len(), "one answer, then the end");
    let reply = ServerMessage::decode(body).unwrap();
    assert!(matches!(reply, ServerMessage::Refused { .. }));
    // As the client of another version reads it.
    let error = frame::first_as(VERSION + 1, &answer).unwrap_err();
    assert_eq!(error, frame::FrameError::Version(VERSION));
}

#[test]
fn a_version_mismatch_says_which_side_is_older() {
    let text = |version| frame::FrameError::Version(version).to_string();
    assert!(text(VERSION - 1).contains("the other process runs the older undercroft"));
    assert!(text(VERSION + 1).contains("this process runs the older undercroft"));
}

/// A message as this version has it.
fn frame_of(message: &ClientMessage<'_>) -> Vec<u8> {
    let mut bytes = Vec::new();
    assert!(message.append_to(&mut bytes));
    bytes
}

/// Passes a descriptor with half of a header.
fn pass(stream: &UnixStream, descriptor: OwnedFd) -> Result<usize, rustix::io::Errno> {
    let descriptors = [descriptor.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    assert!(ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)));
    let bytes = [IoSlice::new(b"UCFT")];
    sendmsg(stream, &bytes, &mut ancillary, SendFlags::NOSIGNAL)
}

#[test]
fn descriptors_that_nobody_has_asked_for_end_their_connection_and_delay_nobody() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run/s.sock");
    let terms = Terms {
        refuses_descriptors: false,
        ..Terms::USUAL
    };
    let server = serve_on(&path, terms);
    let mut bad = connect(&path);
    let (lingers, receiver) = lingering(2 * PATIENCE);
    assert_eq!(pass(&bad, lingers), Ok(4));
    assert_eq!(bad.read(&mut [0]).unwrap(), 0, "closed");
    let mut other = connect(&path);
    let mut bytes = Vec::new();
    assert!(ClientMessage::Status.append_to(&mut bytes));
    other.write_all(&bytes).unwrap();
    assert_eq!(hear(&mut other).0, VERSION, "while the close waits");
    assert_eq!(server.counters().malformed, 1);
    drop(receiver);
}

#[test]
fn the_kernel_refuses_descriptors_for_the_server_if_it_can() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run/s.sock");
    let server = serve_on(&path, Terms::USUAL);
    let mut bad = connect(&path);
    match pass(&bad, std::fs::File::open("/dev/null").unwrap().into()) {
        Err(errno) => assert_eq!(errno, rustix::io::Errno::PERM),
        // Before Linux 6.16.
        Ok(_) => {
            assert_eq!(bad.read(&mut [0]).unwrap(), 0, "closed");
            assert_eq!(server.counters().malformed, 1);
        }
    }
}

#[test]
fn who_says_nothing_or_half_of_a_frame_is_left_and_a_session_that_is_idle_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run/s.sock");
    let terms = Terms {
        silence_max: Duration::from_millis(50),
        ..Terms::USUAL
    };
    let server = serve_on(&path, terms);
    let register = frame_of(&ClientMessage::Register {
        namespace: NamespaceSpec::uniform("{}", 16, &[(GroupKind::Full, 4096)]),
        dropped_tokens: Tokens(0),
        private: false,
        tenant_share: 0,
    });
    let ping = frame_of(&ClientMessage::Ping);
    let session = || {
        let mut stream = connect(&path);
        stream.write_all(&register).unwrap();
        let (_, body) = hear(&mut stream);
        let reply = ServerMessage::decode(&body).unwrap();
        assert!(matches!(reply, ServerMessage::Registered { .. }));
        stream
    };
    let (mut idle, mut broken) = (session(), session());
    broken.write_all(&ping[..HEADER_BYTES]).unwrap();
    let mut half = connect(&path);
    half.write_all(&register[..register.len() / 2]).unwrap();
    let mut silent = connect(&path);
    for stream in [&mut silent, &mut half, &mut broken] {
        assert_eq!(stream.read(&mut [0]).unwrap(), 0, "closed");
    }
    assert_eq!(server.counters().malformed, 3);
    idle.write_all(&ping).unwrap();
    let (_, body) = hear(&mut idle);
    assert!(matches!(
        ServerMessage::decode(&body),
        Ok(ServerMessage::Pong { .. })
    ));
}

/// A service without a thread.
fn service(dir: &tempfile::TempDir) -> (Service, std::path::PathBuf) {
    let path = dir.path().join("run/s.sock");
    crate::socket_dir::prepare(path.parent().unwrap()).unwrap();
    let (listener, path) = crate::socket_dir::listen_alone(path).unwrap();
    let wake = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
    let control = Arc::new(ServerControl::new(wake));
    let closer = Closer::start().unwrap();
    let terms = Terms::USUAL;
    let service = Service::new(listener, path.clone(), served(), control, terms, closer);
    (service, path)
}

#[test]
fn the_connections_of_a_process_have_one_account_which_ends_with_the_last() {
    let dir = tempfile::tempdir().unwrap();
    let (mut service, path) = service(&dir);
    let _ours = [(); 3].map(|()| connect(&path));
    while service.connections.len() < 3 {
        service.accept();
    }
    let peers = service.connections.values();
    let accounts: HashSet<_> = peers.map(|peer| peer.account).collect();
    assert_eq!(accounts.len(), 1);
    let ids: Vec<_> = service.connections.keys().collect();
    for id in ids {
        assert_eq!(service.queue.accounts(), 1);
        service.close(id, End::Closed);
    }
    assert_eq!(service.queue.accounts(), 0, "the last one is gone");
}

#[test]
fn the_serving_thread_does_not_close_connections_itself() {
    let dir = tempfile::tempdir().unwrap();
    let (mut service, path) = service(&dir);
    let theirs = connect(&path);
    while service.connections.is_empty() {
        service.accept();
    }
    let (lingers, receiver) = lingering(PATIENCE);
    pass(&theirs, lingers).unwrap();
    let id = service.connections.keys().next().unwrap();
    service.close(id, End::Closed);
    assert_eq!(service.closer.pending(), 1, "the close waits elsewhere");
    drop(receiver);
    while service.closer.pending() > 0 {
        std::thread::yield_now();
    }
}
