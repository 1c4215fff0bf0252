//! SIGKILL at random moments under load: all payloads of the store are right afterwards.

use std::io::{BufRead, BufReader};
use std::time::Instant;

use undercroft_contract::session::{LookupRequest, SaveRequest, Tokens};
use undercroft_driver::{Driver, EngineAccess};
use undercroft_engine::{Engine, EngineConfig};
use undercroft_io::arena::Arena;
use undercroft_io::{IoEngineChoice, open_io_engine};

use crate::child;
use crate::rig::{DISK, HASH_BLOCK, HOST, MODEL, Model, Open, PATIENCE, Random, dir};

/// More than the host tier and the disk hold, so that everything moves all the time.
const PROMPTS: u64 = 120;
const LEN: u32 = 24;
const READY: &str = "under load";
/// A child says so after each request.
const SERVED: &str = "served";
/// Requests of a child after which it is killed, at most.
const REQUESTS: u64 = 120;

/// How many processes are killed; `UNDERCROFT_CRASHES` says so for a soak.
fn crashes() -> u64 {
    let given = std::env::var("UNDERCROFT_CRASHES");
    given
        .ok()
        .and_then(|given| given.parse().ok())
        .unwrap_or(25)
}

#[test]
fn a_killed_process_leaves_no_wrong_byte() {
    let (_guard, store) = dir();
    let dirs = [store];
    let seed = std::env::var("UNDERCROFT_CRASH_SEED");
    let seed = seed
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or_else(|| {
            use std::hash::{BuildHasher, RandomState};
            RandomState::new().hash_one(0) >> 16
        });
    eprintln!("UNDERCROFT_CRASH_SEED={seed}");
    let mut random = Random(seed);
    let mut found = 0;
    for round in 0..crashes() {
        let mut killed = child::start("crash::child_works", &dirs[0], "077");
        let mut said = BufReader::new(killed.stdout.take().unwrap()).lines();
        let mut lines = said.by_ref().map_while(Result::ok);
        let ready = lines.any(|line| line.contains(READY));
        // By progress, not by time: a child on a busy machine would have written nothing.
        let requests = random.below(REQUESTS) as usize;
        let served = lines.filter(|line| line.contains(SERVED)).take(requests);
        let served = served.count();
        killed.kill().unwrap();
        let status = killed.wait().unwrap();
        let last: Vec<String> = said.map_while(Result::ok).collect();
        let ready = ready && served == requests;
        assert!(
            ready && status.code().is_none(),
            "round {round}: {status}: {last:?}"
        );
        let mut rig = Open::new(&dirs).plain();
        assert_eq!(
            rig.recovery.damaged, 0,
            "round {round}: a record was torn by a mere kill"
        );
        let hits = (0..PROMPTS)
            .map(|prompt| u64::from(rig.hit(prompt, LEN)))
            .sum::<u64>();
        assert_eq!(
            rig.engine.counters().checksum_failures,
            lost(&rig, hits),
            "round {round}"
        );
        found += hits;
    }
    assert!(found > 0, "nothing ever survived");
}

/// Recovered blocks that turned out to be overwritten or never written: each ends a chain.
fn lost(rig: &crate::rig::Rig, hits: u64) -> u64 {
    let failures = rig.engine.counters().checksum_failures;
    assert!(hits + failures <= rig.recovery.blocks + failures);
    failures
}

/// Saves, looks up and verifies as fast as it can, until it is killed.
#[test]
#[ignore = "run by another test in a process of its own"]
fn child_works() {
    let Some(store) = child::store() else { return };
    let directory = undercroft_io::disk::open::open(&store, DISK, 1).unwrap();
    let (files, image, _lock) = directory.into_parts();
    let arena = std::sync::Arc::new(Arena::create(HOST).unwrap());
    let (io, _) = open_io_engine(
        IoEngineChoice::Auto,
        16,
        std::sync::Arc::clone(&arena),
        vec![files],
    )
    .unwrap();
    let mut engine = Engine::new(EngineConfig::new(HOST));
    engine.attach_disks(vec![image]);
    let session = engine.open_session(MODEL.spec()).unwrap();
    let driver = Driver::start(engine, io).unwrap();
    println!("{READY}");
    let mut random = Random(u64::from(std::process::id()) << 32);
    let end = Instant::now() + PATIENCE;
    while Instant::now() < end {
        let (prompt, len) = (
            random.below(PROMPTS),
            1 + random.below(u64::from(LEN)) as u32,
        );
        let hashes = Model::hashes(prompt, len);
        let mut tokens = 0;
        driver.wait_until(PATIENCE, |engine| {
            match engine
                .lookup(session, &LookupRequest::new("r", &hashes))
                .tokens()
            {
                None => false,
                Some(Tokens(found)) => {
                    tokens = found;
                    true
                }
            }
        });
        let load = driver
            .enter(|engine| engine.begin_load(session, "r", Tokens(0), Tokens(tokens)))
            .unwrap();
        if let Some(load) = load {
            MODEL.verify(&arena, &hashes, &load.extents);
            driver.enter(|engine| engine.end_transfer(load.id, true));
        }
        let save = |engine: &mut Engine| {
            engine
                .begin_save(
                    session,
                    &SaveRequest::new("r", &hashes, Tokens(len * HASH_BLOCK)),
                )
                .transfer
        };
        if let Some(save) = driver.enter(save).unwrap() {
            MODEL.fill(&arena, &hashes, &save.extents);
            driver.enter(|engine| engine.end_transfer(save.id, true));
        }
        driver.enter(|engine| engine.finish_request(session, "r"));
        if random.below(16) == 0 {
            // Records are written while nothing else is.
            driver.wait_until(PATIENCE, |engine| engine.is_quiet());
        }
        println!("{SERVED}");
    }
    panic!("not killed within {PATIENCE:?}");
}
