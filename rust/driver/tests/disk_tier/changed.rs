//! Bytes in the arena change after their save.

use std::path::Path;
use std::sync::Arc;

use undercroft_contract::key::BlockHash;
use undercroft_contract::session::{Extent, LookupRequest, SaveRequest, Tokens};
use undercroft_driver::{Driver, EngineAccess};
use undercroft_engine::{Due, Engine, EngineConfig, SessionId};
use undercroft_io::arena::Arena;
use undercroft_io::disk::open;
use undercroft_io::fault_hook::Direct;

use crate::rig::{DISK, HASH_BLOCK, HOST, Io, MODEL, Model, PATIENCE, dir};

const LEN: u32 = 10;
/// The block whose bytes change.
const CHANGED: usize = 4;

/// An engine with its threads over one directory, or none.
struct Running {
    driver: Driver,
    arena: Arc<Arena>,
    session: SessionId,
    _lock: Option<open::DirectoryLock>,
}

impl Running {
    fn open(io: Io, store: Option<&Path>, change: impl FnOnce(&mut EngineConfig)) -> Self {
        let arena = Arc::new(Arena::create(HOST).unwrap());
        let mut config = EngineConfig::new(HOST);
        change(&mut config);
        let mut engine = Engine::new(config);
        let (mut files, mut lock) = (Vec::new(), None);
        if let Some(store) = store {
            let (of_device, image, of_store) = open::open(store, DISK, 1).unwrap().into_parts();
            engine.attach_disks(vec![image]);
            files.push(of_device);
            lock = Some(of_store);
        }
        let session = engine.open_session(MODEL.spec()).unwrap();
        let io = io.open(Arc::clone(&arena), files, Direct);
        Self {
            driver: Driver::start(engine, io).unwrap(),
            arena,
            session,
            _lock: lock,
        }
    }

    /// Saves a prompt; the extents of its blocks.
    fn save(&self, hashes: &[BlockHash]) -> Vec<Extent> {
        let request = SaveRequest::new("save", &hashes, Tokens(LEN * HASH_BLOCK));
        let granted = self
            .driver
            .enter(|engine| engine.begin_save(self.session, &request));
        let transfer = granted.unwrap().transfer.unwrap();
        MODEL.fill(&self.arena, hashes, &transfer.extents);
        self.driver
            .enter(|engine| engine.end_transfer(transfer.id, true));
        transfer.extents
    }

    /// Waits until checksums and writes have ended.
    fn settle(&self) {
        let settled = |engine: &mut Engine| engine.is_quiet() && engine.wake() < Due::Start;
        assert!(self.driver.wait_until(PATIENCE, settled));
    }

    /// One byte of the block changes.
    fn change(&self, extents: &[Extent]) {
        let at = extents[0].offsets[CHANGED].get().unwrap() + 100;
        let byte = self.arena.read(at, 1).unwrap()[0];
        self.arena.write(at, &[byte ^ 0x40]).unwrap();
    }

    /// Blocks of the hit of a request, once it is answered.
    fn hit(&self, name: &str, hashes: &[BlockHash]) -> u32 {
        let question = LookupRequest::new(name, &hashes);
        let mut tokens = None;
        let answered = self.driver.wait_until(PATIENCE, |engine| {
            tokens = engine.lookup(self.session, &question).tokens();
            tokens.is_some()
        });
        assert!(answered);
        tokens.unwrap().0 / HASH_BLOCK
    }

    fn finish(&self, name: &str) {
        self.driver
            .enter(|engine| engine.finish_request(self.session, name));
    }

    fn failures(&self) -> u64 {
        self.driver
            .read(|engine| engine.counters().host_checksum_failures)
            .unwrap()
    }
}

#[test]
fn a_block_that_changed_after_its_save_is_not_written() {
    for io in Io::all() {
        let (_guard, store) = dir();
        let hashes = Model::hashes(1, LEN);
        {
            let running = Running::open(io, Some(&store), |config| config.second_touch = true);
            let extents = running.save(&hashes);
            running.settle();
            running.change(&extents);
            // The second use has the blocks written. Before that, the hit is as good as the memory is.
            assert_eq!(running.hit("first", &hashes), LEN);
            running.finish("first");
            running.settle();
            assert_eq!(running.failures(), 1);
            assert_eq!(running.hit("second", &hashes), CHANGED as u32);
        }
        let running = Running::open(io, Some(&store), |_| ());
        assert_eq!(running.hit("after", &hashes), CHANGED as u32);
        assert_eq!(running.failures(), 0);
    }
}

#[test]
fn a_verified_hit_ends_before_a_block_that_changed() {
    let running = Running::open(Io::Pool, None, |config| config.verify_host = true);
    let hashes = Model::hashes(1, LEN);
    let extents = running.save(&hashes);
    assert_eq!(running.hit("before", &hashes), LEN);
    running.finish("before");
    running.change(&extents);
    assert_eq!(running.hit("after", &hashes), CHANGED as u32);
    assert_eq!(running.failures(), 1);
    running.finish("after");
    // Blocks that are saved again are found again.
    running.save(&hashes);
    assert_eq!(running.hit("again", &hashes), LEN);
}

#[test]
fn a_payload_from_disk_keeps_the_checksum_of_its_record() {
    let (_guard, store) = dir();
    let hashes = Model::hashes(1, LEN);
    for io in Io::all() {
        let verify = |config: &mut EngineConfig| config.verify_host = true;
        let running = Running::open(io, Some(&store), verify);
        if running.hit("first", &hashes) == 0 {
            running.save(&hashes);
            running.settle();
        }
        drop(running);
        let running = Running::open(io, Some(&store), verify);
        assert_eq!(running.hit("from disk", &hashes), LEN);
        let extents = running.driver.enter(|engine| {
            engine
                .inspect()
                .hit_extents(running.session, "from disk", Tokens(0))
        });
        running.finish("from disk");
        running.change(&extents.unwrap());
        assert_eq!(running.hit("changed", &hashes), CHANGED as u32);
        assert_eq!(running.failures(), 1);
        running.save(&hashes);
        running.settle();
    }
}
