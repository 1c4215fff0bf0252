//! A server in this process, and clients of it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use undercroft_contract::key::BlockHash;
use undercroft_contract::namespace::{GroupKind, NamespaceSpec};
use undercroft_contract::session::{
    LookupRequest, Save, SaveRequest, Session, SessionToken, Tokens,
};
use undercroft_driver::{Driver, EngineAccess};
use undercroft_engine::{Engine, EngineConfig};
use undercroft_io::arena::Arena;
use undercroft_io::disk::open::{DirectoryLock, open};
use undercroft_io::{IoEngineChoice, open_io_engine};
use undercroft_ipc::{Client, ClientConfig, Served, Server, SocketLocation};

pub(crate) const PAYLOAD: u32 = 4096;
pub(crate) const TOKENS: u32 = 16;
/// The token of workers of the server's own process.
pub(crate) const OWN_TOKEN: SessionToken = SessionToken(77);
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Waits for another thread to have done something.
pub(crate) fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < PATIENCE, "{what}");
        std::thread::yield_now();
    }
}

/// A server and its engine.
pub(crate) struct Rig {
    pub(crate) server: Server,
    pub(crate) driver: Arc<Driver>,
    pub(crate) arena: Arc<Arena>,
    _lock: Option<DirectoryLock>,
}

impl Rig {
    /// Serves at `socket`; with a disk tier if a directory is given.
    pub(crate) fn start(socket: &Path, disk: Option<&Path>, arena_id: u64) -> Self {
        Self::with_memory(socket, disk, arena_id, 1 << 20)
    }

    pub(crate) fn with_memory(
        socket: &Path,
        disk: Option<&Path>,
        arena_id: u64,
        host_bytes: u64,
    ) -> Self {
        let arena = Arc::new(Arena::create(host_bytes).unwrap());
        let (mut files, mut images, mut lock) = (Vec::new(), Vec::new(), None);
        if let Some(dir) = disk {
            let (of_device, image, locked) = open(dir, 64 << 20, 1).unwrap().into_parts();
            files.push(of_device);
            images.push(image);
            lock = Some(locked);
        }
        let pool = IoEngineChoice::ThreadPool;
        let (io, _) = open_io_engine(pool, 4, Arc::clone(&arena), files).unwrap();
        let mut engine = Engine::new(EngineConfig {
            seed: arena_id,
            ..EngineConfig::new(host_bytes)
        });
        engine.attach_disks(images);
        let driver = Arc::new(Driver::start(engine, io).unwrap());
        let of_stats = Arc::clone(&driver);
        let served = Served {
            driver: Arc::clone(&driver),
            arena: Arc::clone(&arena),
            arena_id,
            own_token: OWN_TOKEN,
            info: Box::new(|| serde_json::json!({})),
            stats: undercroft_ipc::StatsSource::new(move || {
                let taken = of_stats.enter(|engine| (*engine.counters(), engine.gauges()));
                let (counters, gauges) = taken.unwrap_or_default();
                undercroft_ipc::stats_json(&counters, &gauges)
            }),
        };
        let server = Server::start(SocketLocation::At(socket), served).unwrap();
        Self {
            server,
            driver,
            arena,
            _lock: lock,
        }
    }

    /// Sessions that are open.
    pub(crate) fn sessions(&self) -> u64 {
        self.driver
            .enter(|engine| engine.gauges())
            .unwrap()
            .sessions
    }

    /// Lookups, promotions under way, loads and saves of all sessions, and bytes that are kept from eviction.
    pub(crate) fn in_use(&self) -> [u64; 4] {
        let gauges = self.driver.enter(|engine| engine.gauges()).unwrap();
        [
            gauges.active_lookups,
            gauges.loads,
            gauges.saves,
            gauges.host_pinned_bytes,
        ]
    }
}

/// A namespace with one full-attention group.
pub(crate) fn spec() -> NamespaceSpec {
    NamespaceSpec::uniform("a model", TOKENS, &[(GroupKind::Full, PAYLOAD)])
}

/// A client of the server at `socket`, as patient as a loaded machine needs.
pub(crate) fn client(socket: &Path) -> Client {
    patient_client(socket, Duration::from_secs(30))
}

pub(crate) fn patient_client(socket: &Path, deadline: Duration) -> Client {
    let path: PathBuf = socket.to_owned();
    let config = ClientConfig {
        namespace: spec(),
        dropped_tokens: Tokens(0),
        tenant_share: 0,
        deadline,
        spin: deadline,
    };
    Client::start(config, Box::new(move || Ok(path.clone()))).unwrap()
}

/// The hashes of the blocks of a prompt.
pub(crate) fn hashes(prompt: u8, blocks: u32) -> Vec<BlockHash> {
    let hash = |block: u32| {
        let mut bytes = [prompt; 32];
        bytes[..4].copy_from_slice(&block.to_le_bytes());
        BlockHash::new(&bytes).unwrap()
    };
    (0..blocks).map(hash).collect()
}

/// Saves a prompt's blocks: each is filled with its index.
pub(crate) fn save(rig: &Rig, client: &Client, request: &str, hashes: &[BlockHash]) {
    let tokens = Tokens(u32::try_from(hashes.len()).unwrap() * TOKENS);
    let save = client.begin_save(&SaveRequest::new(request, &hashes, tokens));
    let Save::Pending(id) = save else {
        panic!("{save:?}")
    };
    let mut grants = Vec::new();
    until("the grant", || {
        grants.extend(client.poll_saves());
        !grants.is_empty()
    });
    assert_eq!((grants.len(), grants[0].id), (1, id));
    for extent in &grants[0].extents {
        for (index, offset) in (extent.first_block..).zip(&extent.offsets) {
            let at = offset.get().unwrap();
            let bytes = [u8::try_from(index).unwrap(); PAYLOAD as usize];
            rig.arena.write(at, &bytes).unwrap();
        }
    }
    client.end_transfer(id, true);
    client.finish_request(request.into());
}

/// Asks for all that is cached of a prompt.
pub(crate) fn lookup(client: &Client, request: &str, hashes: &[BlockHash]) -> Option<u32> {
    let answer = client.lookup(&LookupRequest::new(request, &hashes));
    answer.tokens().map(|tokens| tokens.0)
}
