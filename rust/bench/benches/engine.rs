//! The state machine alone, without Python, threads or devices: lookups by length of the prompt, and
//! saves; and the checksum, whose limit is the memory.

use std::hint::black_box;

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use undercroft_contract::checksum::checksum;
use undercroft_contract::key::BlockHash;
use undercroft_contract::namespace::{GroupKind, NamespaceSpec};
use undercroft_contract::session::{LookupRequest, SaveRequest, Tokens};
use undercroft_engine::{Engine, EngineConfig, SessionId};

const TOKENS: u32 = 16;
const PAYLOAD: u32 = 4096;
const LENGTHS: [u32; 3] = [128, 2048, 8192];

fn hashes(count: u32, salt: u8) -> Vec<BlockHash> {
    let hash = |index: u32| {
        let mut bytes = [salt; 32];
        bytes[..4].copy_from_slice(&index.wrapping_mul(0x9e37_79b1).to_le_bytes());
        bytes[4..8].copy_from_slice(&index.to_le_bytes());
        BlockHash::new(&bytes).expect("32 bytes")
    };
    (0..count).map(hash).collect()
}

fn engine(blocks: u32) -> (Engine, SessionId) {
    let mut engine = Engine::new(EngineConfig::new(
        u64::from(blocks) * u64::from(PAYLOAD) * 2 + (64 << 20),
    ));
    let spec = NamespaceSpec::uniform("benchmark", TOKENS, &[(GroupKind::Full, PAYLOAD)]);
    let session = engine.open_session(spec).expect("the spec is sound");
    (engine, session)
}

fn filled(hashes: &Vec<BlockHash>) -> (Engine, SessionId) {
    let blocks = u32::try_from(hashes.len()).expect("few");
    let (mut engine, session) = engine(blocks);
    save(&mut engine, session, hashes);
    (engine, session)
}

fn save(engine: &mut Engine, session: SessionId, hashes: &Vec<BlockHash>) {
    let tokens = u32::try_from(hashes.len()).expect("few") * TOKENS;
    let transfer = engine
        .begin_save(session, &SaveRequest::new("fill", &hashes, Tokens(tokens)))
        .transfer
        .expect("there is room");
    engine.end_transfer(transfer.id, true);
}

fn lookup(c: &mut Criterion) {
    let mut group = c.benchmark_group("lookup");
    for length in LENGTHS {
        let here = hashes(length, 1);
        let half: Vec<BlockHash> = here
            .iter()
            .take(here.len() / 2)
            .copied()
            .chain(hashes(length / 2, 2))
            .collect();
        for (name, asked) in [
            ("all_hit", &here),
            ("half_hit", &half),
            ("miss", &hashes(length, 3)),
        ] {
            let (mut engine, session) = filled(&here);
            group.bench_with_input(BenchmarkId::new(name, length), asked, |b, asked| {
                b.iter(|| {
                    engine.lookup(session, &LookupRequest::new("request", &asked).prefetch());
                    black_box(
                        engine
                            .lookup(session, &LookupRequest::new("request", &asked))
                            .tokens(),
                    );
                    engine.finish_request(session, "request");
                });
            });
        }
    }
    group.finish();
}

fn saves(c: &mut Criterion) {
    let mut group = c.benchmark_group("save");
    for length in LENGTHS {
        let new = hashes(length, 1);
        group.throughput(Throughput::Elements(u64::from(length)));
        group.bench_with_input(BenchmarkId::new("new_blocks", length), &new, |b, new| {
            b.iter_batched(
                || engine(length),
                |(mut engine, session)| {
                    save(&mut engine, session, new);
                    engine
                },
                BatchSize::LargeInput,
            );
        });
    }
    group.finish();
}

fn checksums(c: &mut Criterion) {
    let mut group = c.benchmark_group("checksum");
    for bytes in [64 << 10, 2 << 20] {
        let payload = vec![7; bytes];
        group.throughput(Throughput::Bytes(bytes as u64));
        group.bench_with_input(BenchmarkId::new("crc64", bytes), &payload, |b, payload| {
            b.iter(|| checksum(black_box(payload)));
        });
    }
    group.finish();
}

criterion_group!(benches, lookup, saves, checksums);
criterion_main!(benches);
