//! An engine over devices that keep tables and no payloads. The rig counts the work of each entry of the engine.

use undercroft_contract::format::Superblock;
use undercroft_contract::image::DeviceImage;
use undercroft_contract::io::{FileKind, IoCompletion, IoFault, IoRequest};
use undercroft_contract::key::BlockHash;
use undercroft_contract::namespace::{GroupKind, GroupSpec, NamespaceSpec};
use undercroft_contract::pages::page_bytes_for;
use undercroft_contract::session::{LookupRequest, Offer, SaveRequest, Tokens};
use undercroft_engine::work::Work;
use undercroft_engine::{Due, Engine, EngineConfig, LookupCursor, Room, SessionId, Started};

/// Units of work that an entry may do, however many blocks the engine holds.
pub(crate) const UNITS: u64 = 2_000;
/// Further units for each hash block that the caller names.
pub(crate) const UNITS_PER_BLOCK: u64 = 40;

pub(crate) const BLOCK: u32 = 16;
pub(crate) const PAYLOAD: u32 = 128 << 10;
/// Operations that a device takes at once.
const DEPTH: usize = 64;

/// The operations that the device fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    None,
    Reads,
    Writes,
}

#[derive(Debug)]
pub(crate) struct Rig {
    engine: Engine,
    table: Vec<u8>,
    super_bytes: Vec<u8>,
    capacity: u64,
    pub(crate) fault: Fault,
    /// The most work of an entry, beyond the work that its caller's arguments allow.
    pub(crate) most: u64,
}

pub(crate) fn hash(chain: u64, block: u64) -> BlockHash {
    let mut bytes = [0; 32];
    for (word, chunk) in (0u64..).zip(bytes.chunks_exact_mut(8)) {
        let mut z = (chain << 32 | block << 2 | word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        chunk.copy_from_slice(&(z ^ z >> 31).to_le_bytes());
    }
    BlockHash::new(&bytes).unwrap()
}

pub(crate) fn chain(chain: u64, blocks: u64) -> Vec<BlockHash> {
    (0..blocks).map(|block| hash(chain, block)).collect()
}

pub(crate) fn namespace(name: &str) -> NamespaceSpec {
    NamespaceSpec::uniform(name, BLOCK, &[(GroupKind::Full, PAYLOAD)])
}

/// Like [`namespace`], with another group.
pub(crate) fn hybrid(name: &str, kind: GroupKind) -> NamespaceSpec {
    let mut spec = namespace(name);
    let of = GroupSpec {
        kind,
        ..spec.groups[0]
    };
    spec.groups.push(of);
    spec
}

/// Hints may pin all of the arena.
pub(crate) fn config(host_blocks: u64) -> EngineConfig {
    let host_bytes = host_blocks * u64::from(PAYLOAD);
    EngineConfig {
        pin_bytes: host_bytes,
        ..EngineConfig::new(host_bytes)
    }
}

impl Rig {
    /// An engine for this many blocks in the arena and on disk.
    pub(crate) fn new(host_blocks: u64, disk_blocks: u64) -> Self {
        let capacity = disk_blocks * u64::from(PAYLOAD);
        let page_bytes = page_bytes_for(capacity);
        let super_bytes = Superblock {
            store_id: 1,
            page_bytes,
            encrypted: false,
        };
        let mut rig = Self {
            engine: Engine::new(config(host_blocks)),
            table: Vec::new(),
            super_bytes: super_bytes.encode().into(),
            capacity,
            fault: Fault::None,
            most: 0,
        };
        rig.restart(host_blocks);
        rig
    }

    /// The engine ends, and another engine takes over the directory.
    pub(crate) fn restart(&mut self, host_blocks: u64) {
        self.engine = Engine::new(config(host_blocks));
        if self.capacity > 0 {
            let page_bytes = page_bytes_for(self.capacity);
            self.engine.attach_disks(vec![DeviceImage {
                capacity: self.capacity / page_bytes * page_bytes,
                page_bytes,
                holes: Vec::new(),
                super_bytes: self.super_bytes.clone(),
                table: self.table.clone().into(),
            }]);
        }
    }

    pub(crate) fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Enters the engine. The caller names `named` hash blocks.
    pub(crate) fn enter<R>(&mut self, named: u64, work: impl FnOnce(&mut Engine) -> R) -> R {
        Work::take();
        let result = work(&mut self.engine);
        self.engine.end_entry();
        let done = Work::take();
        let most = UNITS + UNITS_PER_BLOCK * named;
        assert!(
            done.units() <= most,
            "an entry that names {named} blocks did {} units of work, of {most}: {done:?}",
            done.units()
        );
        self.most = self
            .most
            .max(done.units().saturating_sub(UNITS_PER_BLOCK * named));
        result
    }

    pub(crate) fn open(&mut self, spec: NamespaceSpec) -> SessionId {
        self.enter(0, |engine| engine.open_session(spec)).unwrap()
    }

    /// Saves a prompt. Returns the number of granted blocks.
    pub(crate) fn save(&mut self, session: SessionId, hashes: &[BlockHash]) -> usize {
        self.save_with(session, hashes, &[])
    }

    /// Saves a prompt with blocks of windows and states.
    pub(crate) fn save_with(
        &mut self,
        session: SessionId,
        hashes: &[BlockHash],
        offers: &[Offer],
    ) -> usize {
        let named = hashes.len() as u64;
        let hashes = hashes.to_vec();
        let granted = self.enter(named, |engine| {
            let tokens = Tokens(hashes.len() as u32 * BLOCK);
            engine.begin_save(
                session,
                &SaveRequest::new("save", &hashes, tokens).offers(offers),
            )
        });
        let blocks = granted.transfer.map_or(0, |transfer| {
            self.enter(named, |engine| engine.end_transfer(transfer.id, true));
            transfer
                .extents
                .iter()
                .map(|extent| extent.offsets.len())
                .sum()
        });
        self.enter(0, |engine| engine.finish_request(session, "save"));
        blocks
    }

    /// Looks up a prompt until the answer is no longer pending. Returns the tokens of the hit.
    pub(crate) fn lookup(&mut self, session: SessionId, hashes: &[BlockHash]) -> u32 {
        let named = hashes.len() as u64;
        self.lookup_within(named, session, hashes)
    }

    /// Like `lookup`. Each entry may do as much work as an entry that names this many hash blocks.
    pub(crate) fn lookup_within(
        &mut self,
        named: u64,
        session: SessionId,
        hashes: &[BlockHash],
    ) -> u32 {
        let hashes = hashes.to_vec();
        let mut cursor = LookupCursor::default();
        loop {
            let request = LookupRequest::new("lookup", &hashes);
            let step = |engine: &mut Engine| engine.step_lookup(session, &request, &mut cursor);
            match self.enter(named, step).map(|answer| answer.tokens()) {
                None => {}
                Some(Some(tokens)) => {
                    self.enter(named, |engine| engine.finish_request(session, "lookup"));
                    return tokens.0;
                }
                Some(None) => {
                    self.pump();
                    cursor = LookupCursor::default();
                }
            }
        }
    }

    /// Runs the IO thread until nothing is left to do.
    pub(crate) fn pump(&mut self) {
        while self.step() > 0 || self.engine.wake() == Due::Now {}
    }

    /// Runs this many turns of the IO thread.
    pub(crate) fn idle(&mut self, turns: usize) {
        for _ in 0..turns {
            self.step();
        }
    }

    /// Runs the IO thread until nothing is in flight and nothing waits to be written or read.
    pub(crate) fn flush(&mut self) {
        while !self.engine.is_quiet() {
            self.step();
        }
    }

    /// Runs one turn of the IO thread. Returns the number of operations.
    pub(crate) fn step(&mut self) -> usize {
        let mut started = Started::default();
        self.enter(0, |engine| engine.turn(Room::io(DEPTH), &mut started));
        for request in &started.io {
            let result = self.execute(request);
            let token = request.token();
            self.enter(0, |engine| engine.complete(IoCompletion { token, result }));
        }
        started.io.len()
    }

    fn execute(&mut self, request: &IoRequest) -> Result<u64, IoFault> {
        match request {
            IoRequest::ReadPayload { .. } if self.fault == Fault::Reads => Err(IoFault::Os(5)),
            IoRequest::ReadPayload { checksum, .. } => Ok(*checksum),
            _ if self.fault == Fault::Writes => Err(IoFault::Os(28)),
            IoRequest::WritePayload { .. } | IoRequest::Sealed(_) => Ok(7),
            IoRequest::Erase { .. } | IoRequest::Sync { .. } => Ok(0),
            IoRequest::WriteMeta {
                file,
                file_offset,
                bytes,
                ..
            } => {
                let held = match file {
                    FileKind::Super => &mut self.super_bytes,
                    _ => &mut self.table,
                };
                let at = *file_offset as usize;
                held.resize(held.len().max(at + bytes.len()), 0);
                held[at..at + bytes.len()].copy_from_slice(bytes);
                Ok(0)
            }
        }
    }
}
