//! A model whose blocks have another size takes about as much space as it saves, at any age of the tier.

use undercroft_bench::chats::{Chats, Directory, Store, prompt};
use undercroft_contract::pages::page_bytes_for;

const A: u32 = 128 << 10;
const B: u32 = 96 << 10;
const SLOTS: u64 = 4096;
const TIER: u64 = SLOTS * A as u64;
const USERS: u64 = 40;
const NEWCOMER: u64 = 1 << 40;

/// The most of A's blocks that may go for so many of B: twice their bytes, and two pages.
fn most_evicted(blocks: u64) -> u64 {
    (2 * blocks * u64::from(B) + 2 * page_bytes_for(TIER)) / u64::from(A)
}

#[test]
fn blocks_of_another_size_evict_little_of_an_old_arena() {
    for turned_over in [5, 20] {
        let mut store = Store::open(TIER, None, [A, B]).unwrap();
        let mut chats = Chats::new(USERS, 10, 0);
        chats.save(&mut store, SLOTS * turned_over);
        for blocks in [1, 100] {
            let before = store.engine.counters().host_evictions;
            let (saved, _) = store.save_all(1, &prompt(NEWCOMER + blocks, blocks));
            let evicted = store.engine.counters().host_evictions - before;
            assert_eq!(saved, blocks);
            assert!(
                evicted <= most_evicted(blocks),
                "{blocks}: {evicted} evicted"
            );
        }
    }
}

#[test]
fn blocks_of_another_size_evict_little_of_an_old_disk() {
    let host = 2 * TIER;
    let directory = Directory::new(TIER);
    let mut store = Store::open(host, Some(directory), [A, B]).unwrap();
    Chats::new(USERS, 10, 0).save(&mut store, SLOTS * 20);
    let directory = store.crash();
    let mut store = Store::open(host, directory, [A, B]).unwrap();
    for blocks in [1, 100] {
        let before = *store.engine.counters();
        store.save_all(1, &prompt(NEWCOMER + blocks, blocks));
        store.search_and_settle();
        let after = *store.engine.counters();
        assert_eq!(after.disk_writes - before.disk_writes, blocks);
        let evicted = after.disk_evictions - before.disk_evictions;
        assert!(
            evicted <= most_evicted(blocks),
            "{blocks}: {evicted} evicted"
        );
    }
}

#[test]
fn leases_of_a_model_keep_neither_it_nor_the_other_from_the_arena() {
    let mut store = Store::open(TIER, None, [A, B]).unwrap();
    let mut chats = Chats::new(USERS, 10, 0);
    chats.save(&mut store, SLOTS * 20);
    let before = chats.hit_rate(&mut store, 500);
    let leased = chats.wait(&mut store, 4);
    assert!(leased > 50, "{leased} blocks are leased");
    for user in NEWCOMER..NEWCOMER + 4 {
        let (saved, _) = store.save_all(1, &prompt(user, 1));
        assert_eq!(saved, 1);
    }
    let after = chats.hit_rate(&mut store, 500);
    assert!(after > before - 0.1, "hit rate {before} and then {after}");
}

#[test]
fn a_burst_that_waits_to_be_written_leaves_the_arena_full() {
    let directory = Directory::new(40 * TIER);
    let mut store = Store::open(TIER, Some(directory), [A, B]).unwrap();
    let mut chats = Chats::new(USERS, 10, 1);
    chats.save(&mut store, SLOTS * 10);
    for burst in 0..4 {
        store.save_all(1, &prompt(NEWCOMER + burst, 500));
        let gauges = store.engine.gauges();
        let used = 100 * gauges.host_used_bytes / gauges.host_capacity_bytes;
        assert!(used >= 90, "{used} % of the arena are used");
    }
}
