//! If two records claim the same bytes, or describe the same block, the one that was written later is right.

#![expect(clippy::unwrap_used, reason = "tests")]

use undercroft_contract::format::{
    NAMESPACE_BYTES, NamespaceEntry, RECORD_BYTES, Record, namespace_offset,
};
use undercroft_contract::image::DeviceImage;
use undercroft_contract::io::IoRequest;
use undercroft_contract::key::BlockHash;
use undercroft_contract::namespace::{GroupKind, NamespaceSpec};
use undercroft_contract::session::{LookupRequest, Tokens};
use undercroft_engine::{Engine, EngineConfig, Room, Started};

const INSTANCE: u64 = 7;
const PAYLOAD: u32 = 16 << 10;
const TOKENS: u32 = 16;

fn hash(number: u8) -> BlockHash {
    BlockHash::new(&[number; 32]).unwrap()
}

fn record(seq: u64, block: u8, slot: u32) -> Record {
    Record {
        group: 0,
        hit_class: 0,
        seq,
        instance: INSTANCE,
        slot: slot * PAYLOAD / 4096,
        payload_bytes: PAYLOAD,
        checksum: seq,
        depth: 1,
        last: 1,
        written_s: 1_800_000_000,
        hash: hash(block),
        parent: None,
    }
}

fn spec() -> NamespaceSpec {
    NamespaceSpec::uniform("{}", TOKENS, &[(GroupKind::Full, PAYLOAD)])
}

/// The read of a block from a store whose table holds these records: its place and checksum. `None`: a miss.
fn read(records: &[Record], block: u8) -> Option<(u64, u64)> {
    let entry = NamespaceEntry {
        instance: INSTANCE,
        spec: spec(),
    };
    let at = namespace_offset(0) as usize;
    let mut super_bytes = vec![0; at + NAMESPACE_BYTES];
    let encoded = entry.encode().unwrap();
    super_bytes[at..at + encoded.len()].copy_from_slice(&encoded);
    let mut table = vec![0; records.len() * RECORD_BYTES];
    for (record, out) in records.iter().zip(table.chunks_mut(RECORD_BYTES)) {
        record.encode(out);
    }
    let mut engine = Engine::new(EngineConfig::new(16 << 20));
    engine.attach_disks(vec![DeviceImage {
        capacity: 16 << 20,
        page_bytes: 256 << 10,
        holes: Vec::new(),
        super_bytes,
        table: table.into(),
    }]);
    let session = engine.open_session(spec()).unwrap();
    let hashes = vec![hash(block)];
    let answer = engine.lookup(session, &LookupRequest::new("request", &hashes));
    if !answer.is_pending() {
        assert_eq!(answer.tokens(), Some(Tokens(0)));
        return None;
    }
    let mut started = Started::default();
    engine.turn(Room::io(8), &mut started);
    let mut reads = started.io.iter().filter_map(|request| match request {
        IoRequest::ReadPayload {
            file_offset,
            checksum,
            ..
        } => Some((*file_offset, *checksum)),
        _ => None,
    });
    reads.next_back()
}

#[test]
fn of_two_blocks_that_claim_the_same_bytes_the_later_one_is_found() {
    for (first, second) in [(5, 9), (9, 5)] {
        let records = [record(first, 1, 3), record(second, 2, 3)];
        let found = [read(&records, 1), read(&records, 2)];
        let there = Some((u64::from(3 * PAYLOAD), 9));
        let expected = if first > second {
            [there, None]
        } else {
            [None, there]
        };
        assert_eq!(found, expected, "written {first}th and {second}th");
    }
}

#[test]
fn of_two_places_of_a_block_the_later_one_is_read() {
    for (first, second) in [(5, 9), (9, 5)] {
        let records = [record(first, 1, 3), record(second, 1, 4)];
        let slot = if first > second { 3 } else { 4 };
        let expected = Some((u64::from(slot * PAYLOAD), 9));
        assert_eq!(
            read(&records, 1),
            expected,
            "written {first}th and {second}th"
        );
    }
}
