//! The remote store behind a running engine: its threads, and its end.

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use undercroft_contract::key::BlockHash;
use undercroft_contract::namespace::{GroupKind, NamespaceSpec};
use undercroft_contract::remote::segment::{SEGMENT_ALIGN, verify};
use undercroft_contract::remote::{
    RemoteCompletion, RemoteConfig, RemoteDone, RemoteError, RemoteRequest, RemoteStore,
};
use undercroft_contract::session::{LookupRequest, SaveRequest, Tokens};
use undercroft_driver::{Driver, EngineAccess};
use undercroft_engine::{Engine, EngineConfig, SessionId};
use undercroft_io::Waker;
use undercroft_io::arena::Arena;
use undercroft_io::pool::ThreadPool;

const BLOCK: u32 = 16;
const PAYLOAD: u32 = 4096;
const ARENA: u64 = 1 << 20;

/// The name of an object that makes the next write fail.
const REFUSED_ONCE: &str = "refused once";

type Objects = Arc<Mutex<HashMap<String, Vec<u8>>>>;

/// A store in memory, with a thread of its own.
#[derive(Debug)]
struct Memory {
    requests: Option<Sender<RemoteRequest>>,
    completions: Receiver<RemoteCompletion>,
    thread: Option<JoinHandle<()>>,
}

impl Memory {
    fn new(objects: Objects, arena: Arc<Arena>, waker: Waker) -> Self {
        let (requests, todo) = channel();
        let (done, completions) = channel();
        let thread = std::thread::spawn(move || {
            for request in todo {
                let result = carry_out(&request, &objects, &arena);
                let token = request.token();
                if done.send(RemoteCompletion { token, result }).is_err() {
                    return;
                }
                waker.wake();
            }
        });
        Self {
            requests: Some(requests),
            completions,
            thread: Some(thread),
        }
    }
}

impl RemoteStore for Memory {
    fn name(&self) -> &'static str {
        "memory"
    }

    fn room(&self) -> usize {
        16
    }

    fn submit(&mut self, request: RemoteRequest) {
        let requests = self.requests.as_ref().expect("it is open");
        requests.send(request).expect("the thread lives");
    }

    fn drain(&mut self, out: &mut Vec<RemoteCompletion>) {
        out.extend(self.completions.try_iter());
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.requests = None;
        let ended = self.thread.take().map(JoinHandle::join);
        assert!(ended.is_some_and(|ended| ended.is_ok()));
    }
}

fn carry_out(
    request: &RemoteRequest,
    objects: &Objects,
    arena: &Arena,
) -> Result<RemoteDone, RemoteError> {
    let mut objects = objects.lock().expect("nobody panics");
    match request {
        RemoteRequest::Probe { keys, .. } => {
            let bits = (0..).zip(keys).fold(0, |bits, (at, key)| {
                bits | u64::from(objects.contains_key(&key.path())) << at
            });
            Ok(RemoteDone::Present(bits))
        }
        RemoteRequest::Get {
            key, expect, parts, ..
        } => {
            let object = objects.get(&key.path()).ok_or(RemoteError::NotFound)?;
            let header = verify(object, expect).map_err(|_| RemoteError::Corrupt)?;
            let offsets: Vec<u64> = expect.offsets().collect();
            for part in parts {
                let from = offsets[part.payload as usize] as usize;
                let bytes = &object[from..from + part.len as usize];
                arena.write(part.arena_offset, bytes).expect("in the arena");
            }
            let sums = parts
                .iter()
                .map(|part| header.checksums[part.payload as usize]);
            Ok(RemoteDone::Got(sums.collect()))
        }
        RemoteRequest::Put { .. } if objects.remove(REFUSED_ONCE).is_some() => {
            Err(RemoteError::Unreachable)
        }
        RemoteRequest::Put {
            key, header, parts, ..
        } => {
            let mut object = header.to_vec();
            for part in parts {
                let bytes = arena.read(part.arena_offset, u64::from(part.len));
                object.extend(bytes.expect("in the arena"));
                object.resize(object.len().next_multiple_of(SEGMENT_ALIGN as usize), 0);
            }
            objects.insert(key.path(), object);
            Ok(RemoteDone::Stored)
        }
    }
}

/// A running engine with a session, whose segments have four hash blocks.
fn start(objects: &Objects) -> (Driver, Arc<Arena>, SessionId) {
    let arena = Arc::new(Arena::create(ARENA).expect("memory"));
    let mut config = EngineConfig::new(ARENA);
    config.remote = Some(RemoteConfig {
        object_bytes: u64::from(4 * PAYLOAD),
        ..RemoteConfig::default()
    });
    let io = ThreadPool::new(4, Arc::clone(&arena), Vec::new()).expect("threads");
    let driver = Driver::start(Engine::new(config), Box::new(io)).expect("a thread");
    let store = Memory::new(Arc::clone(objects), Arc::clone(&arena), driver.waker());
    driver.attach_remote(Box::new(store));
    let namespace = NamespaceSpec::uniform("a model", BLOCK, &[(GroupKind::Full, PAYLOAD)]);
    // The store counts from when the IO thread has taken it.
    let attached = driver.wait_until(Duration::from_secs(10), |engine| engine.has_remote());
    assert!(attached, "the IO thread takes the store");
    let session = driver.enter(|engine| engine.open_session(namespace));
    let session = session.expect("it runs").expect("a payload fits");
    (driver, arena, session)
}

fn hashes() -> Vec<BlockHash> {
    (1..=32)
        .map(|byte| BlockHash::new(&[byte; 32]).expect("32 bytes"))
        .collect()
}

/// Saves all blocks: eight segments.
fn save(writer: &Driver, arena: &Arena, session: SessionId) {
    let hashes = hashes();
    let save = SaveRequest::new("w", &hashes, Tokens(32 * BLOCK));
    let granted = writer.enter(|engine| engine.begin_save(session, &save));
    let transfer = granted.expect("it runs").transfer.expect("there is room");
    for (block, offset) in (0u8..).zip(&transfer.extents[0].offsets) {
        let bytes = vec![block; PAYLOAD as usize];
        arena
            .write(offset.get().expect("a slot"), &bytes)
            .expect("in the arena");
    }
    writer.enter(|engine| engine.end_transfer(transfer.id, true));
}

/// Nothing but the hit has the store asked for anything, and the segments below the missing one are there.
#[test]
fn a_hit_has_a_segment_written_whose_write_has_failed() {
    let objects = Objects::default();
    let refused = (REFUSED_ONCE.to_owned(), Vec::new());
    objects.lock().expect("nobody panics").extend([refused]);
    let (writer, arena, session) = start(&objects);
    save(&writer, &arena, session);
    let limit = Duration::from_secs(30);
    let is_written = |engine: &mut Engine| {
        let counters = engine.counters();
        let ended = counters.remote_puts + counters.remote_puts_failed;
        ended == 8 && !engine.inspect().has_remote_work()
    };
    assert!(writer.wait_until(limit, is_written));
    assert_eq!(objects.lock().expect("nobody panics").len(), 7);
    let (all, hashes) = (Tokens(32 * BLOCK), hashes());
    let question = LookupRequest::new("r", &hashes);
    let found = writer.enter(|engine| engine.lookup(session, &question).tokens());
    assert_eq!(found, Some(Some(all)));
    assert!(writer.wait_until(limit, |engine| engine.counters().remote_puts == 8));
    assert_eq!(objects.lock().expect("nobody panics").len(), 8);
}

#[test]
fn segments_go_from_one_running_engine_to_another() {
    let objects = Objects::default();
    let (all, hashes) = (Tokens(32 * BLOCK), hashes());
    let (writer, arena, session) = start(&objects);
    save(&writer, &arena, session);
    let is_written = |engine: &mut Engine| engine.counters().remote_puts == 8;
    assert!(writer.wait_until(Duration::from_secs(30), is_written));
    writer.stop(Duration::from_secs(5));
    assert_eq!(objects.lock().expect("nobody panics").len(), 8);

    let (reader, arena, session) = start(&objects);
    let question = LookupRequest::new("r", &hashes);
    let mut tokens = None;
    let is_answered = |engine: &mut Engine| {
        tokens = engine.lookup(session, &question).tokens();
        tokens.is_some()
    };
    assert!(reader.wait_until(Duration::from_secs(30), is_answered));
    assert_eq!(tokens, Some(all));
    let load = reader.enter(|engine| engine.begin_load(session, "r", Tokens(0), all));
    let load = load.expect("it runs").expect("a hit can be loaded");
    for (block, offset) in (0u8..).zip(&load.extents[0].offsets) {
        let found = arena.read(offset.get().expect("a slot"), u64::from(PAYLOAD));
        assert!(
            found.expect("in the arena") == vec![block; PAYLOAD as usize],
            "block {block}"
        );
    }
    // The driver ends with a store that may still be asked.
    drop(reader);
}
