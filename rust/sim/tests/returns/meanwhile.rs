//! Anything may happen while a conversation is being read.

use undercroft_contract::hint::{Hint, HintRequest};
use undercroft_contract::session::Tokens;
use undercroft_engine::{ClearOrder, ClearWhat, SessionId};

use super::{BLOCK, FIRST, Life, MILLISECOND, Random, SECOND, chain};

const CONVERSATIONS: u64 = 8;
const PAUSE: u64 = 20 * SECOND;

/// Something happens that ends reads, or hinders them.
fn disturb(life: &mut Life, sessions: &mut [SessionId; 2], random: &mut Random, known: u64) {
    let session = sessions[(random.next() % 2) as usize];
    match random.next() % 12 {
        0 => {
            life.engine.reset(session);
        }
        1 => {
            let what = match random.next() % 2 {
                0 => ClearWhat::All,
                _ => ClearWhat::OlderThan((random.next() % 40) as u32),
            };
            let erase = random.next().is_multiple_of(2);
            life.engine.clear(&ClearOrder { what, erase }).ok();
        }
        2 => {
            life.engine.close_session(session);
            let at = sessions.iter().position(|&of| of == session);
            sessions[at.expect("one of them")] = life.open("model");
        }
        3 => {
            life.engine.drain(false);
            life.until(life.now_ns + random.next() % (3 * SECOND));
            life.engine.drain(true);
        }
        4 => life.is_failing = !life.is_failing,
        5 => {
            life.engine.end_lookups(session);
        }
        6..8 => {
            let of = random.next() % CONVERSATIONS;
            let hashes = chain(of, known);
            let hint = match random.next() % 2 {
                0 => Hint::Prefetch,
                _ => Hint::Demote,
            };
            life.engine.hint(
                session,
                &HintRequest {
                    request: "hint",
                    hashes: &hashes,
                    max: Tokens(known as u32 * BLOCK),
                    hint: &hint,
                },
            );
        }
        _ => {
            let of = 1000 + random.next() % 8;
            life.request(session, of, FIRST - 1);
        }
    }
}

#[test]
fn the_invariants_hold() {
    let (mut used, mut wasted) = (0, 0);
    for seed in 0..60 {
        let mut random = Random::new(seed);
        let host = 64 + random.next() % 200;
        let mut life = Life::new(host, 300 + random.next() % 1000, true);
        let mut sessions = [life.open("model"), life.open("model")];
        let disturbs = random.next() % 4;
        for turn in 0..14 {
            let known = FIRST + turn - 1;
            for of in 0..CONVERSATIONS {
                let due_ns = SECOND + turn * PAUSE + of * PAUSE / CONVERSATIONS;
                while life.now_ns < due_ns {
                    let by_ns = random.next() % (4 * SECOND);
                    let to_ns = (life.now_ns + by_ns).min(due_ns);
                    life.until(to_ns);
                    // In the middle of a read, if there is one.
                    if turn > 5 && random.next() % 16 < disturbs {
                        for _ in 0..random.next() % 4 {
                            life.turn();
                            life.now_ns += MILLISECOND;
                        }
                        disturb(&mut life, &mut sessions, &mut random, known);
                        life.check();
                    }
                }
                let session = sessions[(of % 2) as usize];
                life.request(session, of, known);
                life.check();
            }
        }
        life.is_failing = false;
        life.until(life.now_ns + 5 * PAUSE);
        life.check();
        assert_eq!(life.engine.gauges().active_lookups, 0, "seed {seed}");
        used += life.engine.counters().return_reads_used;
        wasted += life.engine.counters().return_reads_wasted;
    }
    assert!(used > 500 && wasted > 50, "{used} used, {wasted} wasted");
}
