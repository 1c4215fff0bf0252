//! One life of an engine, on plain bytes: save, hit, write-back, restart, promotion, load.

#![expect(
    clippy::unwrap_used,
    reason = "a helper that fails is a test that fails"
)]

use undercroft_contract::checksum::checksum;
use undercroft_contract::format::Superblock;
use undercroft_contract::image::DeviceImage;
use undercroft_contract::io::{FileKind, IoCompletion, IoFault, IoRequest};
use undercroft_contract::key::BlockHash;
use undercroft_contract::namespace::{GroupKind, NamespaceSpec};
use undercroft_contract::session::{
    Extent, LookupRequest, Priority, SaveRequest, SessionSpec, Tokens,
};
use undercroft_engine::{Engine, EngineConfig, Room, SessionId, Started};

const HOST_BYTES: usize = 4 << 20;
const DATA_BYTES: usize = 8 << 20;
const PAGE_BYTES: u64 = 256 << 10;
const PAYLOAD: usize = 10_000;
const HASH_BLOCK: u32 = 16;

/// A machine that carries out every operation at once.
struct Machine {
    arena: Vec<u8>,
    data: Vec<u8>,
    table: Vec<u8>,
    super_file: Vec<u8>,
    reads: usize,
}

impl Machine {
    fn new() -> Self {
        Self {
            arena: vec![0; HOST_BYTES],
            data: vec![0; DATA_BYTES],
            table: Vec::new(),
            super_file: Superblock {
                store_id: 1,
                page_bytes: PAGE_BYTES,
                encrypted: false,
            }
            .encode()
            .into(),
            reads: 0,
        }
    }

    fn engine(&mut self, seed: u64) -> Engine {
        self.engine_with(EngineConfig {
            seed,
            ..EngineConfig::new(HOST_BYTES as u64)
        })
    }

    fn engine_with(&mut self, config: EngineConfig) -> Engine {
        let mut engine = Engine::new(config);
        engine.attach_disks(vec![self.image()]);
        self.arena.fill(0);
        engine
    }

    fn image(&self) -> DeviceImage {
        DeviceImage {
            capacity: DATA_BYTES as u64,
            page_bytes: PAGE_BYTES,
            holes: Vec::new(),
            super_bytes: self.super_file.clone(),
            table: self.table.clone().into(),
        }
    }

    fn run(&mut self, engine: &mut Engine) {
        for _ in 0..1000 {
            let requests = turn(engine, 4);
            if requests.is_empty() {
                return;
            }
            self.complete(engine, requests);
        }
        panic!("the engine never comes to rest");
    }

    fn complete(&mut self, engine: &mut Engine, requests: Vec<IoRequest>) {
        for request in requests {
            let token = request.token();
            let result = self.execute(request);
            engine.complete(IoCompletion { token, result });
        }
    }

    fn execute(&mut self, request: IoRequest) -> Result<u64, IoFault> {
        match request {
            IoRequest::ReadPayload {
                file_offset,
                arena_offset,
                len,
                payload_len,
                checksum: expected,
                ..
            } => {
                self.reads += 1;
                let (from, to) = (file_offset as usize, arena_offset as usize);
                let source = &self.data[from..from + len as usize];
                self.arena[to..to + len as usize].copy_from_slice(source);
                let found = checksum(&self.arena[to..to + payload_len as usize]);
                (found == expected).then_some(found).ok_or(IoFault::Corrupt)
            }
            IoRequest::WritePayload {
                file_offset,
                arena_offset,
                len,
                payload_len,
                checksum: given,
                ..
            } => {
                let (from, to) = (arena_offset as usize, file_offset as usize);
                let source = &self.arena[from..from + len as usize];
                self.data[to..to + len as usize].copy_from_slice(source);
                Ok(given.unwrap_or_else(|| checksum(&source[..payload_len as usize])))
            }
            IoRequest::Sealed(_) => unreachable!("the store is plain"),
            IoRequest::Erase {
                file_offset, len, ..
            } => {
                let from = file_offset as usize;
                self.data[from..from + len as usize].fill(0);
                Ok(0)
            }
            IoRequest::Sync { .. } => Ok(0),
            IoRequest::WriteMeta {
                file,
                file_offset,
                bytes,
                ..
            } => {
                let file = match file {
                    FileKind::Super => &mut self.super_file,
                    _ => &mut self.table,
                };
                let at = file_offset as usize;
                if file.len() < at + bytes.len() {
                    file.resize(at + bytes.len(), 0);
                }
                file[at..at + bytes.len()].copy_from_slice(&bytes);
                Ok(0)
            }
        }
    }
}

fn spec() -> NamespaceSpec {
    NamespaceSpec::uniform("smoke", HASH_BLOCK, &[(GroupKind::Full, PAYLOAD as u32)])
}

fn chain(len: u8) -> Vec<BlockHash> {
    (1..=len)
        .map(|depth| BlockHash::new(&[depth; 32]).unwrap())
        .collect()
}

fn payload(depth: usize) -> Vec<u8> {
    let word = |i: u64| (i ^ (depth as u64) << 32).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (0..PAYLOAD as u64)
        .map(|i| (word(i) ^ word(i) >> 29).wrapping_mul(0xBF58_476D_1CE4_E5B9) as u8)
        .collect()
}

fn offsets(extents: &[Extent]) -> Vec<(usize, usize)> {
    let blocks = extents
        .iter()
        .flat_map(|extent| (extent.first_block as usize..).zip(&extent.offsets));
    blocks
        .map(|(block, &offset)| (block, offset.get().unwrap() as usize))
        .collect()
}

fn save(machine: &mut Machine, engine: &mut Engine, session: SessionId, hashes: &Vec<BlockHash>) {
    let tokens = hashes.len() as u32 * HASH_BLOCK;
    let transfer = engine
        .begin_save(session, &SaveRequest::new("r", &hashes, Tokens(tokens)))
        .transfer
        .unwrap();
    for (block, offset) in offsets(&transfer.extents) {
        machine.arena[offset..offset + PAYLOAD].copy_from_slice(&payload(block + 1));
    }
    engine.end_transfer(transfer.id, true);
}

fn load(machine: &Machine, engine: &mut Engine, session: SessionId, blocks: u32) {
    let transfer = engine
        .begin_load(session, "r", Tokens(0), Tokens(blocks * HASH_BLOCK))
        .unwrap();
    let found = offsets(&transfer.extents);
    assert_eq!(found.len(), blocks as usize);
    for (block, offset) in found {
        let bytes = &machine.arena[offset..offset + PAYLOAD];
        assert!(bytes == payload(block + 1), "block {block} is wrong");
    }
    engine.end_transfer(transfer.id, true);
    engine.finish_request(session, "r");
}

#[test]
fn a_chain_survives_a_restart() {
    let mut machine = Machine::new();
    let hashes = chain(6);
    let all = 6 * HASH_BLOCK;

    let mut engine = machine.engine(1);
    let session = engine.open_session(spec()).unwrap();
    assert_eq!(
        engine
            .lookup(session, &LookupRequest::new("r", &hashes).max(Tokens(all)))
            .tokens(),
        Some(Tokens(0)),
        "nothing is there yet"
    );
    engine.finish_request(session, "r");
    save(&mut machine, &mut engine, session, &hashes);
    assert_eq!(
        engine
            .lookup(session, &LookupRequest::new("r", &hashes).max(Tokens(all)))
            .tokens(),
        Some(Tokens(all))
    );
    load(&machine, &mut engine, session, 6);
    machine.run(&mut engine);
    assert!(engine.is_quiet());
    assert_eq!(engine.counters().disk_writes, 6);
    assert_eq!(machine.reads, 0);

    let mut engine = machine.engine(2);
    assert_eq!(engine.gauges().disk_blocks, 6);
    let session = engine.open_session(spec()).unwrap();
    engine.lookup(
        session,
        &LookupRequest::new("r", &hashes).max(Tokens(all)).prefetch(),
    );
    assert_eq!(
        engine
            .lookup(session, &LookupRequest::new("r", &hashes).max(Tokens(all)))
            .tokens(),
        None
    );
    machine.run(&mut engine);
    assert_eq!(
        engine
            .lookup(session, &LookupRequest::new("r", &hashes).max(Tokens(all)))
            .tokens(),
        Some(Tokens(all))
    );
    load(&machine, &mut engine, session, 6);
    assert_eq!(machine.reads, 6, "each payload is read once");
    engine.close_session(session);
    let gauges = engine.gauges();
    assert_eq!(
        (gauges.active_lookups, gauges.loads, gauges.saves),
        (0, 0, 0)
    );
}

#[test]
fn namespaces_are_counted_while_they_have_nodes() {
    let mut machine = Machine::new();
    let mut engine = machine.engine(1);
    let session = engine.open_session(spec()).unwrap();
    assert_eq!(engine.gauges().namespaces, 0);
    save(&mut machine, &mut engine, session, &chain(6));
    assert_eq!(engine.gauges().namespaces, 1);
    engine.reset(session);
    machine.run(&mut engine);
    assert_eq!(engine.gauges().namespaces, 0);
    // The session has its own from now on, beside the one of the description.
    save(&mut machine, &mut engine, session, &chain(6));
    let other = engine.open_session(spec()).unwrap();
    save(&mut machine, &mut engine, other, &chain(6));
    assert_eq!(engine.gauges().namespaces, 2);
    engine.close_session(session);
    machine.run(&mut engine);
    assert_eq!(engine.gauges().namespaces, 1);
}

/// An engine whose directories have tables of two entries.
fn of_two_entries(images: Vec<DeviceImage>) -> Engine {
    let mut engine = Engine::new(EngineConfig {
        namespace_entries_max: 2,
        ..EngineConfig::new(HOST_BYTES as u64)
    });
    engine.attach_disks(images);
    engine
}

fn open(engine: &mut Engine, name: &str) -> SessionId {
    let description = name.to_owned();
    let spec = NamespaceSpec {
        description,
        ..spec()
    };
    engine.open_session(spec).unwrap()
}

#[test]
fn for_a_directory_that_is_absent_no_namespace_makes_room() {
    let mut engine = of_two_entries(vec![Machine::new().image(), DeviceImage::absent()]);
    for name in ["one", "two", "one"] {
        let session = open(&mut engine, name);
        engine.close_session(session);
    }
    assert_eq!(known_and_kept(&engine).0, 2);
}

/// Shared namespaces, and those that all directories keep.
fn known_and_kept(engine: &Engine) -> (usize, usize) {
    let known: Vec<_> = engine.inspect().shared_namespaces().collect();
    (known.len(), known.iter().filter(|(_, kept)| *kept).count())
}

#[test]
fn a_namespace_that_was_reset_and_is_in_use_keeps_its_place_in_a_full_table() {
    let mut machine = Machine::new();
    let mut engine = of_two_entries(vec![machine.image()]);
    let [one, other, two] = ["one", "one", "two"].map(|name| open(&mut engine, name));
    engine.close_session(two);
    machine.run(&mut engine);
    engine.reset(one);
    // The reset has cleared an entry, and takes it again when that is durable.
    let three = open(&mut engine, "three");
    machine.run(&mut engine);
    assert_eq!(engine.gauges().volatile_namespaces, 0);
    assert_eq!(known_and_kept(&engine), (2, 2));
    // Its own session does not count against it.
    engine.close_session(three);
    engine.reset(other);
    open(&mut engine, "one");
    machine.run(&mut engine);
    assert_eq!(known_and_kept(&engine).0, 2, "nobody is forgotten");
}

#[test]
fn an_empty_namespace_that_nobody_uses_loses_nothing_at_a_restart() {
    let mut machine = Machine::new();
    let mut engine = of_two_entries(vec![machine.image()]);
    let [one, two] = ["one", "two"].map(|name| open(&mut engine, name));
    engine.close_session(two);
    engine.reset(one);
    assert_eq!(
        engine.gauges().volatile_namespaces,
        0,
        "the reset is under way"
    );
    // Takes the entry that the reset has cleared.
    let three = open(&mut engine, "three");
    machine.run(&mut engine);
    assert_eq!(known_and_kept(&engine), (3, 2));
    assert_eq!(
        engine.gauges().volatile_namespaces,
        0,
        "nobody uses it, and it is empty"
    );
    let again = open(&mut engine, "one");
    machine.run(&mut engine);
    assert_eq!(engine.gauges().volatile_namespaces, 0, "it makes room");
    for session in [one, three, again] {
        engine.close_session(session);
    }
}

#[test]
fn a_payload_that_was_summed_while_it_waited_to_be_written_is_not_summed_again() {
    let mut machine = Machine::new();
    let hashes = chain(6);
    let all = 6 * HASH_BLOCK;
    let mut engine = machine.engine(1);
    let session = engine.open_session(spec()).unwrap();
    let before = vec![BlockHash::new(&[99; 32]).unwrap()];
    save(&mut machine, &mut engine, session, &before);
    machine.run(&mut engine);

    save(&mut machine, &mut engine, session, &hashes);
    let first = turn(&mut engine, 2);
    assert_eq!(given(&first), [None, None]);
    let mut started = Started::default();
    engine.turn(Room::checksums(u32::MAX), &mut started);
    let sums = started.checksums;
    assert_eq!(sums.len(), 4, "a write in flight computes its own");
    for request in sums {
        let from = request.arena_offset as usize;
        let bytes = &machine.arena[from..from + request.payload_len as usize];
        let (token, result) = (request.token, Ok(checksum(bytes)));
        engine.complete(IoCompletion { token, result });
    }
    let start = payload(5);
    let mut places = machine.arena.windows(64);
    let at = places.position(|window| window == &start[..64]).unwrap();
    machine.arena[at + 9_000] ^= 4;
    machine.complete(&mut engine, first);
    let later = turn(&mut engine, 8);
    let saved: Vec<_> = (3..=6)
        .map(|depth| Some(checksum(&payload(depth))))
        .collect();
    assert_eq!(given(&later), saved);
    machine.complete(&mut engine, later);
    machine.run(&mut engine);

    // The record has the checksum of the saved bytes, and the changed bytes do not match.
    let mut engine = machine.engine(2);
    let session = engine.open_session(spec()).unwrap();
    let asked = LookupRequest::new("r", &hashes).max(Tokens(all));
    assert_eq!(engine.lookup(session, &asked).tokens(), None);
    machine.run(&mut engine);
    let found = engine.lookup(session, &asked).tokens();
    assert_eq!(found, Some(Tokens(4 * HASH_BLOCK)));
    assert_eq!(engine.counters().checksum_failures, 1);
    load(&machine, &mut engine, session, 4);
}

/// The checksums that writes of payloads need not compute.
/// The operations of the disk that start now.
fn turn(engine: &mut Engine, room: usize) -> Vec<IoRequest> {
    let mut started = Started::default();
    engine.turn(Room::io(room), &mut started);
    started.io
}

fn given(requests: &[IoRequest]) -> Vec<Option<u64>> {
    let checksum = |request: &IoRequest| match request {
        IoRequest::WritePayload { checksum, .. } => Some(*checksum),
        _ => None,
    };
    requests.iter().filter_map(checksum).collect()
}

#[test]
fn a_flipped_bit_is_a_miss() {
    let mut machine = Machine::new();
    let hashes = chain(6);
    let all = 6 * HASH_BLOCK;
    let mut engine = machine.engine(1);
    let session = engine.open_session(spec()).unwrap();
    save(&mut machine, &mut engine, session, &hashes);
    machine.run(&mut engine);

    let mut engine = machine.engine(2);
    let session = engine.open_session(spec()).unwrap();
    let start = payload(4);
    let at = machine
        .data
        .windows(64)
        .position(|window| window == &start[..64])
        .unwrap();
    machine.data[at + 9_000] ^= 4;
    engine.lookup(
        session,
        &LookupRequest::new("r", &hashes).max(Tokens(all)).prefetch(),
    );
    assert!(
        engine
            .still_pending(session, "r", Tokens(0), Priority::Demand)
            .is_none(),
        "nobody has asked yet"
    );
    assert_eq!(
        engine
            .lookup(session, &LookupRequest::new("r", &hashes).max(Tokens(all)))
            .tokens(),
        None
    );
    assert!(
        engine
            .still_pending(session, "r", Tokens(0), Priority::Demand)
            .is_some()
    );
    assert!(
        engine
            .still_pending(session, "r", Tokens(all), Priority::Demand)
            .is_none(),
        "the device has it all"
    );
    machine.run(&mut engine);
    assert!(
        engine
            .still_pending(session, "r", Tokens(0), Priority::Demand)
            .is_none()
    );
    let before_it = 3 * HASH_BLOCK;
    assert_eq!(
        engine
            .lookup(session, &LookupRequest::new("r", &hashes).max(Tokens(all)))
            .tokens(),
        Some(Tokens(before_it))
    );
    load(&machine, &mut engine, session, 3);
    assert_eq!(engine.counters().checksum_failures, 1);
}

#[test]
fn writes_leave_a_part_of_the_depth_to_reads() {
    let mut machine = Machine::new();
    let mut engine = machine.engine(1);
    engine.set_io_depth(8);
    let session = engine.open_session(spec()).unwrap();
    machine.run(&mut engine);
    save(&mut machine, &mut engine, session, &chain(12));
    let mut requests = turn(&mut engine, 8);
    assert_eq!(requests.len(), 6);
    assert_eq!(turn(&mut engine, 2), [], "none has ended");
    machine.complete(&mut engine, vec![requests.swap_remove(0)]);
    assert_eq!(turn(&mut engine, 3).len(), 1);
}

#[test]
fn limits_below_one_hash_block_are_a_miss() {
    let mut machine = Machine::new();
    let hashes = chain(3);
    let mut engine = machine.engine(1);
    let session = engine.open_session(spec()).unwrap();
    save(&mut machine, &mut engine, session, &hashes);
    for most in [0, 1, HASH_BLOCK - 1] {
        assert_eq!(
            engine
                .lookup(session, &LookupRequest::new("r", &hashes).max(Tokens(most)))
                .tokens(),
            Some(Tokens(0))
        );
    }
}

#[test]
fn a_prefetch_with_a_lease_gives_way_to_no_lookup() {
    let mut machine = Machine::new();
    let mut engine = machine.engine(1);
    let session = engine.open_session(spec()).unwrap();
    let prompts: Vec<Vec<BlockHash>> = (0..2)
        .map(|prompt| {
            chain(8 + prompt)
                .iter()
                .map(|hash| other(hash, prompt))
                .collect()
        })
        .collect();
    for hashes in &prompts {
        save(&mut machine, &mut engine, session, hashes);
    }
    machine.run(&mut engine);
    // Promotions may hold as much as twice the first one needs, prefetches half of that.
    let slots = 8 * 12_288;
    for told in [false, true] {
        let mut engine = machine.engine_with(EngineConfig {
            seed: 2,
            promotion_bytes: 2 * slots,
            ..EngineConfig::new(HOST_BYTES as u64)
        });
        let mut session = SessionSpec::from(spec());
        session.leases_prefetches = told;
        let session = engine.open_session(session).unwrap();
        let early = &prompts[0];
        let tokens = 8 * HASH_BLOCK;
        assert_eq!(
            engine
                .lookup(session, &LookupRequest::new("early", &early).prefetch())
                .tokens(),
            None
        );
        machine.run(&mut engine);
        let mut promised = Vec::new();
        if told {
            let answer = engine
                .lookup(session, &LookupRequest::new("early", &early).prefetch())
                .tokens();
            assert_eq!(answer, Some(Tokens(tokens)));
            promised = engine.inspect().hit_extents(session, "early", Tokens(0));
        }
        // The scheduler asks for the other one; together they exceed the budget by one payload.
        engine.lookup(session, &LookupRequest::new("asked", &prompts[1]));
        machine.run(&mut engine);
        let loaded = engine.begin_load(session, "early", Tokens(0), Tokens(tokens));
        assert_eq!(loaded.map(|load| load.extents), told.then_some(promised));
    }
}

/// The hash of the same block of another prompt.
fn other(hash: &BlockHash, prompt: u8) -> BlockHash {
    let mut bytes = [0; 32];
    bytes.copy_from_slice(hash.padded());
    bytes[31] = prompt + 1;
    BlockHash::new(&bytes).unwrap()
}
