//! Hosts. Each has an engine, an arena of real bytes, a disk that always works, and a connection to the shared store.

use std::collections::{HashMap, HashSet};

use undercroft_contract::format::Superblock;
use undercroft_contract::image::DeviceImage;
use undercroft_contract::io::{IoCompletion, IoRequest};
use undercroft_contract::key::BlockHash;
use undercroft_contract::namespace::{GroupKind, NamespaceSpec};
use undercroft_contract::pages::page_bytes_for;
use undercroft_contract::remote::RemoteConfig;
use undercroft_contract::session::{
    Extent, Load, Lookup, LookupRequest, Offer, SaveRequest, Tokens,
};
use undercroft_engine::policy::PolicyKind;
use undercroft_engine::work::Work;
use undercroft_engine::{Engine, EngineConfig, Room, SessionId, Started};
use undercroft_io::arena::Arena;

use crate::store::{Connection, Objects};

pub(crate) const BLOCK: u32 = 16;
pub(crate) const PAYLOAD: u32 = 4000;
pub(crate) const SLOT: u64 = 4096;
pub(crate) const MILLISECOND: u64 = 1_000_000;
pub(crate) const SECOND: u64 = 1000 * MILLISECOND;

/// SplitMix64.
#[derive(Clone, Debug)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    /// Whether an event of this probability occurs, in a thousand.
    pub(crate) fn chance(&mut self, of: u64) -> bool {
        self.below(1000) < of
    }
}

/// A model's description and groups.
pub(crate) fn model(id: u64, kinds: &[GroupKind]) -> NamespaceSpec {
    let groups: Vec<_> = kinds.iter().map(|&kind| (kind, PAYLOAD)).collect();
    NamespaceSpec::uniform(format!("model {id}"), BLOCK, &groups)
}

/// The blocks of windows and states that hits at these boundaries need, as a device offers them.
pub(crate) fn offers(spec: &NamespaceSpec, boundaries: &[u32]) -> Vec<Offer> {
    let mut offers = Vec::new();
    for &boundary in boundaries {
        for (group, of) in (0..).zip(&spec.groups) {
            if !matches!(of.kind, GroupKind::Full | GroupKind::Ignored) {
                offers.push(Offer {
                    group,
                    first_block: spec.needed_after(usize::from(group), boundary),
                    end_block: boundary,
                });
            }
        }
    }
    offers
}

/// Checks that a load has every payload that a hit of this many tokens needs.
pub(crate) fn assert_complete(load: &Load, spec: &NamespaceSpec, tokens: u32) {
    let boundary = tokens / BLOCK;
    let there: HashSet<(u8, usize)> = slots(&load.extents)
        .map(|(group, block, _)| (group, block))
        .collect();
    for (group, of) in (0..).zip(&spec.groups) {
        let after = spec.needed_after(usize::from(group), boundary);
        for block in after..boundary {
            assert!(
                of.kind == GroupKind::Ignored || there.contains(&(group, block as usize)),
                "a hit of {boundary} blocks without block {block} of group {group}"
            );
        }
    }
}

/// A chain of block hashes. Two chains are equal up to the point where their branches differ.
pub(crate) fn chain(branches: &[(u64, u32)]) -> Vec<BlockHash> {
    let (mut key, mut hashes) = (0, Vec::new());
    for &(branch, blocks) in branches {
        for block in 0..blocks {
            let mut random = Random(key ^ branch << 32 ^ u64::from(block));
            key = random.next();
            let mut bytes = [0; 32];
            for word in bytes.chunks_exact_mut(8) {
                word.copy_from_slice(&random.next().to_le_bytes());
            }
            hashes.push(BlockHash::new(&bytes).expect("32 bytes"));
        }
    }
    hashes
}

/// The bytes of a payload, by the model, the weights in use, the block and the group.
pub(crate) fn payload(model: u64, weights: u64, hash: &BlockHash, group: u8) -> Vec<u8> {
    let seed = hash.fingerprint() ^ model << 56 ^ weights << 40 ^ u64::from(group) << 36;
    let mut random = Random(seed);
    let words = (0..PAYLOAD / 8).flat_map(|_| random.next().to_le_bytes());
    words.collect()
}

/// A host.
#[derive(Debug)]
pub(crate) struct Host {
    pub(crate) engine: Engine,
    pub(crate) arena: Arena,
    pub(crate) store: Connection,
    /// Payloads on disk, by place.
    disk: HashMap<u64, Vec<u8>>,
    pub(crate) now_ns: u64,
    pub(crate) policy: PolicyKind,
    /// The most work of an entry.
    pub(crate) most_work: Work,
}

/// The configuration of a host with room for this many payloads, and this many payloads to a segment.
pub(crate) fn config(slots: u64, segment: u64) -> EngineConfig {
    let mut config = EngineConfig::new(slots * SLOT);
    config.remote = Some(RemoteConfig {
        object_bytes: segment * SLOT,
        write_rate: 0,
        ..RemoteConfig::default()
    });
    config
}

impl Host {
    pub(crate) fn new(config: EngineConfig, store: Connection, disk_slots: u64) -> Self {
        let arena = Arena::create(config.host_bytes).expect("memory");
        let policy = config.policy;
        let mut engine = Engine::new(config);
        if disk_slots > 0 {
            let capacity = disk_slots * SLOT;
            let page_bytes = page_bytes_for(capacity);
            let superblock = Superblock {
                store_id: 1,
                page_bytes,
                encrypted: false,
            };
            engine.attach_disks(vec![DeviceImage {
                capacity: capacity / page_bytes * page_bytes,
                page_bytes,
                holes: Vec::new(),
                super_bytes: superblock.encode().into(),
                table: Vec::new().into(),
            }]);
        }
        engine.attach_remote();
        Self {
            engine,
            arena,
            store,
            disk: HashMap::new(),
            now_ns: 0,
            policy,
            most_work: Work::default(),
        }
    }

    /// Enters the engine.
    pub(crate) fn enter<R>(&mut self, work: impl FnOnce(&mut Engine) -> R) -> R {
        self.engine.set_now(self.now_ns);
        Work::take();
        let result = work(&mut self.engine);
        let done = Work::take();
        if done.units() > self.most_work.units() {
            self.most_work = done;
        }
        result
    }

    /// Runs one turn of the IO thread.
    pub(crate) fn turn(&mut self, objects: &mut Objects, random: &mut Random) {
        let ended = self.store.drain(self.now_ns, objects, &self.arena, random);
        for completion in ended {
            self.enter(|engine| engine.complete_remote(completion));
        }
        let mut started = Started::default();
        self.enter(|engine| engine.turn(Room::checksums(u32::MAX), &mut started));
        for sum in started.checksums.drain(..) {
            let len = u64::from(sum.payload_len);
            let found = self.arena.checksum(sum.arena_offset, len);
            let completion = IoCompletion {
                token: sum.token,
                result: Ok(found.expect("in the arena")),
            };
            self.enter(|engine| engine.complete(completion));
        }
        self.enter(|engine| engine.turn(Room::io(64), &mut started));
        for request in started.io.drain(..) {
            let completion = self.carry_out(&request);
            self.enter(|engine| engine.complete(completion));
        }
        let room = Room::store(self.store.room());
        self.enter(|engine| engine.turn(room, &mut started));
        for request in started.store {
            self.store.submit(request, self.now_ns, objects, random);
        }
    }

    /// Carries out an operation of the disk at once.
    fn carry_out(&mut self, request: &IoRequest) -> IoCompletion {
        let sum = |host: &Self, offset: u64, len: u32| {
            let sum = host.arena.checksum(offset, u64::from(len));
            sum.expect("in the arena")
        };
        let result = match *request {
            IoRequest::ReadPayload {
                file_offset,
                arena_offset,
                payload_len,
                checksum,
                ..
            } => {
                let bytes = &self.disk[&file_offset];
                self.arena.write(arena_offset, bytes).expect("in the arena");
                let found = sum(self, arena_offset, payload_len);
                assert_eq!(found, checksum, "the disk of a test never lies");
                found
            }
            IoRequest::WritePayload {
                file_offset,
                arena_offset,
                payload_len,
                ..
            } => {
                let bytes = self.arena.read(arena_offset, u64::from(payload_len));
                self.disk.insert(file_offset, bytes.expect("in the arena"));
                sum(self, arena_offset, payload_len)
            }
            IoRequest::WriteMeta { .. } | IoRequest::Erase { .. } | IoRequest::Sync { .. } => 0,
            IoRequest::Sealed(_) => unreachable!("the store is plain"),
        };
        IoCompletion {
            token: request.token(),
            result: Ok(result),
        }
    }

    /// Runs turns for this many milliseconds.
    pub(crate) fn run(&mut self, milliseconds: u64, objects: &mut Objects, random: &mut Random) {
        for _ in 0..milliseconds {
            self.turn(objects, random);
            self.now_ns += MILLISECOND;
        }
    }

    /// Looks up a prompt until there is an answer. Returns the tokens of the hit, and the milliseconds until then.
    pub(crate) fn ask(
        &mut self,
        session: SessionId,
        name: &str,
        hashes: &[BlockHash],
        objects: &mut Objects,
        random: &mut Random,
    ) -> (u32, u64) {
        let hashes = hashes.to_vec();
        for waited in 0..100_000 {
            let question = LookupRequest::new(name, &hashes);
            let answer = self.enter(|engine| engine.lookup(session, &question));
            if let Some(tokens) = answer.tokens() {
                return (tokens.0, waited);
            }
            self.run(1, objects, random);
        }
        panic!("no answer in 100 s: {:?}", self.engine.counters());
    }

    /// Loads a hit, and checks its bytes. Returns the number of blocks.
    pub(crate) fn load(
        &mut self,
        (session, name): (SessionId, &str),
        tokens: u32,
        hashes: &[BlockHash],
        (model, weights): (u64, u64),
    ) -> u32 {
        let load = self.enter(|engine| engine.begin_load(session, name, Tokens(0), Tokens(tokens)));
        let load = load.expect("a hit can be loaded");
        let blocks = self.compare(&load, hashes, (model, weights));
        self.enter(|engine| engine.end_transfer(load.id, true));
        self.enter(|engine| engine.finish_request(session, name));
        blocks
    }

    /// Checks the bytes of a load. Returns the number of blocks.
    pub(crate) fn compare(
        &self,
        load: &Load,
        hashes: &[BlockHash],
        (model, weights): (u64, u64),
    ) -> u32 {
        let mut blocks = 0;
        for (group, block, offset) in slots(&load.extents) {
            let found = self.arena.read(offset, u64::from(PAYLOAD));
            let right = payload(model, weights, &hashes[block], group);
            assert!(
                found.expect("in the arena") == right,
                "wrong bytes of block {block} in group {group}"
            );
            assert!(
                !self.store.uses(offset, SLOT, false),
                "a load is overwritten"
            );
            blocks += 1;
        }
        blocks
    }

    /// Saves a computed prompt. Returns the number of new payloads.
    pub(crate) fn save(
        &mut self,
        of: (SessionId, &str),
        hashes: &[BlockHash],
        weights: (u64, u64),
    ) -> usize {
        self.save_with(of, hashes, &[], weights)
    }

    /// Saves a prompt with windows and states.
    pub(crate) fn save_with(
        &mut self,
        (session, name): (SessionId, &str),
        hashes: &[BlockHash],
        offers: &[Offer],
        (model, weights): (u64, u64),
    ) -> usize {
        let all = hashes.to_vec();
        let tokens = Tokens(all.len() as u32 * BLOCK);
        let save = SaveRequest::new(name, &all, tokens).offers(offers);
        let granted = self.enter(|engine| engine.begin_save(session, &save));
        let Some(transfer) = granted.transfer else {
            return 0;
        };
        self.fill(&transfer.extents, hashes, (model, weights));
        self.enter(|engine| engine.end_transfer(transfer.id, true));
        self.enter(|engine| engine.finish_request(session, name));
        slots(&transfer.extents).count()
    }

    /// Does a worker's part of a save.
    pub(crate) fn fill(
        &self,
        extents: &[Extent],
        hashes: &[BlockHash],
        (model, weights): (u64, u64),
    ) {
        for (group, block, offset) in slots(extents) {
            assert!(
                !self.store.uses(offset, SLOT, true),
                "a slot is given twice"
            );
            let bytes = payload(model, weights, &hashes[block], group);
            self.arena.write(offset, &bytes).expect("in the arena");
        }
    }

    /// Looks up once. Returns the answer, which may be pending.
    pub(crate) fn look(&mut self, session: SessionId, question: &LookupRequest<'_>) -> Lookup {
        self.enter(|engine| engine.lookup(session, question))
    }

    pub(crate) fn check(&self) {
        if let Err(message) = self.engine.inspect().check() {
            panic!("{message}");
        }
    }
}

/// The slots of extents: the group, the block and the offset of each.
pub(crate) fn slots(extents: &[Extent]) -> impl Iterator<Item = (u8, usize, u64)> + '_ {
    extents.iter().flat_map(|extent| {
        let blocks = (extent.first_block as usize..).zip(&extent.offsets);
        let known = blocks.filter_map(|(block, offset)| Some((block, offset.get()?)));
        known.map(|(block, offset)| (extent.group, block, offset))
    })
}
