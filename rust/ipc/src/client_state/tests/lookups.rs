//! Lookups.

use super::*;

#[test]
fn a_request_is_asked_for_once_however_often_it_is_polled() {
    let mut rig = StateRig::new();
    rig.prefetch("a", &hashes(8), 128);
    rig.prefetch("a", &hashes(8), 128);
    assert_eq!(rig.poll("a", 0, 128), Seen::Soon);
    rig.state.waited("a");
    for _ in 0..100 {
        assert_eq!(rig.poll("a", 0, 128), Seen::Pending);
    }
    assert_eq!(rig.sent(), ["prefetch 2.1 0+8 computed 0"]);
    assert!(rig.answer(2, 1, true, None));
    for _ in 0..100 {
        assert_eq!(rig.poll("a", 0, 128), Seen::Pending);
    }
    assert_eq!(
        rig.sent(),
        ["Demand { request: 2, queued: Tokens(0) }"],
        "it is no prefetch any more"
    );
    assert!(rig.answer(2, 1, false, Some(64)));
    for _ in 0..100 {
        assert_eq!(rig.poll("a", 0, 128), Seen::Ready(64));
        assert_eq!(rig.poll("a", 48, 128), Seen::Ready(64));
    }
    assert_eq!(rig.sent(), [""; 0]);
}

#[test]
fn fewer_device_tokens_or_a_longer_prompt_void_an_answer_and_repeat_the_lookup() {
    let mut rig = StateRig::new();
    rig.poll("a", 32, 128);
    rig.answer(2, 1, true, Some(96));
    // The device has lost its blocks.
    assert_eq!(rig.poll("a", 0, 128), Seen::Soon);
    assert_eq!(rig.begin_load("a", 32, 64), None);
    // The request has come back from preemption with more tokens.
    rig.answer(2, 2, true, Some(96));
    assert_eq!(rig.poll("a", 0, 128), Seen::Ready(96));
    assert_eq!(rig.poll("a", 0, 144), Seen::Soon);
    rig.answer(2, 2, false, Some(96));
    rig.state.waited("a");
    assert_eq!(
        rig.poll("a", 0, 144),
        Seen::Pending,
        "an answer to an older lookup"
    );
    rig.answer(2, 3, true, Some(112));
    assert_eq!(rig.poll("a", 0, 144), Seen::Ready(112));
    let sent = rig.sent();
    assert_eq!(sent[1], "lookup 2.2 8+0 computed 0", "the hashes are there");
}

#[test]
fn a_name_that_is_used_again_is_another_request() {
    let mut rig = StateRig::new();
    rig.poll("a", 0, 128);
    rig.state.finish_request("a".into());
    rig.state.finish_request("a".into());
    assert_eq!(rig.poll("a", 0, 128), Seen::Soon);
    assert_eq!(
        rig.sent(),
        [
            "lookup 2.1 0+8 computed 0",
            "FinishRequest { request: 2, turn_end: TurnEnd(0) }",
            "lookup 3.1 0+8 computed 0",
        ]
    );
    // The answer to the one that was aborted.
    assert!(rig.answer(2, 1, true, Some(128)));
    rig.state.waited("a");
    assert_eq!(rig.poll("a", 0, 128), Seen::Pending);
    rig.answer(3, 1, true, Some(16));
    assert_eq!(rig.poll("a", 0, 128), Seen::Ready(16));
    // Another prompt under the same name, without a word in between.
    rig.poll_for("a", &hashes(2), (0, 64));
    rig.poll_for("a", &hashes(2), (0, 144));
    assert!(rig.sent().contains(&"lookup 4.1 0+2 computed 0".to_owned()));
}

#[test]
fn a_released_lookup_keeps_its_hashes_and_voids_its_answer() {
    let mut rig = StateRig::new();
    rig.poll("a", 0, 128);
    rig.state.end_lookup("a");
    rig.state.end_lookup("a");
    rig.answer(2, 1, true, Some(128));
    assert_eq!(rig.begin_load("a", 0, 128), None);
    assert_eq!(rig.begin_save("a", &hashes(9)), Some(TransferId(3)));
    let sent = rig.sent();
    assert_eq!(sent[1..], ["EndLookup { request: 2 }", "save 3 of 2 8+"]);
}

#[test]
fn a_miss_is_looked_at_again_when_it_is_old_but_not_waited_for() {
    let mut rig = StateRig::new();
    rig.poll("a", 0, 128);
    rig.answer(2, 1, true, Some(0));
    assert_eq!(rig.poll("a", 0, 128), Seen::Ready(0));
    rig.now += 6 * MS;
    assert_eq!(rig.poll("a", 0, 128), Seen::Soon);
    rig.state.waited("a");
    assert_eq!(rig.poll("a", 0, 128), Seen::Ready(0));
    rig.answer(2, 2, true, Some(128));
    assert_eq!(rig.poll("a", 0, 128), Seen::Ready(128));
}

#[test]
fn a_server_that_is_late_is_not_waited_for_and_not_asked() {
    let mut rig = StateRig::new();
    rig.poll("a", 0, 128);
    rig.poll("b", 0, 128);
    rig.answer(2, 1, true, None);
    rig.sent();
    rig.now += DEADLINE + MS;
    assert_eq!(rig.poll("b", 0, 128), Seen::Ready(0));
    assert_eq!(rig.poll("c", 0, 128), Seen::Ready(0));
    rig.prefetch("d", &hashes(8), 128);
    assert_eq!(rig.begin_save("a", &hashes(8)), None);
    assert_eq!(rig.sent(), [""; 0]);
    assert_eq!(
        rig.poll("a", 0, 128),
        Seen::Pending,
        "the disk may take longer"
    );
    rig.now += Duration::from_millis(100);
    assert_eq!(rig.poll("a", 0, 128), Seen::Ready(0));
    // It was only slow.
    rig.answer(3, 1, true, Some(64));
    assert_eq!(rig.poll("b", 0, 128), Seen::Ready(64));
    assert_eq!(rig.poll("c", 0, 128), Seen::Soon);
}

#[test]
fn a_frozen_server_is_noticed_while_a_request_waits_for_the_disk() {
    let mut rig = StateRig::new();
    rig.poll("a", 0, 128);
    rig.answer(2, 1, true, None);
    rig.sent();
    assert_eq!(rig.state.tick(rig.now), Duration::from_millis(50));
    assert_eq!(rig.sent(), ["Ping"]);
    rig.state.tick(rig.now + 60 * MS);
    assert_eq!(rig.sent(), [""; 0], "one at a time");
    rig.now += 101 * MS;
    assert_eq!(rig.poll("a", 0, 128), Seen::Ready(0));
    let stats = String::new();
    assert!(rig.state.take(ServerMessage::Pong { stats }, rig.now));
    assert_eq!(rig.poll("a", 0, 128), Seen::Pending);
}

#[test]
fn other_hashes_under_the_same_name_are_another_prompt() {
    let mut rig = StateRig::new();
    rig.poll("a", 0, 128);
    rig.sent();
    let mut changed = hashes(9);
    changed.swap(7, 8);
    let span = (0, 144);
    rig.poll_for("a", &changed, span);
    let sent = rig.sent();
    assert_eq!(sent.len(), 2, "{sent:?}");
    assert!(sent[0].starts_with("FinishRequest"), "{sent:?}");
    assert!(sent[1].contains(" 0+9 "), "{sent:?}");
}

#[test]
fn replies_that_nobody_asked_for_are_no_replies() {
    let mut rig = StateRig::new();
    assert!(!rig.answer(1, 1, true, Some(16)));
    let stats = String::new();
    assert!(!rig.state.take(ServerMessage::Pong { stats }, rig.now));
    let json = String::new();
    assert!(!rig.state.take(ServerMessage::Status { json }, rig.now));
}

#[test]
fn a_burst_of_long_prompts_asks_no_more_than_can_be_sent() {
    let mut rig = StateRig::new();
    rig.state.deadline = Duration::from_secs(60);
    let prompt = hashes(80).repeat(100);
    for index in 0..1000 {
        let name = format!("burst {index}");
        rig.prefetch(&name, &prompt, 128_000);
    }
    assert!(!rig.state.is_overfull(), "the session would be lost");
    // A lookup that was not sent is a miss, and a save that was not sent is sent later.
    assert_eq!(
        rig.poll_for("burst 999", &prompt, (0, 128_000)),
        Seen::Ready(0)
    );
    let save = rig.begin_save("burst 0", &prompt);
    assert_eq!(save, None);
    rig.sent();
    rig.prefetch("later", &prompt, 128_000);
    assert_eq!(rig.sent().len(), 1);
}

#[test]
fn shared_tokens_are_known_while_pending_with_a_hit_and_with_a_miss() {
    let mut rig = StateRig::new();
    let prompt = hashes(8);
    let question = LookupRequest::new("a", &prompt).max(Tokens(128));
    let shared = Tokens(96);
    assert_eq!(
        rig.state.lookup(&question, rig.now),
        Polled::Soon { shared: Tokens(0) }
    );
    rig.take_answer(2, 1, true, LookupAnswer::Pending { shared });
    let pending = Polled::Answer(Lookup::Pending { shared });
    assert_eq!(rig.state.lookup(&question, rig.now), pending);
    let tokens = Tokens(64);
    let hit = LookupAnswer::Hit(LeasedHit {
        tokens,
        shared,
        brought: Brought::default(),
        extents: vec![extent(0, 0..4)],
    });
    rig.take_answer(2, 1, false, hit);
    let hit = Polled::Answer(Lookup::Hit(Hit { tokens, shared }));
    assert_eq!(rig.state.lookup(&question, rig.now), hit);
    // The device has computed as much meanwhile.
    let miss = Polled::Answer(Lookup::Miss { shared });
    let question = question.computed(tokens);
    assert_eq!(rig.state.lookup(&question, rig.now), miss);
}

#[test]
fn a_prefetch_is_not_waited_for_and_its_hit_is_loaded_without_another_lookup() {
    let mut rig = StateRig::new();
    let prompt = hashes(8);
    let question = LookupRequest::new("a", &prompt).max(Tokens(128)).prefetch();
    let pending = Polled::Answer(Lookup::Pending { shared: Tokens(0) });
    assert_eq!(rig.state.lookup(&question, rig.now), pending);
    assert_eq!(rig.state.lookup(&question, rig.now), pending);
    rig.answer(2, 1, true, None);
    assert_eq!(rig.state.lookup(&question, rig.now), pending);
    assert_eq!(rig.sent(), ["prefetch 2.1 0+8 computed 0"]);
    rig.answer(2, 1, false, Some(128));
    assert_eq!(rig.begin_load("a", 0, 128), Some(vec![extent(0, 0..8)]));
    assert_eq!(rig.sent().len(), 1, "the load alone");
}
