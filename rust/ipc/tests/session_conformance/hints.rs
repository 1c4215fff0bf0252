//! Hints: prefetches, pins, demotions and releases.

use std::time::Duration;

use undercroft_contract::hint::{Hint, HintAnswer, HintRefusal, HintRequest};
use undercroft_contract::namespace::GroupKind;
use undercroft_contract::session::{Lookup, Session};
use undercroft_contract::tier::Tier;
use undercroft_driver::EngineAccess;

use crate::rig::{
    ARENA_BLOCKS, Implementation, SessionRig, full, hashes, hit, look_up, miss, tokens, until,
    with_groups,
};

/// Blocks that pins may keep: three tenths of the arena.
const BUDGET: u32 = ARENA_BLOCKS / 10 * 3 + 1;
const LONG_NS: u64 = 3_600_000_000_000;

fn pin(name: &str) -> Hint {
    Hint::Pin {
        ttl_ns: LONG_NS,
        name: name.to_owned(),
    }
}

fn release(name: &str) -> Hint {
    let name = name.to_owned();
    Hint::Release { name }
}

/// A hint about the first blocks of a prompt.
fn give(session: &dyn Session, prompt: u8, blocks: u32, hint: &Hint) -> HintAnswer {
    let request = format!("hint about {prompt}");
    let answer = session.hint(&HintRequest {
        request: &request,
        hashes: &hashes(prompt, blocks),
        max: tokens(blocks),
        hint,
    });
    session.finish_request(request.as_str().into());
    answer
}

fn found(session: &dyn Session, prompt: u8, blocks: u32) -> Lookup {
    let found = look_up(session, "r", &hashes(prompt, blocks));
    session.finish_request("r".into());
    found
}

fn rejected(refusal: HintRefusal) -> HintAnswer {
    HintAnswer::Rejected(refusal)
}

/// Blocks of a namespace that are in a tier.
fn blocks_in(rig: &SessionRig, tier: Tier) -> u64 {
    let gauges = rig.driver.read(|engine| engine.gauges()).unwrap();
    match tier {
        Tier::Host => gauges.host_blocks,
        Tier::Disk => gauges.disk_blocks,
    }
}

/// Saves ten times as much as the arena holds.
fn flood(rig: &SessionRig, session: &dyn Session) {
    for round in 0..80 {
        rig.save(session, 100 + round, ARENA_BLOCKS / 8);
    }
}

pub(crate) fn a_pinned_prompt_outlives_a_flood(of: Implementation) {
    let rig = SessionRig::new(of);
    let session = rig.open(full());
    rig.save(&*session, 1, 40);
    rig.save(&*session, 2, 40);
    let accepted = HintAnswer::Accepted(tokens(40));
    assert_eq!(give(&*session, 1, 40, &pin("")), accepted);
    flood(&rig, &*session);
    assert_eq!(found(&*session, 1, 40), hit(40, 40));
    assert_eq!(found(&*session, 2, 40), miss(0));
    // The others have all that the pin leaves them.
    assert_eq!(blocks_in(&rig, Tier::Host), u64::from(ARENA_BLOCKS));
    let last = 100 + 79;
    assert_eq!(found(&*session, last, 32), hit(32, 32));
}

pub(crate) fn pins_beyond_the_budget_end_the_one_that_was_used_least_recently(of: Implementation) {
    let rig = SessionRig::new(of);
    let session = rig.open(full());
    for prompt in 1..=3 {
        rig.save(&*session, prompt, 30);
        if prompt < 3 {
            let accepted = HintAnswer::Accepted(tokens(30));
            assert_eq!(give(&*session, prompt, 30, &pin("")), accepted);
        }
    }
    assert_eq!(found(&*session, 1, 30), hit(30, 30));
    let accepted = HintAnswer::Accepted(tokens(30));
    assert_eq!(give(&*session, 3, 30, &pin("")), accepted);
    let counters = rig.driver.read(|engine| *engine.counters()).unwrap();
    assert_eq!(
        (counters.hints_pin_accepted, counters.pins_over_budget),
        (3, 1)
    );
    flood(&rig, &*session);
    let all = [1, 2, 3].map(|prompt| found(&*session, prompt, 30));
    assert_eq!(all, [hit(30, 30), miss(0), hit(30, 30)]);
}

pub(crate) fn a_pin_that_exceeds_the_budget_or_the_cached_prefix_is_clipped(of: Implementation) {
    let rig = SessionRig::new(of);
    let session = rig.open(full());
    rig.save(&*session, 1, 100);
    let clipped = HintAnswer::Clipped(tokens(BUDGET));
    assert_eq!(give(&*session, 1, 100, &pin("")), clipped);
    assert_eq!(
        give(&*session, 1, 10, &release("")),
        rejected(HintRefusal::NotPinned)
    );
    assert_eq!(
        give(&*session, 1, 100, &release("")),
        HintAnswer::Accepted(tokens(BUDGET))
    );
    rig.save(&*session, 2, 5);
    assert_eq!(
        give(&*session, 2, 8, &pin("")),
        HintAnswer::Clipped(tokens(5))
    );
    assert_eq!(
        give(&*session, 3, 8, &pin("")),
        rejected(HintRefusal::NotCached)
    );
    let counters = rig.driver.read(|engine| *engine.counters()).unwrap();
    assert_eq!(
        (counters.hints_pin_clipped, counters.hints_pin_rejected),
        (2, 1)
    );
}

pub(crate) fn blocks_that_pins_share_count_once_and_a_name_has_one_pin(of: Implementation) {
    let rig = SessionRig::new(of);
    let session = rig.open(full());
    rig.save(&*session, 1, 60);
    let bytes = |blocks: u64| (blocks * 4096, 1);
    let pinned = || {
        let gauges = rig.driver.read(|engine| engine.gauges()).unwrap();
        (gauges.pin_bytes, gauges.pins)
    };
    for turn in 1..=6 {
        let accepted = HintAnswer::Accepted(tokens(10 * turn));
        assert_eq!(give(&*session, 1, 10 * turn, &pin("a chat")), accepted);
        assert_eq!(pinned(), bytes(10 * u64::from(turn)));
    }
    let accepted = HintAnswer::Accepted(tokens(20));
    assert_eq!(give(&*session, 1, 20, &pin("")), accepted);
    assert_eq!(give(&*session, 1, 20, &pin("")), accepted, "and again");
    assert_eq!(pinned(), (60 * 4096, 2));
    // Without a name the named pin stays.
    assert_eq!(
        give(&*session, 1, 60, &release("")),
        HintAnswer::Accepted(tokens(20))
    );
    assert_eq!(pinned(), bytes(60));
    assert_eq!(
        give(&*session, 9, 1, &release("a chat")),
        HintAnswer::Accepted(tokens(60))
    );
    assert_eq!(pinned(), (0, 0));
}

pub(crate) fn a_name_is_that_of_a_pin_of_the_same_namespace(of: Implementation) {
    let rig = SessionRig::new(of);
    let (mine, other) = (full(), with_groups(&[GroupKind::Full; 2]));
    let sessions = [rig.open(mine.clone()), rig.open(other), rig.open(mine)];
    for (session, prompt) in sessions.iter().zip([1, 2, 3]) {
        rig.save(&**session, prompt, 4);
    }
    let accepted = HintAnswer::Accepted(tokens(4));
    for (session, prompt) in sessions.iter().zip([1, 2]) {
        assert_eq!(give(&**session, prompt, 4, &pin("chat")), accepted);
    }
    let pins = || rig.driver.read(|engine| engine.gauges()).unwrap().pins;
    assert_eq!(pins(), 2);
    // Another vLLM of the model means the same pin, and one of another model does not.
    assert_eq!(give(&*sessions[2], 3, 4, &release("chat")), accepted);
    assert_eq!(pins(), 1);
    let none = rejected(HintRefusal::NotPinned);
    assert_eq!(give(&*sessions[0], 1, 4, &release("chat")), none);
    assert_eq!(give(&*sessions[1], 2, 4, &release("other")), none);
    assert_eq!(pins(), 1);
    assert_eq!(give(&*sessions[1], 2, 4, &release("chat")), accepted);
    assert_eq!(pins(), 0);
}

pub(crate) fn a_pin_ends_after_its_time_unless_it_is_used(of: Implementation) {
    let rig = SessionRig::new(of);
    let session = rig.open(full());
    for prompt in 1..=2 {
        rig.save(&*session, prompt, 4);
    }
    let short = Hint::Pin {
        ttl_ns: 300_000_000,
        name: String::new(),
    };
    for prompt in 1..=2 {
        assert_eq!(
            give(&*session, prompt, 4, &short),
            HintAnswer::Accepted(tokens(4))
        );
    }
    let pins = || rig.driver.read(|engine| engine.gauges()).unwrap().pins;
    // One is used all the time; the other ends although nothing else happens.
    until("the pin that is not used ends", || {
        std::thread::sleep(Duration::from_millis(1));
        assert_eq!(found(&*session, 1, 4), hit(4, 4));
        pins() == 1
    });
    until("the other ends, too", || pins() == 0);
    let counters = rig.driver.read(|engine| *engine.counters()).unwrap();
    assert_eq!(counters.pins_expired, 2);
}

pub(crate) fn a_reset_ends_the_pins_of_the_namespace(of: Implementation) {
    let rig = SessionRig::new(of);
    let session = rig.open(full());
    rig.save(&*session, 1, 40);
    assert_eq!(
        give(&*session, 1, 40, &pin("x")),
        HintAnswer::Accepted(tokens(40))
    );
    assert!(session.reset(Duration::from_secs(10)));
    assert_eq!(found(&*session, 1, 40), miss(0));
    until("the pin has ended", || {
        let gauges = rig.driver.read(|engine| engine.gauges()).unwrap();
        (gauges.pins, gauges.host_used_bytes) == (0, 0)
    });
}

pub(crate) fn a_prefetch_brings_a_prompt_from_disk_although_its_request_has_finished(
    of: Implementation,
) {
    let dir = tempfile::tempdir().unwrap();
    let rig = SessionRig::with_disk(of, dir.path());
    let session = rig.open(full());
    rig.save(&*session, 1, 20);
    until("it is on disk", || blocks_in(&rig, Tier::Disk) == 20);
    let other = rig.open(full());
    assert_eq!(
        give(&*other, 2, 4, &Hint::Prefetch),
        rejected(HintRefusal::NotCached)
    );
    session.close();
    other.close();
    rig.stop();
    let rig = SessionRig::with_disk(of, dir.path());
    let session = rig.open(full());
    assert_eq!(blocks_in(&rig, Tier::Host), 0);
    assert_eq!(
        give(&*session, 1, 20, &Hint::Prefetch),
        HintAnswer::Accepted(tokens(20))
    );
    until("it is in host memory", || blocks_in(&rig, Tier::Host) == 20);
    until("nothing is held for it", || rig.in_use()[1..] == [0; 4]);
    rig.device.hang();
    assert_eq!(found(&*session, 1, 20), hit(20, 20), "from host memory");
    assert_eq!(
        give(&*session, 1, 20, &Hint::Prefetch),
        HintAnswer::Accepted(tokens(20))
    );
    rig.device.release();
}

pub(crate) fn a_demoted_prompt_leaves_host_memory_first(of: Implementation) {
    let dir = tempfile::tempdir().unwrap();
    let rig = SessionRig::with_disk(of, dir.path());
    let session = rig.open(full());
    rig.save(&*session, 1, 20);
    // Its blocks may be on their way to disk.
    assert_eq!(
        give(&*session, 1, 20, &Hint::Demote),
        HintAnswer::Accepted(tokens(20))
    );
    until("it is on disk only", || {
        (blocks_in(&rig, Tier::Host), blocks_in(&rig, Tier::Disk)) == (0, 20)
    });
    assert_eq!(found(&*session, 1, 20), hit(20, 20));
    assert_eq!(
        give(&*session, 2, 20, &Hint::Demote),
        rejected(HintRefusal::NotCached)
    );
}

pub(crate) fn a_demotion_evicts_no_other_prompt_and_no_pin(of: Implementation) {
    let rig = SessionRig::new(of);
    let session = rig.open(full());
    // Without a disk the demoted prompt is evicted before older ones.
    rig.save(&*session, 1, ARENA_BLOCKS / 2);
    rig.save(&*session, 2, ARENA_BLOCKS / 2);
    let half = ARENA_BLOCKS / 2;
    assert_eq!(
        give(&*session, 2, half, &Hint::Demote),
        HintAnswer::Accepted(tokens(half))
    );
    rig.save(&*session, 3, half);
    let all = [1, 3].map(|prompt| found(&*session, prompt, half));
    assert_eq!(all, [hit(half, half), hit(half, half)]);
    assert_eq!(found(&*session, 2, half), miss(0));
    assert_eq!(
        give(&*session, 1, 20, &pin("")),
        HintAnswer::Accepted(tokens(20))
    );
    assert_eq!(
        give(&*session, 1, half, &Hint::Demote),
        HintAnswer::Accepted(tokens(half))
    );
    rig.save(&*session, 4, half);
    assert_eq!(found(&*session, 1, half), hit(20, 20));
}
