//! Payloads that no request uses leave the directories after a time.

use undercroft_engine::{ClearOrder, ClearWhat, EngineConfig};

use crate::rig::{Rig, SECOND};

const PAYLOAD: u32 = 64 << 10;
const TTL_S: u64 = 100;
const BLOCKS: u32 = 30;

/// The engine's clock begins at so many seconds since 1970.
fn config(at_s: u64) -> EngineConfig {
    EngineConfig {
        seed: 42,
        disk_ttl_s: TTL_S,
        unix_at_zero_s: 1_790_000_000 + at_s,
        ..EngineConfig::new(64 << 20)
    }
}

fn rig() -> Rig {
    Rig::new(config(0), &[256 << 20], PAYLOAD)
}

/// So many seconds pass, while the IO thread looks once in a second.
fn wait(rig: &mut Rig, seconds: u64) {
    for _ in 0..seconds {
        rig.pass(SECOND);
        rig.settle();
    }
}

fn on_disk(rig: &Rig) -> u64 {
    rig.engine.devices()[0].blocks
}

#[test]
fn blocks_leave_the_directories_when_no_request_has_used_them_for_the_time_to_live() {
    let mut rig = rig();
    rig.save(1, BLOCKS);
    wait(&mut rig, 60);
    rig.save(2, BLOCKS);
    rig.settle();
    assert_eq!(on_disk(&rig), 60);
    wait(&mut rig, 37);
    assert_eq!(on_disk(&rig), 60, "not before their time");
    wait(&mut rig, 8);
    assert_eq!(on_disk(&rig), 30, "those of the first prompt are gone");
    wait(&mut rig, 60);
    assert_eq!(on_disk(&rig), 0);
    let mut rig = rig.restart(config(165));
    assert_eq!((rig.ask(1, BLOCKS), rig.ask(2, BLOCKS)), (Some(0), Some(0)));
}

#[test]
fn a_hit_keeps_its_blocks_for_another_time_to_live() {
    let mut rig = rig();
    rig.save(1, BLOCKS);
    rig.save(2, BLOCKS);
    wait(&mut rig, 80);
    assert_eq!(rig.ask(1, BLOCKS), Some(BLOCKS));
    rig.leave(1, BLOCKS);
    wait(&mut rig, 90);
    assert_eq!(on_disk(&rig), 30);
    wait(&mut rig, 20);
    assert_eq!(on_disk(&rig), 0);
}

#[test]
fn a_restart_keeps_the_time_of_the_last_use() {
    let mut rig = rig();
    rig.save(1, BLOCKS);
    wait(&mut rig, 50);
    rig.save(2, BLOCKS);
    wait(&mut rig, 10);
    let mut rig = rig.restart(config(60));
    assert_eq!(on_disk(&rig), 60);
    wait(&mut rig, 45);
    assert_eq!(on_disk(&rig), 30);
    // Longer than the time to live passes while no engine runs.
    let mut rig = rig.restart(config(400));
    assert_eq!(on_disk(&rig), 0, "before the first lookup");
    assert_eq!(rig.ask(2, BLOCKS), Some(0));
}

#[test]
fn a_life_with_a_wrong_clock_empties_nothing() {
    const NOW: u64 = 1_790_000_000;
    const DAY: u64 = 86_400;
    let life = |at_s| EngineConfig {
        disk_ttl_s: 7 * DAY,
        unix_at_zero_s: at_s,
        ..config(0)
    };
    let mut rig = Rig::new(life(NOW), &[256 << 20], PAYLOAD);
    rig.save(1, BLOCKS);
    wait(&mut rig, 10);
    // The host starts in 1970, with a restored image of last year, and far in the past of its first life again.
    for (number, at_s) in [(2, 1000), (3, NOW - 400 * DAY), (4, 2000)] {
        rig = rig.restart(life(at_s));
        assert_eq!(on_disk(&rig), u64::from(BLOCKS) * (number - 1));
        rig.save(number, BLOCKS);
        wait(&mut rig, 10);
    }
    let mut rig = rig.restart(life(NOW + DAY));
    assert_eq!(on_disk(&rig), 4 * u64::from(BLOCKS));
    // Nothing stays for ever either, once a life with a right clock has written a record.
    rig.save(5, BLOCKS);
    wait(&mut rig, 10);
    let rig = rig.restart(life(NOW + 9 * DAY));
    assert_eq!(on_disk(&rig), 0);
}

#[test]
fn a_block_above_an_evicted_one_was_used_when_that_one_was() {
    const HOST: u32 = 16;
    let config = EngineConfig {
        unix_at_zero_s: 1_790_000_000,
        ..EngineConfig::new(u64::from(HOST * PAYLOAD))
    };
    let mut rig = Rig::new(config, &[], PAYLOAD);
    rig.save(1, 2);
    wait(&mut rig, 3000);
    assert_eq!(rig.ask(1, 2), Some(2));
    rig.leave(1, 2);
    // The last of these takes the place of the deeper block.
    for number in 2..=u64::from(HOST) {
        rig.save(number, 1);
    }
    assert_eq!(rig.engine.counters().host_evictions, 1);
    wait(&mut rig, 600);
    let order = ClearOrder {
        what: ClearWhat::OlderThan(1800),
        erase: false,
    };
    rig.engine.clear(&order).unwrap();
    rig.settle();
    assert_eq!(rig.engine.cleared().host_blocks, 0);
    assert_eq!(rig.ask(1, 2), Some(1));
}
