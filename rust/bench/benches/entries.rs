//! How long the entries of an engine take that holds many blocks: the longest, and the cost of a large hash map beside
//! it. `cargo bench -p undercroft-bench --bench entries [-- MILLIONS ...]`.
//!
//! Each scenario runs several times with the same entries, and the least time of an entry counts: an interrupt or
//! a page that the system has to clear hits another entry each time.

use std::collections::HashMap;
use std::hint::black_box;
use std::time::Duration;

use undercroft_contract::format::{
    NAMESPACE_BYTES, NamespaceEntry, RECORD_BYTES, Record, namespace_offset,
};
use undercroft_contract::image::DeviceImage;
use undercroft_contract::io::{IoCompletion, IoFault, IoRequest};
use undercroft_contract::key::BlockHash;
use undercroft_contract::namespace::{GroupKind, NamespaceSpec};
use undercroft_contract::pages::page_bytes_for;
use undercroft_contract::session::{LookupRequest, SaveRequest, Tokens};
use undercroft_engine::{Due, Engine, EngineConfig, Room, SessionId, Started};
use undercroft_io::raw::process_time;

const INSTANCE: u64 = 7;
const TOKENS: u32 = 16;
const PAYLOAD: u32 = 128 << 10;
/// Blocks of a prompt.
const CHAIN: u64 = 64;
/// Blocks of the arena.
const HOST: u64 = 65_536;
/// Nodes that become visible together.
const LATE: u64 = 100_000;
/// Operations that the device takes at once.
const DEPTH: usize = 64;
const RUNS: usize = 3;

/// Its name, and its entries into an engine of so many blocks.
type Scenario = (&'static str, fn(&mut Timed, u64));

fn hash(index: u64) -> BlockHash {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&index.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes());
    bytes[8..16].copy_from_slice(&index.to_le_bytes());
    BlockHash::new(&bytes).expect("32 bytes are a hash")
}

fn prompt(chain: u64, blocks: u64) -> Vec<BlockHash> {
    (0..blocks)
        .map(|block| hash(chain * CHAIN + block))
        .collect()
}

fn spec(payload_bytes: u32) -> NamespaceSpec {
    NamespaceSpec::uniform(
        format!("blocks of {payload_bytes} bytes"),
        TOKENS,
        &[(GroupKind::Full, payload_bytes)],
    )
}

fn record(index: u64) -> Record {
    let depth = index % CHAIN;
    Record {
        group: 0,
        hit_class: 0,
        seq: index + 1,
        instance: INSTANCE,
        slot: u32::try_from(index * u64::from(PAYLOAD) / 4096).expect("fits 32 bits"),
        payload_bytes: PAYLOAD,
        checksum: index,
        depth: u32::try_from(depth + 1).expect("fits 32 bits"),
        last: index,
        written_s: 1_800_000_000,
        hash: hash(index),
        parent: (depth > 0).then(|| hash(index - 1)),
    }
}

/// A directory full of chains.
fn image(blocks: u64) -> DeviceImage {
    let entry = NamespaceEntry {
        instance: INSTANCE,
        spec: spec(PAYLOAD),
    };
    let at = namespace_offset(0) as usize;
    let mut super_bytes = vec![0; at + NAMESPACE_BYTES];
    let encoded = entry.encode().expect("a short description");
    super_bytes[at..at + encoded.len()].copy_from_slice(&encoded);
    let mut table = vec![0; blocks as usize * RECORD_BYTES];
    for (index, out) in (0..).zip(table.chunks_mut(RECORD_BYTES)) {
        record(index).encode(out);
    }
    let capacity = blocks * u64::from(PAYLOAD);
    let page_bytes = page_bytes_for(capacity);
    DeviceImage {
        capacity: capacity.next_multiple_of(page_bytes),
        page_bytes,
        holes: Vec::new(),
        super_bytes,
        table: table.into(),
    }
}

/// An engine whose entries are timed.
struct Timed {
    engine: Engine,
    session: SessionId,
    entries: Vec<Duration>,
    fails: bool,
}

impl Timed {
    fn open(blocks: u64) -> Self {
        let mut engine = Engine::new(EngineConfig::new(HOST * u64::from(PAYLOAD)));
        let recovery = engine.attach_disks(vec![image(blocks)]);
        assert_eq!(recovery.blocks, blocks, "all is found again");
        let session = engine.open_session(spec(PAYLOAD)).expect("it fits");
        Self {
            engine,
            session,
            entries: Vec::new(),
            fails: false,
        }
    }

    fn enter<R>(&mut self, entry: impl FnOnce(&mut Engine) -> R) -> R {
        let start = process_time();
        let result = black_box(entry(&mut self.engine));
        self.entries.push(process_time() - start);
        result
    }

    /// A turn of the IO thread.
    fn step(&mut self) -> usize {
        let mut started = Started::default();
        self.enter(|engine| engine.turn(Room::io(DEPTH), &mut started));
        for request in &started.io {
            let result = match request {
                IoRequest::ReadPayload { .. } if self.fails => Err(IoFault::Os(5)),
                IoRequest::ReadPayload { checksum, .. } => Ok(*checksum),
                _ => Ok(0),
            };
            let token = request.token();
            self.enter(|engine| engine.complete(IoCompletion { token, result }));
        }
        started.io.len()
    }

    fn settle(&mut self) {
        while self.step() > 0 || self.engine.wake() == Due::Now {}
    }

    fn save(&mut self, session: SessionId, hashes: &[BlockHash]) -> bool {
        let hashes = hashes.to_vec();
        let tokens = Tokens(hashes.len() as u32 * TOKENS);
        let request = SaveRequest::new("save", &hashes, tokens);
        let granted = self.enter(|engine| engine.begin_save(session, &request));
        if let Some(transfer) = &granted.transfer {
            self.enter(|engine| engine.end_transfer(transfer.id, true));
        }
        self.enter(|engine| engine.finish_request(session, "save"));
        granted.transfer.is_some()
    }

    fn load(&mut self, hashes: &[BlockHash]) {
        let (session, hashes) = (self.session, hashes.to_vec());
        let request = LookupRequest::new("load", &hashes);
        loop {
            let answer = self.enter(|engine| engine.lookup(session, &request));
            if let Some(hit) = answer.tokens() {
                let load = self.enter(|engine| engine.begin_load(session, "load", Tokens(0), hit));
                if let Some(load) = load {
                    self.enter(|engine| engine.end_transfer(load.id, true));
                }
                self.enter(|engine| engine.finish_request(session, "load"));
                return;
            }
            self.step();
        }
    }
}

/// Prompts that lie on disk are loaded.
fn loads(timed: &mut Timed, blocks: u64) {
    for at in 0..2000 {
        timed.load(&prompt(at * 7919 % (blocks / CHAIN), CHAIN));
    }
    timed.settle();
}

/// New prompts are saved and written, and others evicted for them.
fn saves(timed: &mut Timed, blocks: u64) {
    for at in 0..4000 {
        timed.save(timed.session, &prompt(blocks + at, CHAIN));
        timed.step();
    }
    timed.settle();
}

/// A model whose blocks have another size gets its first page, and more.
fn another_size(timed: &mut Timed, blocks: u64) {
    saves(timed, blocks);
    timed.entries.clear();
    let session = timed.engine.open_session(spec(PAYLOAD / 4 * 3));
    let session = session.expect("it fits");
    for at in 0..500 {
        let hashes = prompt(2 * blocks + at, 1);
        while !timed.save(session, &hashes) {
            timed.step();
        }
        timed.step();
    }
    timed.settle();
}

fn reset(timed: &mut Timed, _: u64) {
    let session = timed.session;
    timed.enter(|engine| engine.reset(session));
    timed.settle();
    assert_eq!(timed.engine.gauges().disk_blocks, 0, "all has gone");
}

/// Each read fails, until the directory is given up.
fn failing_directory(timed: &mut Timed, _: u64) {
    timed.fails = true;
    for at in 0..12 {
        timed.load(&prompt(at, CHAIN));
    }
    timed.settle();
    assert_eq!(timed.engine.gauges().disk_blocks, 0, "it is given up");
}

/// Blocks of a prompt whose first is saved last.
fn late_block(timed: &mut Timed, blocks: u64) {
    timed.fails = false;
    // One third of the arena.
    let hashes = prompt(3 * blocks, LATE.min(HOST / 3));
    let first = hashes[..1].to_vec();
    let request = SaveRequest::new("first", &first, Tokens(TOKENS));
    let session = timed.session;
    let granted = timed.enter(|engine| engine.begin_save(session, &request));
    let transfer = granted.transfer.expect("it is new");
    for end in (CHAIN as usize..=hashes.len()).step_by(CHAIN as usize) {
        timed.save(session, &hashes[..end]);
    }
    timed.entries.clear();
    timed.enter(|engine| engine.end_transfer(transfer.id, true));
    timed.settle();
}

/// Nanoseconds of an insertion into a hash map of as many 64-bit keys, without its growth.
fn insertion_ns(blocks: u64) -> f64 {
    let mut map: HashMap<u64, u64> = HashMap::with_capacity(2 * blocks as usize);
    let key = |index: u64| index.wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29);
    map.extend((0..blocks).map(|index| (key(index), index)));
    let start = process_time();
    (blocks..blocks + blocks / 4).for_each(|index| {
        map.insert(key(index), index);
    });
    let took = process_time() - start;
    black_box(&map);
    took.as_nanos() as f64 / (blocks / 4) as f64
}

/// The least time of each entry of a scenario.
fn least(blocks: u64, scenario: fn(&mut Timed, u64)) -> Vec<Duration> {
    let run = || {
        let mut timed = Timed::open(blocks);
        scenario(&mut timed, blocks);
        timed.entries
    };
    let mut least = run();
    for _ in 1..RUNS {
        let entries = run();
        assert_eq!(entries.len(), least.len(), "each run has the same entries");
        for (least, entry) in least.iter_mut().zip(entries) {
            *least = entry.min(*least);
        }
    }
    least
}

fn main() {
    let millions: Vec<u64> = std::env::args()
        .skip(1)
        .filter_map(|argument| argument.parse().ok())
        .collect();
    let millions = if millions.is_empty() {
        vec![1, 4]
    } else {
        millions
    };
    let scenarios: [Scenario; 6] = [
        ("loads of 64 blocks", loads),
        ("saves of 64 blocks", saves),
        ("another size", another_size),
        ("a late first block", late_block),
        ("reset", reset),
        ("failing directory", failing_directory),
    ];
    for millions in millions {
        let blocks = millions << 20;
        let insertion = insertion_ns(blocks);
        println!(
            "{blocks} blocks; an insertion into a map of as many keys takes {insertion:.0} ns"
        );
        for (name, scenario) in scenarios {
            let mut entries = least(blocks, scenario);
            entries.sort_unstable();
            let us = |at: usize| entries[at].as_nanos() as f64 / 1e3;
            let last = entries.len() - 1;
            println!(
                "  {name:<20} {:>8} entries: median {:>6.1} us, 99.9 % {:>6.1}, longest {:>7.1}; at 100 ns an insertion {:>7.1}",
                entries.len(),
                us(last / 2),
                us(last - last / 1000),
                us(last),
                us(last) * 100.0 / insertion,
            );
        }
    }
}
