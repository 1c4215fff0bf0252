//! Hit rates and insert rates of the policies, against naive implementations on a sample of a real
//! trace and against published figures on the whole of it.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod naive;

use std::path::{Path, PathBuf};

use naive::{ModelCache, Outcome};
use proptest::prelude::*;
use undercroft_bench::replay::{Options, ReplayEngine, Report, Trace, replay};
use undercroft_engine::policy::PolicyKind;

fn sample() -> Trace {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/conversation_1000.jsonl");
    Trace::read(&path).unwrap()
}

fn run(trace: &Trace, capacities: &[usize], kind: PolicyKind) -> Report {
    replay(trace, &mut ModelCache::new(capacities, kind))
}

fn run_engine(trace: &Trace, options: &Options) -> Report {
    replay(trace, &mut ReplayEngine::new(options).unwrap())
}

fn options(host_blocks: usize, disk_blocks: usize, policy: PolicyKind) -> Options {
    Options {
        host_blocks,
        disk_blocks,
        policy,
        second_touch: false,
        disk_writes_per_s: 0.0,
        seed: 1,
    }
}

fn outcome(report: &Report) -> Outcome {
    Outcome {
        hits: report.hits,
        inserted: report.tiers[0].inserted,
    }
}

fn assert_near(what: &str, found: f64, expected: f64, tolerance: f64) {
    assert!(
        (found - expected).abs() <= tolerance,
        "{what}: {found:.2}, expected {expected:.2} within {tolerance}"
    );
}

#[test]
fn the_sample_is_read_as_documented() {
    let trace = sample();
    assert_eq!(trace.requests().count(), 1000);
    assert_eq!(
        trace.requests().map(<[u64]>::len).sum::<usize>(),
        trace.blocks()
    );
    // 6,758 tokens: the fourteenth block is not full.
    assert_eq!(
        trace.requests().next().unwrap(),
        (0..13).collect::<Vec<u64>>()
    );
}

#[test]
fn a_file_that_is_no_trace_is_refused_with_the_reason() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("trace.jsonl");
    let refusal = || Trace::read(&path).unwrap_err().to_string();
    assert!(refusal().contains("cannot read the trace"));
    std::fs::write(&path, "\n{\"input_length\": 511, \"hash_ids\": [0]}\n").unwrap();
    assert!(refusal().contains("no full block"));
    std::fs::write(
        &path,
        "{\"input_length\": 512, \"hash_ids\": [0]}\n{\"input_length\": -1}\n",
    )
    .unwrap();
    assert!(refusal().contains("line 2"));
}

#[test]
fn lru_equals_the_naive_one_on_the_sample() {
    let trace = sample();
    for capacity in [200, 1000, 100_000] {
        let report = run(&trace, &[capacity], PolicyKind::Lru);
        assert_eq!(
            outcome(&report),
            naive::lru(trace.requests(), capacity),
            "capacity {capacity}"
        );
    }
}

#[test]
fn leafhd_agrees_with_the_naive_one_on_the_sample() {
    let trace = sample();
    for capacity in [300, 1000, 4000] {
        let report = run(&trace, &[capacity], PolicyKind::LeafHd);
        let naive = naive::leafhd(trace.requests(), capacity);
        let percent = |blocks: u64| 100.0 * blocks as f64 / trace.blocks() as f64;
        assert_near("hits", report.hit_percent(), percent(naive.hits), 0.5);
        // One other choice leads to others, hardly to more hits.
        assert_near(
            "inserts",
            report.insert_percent(0),
            percent(naive.inserted),
            4.0,
        );
    }
}

#[test]
fn a_tier_that_holds_everything_stores_each_block_once() {
    let trace = sample();
    for kind in [PolicyKind::Lru, PolicyKind::LeafHd] {
        let report = run(&trace, &[trace.unique_blocks()], kind);
        assert_eq!(report.tiers[0].inserted, trace.unique_blocks() as u64);
        assert_eq!(report.hits, report.blocks - report.tiers[0].inserted);
        assert_eq!(report.tiers[0].evicted, 0);
    }
}

#[test]
fn the_lower_tier_counts_the_same_without_the_upper_tier() {
    let trace = sample();
    for kind in [PolicyKind::Lru, PolicyKind::LeafHd] {
        let both = run(&trace, &[500, 4000], kind);
        let lower = run(&trace, &[4000], kind);
        assert_eq!(both.tiers[1], lower.tiers[0]);
        assert!(both.hits >= lower.hits);
    }
}

#[test]
fn the_engine_agrees_with_the_model_on_the_sample() {
    let trace = sample();
    // LeafHD learns by ticks, and an engine's session takes one: in a small cache its admissions differ by that.
    for (kind, hits, inserts) in [(PolicyKind::Lru, 0.1, 0.5), (PolicyKind::LeafHd, 0.5, 4.0)] {
        for capacity in [512, 4096] {
            let engine = run_engine(&trace, &options(capacity, 0, kind));
            let model = run(&trace, &[capacity], kind);
            assert_near("hits", engine.hit_percent(), model.hit_percent(), hits);
            assert_near(
                "inserts",
                engine.insert_percent(0),
                model.insert_percent(0),
                inserts,
            );
        }
    }
}

#[test]
fn the_engine_with_a_disk_matches_its_policy_alone() {
    let trace = sample();
    for kind in [PolicyKind::Lru, PolicyKind::LeafHd] {
        let engine = run_engine(&trace, &options(512, 4096, kind));
        let lower = run(&trace, &[4096], kind);
        assert_near("hits", engine.hit_percent(), lower.hit_percent(), 0.5);
        assert_near(
            "inserts",
            engine.insert_percent(1),
            lower.insert_percent(0),
            2.0,
        );
    }
}

#[test]
fn second_touch_writes_reused_blocks_only() {
    let trace = sample();
    let all = options(512, 100_000, PolicyKind::Lru);
    let writes_all = run_engine(&trace, &all);
    let second_touch = run_engine(
        &trace,
        &Options {
            second_touch: true,
            ..all
        },
    );
    let mut uses = std::collections::HashMap::new();
    trace
        .requests()
        .flatten()
        .for_each(|&block| *uses.entry(block).or_insert(0) += 1);
    let reused = uses.values().filter(|&&uses| uses > 1).count() as u64;
    assert_eq!(writes_all.tiers[1].inserted, trace.unique_blocks() as u64);
    assert_eq!(second_touch.tiers[1].inserted, reused);
    assert!(second_touch.hits < writes_all.hits);
}

#[test]
fn a_slow_disk_writes_at_its_rate_and_drops_the_rest() {
    let mut engine = ReplayEngine::new(&Options {
        disk_writes_per_s: 4.0,
        ..options(64, 640, PolicyKind::Lru)
    })
    .unwrap();
    let first: Vec<u64> = (0..64).collect();
    let others: Vec<u64> = (100..164).collect();
    // Writes that wait may take half of the memory: 32 blocks.
    engine.request(64, &first);
    let counts = |engine: &ReplayEngine| {
        let counters = engine.counters();
        let dropped = counters.refused_disk_behind + counters.refused_write_rate;
        (counters.disk_writes, dropped)
    };
    assert_eq!(counts(&engine), (0, 32));
    // The request took a millisecond.
    engine.pass_time(5_001_000_000);
    assert_eq!(counts(&engine), (20, 32));
    engine.pass_time(3_600_000_000_000);
    assert_eq!(counts(&engine), (32, 32));
    engine.request(64, &others);
    engine.pass_time(7_200_000_000_000);
    let hit = engine.request(64, &first);
    assert_eq!((hit.host, hit.disk), (0, 32));
}

#[test]
fn a_host_tier_below_one_page_is_refused() {
    assert!(ReplayEngine::new(&options(1, 0, PolicyKind::Lru)).is_err());
}

#[test]
fn a_replay_is_repeatable() {
    let trace = sample();
    let replay = || {
        let report = run(&trace, &[1000], PolicyKind::LeafHd);
        (report.hits, report.tiers)
    };
    assert_eq!(replay(), replay());
}

/// Requests over a small forest, where a block is named by its path.
fn forest() -> impl Strategy<Value = Vec<Vec<u64>>> {
    let request = prop::collection::vec(0..3_u64, 1..6).prop_map(|turns| {
        let mut path = 1;
        turns
            .into_iter()
            .map(|turn| {
                path = path * 3 + turn;
                path
            })
            .collect()
    });
    prop::collection::vec(request, 1..80)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn lru_equals_the_naive_one_on_any_forest(requests in forest(), capacity in 1..30_usize) {
        let mut trace = Trace::default();
        requests.iter().for_each(|blocks| trace.push(blocks));
        let report = run(&trace, &[capacity], PolicyKind::Lru);
        prop_assert_eq!(outcome(&report), naive::lru(trace.requests(), capacity));
    }
}

/// Capacity, then hit and insert rate in percent of all block references.
const LRU: [(usize, f64, f64); 4] = [
    (1708, 5.4, 95.0),
    (8544, 20.2, 80.0),
    (17_089, 28.8, 71.0),
    (42_724, 36.8, 63.0),
];
/// As published for LRU; the learned order has figures of its own.
const LEAFHD: [(usize, f64, f64); 4] = [
    (1708, 10.95, 35.9),
    (8544, 22.8, 66.3),
    (17_089, 30.3, 69.4),
    (42_724, 36.8, 63.0),
];
/// Capacities of the upper and the lower tier, then hit rate in either and insert rate of the lower.
const TWO_TIERS: [(usize, usize, f64, f64); 4] = [
    (1708, 17_089, 28.8, 71.0),
    (1708, 170_899, 38.2, 62.0),
    (8544, 85_449, 37.8, 62.0),
    (8544, 170_899, 38.2, 62.0),
];

/// Needs the whole conversation trace: `UNDERCROFT_TRACE=conversation_trace.jsonl`.
#[test]
fn published_figures_of_the_whole_trace() {
    let Some(path) = std::env::var_os("UNDERCROFT_TRACE").map(PathBuf::from) else {
        println!("skipped: UNDERCROFT_TRACE does not name the conversation trace");
        return;
    };
    let trace = Trace::read(&path).unwrap();
    assert_eq!((trace.blocks(), trace.unique_blocks()), (276_491, 170_899));
    for (kind, figures) in [(PolicyKind::Lru, LRU), (PolicyKind::LeafHd, LEAFHD)] {
        for (capacity, hits, inserts) in figures {
            let model = run(&trace, &[capacity], kind);
            let engine = run_engine(&trace, &options(capacity, 0, kind));
            for (what, report) in [("model", model), ("engine", engine)] {
                let what = format!("{what}, {kind:?}, {capacity} blocks");
                println!(
                    "{what}: {:.2} {:.2}, {:.1} million a second",
                    report.hit_percent(),
                    report.insert_percent(0),
                    report.accesses_per_second() / 1e6
                );
                assert_near(&what, report.hit_percent(), hits, 0.3);
                assert_near(&what, report.insert_percent(0), inserts, 3.0);
            }
        }
    }
    for (host, disk, hits, inserts) in TWO_TIERS {
        let model = run(&trace, &[host, disk], PolicyKind::Lru);
        let engine = run_engine(&trace, &options(host, disk, PolicyKind::Lru));
        let learned = run_engine(&trace, &options(host, disk, PolicyKind::LeafHd));
        for (what, report) in [("model", model), ("engine", engine), ("leafhd", learned)] {
            let what = format!("{what}, {host} and {disk} blocks");
            println!(
                "{what}: {:.2} {:.2}",
                report.hit_percent(),
                report.insert_percent(1)
            );
            assert_near(&what, report.insert_percent(1), inserts, 2.5);
            // The learned policy may be better.
            let found = report.hit_percent();
            assert!(
                (hits - 0.3..hits + 1.5).contains(&found),
                "{what}: {found:.2}"
            );
        }
    }
}
