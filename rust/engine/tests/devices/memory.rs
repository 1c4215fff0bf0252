//! Who waits for the arena's memory, and for how long.

use undercroft_contract::io::IoRequest;
use undercroft_contract::session::{LookupRequest, Tokens};
use undercroft_engine::EngineConfig;

use crate::rig::{HASH_BLOCK, MILLISECOND, Rig, SECOND, prompt};
use crate::{SMALL, two_directories};

const PAYLOAD: u32 = 64 << 10;
/// Blocks of the arena.
const HOST: u32 = 16;

fn config(budget: u32) -> EngineConfig {
    EngineConfig {
        seed: 42,
        promotion_bytes: u64::from(budget * PAYLOAD),
        ..EngineConfig::new(u64::from(HOST * PAYLOAD))
    }
}

/// An engine after a restart, with prompts of so many blocks on its device.
fn on_disk(config: &EngineConfig, prompts: &[(u64, u32)]) -> Rig {
    let mut rig = Rig::new(config.clone(), &[256 << 20], PAYLOAD);
    for &(number, blocks) in prompts {
        // At most half of the arena may wait to be written.
        for blocks in [blocks.min(HOST / 2), blocks] {
            rig.save(number, blocks);
            rig.settle();
        }
    }
    rig.restart(config.clone())
}

/// Asks for a prompt until it is answered, while the device delivers at once.
fn wait_for(number: u64, blocks: u32, rig: &mut Rig) -> u32 {
    for _ in 0..100 {
        if let Some(found) = rig.ask(number, blocks) {
            return found;
        }
        for request in rig.start(64) {
            rig.end(request);
        }
        rig.pass(50 * MILLISECOND);
    }
    panic!("the prompt waits after 5 s: {:?}", rig.engine.gauges());
}

#[test]
fn payloads_are_written_while_a_read_waits_for_their_memory() {
    let config = EngineConfig {
        writes_beside_reads: 0,
        ..config(HOST)
    };
    let mut rig = on_disk(&config, &[(1, 12)]);
    assert_eq!(
        rig.save(2, HOST / 2),
        HOST / 2,
        "all of them wait to be written"
    );
    assert_eq!(wait_for(1, 12, &mut rig), 12);
    let counters = rig.engine.counters();
    // The deepest block goes first, and all above it are written before.
    let expected = (0, u64::from(HOST / 2));
    assert_eq!(
        (counters.promotions_given_up, counters.disk_writes),
        expected
    );
}

#[test]
fn a_prefetch_that_finds_no_memory_gives_way_to_a_request() {
    let mut rig = on_disk(&config(10), &[(1, 8), (2, HOST)]);
    // Half of the request's blocks are in the arena, and its lease keeps them there.
    assert_eq!(wait_for(2, HOST / 2, &mut rig), HOST / 2);
    rig.leave(2, HOST / 2);
    let hashes = prompt(1, 8);
    let prefetch = LookupRequest::new("prefetch", &hashes).prefetch();
    assert!(rig.engine.lookup(rig.session, &prefetch).is_pending());
    let first = rig.start(1);
    assert!(matches!(first[..], [IoRequest::ReadPayload { .. }]));
    first.into_iter().for_each(|request| rig.end(request));
    assert_eq!(rig.ask(2, HOST), None);
    // The prefetch has the memory that the request needs, which has a part of the budget that the prefetch needs.
    assert_eq!(wait_for(2, HOST, &mut rig), HOST);
    assert_eq!(rig.engine.counters().promotions_given_up, 1);
    assert!(rig.now_ns > SECOND, "not before it has waited for long");
}

#[test]
fn payloads_are_written_while_a_prefetch_waits_for_the_budget() {
    let config = EngineConfig {
        writes_beside_reads: 0,
        ..config(8)
    };
    let mut rig = on_disk(&config, &[(1, 8), (2, 8)]);
    assert_eq!(wait_for(1, 8, &mut rig), 8, "all of the budget");
    let hashes = prompt(2, 8);
    let prefetch = LookupRequest::new("prefetch", &hashes).prefetch();
    assert!(rig.engine.lookup(rig.session, &prefetch).is_pending());
    assert_eq!(rig.save(3, 4), 4);
    rig.settle();
    assert_eq!(rig.engine.counters().disk_writes, 4);
    assert!(rig.engine.lookup(rig.session, &prefetch).is_pending());
}

#[test]
fn a_request_whose_load_has_failed_leaves_the_budget_of_its_reads_to_others() {
    let mut rig = on_disk(&config(8), &[(1, 8), (2, 8)]);
    assert_eq!(wait_for(1, 4, &mut rig), 4);
    let tokens = Tokens(4 * HASH_BLOCK);
    let load = rig.engine.begin_load(rig.session, "1", Tokens(0), tokens);
    // The request is preempted, and asks for more before its load has ended.
    assert_eq!(rig.ask(1, 8), None);
    rig.engine.end_transfer(load.unwrap().id, false);
    assert_eq!(rig.ask(1, 8), Some(0));
    for request in rig.start(64) {
        let is_read = matches!(request, IoRequest::ReadPayload { .. });
        assert!(!is_read, "nothing is read for it");
        rig.end(request);
    }
    assert_eq!(wait_for(2, 8, &mut rig), 8);
}

#[test]
fn a_partly_started_promotion_continues_before_an_older_one_that_does_not_fit() {
    const BUDGET: u32 = 30;
    let config = EngineConfig {
        seed: 42,
        promotion_bytes: u64::from(BUDGET * SMALL),
        ..EngineConfig::new(64 << 20)
    };
    let (mut rig, [on_first, on_second]) = two_directories(&config);
    let (holder, part, older) = (on_first[0], on_first[1], on_second[0]);
    let in_use = BUDGET - 2;
    assert_eq!(wait_for(holder, in_use, &mut rig), in_use);
    assert_eq!(
        (rig.ask(older, BUDGET), rig.ask(part, BUDGET)),
        (None, None)
    );
    // The second directory has no room now: the older request waits for it, and the other takes the rest of the budget.
    let reads = rig.start(&[64, 0][..]);
    let count = reads.iter().filter(|request| request.is_read()).count();
    assert_eq!(count, 2, "all that the budget allows");
    reads.into_iter().for_each(|request| rig.end(request));
    rig.leave(holder, in_use);
    assert_eq!(wait_for(part, BUDGET, &mut rig), BUDGET);
    rig.leave(part, BUDGET);
    assert_eq!(wait_for(older, BUDGET, &mut rig), BUDGET);
}
