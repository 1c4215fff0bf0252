//! Loads, saves, resets, and lost connections.

use super::*;

#[test]
fn an_answer_is_consumed_once() {
    let mut rig = StateRig::new();
    rig.poll("a", 16, 128);
    rig.answer(2, 1, true, Some(96));
    let load = rig.state.begin_load("a", Tokens(32), Tokens(48)).unwrap();
    assert_eq!((load.id, load.session), (TransferId(3), SessionToken(9)));
    assert_eq!(load.extents, [extent(2, 2..5)]);
    assert_eq!(rig.begin_load("a", 32, 48), None);
    assert_eq!(rig.sent().len(), 2);
    rig.state.end_transfer(load.id, true);
    rig.state.end_transfer(load.id, true);
    assert_eq!(rig.sent(), ["EndTransfer { transfer: 3, ok: true }"]);
}

#[test]
fn blocks_that_no_answer_covers_are_not_loaded() {
    let mut rig = StateRig::new();
    rig.poll("a", 32, 128);
    rig.answer(2, 1, true, Some(96));
    for (local, external) in [(16, 80), (32, 80), (32, 0), (32, 50), (u32::MAX, 16)] {
        assert_eq!(rig.begin_load("a", local, external), None);
    }
    assert_eq!(rig.begin_load("b", 0, 16), None);
}

#[test]
fn a_lost_connection_voids_answers_and_ends_saves_that_wait() {
    let mut rig = StateRig::new();
    rig.poll("a", 0, 128);
    rig.answer(2, 1, true, Some(128));
    let waiting = rig.begin_save("a", &hashes(8));
    rig.state.lost("gone".to_owned());
    assert_eq!(rig.begin_load("a", 0, 128), None);
    assert_eq!(rig.poll("a", 0, 128), Seen::Ready(0));
    assert!(rig.state.is_answered("a"));
    let grants = rig.state.take_grants();
    assert_eq!(grants.len(), 1);
    assert_eq!((Some(grants[0].id), grants[0].extents.len()), (waiting, 0));
    rig.state.registered(address(2), ("", false), String::new());
    assert_eq!(rig.poll("a", 0, 128), Seen::Soon);
    assert_eq!(rig.sent(), ["lookup 4.1 0+8 computed 0"]);
}

#[test]
fn stats_of_the_last_server_are_not_kept_for_the_next_one() {
    let mut rig = StateRig::new();
    rig.state.tick(rig.now);
    let stats = "{}".to_owned();
    assert!(rig.state.take(ServerMessage::Pong { stats }, rig.now));
    assert_eq!(rig.state.stats, "{}");
    rig.state.lost("gone".to_owned());
    assert_eq!(rig.state.stats, "");
    rig.state.registered(address(2), ("", false), String::new());
    assert_eq!(rig.state.stats, "");
}

/// A save with slots and a load, then a lost connection.
fn interrupted(rig: &mut StateRig) -> (TransferId, TransferId) {
    rig.poll("a", 0, 128);
    rig.answer(2, 1, true, Some(128));
    let load = rig.state.begin_load("a", Tokens(0), Tokens(128));
    let load = load.unwrap().id;
    let save = rig.begin_save("a", &hashes(8)).unwrap();
    assert!(rig.grant(save));
    rig.state.lost(String::new());
    assert_eq!(rig.state.take_grants().len(), 1);
    (load, save)
}

#[test]
fn a_new_session_gets_no_ends_of_loads_and_saves_of_the_last_one() {
    let mut rig = StateRig::new();
    let (load, save) = interrupted(&mut rig);
    rig.state.registered(address(1), ("", false), String::new());
    rig.state.end_transfer(load, true);
    rig.state.end_transfer(save, true);
    assert_eq!(rig.sent(), [""; 0]);
}

#[test]
fn a_reset_without_a_server_makes_the_next_session_private() {
    let mut rig = StateRig::new();
    assert!(!rig.state.private);
    rig.state.lost("gone".to_owned());
    assert_eq!(rig.state.begin_reset(), None);
    assert!(rig.state.private, "as the next session is opened");
    rig.state.registered(address(2), ("", true), String::new());
    assert_eq!(rig.sent(), [""; 0]);
    // Asked for while the session was being opened.
    rig.state.lost("gone".to_owned());
    rig.state.registered(address(3), ("", false), String::new());
    let [sent] = &rig.sent()[..] else {
        panic!("one frame")
    };
    assert!(sent.starts_with("Reset"), "{sent}");
}

#[test]
fn a_client_reports_weights_that_change_while_a_session_is_opened() {
    let mut rig = StateRig::new();
    rig.state.change_weights(None);
    rig.state.change_weights(Some("step 1"));
    let told = |description: Option<&str>| {
        let description = description.map(str::to_owned);
        format!("{:?}", ClientMessage::ChangeWeights { description })
    };
    assert_eq!(rig.sent(), [told(None), told(Some("step 1"))]);
    assert_eq!(
        (rig.state.private, &*rig.state.spec.description),
        (false, "step 1")
    );
    rig.state.lost("gone".to_owned());
    rig.state.change_weights(None);
    assert_eq!(rig.sent(), [""; 0], "there is no server");
    for (asked, sent) in [
        (("step 1", true), Vec::new()),
        (("step 1", false), vec![told(None)]),
    ] {
        rig.state.registered(address(2), asked, String::new());
        assert_eq!(rig.sent(), sent);
    }
    rig.state.change_weights(Some("step 2"));
    rig.sent();
    for (asked, sent) in [
        (("step 2", false), Vec::new()),
        (("step 1", false), vec![told(Some("step 2"))]),
        (("step 2", true), vec![told(Some("step 2"))]),
    ] {
        rig.state.registered(address(3), asked, String::new());
        assert_eq!(rig.sent(), sent);
    }
}

#[test]
fn a_reset_of_a_late_server_waits_its_turn() {
    let mut rig = StateRig::new();
    rig.poll("a", 0, 128);
    rig.now += 10 * DEADLINE;
    assert!(rig.state.is_late(rig.now));
    rig.sent();
    assert!(rig.state.begin_reset().is_some());
    assert_eq!(rig.sent().len(), 2, "the lookup is released");
}

#[test]
fn more_requests_than_a_session_may_have_are_misses() {
    let mut rig = StateRig::new();
    for number in 0..REQUESTS_MAX {
        let name = number.to_string();
        rig.prefetch(&name, &hashes(1), 16);
    }
    rig.sent();
    assert_eq!(rig.poll("one more", 0, 128), Seen::Ready(0));
    let save = rig.begin_save("one more", &hashes(8));
    assert_eq!((save, rig.sent()), (None, Vec::new()));
    rig.state.finish_request("7".into());
    assert_eq!(rig.poll("one more", 0, 128), Seen::Soon);
}

#[test]
fn slots_for_a_save_that_nobody_wants_any_more_are_given_back() {
    let mut rig = StateRig::new();
    let save = rig.begin_save("a", &hashes(8)).unwrap();
    rig.state.end_transfer(save, false);
    rig.sent();
    assert!(rig.grant(save));
    assert_eq!(rig.state.take_grants(), []);
    let end = format!("EndTransfer {{ transfer: {}, ok: false }}", save.0);
    assert_eq!(rig.sent(), [end]);
}

#[test]
fn other_weights_void_every_answer() {
    let mut rig = StateRig::new();
    rig.poll("a", 0, 128);
    rig.answer(2, 1, true, Some(128));
    rig.state.change_weights(None);
    assert_eq!(rig.begin_load("a", 0, 128), None);
}

#[test]
fn a_reset_voids_every_answer() {
    let mut rig = StateRig::new();
    rig.poll("a", 0, 128);
    rig.answer(2, 1, true, Some(128));
    let reset = rig.state.begin_reset().unwrap();
    assert_eq!(rig.begin_load("a", 0, 128), None);
    assert!(!rig.state.has_reset_ended(reset));
    rig.state
        .take(ServerMessage::Reset { reset, ok: true }, rig.now);
    assert!(rig.state.has_reset_ended(reset));
    assert!(rig.state.end_reset(reset));
    assert!(!rig.state.end_reset(reset), "once");
}

#[test]
fn a_load_says_how_many_of_its_tokens_came_from_disk_and_from_the_store() {
    let mut rig = StateRig::new();
    rig.poll("a", 0, 128);
    let hit = LookupAnswer::Hit(LeasedHit {
        tokens: Tokens(128),
        shared: Tokens(128),
        brought: Brought {
            disk: Some((Tokens(0), Tokens(32))),
            // The store's run has a block of the disk's. It counts once.
            remote: Some((Tokens(16 + 8), Tokens(104))),
        },
        extents: vec![extent(0, 0..8)],
    });
    rig.take_answer(2, 1, true, hit);
    let load = rig.state.begin_load("a", Tokens(16), Tokens(96)).unwrap();
    let (host, disk, remote) = (Tokens(8), Tokens(8), Tokens(80));
    assert_eq!(load.sources, Sources { host, disk, remote });
}

#[test]
fn a_second_grant_of_one_save_and_one_of_a_load_are_no_replies() {
    let mut rig = StateRig::new();
    let save = rig.begin_save("a", &hashes(8)).unwrap();
    rig.begin_save("b", &hashes(8));
    assert!(rig.grant(save));
    assert!(!rig.grant(save));
    rig.poll("a", 0, 128);
    rig.answer(2, 1, true, Some(128));
    let load = rig.state.begin_load("a", Tokens(0), Tokens(128));
    rig.begin_save("c", &hashes(8));
    assert!(!rig.grant(load.unwrap().id));
}
