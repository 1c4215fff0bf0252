//! Two models with payloads of different sizes share a tier: how much a block of one evicts of the other,
//! at any age of the tier. `cargo bench -p undercroft-bench --bench size_classes [-- PART]`.

use undercroft_bench::chats::{Chats, Directory, Store, prompt};
use undercroft_io::raw::process_time;

const KIB: u64 = 1 << 10;
const USERS: u64 = 200;
/// Users beyond those that chat.
const ONE: u64 = 1 << 40;
const MANY: u64 = 1 << 41;
/// Blocks of the arena in units of model A.
const SLOTS: u64 = 32_768;

fn main() {
    let asked = std::env::args()
        .nth(1)
        .filter(|part| !part.starts_with("--"));
    let parts: [(&str, fn()); 5] = [
        ("host", host),
        ("disk", disk),
        ("leases", leases),
        ("queued", queued),
        ("shared", shared),
    ];
    for (name, part) in parts {
        if asked.as_deref().is_none_or(|asked| asked == name) {
            println!("{name}");
            part();
        }
    }
}

/// Bytes of a block of A and of one of B, which is three quarters of it.
fn payloads(kib: u64) -> [u32; 2] {
    let bytes = u32::try_from(kib * KIB).expect("a few MiB");
    [bytes, bytes / 4 * 3]
}

fn percent(part: u64, of: u64) -> f64 {
    100.0 * part as f64 / of.max(1) as f64
}

fn use_of_arena(store: &Store) -> f64 {
    let gauges = store.engine.gauges();
    percent(gauges.host_used_bytes, gauges.host_capacity_bytes)
}

/// Model A lives in the arena for a while; then B saves one block, and 500.
fn host() {
    for (kib, rounds) in [(2048, 5), (2048, 20), (512, 20), (128, 20)] {
        let mut store = Store::open(SLOTS * kib * KIB, None, payloads(kib)).expect("it fits");
        let mut chats = Chats::new(USERS, 10, 0);
        chats.save(&mut store, SLOTS * rounds);
        let before = (
            store.engine.gauges().host_blocks,
            chats.hit_rate(&mut store, 300),
        );
        let mut line = format!("  {kib} KiB, {rounds} x turned over:");
        for (user, blocks) in [(ONE, 1), (MANY, 500)] {
            let evicted = store.engine.counters().host_evictions;
            let start = process_time();
            let (saved, again) = store.save_all(1, &prompt(user, blocks));
            let took = process_time() - start;
            let evicted = store.engine.counters().host_evictions - evicted;
            line += &format!(
                " {blocks} of B ({saved} saved, {again} steps more) evict {evicted} = {:.1} % in {took:?};",
                percent(evicted, before.0)
            );
        }
        let hit_rate = chats.hit_rate(&mut store, 300);
        println!(
            "{line} hit rate of A {:.3} -> {hit_rate:.3}, used {:.1} %",
            before.1,
            use_of_arena(&store)
        );
    }
}

/// Model A lives on the disk for a while; then the engine restarts and B writes one block, and 500.
fn disk() {
    for (kib, slots, rounds) in [(2048, 131_072, 20), (128, 131_072, 20), (128, 1_048_576, 8)] {
        let directory = Directory::new(slots * kib * KIB);
        let host_bytes = 65_536 * kib * KIB;
        let store = Store::open(host_bytes, Some(directory), payloads(kib));
        let mut store = store.expect("it fits");
        Chats::new(USERS, 10, 0).save(&mut store, slots * rounds);
        let directory = store.crash();
        let mut store = Store::open(host_bytes, directory, payloads(kib)).expect("it fits");
        let before = store.engine.gauges().disk_blocks;
        let mut line = format!("  {kib} KiB, {before} blocks, {rounds} x turned over:");
        for (user, blocks) in [(ONE, 1), (MANY, 500)] {
            let evicted = store.engine.counters().disk_evictions;
            store.save_all(1, &prompt(user, blocks));
            let written = store.engine.counters().disk_writes;
            let mut longest = std::time::Duration::ZERO;
            let mut idle = 0;
            while idle < 100 {
                let start = process_time();
                let requests = store.poll();
                longest = longest.max(process_time() - start);
                idle = if requests == 0 { idle + 1 } else { 0 };
            }
            let evicted = store.engine.counters().disk_evictions - evicted;
            let written = store.engine.counters().disk_writes - written;
            line += &format!(
                " {blocks} of B ({written} written) evict {evicted} = {:.1} %, longest turn of the device {longest:?};",
                percent(evicted, before)
            );
        }
        println!("{line}");
    }
}

/// Requests of A hold leases, and B wants one block, several times.
fn leases() {
    for (kib, count) in [(2048, 20), (128, 8)] {
        let mut store = Store::open(SLOTS * kib * KIB, None, payloads(kib)).expect("it fits");
        let mut chats = Chats::new(USERS, 10, 0);
        chats.save(&mut store, SLOTS * 20);
        let before = chats.hit_rate(&mut store, 2000);
        let leased = chats.wait(&mut store, count);
        let mut line =
            format!("  {kib} KiB, {count} leases on {leased} blocks: hit rate of A {before:.3}");
        for user in ONE..ONE + 4 {
            let evicted = store.engine.counters().host_evictions;
            let (saved, _) = store.save_all(1, &prompt(user, 1));
            let evicted = store.engine.counters().host_evictions - evicted;
            let hit_rate = chats.hit_rate(&mut store, 300);
            line += &format!("; B saves {saved}, {evicted} evicted, hit rate of A {hit_rate:.3}");
        }
        println!("{line}");
    }
}

/// Two models, 80:20, and a disk; bursts of B that it does not write as fast as they come.
fn queued() {
    let kib = 2048;
    let host_bytes = SLOTS * kib * KIB;
    let directory = Directory::new(40 * host_bytes);
    let mut store = Store::open(host_bytes, Some(directory), payloads(kib)).expect("it fits");
    let mut chats = Chats::new(USERS, 10, 1);
    chats.save(&mut store, SLOTS * 20);
    println!("  settled: used {:.1} %", use_of_arena(&store));
    for burst in 0..5 {
        let evicted = store.engine.counters().host_evictions;
        let start = process_time();
        let prompts = (0..8).map(|at| store.save_all(1, &prompt(MANY + burst * 100 + at, 500)).0);
        let saved: u64 = prompts.sum();
        let took = process_time() - start;
        let evicted = store.engine.counters().host_evictions - evicted;
        println!(
            "  4000 blocks of B ({saved} saved) evict {evicted} in {took:?}; used {:.1} %",
            use_of_arena(&store)
        );
    }
}

/// Two models share the arena, with payloads of one size and of two.
fn shared() {
    let kib = 2048;
    let [a, b] = payloads(kib);
    for (fifths, share) in [(1, "80:20"), (2, "60:40")] {
        for (b, sizes) in [(a, "one size"), (b, "two sizes")] {
            let mut store = Store::open(SLOTS * kib * KIB, None, [a, b]).expect("it fits");
            let mut chats = Chats::new(300, 10, fifths);
            chats.hit_rate(&mut store, 10_000);
            let (mut least, mut sum) = (100.0_f64, 0.0);
            let mut hit_rate = 0.0;
            for _ in 0..100 {
                hit_rate += chats.hit_rate(&mut store, 100) / 100.0;
                least = least.min(use_of_arena(&store));
                sum += use_of_arena(&store) / 100.0;
            }
            println!(
                "  {share}, {sizes}: hit rate {hit_rate:.3}, used {sum:.1} %, at least {least:.1} %"
            );
        }
    }
}
