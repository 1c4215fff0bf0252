//! Memory that the index takes for each block of a store that was opened.

use undercroft_contract::format::{
    NAMESPACE_BYTES, NamespaceEntry, RECORD_BYTES, Record, namespace_offset,
};
use undercroft_contract::image::DeviceImage;
use undercroft_contract::key::BlockHash;
use undercroft_contract::namespace::{GroupKind, NamespaceSpec};
use undercroft_engine::disk::INDEX_BYTES_PER_BLOCK;
use undercroft_engine::{Engine, EngineConfig};

const INSTANCE: u64 = 7;
/// Blocks of a prefix chain.
const CHAIN: u64 = 64;

fn hash(index: u64) -> BlockHash {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&index.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes());
    bytes[8..16].copy_from_slice(&index.to_le_bytes());
    BlockHash::new(&bytes).expect("32 bytes are a hash")
}

fn record(index: u64, payload_bytes: u32) -> Record {
    let depth = index % CHAIN;
    Record {
        group: 0,
        hit_class: 0,
        seq: index + 1,
        instance: INSTANCE,
        slot: u32::try_from(index * u64::from(payload_bytes) / 4096).expect("fits 32 bits"),
        payload_bytes,
        checksum: index,
        depth: u32::try_from(depth + 1).expect("fits 32 bits"),
        last: index,
        written_s: 1_800_000_000,
        hash: hash(index),
        parent: (depth > 0).then(|| hash(index - 1)),
    }
}

/// A full store of `blocks` blocks, whose records lie as `place` says.
fn open(blocks: u64, payload_bytes: u32, place: impl Fn(u64) -> u64) -> Engine {
    let entry = NamespaceEntry {
        instance: INSTANCE,
        spec: NamespaceSpec::uniform("{}", 16, &[(GroupKind::Full, payload_bytes)]),
    };
    let at = usize::try_from(namespace_offset(0)).expect("a 64-bit machine");
    let mut super_bytes = vec![0; at + NAMESPACE_BYTES];
    let encoded = entry.encode().expect("a short description");
    super_bytes[at..at + encoded.len()].copy_from_slice(&encoded);
    let mut table = vec![0; usize::try_from(blocks).expect("a 64-bit machine") * RECORD_BYTES];
    for index in 0..blocks {
        let at = usize::try_from(place(index)).expect("a 64-bit machine") * RECORD_BYTES;
        record(index, payload_bytes).encode(&mut table[at..at + RECORD_BYTES]);
    }
    let page_bytes = 64 << 20;
    let mut engine = Engine::new(EngineConfig::new(1 << 20));
    let recovery = engine.attach_disks(vec![DeviceImage {
        capacity: (blocks * u64::from(payload_bytes)).next_multiple_of(page_bytes),
        page_bytes,
        holes: Vec::new(),
        super_bytes,
        table: table.into(),
    }]);
    assert_eq!((recovery.blocks, recovery.dropped), (blocks, 0));
    engine
}

/// Where the index is as sparse as it gets: its segments have just been split.
const SPARSE: u64 = 128 * 832 + 500;

#[test]
fn a_block_costs_no_more_than_the_documents_say() {
    // 256 slots in a page, and 8.
    for payload_bytes in [4 << 10, 128 << 10] {
        for blocks in [SPARSE, 2 * SPARSE, 50_000] {
            let engine = open(blocks, payload_bytes, |index| index);
            let bytes = engine.inspect().index_bytes() / blocks;
            assert!(
                (80..=INDEX_BYTES_PER_BLOCK).contains(&bytes),
                "{blocks} blocks of {payload_bytes} bytes: {bytes} bytes each"
            );
        }
    }
}

#[test]
fn blocks_are_found_wherever_their_records_lie() {
    let blocks = 20_000;
    // Children before their parents, and pages in pieces.
    let engine = open(blocks, 128 << 10, |index| blocks - 1 - index);
    let bytes = engine.inspect().index_bytes() / blocks;
    assert!(bytes <= INDEX_BYTES_PER_BLOCK, "{bytes} bytes each");
    // 7 and 20,000 have no common factor: each record has a place of its own.
    open(blocks, 128 << 10, |index| index * 7 % blocks);
}
