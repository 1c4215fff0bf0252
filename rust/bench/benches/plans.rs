//! The cost of the planner's decisions: to go on waiting, and to load from host memory, each beside the same answer
//! without a plan; and not to start.

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use undercroft_contract::format::Superblock;
use undercroft_contract::image::DeviceImage;
use undercroft_contract::io::{IoCompletion, IoRequest};
use undercroft_contract::key::BlockHash;
use undercroft_contract::namespace::{GroupKind, NamespaceSpec};
use undercroft_contract::pages::page_bytes_for;
use undercroft_contract::session::{
    LookupRequest, Priority, PromotionWait, SaveRequest, Step, Tokens,
};
use undercroft_engine::{Due, Engine, EngineConfig, Room, SessionId, Started};

const TOKENS: u32 = 16;
const PAYLOAD: u32 = 1 << 20;
const HOST: u32 = 256;
const BLOCKS: u32 = 128;
const DISK: u64 = 4 << 30;

fn hashes(salt: u8) -> Vec<BlockHash> {
    let hash = |index: u32| {
        let mut bytes = [salt; 32];
        bytes[..4].copy_from_slice(&index.wrapping_mul(0x9e37_79b1).to_le_bytes());
        BlockHash::new(&bytes).expect("32 bytes")
    };
    (0..BLOCKS).map(hash).collect()
}

/// An engine that has prompts on disk, knows its disk and how fast vLLM computes, and whose clock stands still.
fn engine(read_ns: u64, min_load_tokens: Option<u32>) -> (Engine, SessionId) {
    let mut config = EngineConfig::new(u64::from(HOST) * u64::from(PAYLOAD));
    config.min_load_tokens = min_load_tokens;
    let mut engine = Engine::new(config);
    let page_bytes = page_bytes_for(DISK);
    let superblock = Superblock {
        store_id: 1,
        page_bytes,
        encrypted: false,
    };
    engine.attach_disks(vec![DeviceImage {
        capacity: DISK / page_bytes * page_bytes,
        page_bytes,
        holes: Vec::new(),
        super_bytes: superblock.encode().into(),
        table: Vec::new().into(),
    }]);
    let spec = NamespaceSpec::uniform("benchmark", TOKENS, &[(GroupKind::Full, PAYLOAD)]);
    let session = engine.open_session(spec).expect("the spec is sound");
    for salt in 0..8 {
        let hashes = hashes(salt);
        let save = SaveRequest::new("fill", &hashes, Tokens(BLOCKS * TOKENS));
        let granted = engine.begin_save(session, &save);
        engine.end_transfer(granted.transfer.expect("there is room").id, true);
        engine.finish_request(session, "fill");
        turn(&mut engine, 0, read_ns);
    }
    let step = Step {
        tokens: 512,
        positions: 512 * 256,
        decodes: 0,
        duration_ns: 20_000_000,
    };
    engine.report_steps(session, &[step; 32]);
    let first = hashes(0);
    let request = LookupRequest::new("learn", &first).wait(Some(PromotionWait::Complete));
    while engine.lookup(session, &request).is_pending() {
        turn(&mut engine, 1_000_000, read_ns);
    }
    for i in 0..8 {
        engine.set_now(2_000_000_000 + i * 1_000_000);
        let hit = engine.lookup(session, &request);
        let tokens = hit.tokens().expect("it is in host memory");
        let load = engine.begin_load(session, "learn", Tokens(0), tokens);
        engine.set_now(2_000_000_000 + i * 1_000_000 + 500_000);
        engine.end_transfer(load.expect("there is a hit").id, true);
    }
    engine.finish_request(session, "learn");
    (engine, session)
}

/// One turn of the IO thread, whose reads take so long.
fn turn(engine: &mut Engine, now_ns: u64, read_ns: u64) {
    let mut now_ns = now_ns;
    loop {
        let mut started = Started::default();
        engine.set_now(now_ns);
        engine.turn(Room::io(32), &mut started);
        if started.io.is_empty() && engine.wake() != Due::Now {
            return;
        }
        for request in started.io {
            let token = request.token();
            let mut result = Ok(7);
            if let IoRequest::ReadPayload { checksum, .. } = request {
                result = Ok(checksum);
                now_ns += read_ns;
                engine.set_now(now_ns);
            }
            engine.complete(IoCompletion { token, result });
        }
    }
}

fn benchmarks(c: &mut Criterion) {
    let mut group = c.benchmark_group("plan");
    for (name, wait) in [
        ("go on waiting", PromotionWait::Planned),
        ("wait without a plan", PromotionWait::Complete),
    ] {
        let (mut engine, session) = engine(1000, None);
        let prompt = hashes(1);
        let request = LookupRequest::new("r", &prompt).wait(Some(wait));
        assert!(engine.lookup(session, &request).is_pending());
        engine.turn(Room::io(32), &mut Started::default());
        group.bench_function(name, |b| {
            b.iter(|| {
                let answer = engine.still_pending(session, "r", Tokens(0), Priority::Demand);
                assert!(black_box(answer).is_some());
            });
        });
    }
    let (mut engine, session) = engine(100_000_000, None);
    let prompt = hashes(1);
    let request = LookupRequest::new("r", &prompt).wait(Some(PromotionWait::Planned));
    group.bench_function("lookup that computes", |b| {
        b.iter(|| assert!(!black_box(engine.lookup(session, &request)).is_pending()));
    });
    for (name, wait, least) in [
        ("lookup that hits", PromotionWait::Planned, None),
        (
            "lookup that hits without a plan",
            PromotionWait::Complete,
            Some(1),
        ),
    ] {
        let (mut engine, session) = self::engine(1000, least);
        // The one that was learned from.
        let prompt = hashes(0);
        let request = LookupRequest::new("r", &prompt).wait(Some(wait));
        let all = Tokens(BLOCKS * TOKENS);
        group.bench_function(name, |b| {
            b.iter(|| {
                assert_eq!(
                    black_box(engine.lookup(session, &request)).tokens(),
                    Some(all)
                )
            });
        });
    }
    let unknown = hashes(99);
    let request = LookupRequest::new("u", &unknown);
    group.bench_function("lookup that finds nothing", |b| {
        b.iter(|| assert!(!black_box(engine.lookup(session, &request)).is_pending()));
    });
    group.finish();
}

criterion_group!(benches, benchmarks);
criterion_main!(benches);
