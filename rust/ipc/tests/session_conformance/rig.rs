//! An engine over a disk directory or none, and sessions of one implementation.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use undercroft_contract::key::BlockHash;
use undercroft_contract::namespace::{GroupKind, NamespaceSpec};
use undercroft_contract::session::{
    Extent, Hit, Lookup, LookupRequest, Save, SaveGrant, SaveRequest, Session, SessionSpec,
    SessionToken, Tokens,
};
use undercroft_driver::{Driver, EmbeddedSession, EngineAccess};
use undercroft_engine::{Engine, EngineConfig};
use undercroft_io::arena::Arena;
use undercroft_io::disk::open::{DirectoryLock, open};
use undercroft_io::fault::{FaultControl, FaultEngine};
use undercroft_io::pool::ThreadPool;
use undercroft_ipc::{
    Client, ClientConfig, ConnectionState, Served, Server, SocketLocation, StatsSource,
};

/// Tokens of one block, and of one hash block.
pub(crate) const BLOCK: u32 = 16;
/// Blocks that the arena holds.
pub(crate) const ARENA_BLOCKS: u32 = 256;
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

const PAYLOAD_BYTES: u32 = 4096;
const ARENA_BYTES: u64 = ARENA_BLOCKS as u64 * PAYLOAD_BYTES as u64;
const IO_DEPTH: usize = 8;
/// Events that the engine keeps for a session.
const EVENTS_KEPT: usize = 1024;
/// The first prompt that no test uses.
const OTHER_PROMPTS: u8 = 100;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Implementation {
    Embedded,
    Served,
}

pub(crate) struct SessionRig {
    implementation: Implementation,
    pub(crate) driver: Arc<Driver>,
    arena: Arc<Arena>,
    pub(crate) device: FaultControl,
    socket: PathBuf,
    server: Option<Server>,
    /// Numbers the requests of [`SessionRig::sync`].
    syncs: Cell<u32>,
    _dir: tempfile::TempDir,
    _lock: Option<DirectoryLock>,
}

/// Waits for another thread.
pub(crate) fn until(awaited: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < PATIENCE, "{awaited}");
        std::thread::yield_now();
    }
}

/// A namespace with one group of full attention.
pub(crate) fn full() -> NamespaceSpec {
    with_groups(&[GroupKind::Full])
}

pub(crate) fn with_groups(kinds: &[GroupKind]) -> NamespaceSpec {
    let groups: Vec<_> = kinds.iter().map(|&kind| (kind, PAYLOAD_BYTES)).collect();
    NamespaceSpec::uniform(format!("{kinds:?}"), BLOCK, &groups)
}

/// Hashes of a prompt's blocks.
pub(crate) fn hashes(prompt: u8, blocks: u32) -> Vec<BlockHash> {
    let hash = |block: u32| {
        let mut bytes = [prompt; 32];
        bytes[..4].copy_from_slice(&block.to_le_bytes());
        BlockHash::new(&bytes).unwrap()
    };
    (0..blocks).map(hash).collect()
}

/// Tokens of a number of blocks.
pub(crate) fn tokens(blocks: u32) -> Tokens {
    Tokens(blocks * BLOCK)
}

pub(crate) fn miss(shared_blocks: u32) -> Lookup {
    Lookup::Miss {
        shared: tokens(shared_blocks),
    }
}

pub(crate) fn hit(blocks: u32, shared_blocks: u32) -> Lookup {
    Lookup::Hit(Hit {
        tokens: tokens(blocks),
        shared: tokens(shared_blocks),
    })
}

/// Group, first block, and number of blocks of each extent.
pub(crate) fn shape(extents: &[Extent]) -> Vec<(u8, u32, usize)> {
    let one = |extent: &Extent| (extent.group, extent.first_block, extent.offsets.len());
    let mut shape: Vec<_> = extents.iter().map(one).collect();
    shape.sort_unstable();
    shape
}

/// The answer to a question once it is not pending any more.
pub(crate) fn answer(session: &dyn Session, question: &LookupRequest<'_>) -> Lookup {
    let start = Instant::now();
    loop {
        let answer = session.lookup(question);
        if !answer.is_pending() {
            return answer;
        }
        assert!(start.elapsed() < PATIENCE, "pending for too long");
        session.wait(question.request, Duration::from_millis(10));
    }
}

/// Looks all of a prompt up, by a request of this name.
pub(crate) fn look_up(session: &dyn Session, request: &str, prompt: &[BlockHash]) -> Lookup {
    answer(session, &LookupRequest::new(request, &prompt))
}

/// The grant of a save.
pub(crate) fn grant(session: &dyn Session, save: &SaveRequest<'_>) -> SaveGrant {
    match session.begin_save(save) {
        Save::Granted(grant) => grant,
        Save::Pending(id) => {
            let mut grants = Vec::new();
            until("the grant", || {
                grants.extend(session.poll_saves());
                !grants.is_empty()
            });
            assert_eq!((grants.len(), grants[0].id), (1, id));
            grants.remove(0)
        }
        Save::Unavailable => panic!("no engine"),
    }
}

impl SessionRig {
    pub(crate) fn new(implementation: Implementation) -> Self {
        Self::start(implementation, None)
    }

    /// With a disk tier in `disk`.
    pub(crate) fn with_disk(implementation: Implementation, disk: &Path) -> Self {
        Self::start(implementation, Some(disk))
    }

    fn start(implementation: Implementation, disk: Option<&Path>) -> Self {
        let arena = Arc::new(Arena::create(ARENA_BYTES).unwrap());
        let (mut files, mut images, mut lock) = (Vec::new(), Vec::new(), None);
        if let Some(dir) = disk {
            let (of_device, image, locked) = open(dir, 64 << 20, 1).unwrap().into_parts();
            files.push(of_device);
            images.push(image);
            lock = Some(locked);
        }
        let pool = ThreadPool::new(IO_DEPTH, Arc::clone(&arena), files).unwrap();
        let (io, device) = FaultEngine::new(pool);
        let mut engine = Engine::new(EngineConfig {
            event_ring: EVENTS_KEPT,
            ..EngineConfig::new(ARENA_BYTES)
        });
        engine.attach_disks(images);
        let driver = Arc::new(Driver::start(engine, Box::new(io)).unwrap());
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("run/s.sock");
        let serve = || {
            let served = Served {
                own_token: SessionToken(77),
                driver: Arc::clone(&driver),
                arena: Arc::clone(&arena),
                arena_id: 1,
                info: Box::new(|| serde_json::json!({})),
                stats: StatsSource::new(|| serde_json::json!({})),
            };
            Server::start(SocketLocation::At(&socket), served).unwrap()
        };
        let server = (implementation == Implementation::Served).then(serve);
        Self {
            implementation,
            driver,
            arena,
            device,
            socket,
            server,
            syncs: Cell::new(0),
            _dir: dir,
            _lock: lock,
        }
    }

    /// Opens a session.
    pub(crate) fn open(&self, spec: impl Into<SessionSpec>) -> Box<dyn Session> {
        let spec = spec.into();
        if self.implementation == Implementation::Embedded {
            let session = EmbeddedSession::open(Arc::clone(&self.driver), spec);
            return Box::new(session.unwrap());
        }
        let config = ClientConfig {
            namespace: spec.namespace,
            dropped_tokens: spec.dropped_tokens,
            tenant_share: spec.tenant_share,
            deadline: PATIENCE,
            spin: PATIENCE,
        };
        let socket = self.socket.clone();
        let client = Client::start(config, Box::new(move || Ok(socket.clone()))).unwrap();
        assert_eq!(client.wait_for_connection(PATIENCE), ConnectionState::Up);
        Box::new(client)
    }

    /// Waits until the engine has seen all earlier calls of a session.
    pub(crate) fn sync(&self, session: &dyn Session) {
        self.syncs.set(self.syncs.get() + 1);
        let name = format!("sync {}", self.syncs.get());
        assert_eq!(look_up(session, &name, &hashes(0, 1)), miss(0));
        session.finish_request(name.as_str().into());
    }

    /// Saves the first blocks of a prompt.
    pub(crate) fn save(&self, session: &dyn Session, prompt: u8, blocks: u32) {
        let hashes = hashes(prompt, blocks);
        self.save_as(
            session,
            prompt,
            &SaveRequest::new("save", &hashes, tokens(blocks)),
        );
        session.finish_request("save".into());
        self.sync(session);
    }

    /// Saves. Returns the grant of the save, which has ended.
    pub(crate) fn save_as(
        &self,
        session: &dyn Session,
        prompt: u8,
        save: &SaveRequest<'_>,
    ) -> SaveGrant {
        let grant = grant(session, save);
        self.fill(&grant.extents, prompt);
        session.end_transfer(grant.id, true);
        self.sync(session);
        grant
    }

    /// Saves so much through a session of its own that nothing stays in the arena unless it is in use.
    pub(crate) fn evict_all(&self) {
        let session = self.open(full());
        for prompt in OTHER_PROMPTS..OTHER_PROMPTS + 32 {
            self.save(&*session, prompt, ARENA_BLOCKS / 8);
        }
        session.close();
    }

    /// Writes the payloads of a prompt as workers do.
    pub(crate) fn fill(&self, extents: &[Extent], prompt: u8) {
        for (at, payload) in payloads(extents, prompt) {
            self.arena.write(at, &payload).unwrap();
        }
    }

    /// Whether a prompt's payloads lie where extents say.
    pub(crate) fn holds(&self, extents: &[Extent], prompt: u8) -> bool {
        payloads(extents, prompt).all(|(at, payload)| {
            let found = self.arena.read(at, u64::from(PAYLOAD_BYTES)).unwrap();
            found == payload
        })
    }

    /// Sessions, lookups, loads and saves, and bytes that are kept from eviction.
    pub(crate) fn in_use(&self) -> [u64; 5] {
        let gauges = self.driver.read(|engine| engine.gauges()).unwrap();
        [
            gauges.sessions,
            gauges.active_lookups,
            gauges.loads,
            gauges.saves,
            gauges.host_pinned_bytes,
        ]
    }

    /// Ends the engine when all is written.
    pub(crate) fn stop(self) {
        drop(self.server);
        self.driver.stop(PATIENCE);
    }
}

/// Offset and bytes of each payload of a prompt.
fn payloads(extents: &[Extent], prompt: u8) -> impl Iterator<Item = (u64, Vec<u8>)> {
    extents.iter().flat_map(move |extent| {
        let blocks = (extent.first_block..).zip(&extent.offsets);
        blocks.filter_map(move |(block, offset)| {
            let mut payload = vec![prompt; PAYLOAD_BYTES as usize];
            payload[0] = extent.group;
            payload[1..5].copy_from_slice(&block.to_le_bytes());
            Some((offset.get()?, payload))
        })
    })
}
