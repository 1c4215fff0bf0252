//! Resets, which follow a change of the weights.

use undercroft_contract::namespace::NamespaceSpec;
use undercroft_contract::session::{GiveUp, SaveRequest};
use undercroft_driver::EngineAccess;

use crate::rig::{
    Implementation, PATIENCE, SessionRig, full, grant, hashes, hit, look_up, miss, tokens, until,
};

pub(crate) fn nothing_of_before_a_reset_is_found_or_loaded(of: Implementation) {
    let rig = SessionRig::new(of);
    let (one, other) = (rig.open(full()), rig.open(full()));
    rig.save(&*one, 1, 8);
    let prompt = hashes(1, 8);
    assert_eq!(look_up(&*one, "leased", &prompt), hit(8, 8));
    assert!(one.reset(PATIENCE));
    assert_eq!(one.begin_load("leased", tokens(0), tokens(8)), None);
    for session in [&one, &other] {
        assert_eq!(look_up(&**session, "leased", &prompt), miss(0));
        assert_eq!(look_up(&**session, "r", &prompt), miss(0));
    }
}

pub(crate) fn a_reset_leaves_other_sessions_the_bytes_of_their_hits(of: Implementation) {
    let rig = SessionRig::new(of);
    let (one, other) = (rig.open(full()), rig.open(full()));
    rig.save(&*one, 1, 8);
    for name in ["load", "lease"] {
        assert_eq!(look_up(&*other, name, &hashes(1, 8)), hit(8, 8));
    }
    let load = other.begin_load("load", tokens(0), tokens(8)).unwrap();
    rig.sync(&*other);
    assert!(one.reset(PATIENCE));
    rig.evict_all();
    assert!(rig.holds(&load.extents, 1), "by the load");
    let lease = other.begin_load("lease", tokens(0), tokens(8)).unwrap();
    assert_eq!(lease.extents, load.extents);
    rig.sync(&*other);
    other.end_transfer(load.id, true);
    rig.sync(&*other);
    rig.evict_all();
    assert!(rig.holds(&lease.extents, 1), "by the load that followed");
    other.end_transfer(lease.id, true);
    rig.sync(&*other);
    let used = rig.in_use();
    assert_eq!(used[2..], [0, 0, 0]);
}

pub(crate) fn a_session_that_was_reset_shares_with_no_other(of: Implementation) {
    let rig = SessionRig::new(of);
    let (one, other) = (rig.open(full()), rig.open(full()));
    assert!(one.reset(PATIENCE));
    rig.save(&*one, 1, 8);
    rig.save(&*other, 2, 8);
    assert_eq!(look_up(&*one, "own", &hashes(1, 8)), hit(8, 8));
    assert_eq!(look_up(&*other, "own", &hashes(2, 8)), hit(8, 8));
    assert_eq!(look_up(&*one, "theirs", &hashes(2, 8)), miss(0));
    assert_eq!(look_up(&*other, "theirs", &hashes(1, 8)), miss(0));
    // Another reset.
    assert!(one.reset(PATIENCE));
    assert_eq!(look_up(&*one, "again", &hashes(1, 8)), miss(0));
    assert_eq!(look_up(&*other, "again", &hashes(2, 8)), hit(8, 8));
}

pub(crate) fn other_weights_are_nobody_elses_and_their_hits_go_on(of: Implementation) {
    let dir = tempfile::tempdir().unwrap();
    let rig = SessionRig::with_disk(of, dir.path());
    let (one, other) = (rig.open(full()), rig.open(full()));
    rig.save(&*one, 1, 8);
    let of_before = hashes(2, 8);
    let under_way = grant(&*one, &SaveRequest::new("under way", &of_before, tokens(8)));
    assert_eq!(look_up(&*one, "leased", &hashes(1, 8)), hit(8, 8));
    one.change_weights(None);
    assert_eq!(one.begin_load("leased", tokens(0), tokens(8)), None);
    assert_eq!(look_up(&*one, "own", &hashes(1, 8)), miss(0));
    assert_eq!(look_up(&*other, "kept", &hashes(1, 8)), hit(8, 8));
    one.give_up(under_way.id, GiveUp::Weights);
    rig.save(&*one, 3, 8);
    assert_eq!(look_up(&*one, "new", &hashes(3, 8)), hit(8, 8));
    for (name, prompt) in [("theirs 2", 2), ("theirs 3", 3)] {
        assert_eq!(look_up(&*other, name, &hashes(prompt, 8)), miss(0));
    }
    // Further updates keep the session's own blocks.
    one.change_weights(None);
    assert_eq!(look_up(&*one, "again", &hashes(3, 8)), hit(8, 8));
    let counters = rig.driver.read(|engine| *engine.counters()).unwrap();
    let saves = (counters.save_failures, counters.given_up_saves_weights);
    assert_eq!(saves, (0, 1));
    for session in [one, other] {
        session.close();
    }
    until("the sessions have ended", || rig.in_use()[0] == 0);
    rig.stop();
    let rig = SessionRig::with_disk(of, dir.path());
    let session = rig.open(full());
    for (name, prompt, found) in [
        ("before", 1, hit(8, 8)),
        ("under way", 2, miss(0)),
        ("after", 3, miss(0)),
    ] {
        assert_eq!(look_up(&*session, name, &hashes(prompt, 8)), found);
    }
}

pub(crate) fn weights_with_a_name_are_shared_under_it(of: Implementation) {
    let rig = SessionRig::new(of);
    let (one, other) = (rig.open(full()), rig.open(full()));
    let first = one.namespace();
    one.change_weights(None);
    rig.save(&*one, 1, 8);
    one.change_weights(Some("step 1"));
    assert_eq!(look_up(&*one, "before", &hashes(1, 8)), miss(0));
    rig.save(&*one, 2, 8);
    assert_eq!(look_up(&*other, "r", &hashes(2, 8)), miss(0));
    assert_ne!(one.namespace(), first);
    let named = NamespaceSpec {
        description: "step 1".to_owned(),
        ..full()
    };
    let another = rig.open(named);
    assert_eq!(another.namespace(), one.namespace());
    assert_eq!(look_up(&*another, "r", &hashes(2, 8)), hit(8, 8));
    // From one name to the next, and back.
    one.change_weights(Some("step 2"));
    assert_eq!(look_up(&*one, "r", &hashes(2, 8)), miss(0));
    one.change_weights(Some("step 1"));
    assert_eq!(look_up(&*one, "r", &hashes(2, 8)), hit(8, 8));
}

pub(crate) fn a_load_that_was_given_up_may_be_repeated(of: Implementation) {
    let rig = SessionRig::new(of);
    let session = rig.open(full());
    rig.save(&*session, 1, 8);
    for _ in 0..2 {
        assert_eq!(look_up(&*session, "r", &hashes(1, 8)), hit(8, 8));
        let load = session.begin_load("r", tokens(0), tokens(8)).unwrap();
        session.give_up(load.id, GiveUp::Reset);
    }
    rig.sync(&*session);
    let counters = rig.driver.read(|engine| *engine.counters()).unwrap();
    assert_eq!(
        (counters.load_failures, counters.given_up_loads_reset),
        (0, 2)
    );
}

pub(crate) fn the_end_of_a_session_is_no_failure(of: Implementation) {
    let rig = SessionRig::new(of);
    let session = rig.open(full());
    rig.save(&*session, 1, 8);
    assert_eq!(look_up(&*session, "r", &hashes(1, 8)), hit(8, 8));
    session.begin_load("r", tokens(0), tokens(8)).unwrap();
    let prompt = hashes(2, 8);
    grant(&*session, &SaveRequest::new("s", &prompt, tokens(8)));
    rig.sync(&*session);
    session.close();
    until("the session has ended", || rig.in_use()[0] == 0);
    let counters = rig.driver.read(|engine| *engine.counters()).unwrap();
    assert_eq!((counters.save_failures, counters.load_failures), (0, 0));
    let closed = (
        counters.given_up_loads_closed,
        counters.given_up_saves_closed,
    );
    assert_eq!(closed, (1, 1));
}

pub(crate) fn a_closed_session_resets_nothing(of: Implementation) {
    let rig = SessionRig::new(of);
    let (one, other) = (rig.open(full()), rig.open(full()));
    rig.save(&*one, 1, 8);
    one.close();
    assert!(!one.reset(PATIENCE));
    assert_eq!(look_up(&*other, "r", &hashes(1, 8)), hit(8, 8));
}

pub(crate) fn a_reset_is_durable(of: Implementation) {
    let dir = tempfile::tempdir().unwrap();
    for reset in [true, false] {
        let rig = SessionRig::with_disk(of, dir.path());
        let session = rig.open(full());
        assert_eq!(look_up(&*session, "r", &hashes(1, 8)), miss(0));
        rig.save(&*session, 1, 8);
        until("the blocks are on disk", || {
            let gauges = rig.driver.read(|engine| engine.gauges());
            gauges.unwrap().disk_blocks == 8
        });
        if reset {
            assert!(session.reset(PATIENCE));
        }
        session.close();
        until("the session has ended", || rig.in_use()[0] == 0);
        rig.stop();
    }
    let rig = SessionRig::with_disk(of, dir.path());
    let session = rig.open(full());
    assert_eq!(
        look_up(&*session, "r", &hashes(1, 8)),
        hit(8, 8),
        "only a reset drops"
    );
}
