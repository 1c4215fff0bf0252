//! An engine with a remote store beside its disk: lookups that do not need the store, a prompt that lies half on disk and
//! half in the store, and an entry with nothing to do. The store and the disk answer at once, so the engine's own
//! work is measured.

use std::collections::HashMap;
use std::hint::black_box;

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use undercroft_contract::format::Superblock;
use undercroft_contract::image::DeviceImage;
use undercroft_contract::io::{IoCompletion, IoRequest, IoRoom};
use undercroft_contract::key::BlockHash;
use undercroft_contract::namespace::{GroupKind, NamespaceSpec};
use undercroft_contract::pages::page_bytes_for;
use undercroft_contract::remote::{
    ObjectKey, RemoteCompletion, RemoteConfig, RemoteDone, RemoteError, RemoteRequest, RemoteWrite,
    SegmentHeader,
};
use undercroft_contract::session::{LookupRequest, PromotionWait, SaveRequest, Tokens};
use undercroft_engine::{Due, Engine, EngineConfig, Room, SessionId, Started};

const TOKENS: u32 = 16;
const PAYLOAD: u32 = 128 << 10;
/// Blocks of a prompt.
const BLOCKS: u32 = 256;
/// Blocks of the arena: two prompts.
const HOST: u32 = 2 * BLOCKS;
const DISK: u64 = 4 << 30;
/// Blocks of an object of the store.
const OF_OBJECT: u32 = 16;
/// Room for operations of the disk and of the store.
const ROOM: Room<'_> = Room {
    io: Some(IoRoom::Same(64)),
    memory: false,
    checksum_bytes: None,
    store: Some(64),
};
/// The sum of every payload.
const SUM: u64 = 7;

fn hashes(salt: u8) -> Vec<BlockHash> {
    let hash = |index: u32| {
        let mut bytes = [salt; 32];
        bytes[..4].copy_from_slice(&index.wrapping_mul(0x9e37_79b1).to_le_bytes());
        BlockHash::new(&bytes).expect("32 bytes")
    };
    (0..BLOCKS).map(hash).collect()
}

/// A machine whose disk and store answer at once.
struct Machine {
    engine: Engine,
    session: SessionId,
    /// The sums of each object of the store.
    objects: HashMap<ObjectKey, Vec<u64>>,
}

impl Machine {
    fn start(objects: HashMap<ObjectKey, Vec<u64>>, disk: bool, write: RemoteWrite) -> Self {
        let mut config = EngineConfig::new(u64::from(HOST) * u64::from(PAYLOAD));
        config.remote = Some(RemoteConfig {
            object_bytes: u64::from(OF_OBJECT * PAYLOAD),
            write,
            write_rate: 0,
            ..RemoteConfig::default()
        });
        let mut engine = Engine::new(config);
        let page_bytes = page_bytes_for(DISK);
        let superblock = Superblock {
            store_id: 1,
            page_bytes,
            encrypted: false,
        };
        let image = DeviceImage {
            capacity: DISK / page_bytes * page_bytes,
            page_bytes,
            holes: Vec::new(),
            super_bytes: superblock.encode().into(),
            table: Vec::new().into(),
        };
        engine.attach_disks(if disk { vec![image] } else { Vec::new() });
        engine.attach_remote();
        let spec = NamespaceSpec::uniform("benchmark", TOKENS, &[(GroupKind::Full, PAYLOAD)]);
        let session = engine.open_session(spec).expect("the spec is sound");
        Self {
            engine,
            session,
            objects,
        }
    }

    /// A turn of the IO thread and of the store's threads. Returns whether there was anything to do.
    fn turn(&mut self) -> bool {
        let mut started = Started::default();
        self.engine.turn(Room::checksums(u32::MAX), &mut started);
        self.engine.turn(ROOM, &mut started);
        let Started {
            io,
            checksums,
            store,
            ..
        } = started;
        let any = !(io.is_empty() && store.is_empty() && checksums.is_empty());
        for request in checksums {
            let token = request.token;
            let result = Ok(SUM);
            self.engine.complete(IoCompletion { token, result });
        }
        for request in io {
            let token = request.token();
            let result = match request {
                IoRequest::ReadPayload { checksum, .. } => Ok(checksum),
                _ => Ok(SUM),
            };
            self.engine.complete(IoCompletion { token, result });
        }
        for request in store {
            let token = request.token();
            let result = self.carry_out(request);
            self.engine
                .complete_remote(RemoteCompletion { token, result });
        }
        any || self.engine.wake() == Due::Now
    }

    fn carry_out(&mut self, request: RemoteRequest) -> Result<RemoteDone, RemoteError> {
        match request {
            RemoteRequest::Probe { keys, .. } => {
                let there = (0..)
                    .zip(&keys)
                    .filter(|(_, key)| self.objects.contains_key(key));
                Ok(RemoteDone::Present(
                    there.fold(0, |bits, (at, _)| bits | 1 << at),
                ))
            }
            RemoteRequest::Get { key, parts, .. } => {
                let sums = self.objects.get(&key).ok_or(RemoteError::NotFound)?;
                let of = parts.iter().map(|part| sums[part.payload as usize]);
                Ok(RemoteDone::Got(of.collect()))
            }
            RemoteRequest::Put { key, header, .. } => {
                let header = SegmentHeader::decode(&header).expect("the engine writes headers");
                self.objects.insert(key, header.checksums);
                Ok(RemoteDone::Stored)
            }
        }
    }

    fn settle(&mut self) {
        while self.turn() {}
    }

    fn save(&mut self, hashes: &[BlockHash]) {
        let save = SaveRequest::new("fill", &hashes, Tokens(hashes.len() as u32 * TOKENS));
        let granted = self.engine.begin_save(self.session, &save);
        let transfer = granted.transfer.expect("there is room");
        self.engine.end_transfer(transfer.id, true);
        self.engine.finish_request(self.session, "fill");
        self.settle();
    }

    /// From the first lookup to the end of the load.
    fn load(&mut self, hashes: &[BlockHash]) -> Tokens {
        let request = LookupRequest::new("r", &hashes).wait(Some(PromotionWait::Complete));
        loop {
            let answer = self.engine.lookup(self.session, &request);
            if let Some(hit) = answer.tokens() {
                let load = self.engine.begin_load(self.session, "r", Tokens(0), hit);
                if let Some(load) = load {
                    self.engine.end_transfer(load.id, true);
                }
                self.engine.finish_request(self.session, "r");
                return hit;
            }
            self.turn();
        }
    }
}

/// The objects of a prompt, from another host.
fn objects_of(hashes: &[BlockHash]) -> HashMap<ObjectKey, Vec<u64>> {
    let mut other = Machine::start(HashMap::new(), false, RemoteWrite::All);
    other.save(hashes);
    assert_eq!(other.objects.len() as u32, BLOCKS / OF_OBJECT);
    other.objects
}

fn benchmarks(c: &mut Criterion) {
    let mut group = c.benchmark_group("store");
    let prompt = hashes(1);
    let all = Tokens(BLOCKS * TOKENS);

    let mut machine = Machine::start(HashMap::new(), true, RemoteWrite::None);
    machine.save(&prompt);
    let request = LookupRequest::new("hit", &prompt);
    group.bench_function("lookup that hits in host memory", |b| {
        b.iter(|| {
            let answer = machine.engine.lookup(machine.session, &request);
            assert_eq!(black_box(answer).tokens(), Some(all));
        });
    });
    machine.engine.finish_request(machine.session, "hit");

    let unknown = hashes(99);
    assert_eq!(
        machine.load(&unknown),
        Tokens(0),
        "from now on it is known to be absent"
    );
    let request = LookupRequest::new("miss", &unknown);
    group.bench_function("lookup of an absent prompt", |b| {
        b.iter(|| {
            let answer = machine.engine.lookup(machine.session, &request);
            assert_eq!(black_box(answer).tokens(), Some(Tokens(0)));
        });
    });
    machine.engine.finish_request(machine.session, "miss");
    machine.settle();

    let mut started = Started::default();
    group.bench_function("entry with nothing to do", |b| {
        b.iter(|| {
            machine.engine.turn(ROOM, &mut started);
            assert!(machine.engine.wake() < Due::Start);
            assert!(started.io.is_empty() && started.store.is_empty());
        });
    });

    let objects = objects_of(&prompt);
    let half = &prompt[..prompt.len() / 2];
    let prepared = || {
        let mut machine = Machine::start(objects.clone(), true, RemoteWrite::None);
        machine.save(half);
        // Others take the arena.
        (2..5).for_each(|salt| machine.save(&hashes(salt)));
        machine
    };
    let mut checked = prepared();
    assert_eq!(checked.load(&prompt), all);
    let counters = checked.engine.counters();
    assert_eq!(counters.disk_reads, u64::from(BLOCKS / 2));
    assert_eq!(counters.remote_gets, u64::from(BLOCKS / OF_OBJECT / 2));
    group.bench_function("prompt half on disk, half in the store", |b| {
        b.iter_batched(
            prepared,
            |mut machine| {
                machine.load(black_box(&prompt));
                machine
            },
            BatchSize::PerIteration,
        );
    });
    group.finish();
}

criterion_group!(benches, benchmarks);
criterion_main!(benches);
