//! Hints to an engine with thousands of pins.

use undercroft_contract::hint::{Hint, HintAnswer, HintRefusal, HintRequest};
use undercroft_contract::key::BlockHash;
use undercroft_contract::session::Tokens;
use undercroft_engine::SessionId;

use crate::rig::{BLOCK, Rig, chain, hash, namespace};

const PINS: u64 = 10_000;
/// Pins that an engine keeps at most.
const PINS_MAX: u64 = 16_384;
const TTL_NS: u64 = 1_000_000_000;
/// Blocks of the shared start of all prompts.
const STEM: u64 = 16;

fn pin(name: String) -> Hint {
    let ttl_ns = TTL_NS;
    Hint::Pin { ttl_ns, name }
}

fn release(name: &str) -> Hint {
    let name = name.to_owned();
    Hint::Release { name }
}

/// Gives a hint about a prompt, in one entry.
fn give(rig: &mut Rig, session: SessionId, hashes: &[BlockHash], hint: &Hint) -> HintAnswer {
    let named = hashes.len() as u64;
    let hashes = hashes.to_vec();
    let request = HintRequest {
        request: "hint",
        hashes: &hashes,
        max: Tokens(hashes.len() as u32 * BLOCK),
        hint,
    };
    rig.enter(named, |engine| engine.hint(session, &request))
}

fn accepted(hashes: &[BlockHash]) -> HintAnswer {
    HintAnswer::Accepted(Tokens(hashes.len() as u32 * BLOCK))
}

fn pins(rig: &Rig) -> u64 {
    rig.engine().gauges().pins
}

/// A conversation that begins with the prompt that all conversations share.
fn conversation(number: u64) -> Vec<BlockHash> {
    let own = hash(number + 1, STEM);
    chain(0, STEM).into_iter().chain([own]).collect()
}

/// A rig with this many conversations, each pinned.
fn pinned(count: u64) -> (Rig, SessionId) {
    let mut rig = Rig::new(count + 1024, 0);
    let session = rig.open(namespace("model"));
    for number in 0..count {
        let hashes = conversation(number);
        rig.save(session, &hashes);
        let name = if number % 2 == 0 {
            String::new()
        } else {
            number.to_string()
        };
        assert_eq!(
            give(&mut rig, session, &hashes, &pin(name)),
            accepted(&hashes)
        );
    }
    (rig, session)
}

#[test]
fn thousands_of_pinned_conversations_share_a_prompt() {
    let (mut rig, session) = pinned(PINS);
    assert_eq!(pins(&rig), PINS);
    rig.engine().inspect().check().unwrap();
    for number in [0, PINS / 2, PINS - 1] {
        let hashes = conversation(number);
        assert_eq!(rig.lookup(session, &hashes), hashes.len() as u32 * BLOCK);
        let name = pin(number.to_string());
        assert_eq!(give(&mut rig, session, &hashes, &name), accepted(&hashes));
    }
    // The prompt that all conversations share has a separate pin.
    let stem = chain(0, STEM);
    assert_eq!(
        give(&mut rig, session, &stem, &pin(String::new())),
        accepted(&stem)
    );
    assert_eq!(
        give(&mut rig, session, &stem, &release("")),
        accepted(&stem)
    );
    rig.engine().inspect().check().unwrap();
    // All pins end at the same time.
    rig.enter(0, |engine| engine.set_now(TTL_NS));
    rig.pump();
    assert_eq!(pins(&rig), 0);
    assert_eq!(rig.engine().gauges().pin_bytes, 0);
    rig.engine().inspect().check().unwrap();
}

#[test]
fn thousands_of_names_pin_one_prompt() {
    let mut rig = Rig::new(1024, 0);
    let session = rig.open(namespace("model"));
    let hashes = chain(0, 200);
    rig.save(session, &hashes);
    for number in 0..PINS {
        let of = give(&mut rig, session, &hashes, &pin(number.to_string()));
        assert_eq!(of, accepted(&hashes));
    }
    assert_eq!(pins(&rig), PINS);
    assert_eq!(rig.lookup(session, &hashes), 200 * BLOCK);
    let none = HintAnswer::Rejected(HintRefusal::NotPinned);
    assert_eq!(give(&mut rig, session, &hashes, &release("")), none);
    // A pin without a name is found among all pins with names.
    assert_eq!(
        give(&mut rig, session, &hashes, &pin(String::new())),
        accepted(&hashes)
    );
    assert_eq!(
        give(&mut rig, session, &hashes, &release("")),
        accepted(&hashes)
    );
    for number in [0, PINS - 1] {
        let of = give(&mut rig, session, &[], &release(&number.to_string()));
        assert_eq!(of, accepted(&hashes));
    }
    assert_eq!(pins(&rig), PINS - 2);
    rig.engine().inspect().check().unwrap();
}

#[test]
fn a_long_prompt_is_pinned_at_each_of_its_blocks() {
    const LONG: usize = 4096;
    let mut rig = Rig::new(LONG as u64 + 1024, 0);
    let session = rig.open(namespace("model"));
    let hashes = chain(0, LONG as u64);
    rig.save(session, &hashes);
    for depth in 1..=LONG {
        let of = give(&mut rig, session, &hashes[..depth], &pin(depth.to_string()));
        assert_eq!(of, accepted(&hashes[..depth]));
    }
    assert_eq!(pins(&rig), LONG as u64);
    // A hit renews the deepest pins, which keep all of its blocks. They outlive the other pins.
    rig.enter(0, |engine| engine.set_now(TTL_NS / 2));
    assert_eq!(rig.lookup(session, &hashes), LONG as u32 * BLOCK);
    rig.enter(0, |engine| engine.set_now(TTL_NS));
    rig.pump();
    let left = pins(&rig);
    assert!(
        0 < left && left < 1000,
        "{left} pins were renewed in one entry"
    );
    let of = give(&mut rig, session, &[], &release(&LONG.to_string()));
    assert_eq!(of, accepted(&hashes), "the deepest pin was renewed");
    rig.engine().inspect().check().unwrap();
}

#[test]
fn beyond_the_largest_number_of_pins_the_least_recently_used_one_ends() {
    let (mut rig, session) = pinned(PINS_MAX + 100);
    assert_eq!(pins(&rig), PINS_MAX);
    assert_eq!(rig.engine().counters().pins_over_budget, 100);
    let none = HintAnswer::Rejected(HintRefusal::NotPinned);
    assert_eq!(give(&mut rig, session, &[], &release("99")), none);
    assert_ne!(give(&mut rig, session, &[], &release("101")), none);
    rig.engine().inspect().check().unwrap();
}
