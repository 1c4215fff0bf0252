//! Resets, which follow a change of the weights.

use undercroft_core::driver::EngineAccess;

use crate::rig::{
    Implementation, PATIENCE, SessionRig, full, hashes, hit, look_up, miss, tokens, until,
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
