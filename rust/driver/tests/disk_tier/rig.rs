//! An engine over real directories and a real IO engine, in one thread and in virtual time, with
//! payloads that follow from their keys.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use undercroft_contract::image::DeviceImage;
use undercroft_contract::key::BlockHash;
use undercroft_contract::namespace::{GroupKind, NamespaceSpec};
use undercroft_contract::pages::CAPACITY_MIN;
use undercroft_contract::session::{Extent, LookupRequest, SaveRequest, Tokens};
use undercroft_engine::{Due, Engine, EngineConfig, Recovery, Room, SessionId, Started};
use undercroft_io::arena::Arena;
use undercroft_io::disk::open::{Capacity, DirectoryLock, OnOtherVersion, StoreOptions};
use undercroft_io::disk::{StoreError, open};
use undercroft_io::fault_hook::{Direct, FaultHook};
use undercroft_io::pool::ThreadPool;
use undercroft_io::uring::Uring;
use undercroft_io::{DeviceFiles, IoEngine, probe_io_uring};

pub(crate) const HASH_BLOCK: u32 = 16;
pub(crate) const DEPTH: usize = 8;
pub(crate) const HOST: u64 = 4 << 20;
/// The smallest store.
pub(crate) const DISK: u64 = CAPACITY_MIN;
pub(crate) const SECOND: u64 = 1_000_000_000;
/// Never passes in a healthy run; a hang fails the test instead of blocking it.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// The IO engines to test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Io {
    Ring,
    Pool,
}

impl Io {
    /// The IO engines that this machine allows.
    pub(crate) fn all() -> Vec<Self> {
        match probe_io_uring() {
            Ok(()) => vec![Self::Ring, Self::Pool],
            Err(reason) => {
                eprintln!("without io_uring: {reason}");
                vec![Self::Pool]
            }
        }
    }

    pub(crate) fn open(
        self,
        arena: Arc<Arena>,
        devices: Vec<DeviceFiles>,
        fault_hook: impl FaultHook,
    ) -> Box<dyn IoEngine> {
        match self {
            Self::Ring => {
                Box::new(Uring::with_fault_hook(DEPTH, arena, devices, fault_hook).unwrap())
            }
            Self::Pool => {
                Box::new(ThreadPool::with_fault_hook(DEPTH, arena, devices, fault_hook).unwrap())
            }
        }
    }
}

/// A model: payloads of another one are other bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Model {
    pub(crate) id: u64,
    pub(crate) payload_bytes: u32,
}

/// Its payloads are neither a multiple of 4096 bytes nor small: several fit a page.
pub(crate) const MODEL: Model = Model {
    id: 1,
    payload_bytes: 12_000,
};

fn mix(position: u64) -> u64 {
    let mut state = position.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    state ^ (state >> 31)
}

/// A generator of random numbers from a seed.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(1);
        mix(self.0) % limit
    }
}

impl Model {
    pub(crate) fn spec(&self) -> NamespaceSpec {
        NamespaceSpec::uniform(
            format!("model {}", self.id),
            HASH_BLOCK,
            &[(GroupKind::Full, self.payload_bytes)],
        )
    }

    /// The hashes of a prompt of `len` blocks. Prompts are the same for all models.
    pub(crate) fn hashes(prompt: u64, len: u32) -> Vec<BlockHash> {
        (0..u64::from(len))
            .map(|block| {
                let mut bytes = [0; 32];
                for (lane, word) in (0u64..).zip(bytes.chunks_exact_mut(8)) {
                    word.copy_from_slice(&mix(mix(prompt) ^ (block << 8 | lane)).to_le_bytes());
                }
                BlockHash::new(&bytes).unwrap()
            })
            .collect()
    }

    pub(crate) fn payload(&self, hash: &BlockHash) -> Vec<u8> {
        let mut head = [0; 8];
        head.copy_from_slice(&hash.as_bytes()[..8]);
        let seed = mix(u64::from_le_bytes(head) ^ self.id);
        let words = u64::from(self.payload_bytes).div_ceil(8);
        let mut bytes: Vec<u8> = (0..words)
            .flat_map(|word| mix(seed.wrapping_add(word)).to_le_bytes())
            .collect();
        bytes.truncate(self.payload_bytes as usize);
        bytes
    }

    /// Does a worker's part of a save.
    pub(crate) fn fill(&self, arena: &Arena, hashes: &[BlockHash], extents: &[Extent]) {
        for (hash, offset) in blocks(hashes, extents) {
            arena.write(offset, &self.payload(hash)).unwrap();
        }
    }

    /// How many blocks a load gives.
    ///
    /// # Panics
    /// If one byte of them is wrong.
    pub(crate) fn verify(&self, arena: &Arena, hashes: &[BlockHash], extents: &[Extent]) -> u32 {
        let mut count = 0;
        for (hash, offset) in blocks(hashes, extents) {
            let found = arena.read(offset, u64::from(self.payload_bytes)).unwrap();
            assert!(found == self.payload(hash), "wrong bytes for {hash:?}");
            count += 1;
        }
        count
    }
}

fn blocks<'a>(
    hashes: &'a [BlockHash],
    extents: &'a [Extent],
) -> impl Iterator<Item = (&'a BlockHash, u64)> {
    let of_extents = extents.iter();
    let all = of_extents.flat_map(|extent| {
        hashes[extent.first_block as usize..]
            .iter()
            .zip(&extent.offsets)
    });
    all.filter_map(|(hash, &offset)| Some((hash, offset.get()?)))
}

/// One life of an engine. Dropped, it ends like a killed process: nothing is flushed.
pub(crate) struct Rig {
    /// Dropped first: it waits for the operations in flight.
    pub(crate) io: Box<dyn IoEngine>,
    pub(crate) engine: Engine,
    pub(crate) arena: Arc<Arena>,
    pub(crate) recovery: Recovery,
    pub(crate) notes: Vec<String>,
    session: SessionId,
    now_ns: u64,
    locks: Vec<DirectoryLock>,
}

/// How to open one.
pub(crate) struct Open<'a> {
    pub(crate) dirs: &'a [PathBuf],
    pub(crate) capacity: u64,
    /// Payloads are encrypted.
    pub(crate) encrypted: bool,
    /// Directories that cannot be opened, by their index.
    pub(crate) absent: Vec<usize>,
    pub(crate) config: EngineConfig,
}

impl<'a> Open<'a> {
    pub(crate) fn new(dirs: &'a [PathBuf]) -> Self {
        let mut config = EngineConfig::new(HOST);
        // Promotions may use all of it.
        config.promotion_bytes = HOST;
        config.unix_at_zero_s = 1_790_000_000;
        Self {
            dirs,
            capacity: DISK,
            encrypted: false,
            absent: Vec::new(),
            config,
        }
    }

    pub(crate) fn with(self, io: Io, fault_hook: impl FaultHook) -> Rig {
        self.open(|arena, devices| io.open(arena, devices, fault_hook))
            .unwrap()
    }

    pub(crate) fn plain(self) -> Rig {
        self.with(Io::Pool, Direct)
    }

    pub(crate) fn open(
        self,
        io: impl FnOnce(Arc<Arena>, Vec<DeviceFiles>) -> Box<dyn IoEngine>,
    ) -> Result<Rig, StoreError> {
        let (mut files, mut images, mut locks) = (Vec::new(), Vec::new(), Vec::new());
        let mut notes = Vec::new();
        for (index, dir) in self.dirs.iter().enumerate() {
            if self.absent.contains(&index) {
                files.push(DeviceFiles::absent().unwrap());
                images.push(DeviceImage::absent());
                continue;
            }
            let options = StoreOptions {
                capacity: Capacity::Bytes(self.capacity),
                on_other_version: OnOtherVersion::default(),
                encrypted: self.encrypted,
            };
            let opened = open::open(dir, options, index as u64 + 1)?;
            notes.extend(opened.notes.clone());
            let (of_device, image, lock) = opened.into_parts();
            files.push(of_device);
            images.push(image);
            locks.push(lock);
        }
        let arena = Arc::new(Arena::create(self.config.host_bytes).unwrap());
        let io = io(Arc::clone(&arena), files);
        let mut engine = Engine::new(self.config);
        let recovery = engine.attach_disks(images);
        let session = engine.open_session(MODEL.spec()).unwrap();
        Ok(Rig {
            io,
            engine,
            arena,
            recovery,
            notes,
            session,
            now_ns: 0,
            locks,
        })
    }
}

impl Rig {
    /// Payloads on each device.
    pub(crate) fn blocks(&self) -> Vec<u64> {
        let devices = self.engine.devices();
        devices.iter().map(|device| device.blocks).collect()
    }

    /// Lets time pass.
    pub(crate) fn pass(&mut self, ns: u64) {
        self.now_ns += ns;
        self.engine.set_now(self.now_ns);
    }

    /// The directories' messages about files that are no longer theirs.
    pub(crate) fn missing_files(&self) -> Vec<String> {
        self.locks
            .iter()
            .filter_map(DirectoryLock::missing_file)
            .collect()
    }

    /// Hands the device the operations that the engine wants to start now; returns their number.
    pub(crate) fn start_io(&mut self) -> usize {
        let mut started = Started::default();
        let devices = 0..self.engine.device_count() as u16;
        let rooms: Vec<usize> = devices.map(|device| self.io.room(device)).collect();
        self.engine.turn(Room::io(&rooms[..]), &mut started);
        let count = started.io.len();
        started
            .io
            .drain(..)
            .for_each(|request| self.io.submit(request));
        count
    }

    /// Does all IO that can be done now.
    pub(crate) fn pump(&mut self) {
        loop {
            let started = self.start_io();
            if started == 0 && self.io.in_flight() == 0 {
                if self.engine.wake() == Due::Now {
                    continue;
                }
                return;
            }
            let (mut completions, start) = (Vec::new(), Instant::now());
            while completions.is_empty() {
                self.io.wait(Some(PATIENCE), &mut completions);
                assert!(
                    start.elapsed() < PATIENCE,
                    "no completion within {PATIENCE:?}"
                );
            }
            for completion in completions {
                self.engine.complete(completion);
            }
        }
    }

    pub(crate) fn session(&mut self, model: &Model) -> SessionId {
        if model.id == MODEL.id {
            self.session
        } else {
            self.engine.open_session(model.spec()).unwrap()
        }
    }

    /// Saves the missing blocks of a prompt, and writes them to disk as far as that goes.
    pub(crate) fn save(&mut self, prompt: u64, len: u32) {
        self.save_of(&MODEL, prompt, len);
    }

    pub(crate) fn save_of(&mut self, model: &Model, prompt: u64, len: u32) {
        let session = self.session(model);
        self.save_in(session, model, prompt, len);
    }

    /// Saves a prompt, and starts its writes, without their ends.
    pub(crate) fn begin_writes(&mut self, prompt: u64, len: u32) {
        self.pump();
        let hashes = Model::hashes(prompt, len);
        let save = SaveRequest::new("save", &hashes, Tokens(len * HASH_BLOCK));
        let transfer = self
            .engine
            .begin_save(self.session, &save)
            .transfer
            .unwrap();
        MODEL.fill(&self.arena, &hashes, &transfer.extents);
        self.engine.end_transfer(transfer.id, true);
        self.engine.finish_request(self.session, "save");
        assert_eq!(self.start_io(), len as usize);
    }

    /// As [`Rig::save`], in a session of another model.
    pub(crate) fn save_in(&mut self, session: SessionId, model: &Model, prompt: u64, len: u32) {
        let hashes = Model::hashes(prompt, len);
        // A request is looked up before its blocks are saved.
        self.engine.lookup(
            session,
            &LookupRequest::new("save", &hashes)
                .max(Tokens(0))
                .prefetch(),
        );
        let transfer = self
            .engine
            .begin_save(
                session,
                &SaveRequest::new("save", &hashes, Tokens(len * HASH_BLOCK)),
            )
            .transfer;
        if let Some(transfer) = transfer {
            model.fill(&self.arena, &hashes, &transfer.extents);
            self.engine.end_transfer(transfer.id, true);
        }
        self.engine.finish_request(session, "save");
        self.pump();
    }

    /// Looks a prompt up, loads the hit, compares every byte; returns the number of blocks.
    pub(crate) fn hit(&mut self, prompt: u64, len: u32) -> u32 {
        self.hit_of(&MODEL, prompt, len)
    }

    pub(crate) fn hit_of(&mut self, model: &Model, prompt: u64, len: u32) -> u32 {
        let session = self.session(model);
        self.hit_in(session, model, prompt, len)
    }

    /// As [`Rig::hit`], in a session of another model.
    pub(crate) fn hit_in(
        &mut self,
        session: SessionId,
        model: &Model,
        prompt: u64,
        len: u32,
    ) -> u32 {
        let hashes = Model::hashes(prompt, len);
        self.engine
            .lookup(session, &LookupRequest::new("hit", &hashes).prefetch());
        let tokens = loop {
            self.pump();
            match self
                .engine
                .lookup(session, &LookupRequest::new("hit", &hashes))
                .tokens()
            {
                Some(Tokens(tokens)) => break tokens,
                // Nothing moves any more: only time helps.
                None => self.pass(SECOND / 10),
            }
        };
        let found = self.load(model, &hashes, session, tokens);
        self.engine.finish_request(session, "hit");
        self.pump();
        found
    }

    fn load(
        &mut self,
        model: &Model,
        hashes: &[BlockHash],
        session: SessionId,
        tokens: u32,
    ) -> u32 {
        if tokens == 0 {
            return 0;
        }
        let transfer = self
            .engine
            .begin_load(session, "hit", Tokens(0), Tokens(tokens))
            .unwrap();
        let found = model.verify(&self.arena, hashes, &transfer.extents);
        self.engine.end_transfer(transfer.id, true);
        assert_eq!(
            found * HASH_BLOCK,
            tokens,
            "a load gives what the answer said"
        );
        found
    }
}

/// A directory on a real disk, for a store.
pub(crate) fn dir() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let store = dir.path().join("store");
    (dir, store)
}

/// Changes bytes of a file behind the engine's back.
pub(crate) fn patch(path: &Path, offset: u64, change: impl FnOnce(&mut [u8]), len: usize) {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::options()
        .read(true)
        .write(true)
        .open(path)
        .unwrap();
    let mut bytes = vec![0; len];
    file.read_exact_at(&mut bytes, offset).unwrap();
    change(&mut bytes);
    file.write_all_at(&bytes, offset).unwrap();
}
