//! Who waits for a device, and for how long.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod cleared;
mod given_up;
mod memory;
mod resized;
mod retention;
mod rig;
mod room;
mod saturated;

use std::collections::VecDeque;

use rig::{MILLISECOND, Rig, SECOND};
use undercroft_contract::format::{RECORD_BYTES, Record};
use undercroft_contract::io::{FileKind, IoFault, IoRequest};
use undercroft_contract::pages::SLOT_ALIGN;
use undercroft_engine::EngineConfig;
use undercroft_engine::disk::Health;

const ENOSPC: i32 = 28;
const EIO: i32 = 5;
/// Bytes of the payloads in [`two_directories`].
const SMALL: u32 = 64 << 10;
/// Operations that an IO engine with `io_depth` 32 takes for each device.
const DEPTH: usize = 72;

fn config(host_bytes: u64) -> EngineConfig {
    EngineConfig {
        seed: 42,
        ..EngineConfig::new(host_bytes)
    }
}

/// Prompts of 1 GiB that come at once after a restart, read at 5 GB/s by a device that is never idle: how
/// many are served in full, and how many promotions were given up.
fn burst(prompts: u64) -> (usize, u64) {
    const PAYLOAD: u32 = 2 << 20;
    let blocks = 512;
    let mut rig = Rig::new(config(64 << 30), &[512 << 30], PAYLOAD);
    for number in 0..prompts {
        rig.save(number, blocks);
        rig.settle();
    }
    let mut rig = rig.restart(config(64 << 30));
    rig.engine.set_io_depth(DEPTH);
    let read_ns = u64::from(PAYLOAD) * SECOND / 5_000_000_000;
    let mut in_flight: VecDeque<IoRequest> = VecDeque::new();
    let (mut waiting, mut served): (Vec<u64>, usize) = ((0..prompts).collect(), 0);
    let mut next_step_ns = 0;
    while !waiting.is_empty() {
        if rig.now_ns >= next_step_ns {
            next_step_ns = rig.now_ns + 10 * MILLISECOND;
            waiting.retain(|&number| {
                let Some(found) = rig.ask(number, blocks) else {
                    return true;
                };
                served += usize::from(found == blocks);
                rig.leave(number, found);
                false
            });
        }
        let room = DEPTH - in_flight.len();
        in_flight.extend(rig.start(room));
        rig.pass(read_ns);
        if let Some(request) = in_flight.pop_front() {
            rig.end(request);
        }
    }
    (served, rig.engine.counters().promotions_given_up)
}

#[test]
fn prompts_that_queue_for_a_busy_device_are_all_served() {
    for prompts in [4, 8, 32] {
        assert_eq!(burst(prompts), (prompts as usize, 0));
    }
}

/// A device with two prompts of 40 blocks that the arena does not hold; the arena takes `budget` of them.
fn two_prompts_on_disk(budget: u64) -> Rig {
    const PAYLOAD: u32 = 512 << 10;
    let config = EngineConfig {
        promotion_bytes: budget * u64::from(PAYLOAD),
        ..config(64 << 20)
    };
    let mut rig = Rig::new(config.clone(), &[256 << 20], PAYLOAD);
    for number in 1..=2 {
        rig.save(number, 40);
        rig.settle();
    }
    let mut rig = rig.restart(config);
    rig.engine.set_io_depth(9);
    rig
}

#[test]
fn a_request_waits_behind_a_slow_one_for_as_long_as_reads_end() {
    for budget in [128, 50] {
        let mut rig = two_prompts_on_disk(budget);
        assert_eq!((rig.ask(1, 40), rig.ask(2, 40)), (None, None));
        let mut in_flight = VecDeque::from(rig.start(9));
        let (mut first, mut second) = (None, None);
        while second.is_none() {
            rig.pass(50 * MILLISECOND);
            if let Some(request) = in_flight.pop_front() {
                rig.end(request);
            }
            let room = 9 - in_flight.len();
            in_flight.extend(rig.start(room));
            if first.is_none() {
                first = rig.ask(1, 40);
                if let Some(found) = first {
                    rig.leave(1, found);
                }
            }
            second = rig.ask(2, 40);
        }
        assert_eq!((first, second), (Some(40), Some(40)), "budget {budget}");
        assert!(rig.now_ns > 3 * SECOND);
        assert_eq!(rig.engine.counters().promotions_given_up, 0);
    }
}

#[test]
fn a_promotion_that_was_given_up_may_be_tried_again() {
    let mut rig = two_prompts_on_disk(128);
    assert_eq!(rig.ask(1, 40), None);
    let reads = rig.start(9);
    assert_eq!(reads.len(), 4, "the depth");
    rig.pass(SECOND);
    assert!(rig.start(5).is_empty());
    assert_eq!(rig.ask(1, 40), Some(0));
    let counters = rig.engine.counters();
    assert_eq!((counters.promotions_given_up, counters.promotions), (1, 0));
    reads.into_iter().for_each(|request| rig.end(request));
    assert_eq!(rig.ask(1, 40), None, "the device answers again");
    rig.settle();
    assert_eq!(rig.ask(1, 40), Some(40));
}

/// Two directories with prompts of 30 blocks, and which lies where: by the directory of its first read.
fn two_directories(config: &EngineConfig) -> (Rig, [Vec<u64>; 2]) {
    let mut rig = Rig::new(config.clone(), &[256 << 20; 2], SMALL);
    for number in 0..40 {
        rig.save(number, 30);
        rig.settle();
    }
    let mut of_device = [Vec::new(), Vec::new()];
    let mut probe = rig.restart(config.clone());
    for number in 0..40 {
        probe.ask(number, 30);
        let requests = probe.start(64);
        let read = requests.iter().find(|request| request.is_read());
        of_device[usize::from(read.unwrap().device())].push(number);
        requests.into_iter().for_each(|request| probe.end(request));
        probe.settle();
        probe.leave(number, 0);
    }
    assert!(of_device.iter().all(|prompts| prompts.len() > 10));
    let mut rig = probe.restart(config.clone());
    rig.engine.set_io_depth(DEPTH);
    (rig, of_device)
}

/// Starts the operations that the engine wants. Operations on the device `hung` hang, the others
/// end.
fn serve_all_but(hung: u16, rig: &mut Rig, hanging: &mut Vec<IoRequest>) {
    loop {
        let held = hanging.len();
        let mut rooms = [DEPTH; 2];
        rooms[usize::from(hung)] -= held;
        let requests = rig.start(&rooms[..]);
        if requests.is_empty() {
            return;
        }
        for request in requests {
            if request.device() == hung {
                hanging.push(request);
            } else {
                rig.end(request);
            }
        }
    }
}

#[test]
fn a_device_that_hangs_affects_only_its_own_blocks() {
    let (mut rig, [on_hung, on_other]) = two_directories(&config(64 << 20));
    let mut hanging = Vec::new();
    for &number in &on_hung {
        assert_eq!(rig.ask(number, 30), None);
    }
    serve_all_but(0, &mut rig, &mut hanging);
    assert_eq!(hanging.len(), 32, "its own depth");
    assert_eq!(rig.engine.devices()[0].health, Health::Good);
    for &number in &on_other {
        assert_eq!(rig.ask(number, 30), None);
        serve_all_but(0, &mut rig, &mut hanging);
        assert_eq!(rig.ask(number, 30), Some(30), "without delay");
        rig.leave(number, 30);
    }

    rig.pass(SECOND);
    serve_all_but(0, &mut rig, &mut hanging);
    let health: Vec<_> = rig.engine.devices().iter().map(|of| of.health).collect();
    assert_eq!(health, [Health::Stalled, Health::Good]);
    assert_eq!(rig.engine.gauges().disk_degraded, 1);
    for &number in &on_hung {
        assert_eq!(rig.ask(number, 30), Some(0));
        rig.leave(number, 0);
    }
    let given_up = rig.engine.counters().promotions_given_up;
    assert_eq!(given_up, on_hung.len() as u64);
    // The second is paid once, not by each request that comes.
    assert_eq!(rig.ask(on_hung[0], 30), Some(0));
    rig.leave(on_hung[0], 0);

    // It gets no new operations: saved payloads go to the other device.
    let before = rig.blocks();
    for number in 100..110 {
        rig.save(number, 30);
    }
    serve_all_but(0, &mut rig, &mut hanging);
    let after = rig.blocks();
    assert_eq!((after[0], after[1]), (before[0], before[1] + 300));
    assert_eq!(hanging.len(), 32);

    let answered = hanging.pop().unwrap();
    rig.end(answered);
    assert_eq!(rig.engine.devices()[0].health, Health::Good);
    assert_eq!(rig.engine.gauges().disk_degraded, 0);
    hanging.into_iter().for_each(|request| rig.end(request));
    assert_eq!(
        rig.ask(on_hung[0], 30),
        Some(30),
        "its reads were not in vain"
    );
    assert_eq!(rig.ask(on_hung[2], 30), None);
    rig.settle();
    assert_eq!(rig.ask(on_hung[2], 30), Some(30));
}

#[test]
fn a_device_that_holds_writes_up_is_read_and_gets_no_more_writes() {
    let (mut rig, [on_first, _]) = two_directories(&config(64 << 20));
    for number in 100..140 {
        rig.save(number, 5);
    }
    let writes: Vec<IoRequest> = rig.start(DEPTH);
    assert!(writes.iter().any(|request| request.device() == 0));
    rig.pass(SECOND);
    assert!(rig.start(DEPTH / 2).is_empty(), "both hold writes up");
    assert_eq!(rig.engine.devices()[0].health, Health::Stalled);
    assert_eq!(
        rig.engine.counters().refused_disk_degraded,
        0,
        "writes wait"
    );
    assert_eq!(rig.ask(on_first[0], 30), None);
    rig.start(DEPTH / 2).into_iter().for_each(|request| {
        assert!(request.is_read());
        rig.end(request);
    });
    assert_eq!(rig.ask(on_first[0], 30), Some(30));
    writes.into_iter().for_each(|request| rig.end(request));
    rig.settle();
    let blocks: u64 = rig.blocks().iter().sum();
    assert_eq!(blocks, 40 * 30 + 40 * 5);
}

#[test]
fn a_directory_whose_reads_fail_is_given_up_with_its_own_blocks() {
    let (mut rig, [on_broken, on_other]) = two_directories(&config(64 << 20));
    for &number in &on_broken {
        rig.ask(number, 30);
        while rig.ask(number, 30).is_none() {
            for request in rig.start(DEPTH) {
                let fails = request.is_read() && request.device() == 0;
                if fails {
                    rig.finish(&request, Err(IoFault::Os(EIO)));
                } else {
                    rig.end(request);
                }
            }
        }
        rig.leave(number, 0);
    }
    assert!(matches!(
        rig.engine.devices()[0].health,
        Health::Failed { .. }
    ));
    assert_eq!(rig.ask(on_other[0], 30), None);
    rig.settle();
    assert_eq!(rig.engine.devices()[0].blocks, 0);
    assert_eq!(rig.ask(on_other[0], 30), Some(30));
}

#[test]
fn the_engine_reports_the_end_of_a_promotion_without_an_operation() {
    let config = EngineConfig {
        promotion_bytes: u64::from(30 * SMALL),
        ..config(64 << 20)
    };
    let (mut rig, [on_broken, _]) = two_directories(&config);
    let (first, second) = (on_broken[0], on_broken[1]);
    assert_eq!((rig.ask(first, 30), rig.ask(second, 30)), (None, None));
    // The first has all of the budget.
    for request in rig.start(DEPTH) {
        rig.finish(&request, Err(IoFault::Os(EIO)));
    }
    assert!(matches!(
        rig.engine.devices()[0].health,
        Health::Failed { .. }
    ));
    assert!(rig.engine.end_entry(), "the first has ended");
    assert!(!rig.engine.end_entry());
    // The turn of the second comes when its directory has been given up.
    assert!(rig.start(DEPTH).is_empty());
    assert!(rig.engine.end_entry(), "the second has ended");
    assert_eq!(rig.ask(second, 30), Some(0));
}

#[test]
fn blocks_that_a_full_disk_refused_are_offered_again_when_they_are_hit() {
    const PAYLOAD: u32 = 64 << 10;
    let mut rig = Rig::new(config(1 << 30), &[1 << 30], PAYLOAD);
    rig.settle();
    for number in 0..20 {
        rig.save(number, 50);
    }
    for request in rig.start(64) {
        rig.finish(&request, Err(IoFault::Os(ENOSPC)));
    }
    rig.settle();
    let counters = rig.engine.counters();
    assert!(counters.refused_disk_degraded > 900, "{counters:?}");
    assert_eq!(rig.blocks(), [0]);
    // Hits while the directory is degraded are not counted as refusals again and again.
    let refused = counters.refused_disk_degraded;
    assert_eq!(rig.ask(0, 50), Some(50));
    rig.leave(0, 50);
    rig.settle();
    assert_eq!(rig.engine.counters().refused_disk_degraded, refused);

    rig.pass(60 * SECOND);
    for number in 0..20 {
        assert_eq!(rig.ask(number, 50), Some(50));
        rig.leave(number, 50);
    }
    rig.settle();
    assert_eq!(rig.blocks(), [1000]);
}

/// The bytes of a write of records.
fn records_of(request: &IoRequest) -> Option<&[u8]> {
    match request {
        IoRequest::WriteMeta {
            file: FileKind::Table,
            bytes,
            ..
        } => Some(bytes),
        _ => None,
    }
}

#[test]
fn no_record_describes_a_payload_that_is_being_written() {
    let mut rig = Rig::new(config(64 << 20), &[256 << 20], SMALL);
    rig.save(1, 2);
    let mut writes = rig.start(64);
    let being_written = writes.pop().unwrap();
    let written = writes.pop().unwrap();
    assert!(writes.is_empty());
    let IoRequest::WritePayload { file_offset, .. } = written else {
        panic!("{written:?}");
    };
    rig.end(written);
    let started = rig.start(64);
    let bytes = started.iter().find_map(records_of).unwrap();
    let records = bytes.chunks_exact(RECORD_BYTES).filter_map(Record::decode);
    let places: Vec<u64> = records
        .map(|record| u64::from(record.slot) * SLOT_ALIGN)
        .collect();
    assert_eq!(places, [file_offset]);
    started.into_iter().for_each(|request| rig.end(request));
    rig.end(being_written);
    rig.settle();
    let rig = rig.restart(config(64 << 20));
    assert_eq!(rig.blocks(), [2]);
}

#[test]
fn records_whose_write_failed_are_written_again() {
    let mut rig = Rig::new(config(64 << 20), &[256 << 20], SMALL);
    rig.save(1, 4);
    let (mut failed, mut started) = (0, rig.start(64));
    while !started.is_empty() {
        for request in started {
            if failed == 0 && records_of(&request).is_some() {
                failed += 1;
                rig.finish(&request, Err(IoFault::Os(EIO)));
            } else {
                rig.end(request);
            }
        }
        started = rig.start(64);
    }
    assert_eq!(failed, 1);
    let rig = rig.restart(config(64 << 20));
    assert_eq!(rig.blocks(), [4]);
}

#[test]
fn blocks_beyond_the_write_queue_are_refused_with_a_reason_and_offered_again() {
    const PAYLOAD: u32 = 64 << 10;
    for rate in [0, 1 << 20] {
        let config = EngineConfig {
            write_rate: rate,
            ..config(64 << 20)
        };
        let mut rig = Rig::new(config, &[1 << 30], PAYLOAD);
        rig.settle();
        for number in 0..8 {
            rig.save(number, 100);
            // A disk without room for more operations.
            rig.start(0);
            if rate > 0 {
                rig.start(64);
            }
        }
        let counters = rig.engine.counters();
        let refused = (counters.refused_write_rate, counters.refused_disk_behind);
        let behind = 800 - 512;
        let expected = if rate > 0 { (behind, 0) } else { (0, behind) };
        assert_eq!(refused, expected, "rate {rate}");
        if rate > 0 {
            continue;
        }
        rig.settle();
        assert_eq!(rig.blocks(), [512]);
        for number in 0..8 {
            assert_eq!(rig.ask(number, 100), Some(100));
            rig.leave(number, 100);
            rig.settle();
        }
        assert_eq!(rig.blocks(), [800]);
    }
}
