//! Loads, and the ends of loads and saves.

use undercroft_contract::session::{LookupRequest, Sources, TransferId};

use crate::rig::{
    Implementation, SessionRig, answer, full, hashes, hit, look_up, miss, shape, tokens,
};

pub(crate) fn a_lease_keeps_the_bytes_of_a_hit_until_its_load_has_ended(of: Implementation) {
    let rig = SessionRig::new(of);
    let session = rig.open(full());
    rig.save(&*session, 1, 32);
    assert_eq!(look_up(&*session, "r", &hashes(1, 32)), hit(32, 32));
    rig.evict_all();
    let load = session.begin_load("r", tokens(0), tokens(32)).unwrap();
    assert!(rig.holds(&load.extents, 1), "by the lease");
    rig.sync(&*session);
    rig.evict_all();
    assert!(rig.holds(&load.extents, 1), "by the load");
    session.end_transfer(load.id, true);
    rig.sync(&*session);
    rig.evict_all();
    assert_eq!(look_up(&*session, "again", &hashes(1, 32)), miss(0));
}

pub(crate) fn a_part_of_a_hit_is_loaded(of: Implementation) {
    let rig = SessionRig::new(of);
    let session = rig.open(full());
    rig.save(&*session, 1, 8);
    let prompt = hashes(1, 8);
    let question = LookupRequest::new("r", &prompt).computed(tokens(1));
    assert_eq!(answer(&*session, &question), hit(8, 8));
    let load = session.begin_load("r", tokens(2), tokens(3)).unwrap();
    assert_eq!(shape(&load.extents), [(0, 2, 3)]);
    let (host, disk, remote) = (tokens(3), tokens(0), tokens(0));
    assert_eq!(load.sources, Sources { host, disk, remote });
    assert!(rig.holds(&load.extents, 1));
    rig.sync(&*session);
    assert_eq!(rig.in_use()[2], 1);
    session.end_transfer(load.id, true);
}

pub(crate) fn a_load_that_no_hit_covers_is_refused(of: Implementation) {
    let rig = SessionRig::new(of);
    let session = rig.open(full());
    rig.save(&*session, 1, 8);
    assert_eq!(look_up(&*session, "missed", &hashes(2, 8)), miss(0));
    assert_eq!(session.begin_load("missed", tokens(0), tokens(8)), None);
    assert_eq!(look_up(&*session, "r", &hashes(1, 8)), hit(8, 8));
    let mut within = tokens(8);
    within.0 -= 1;
    let mut most = tokens(0);
    most.0 = u32::MAX;
    for (computed, external) in [
        (tokens(0), tokens(9)),
        (tokens(8), tokens(1)),
        (tokens(0), tokens(0)),
        (tokens(0), within),
        (most, tokens(1)),
    ] {
        let load = session.begin_load("r", computed, external);
        assert_eq!(load, None, "{computed:?} {external:?}");
    }
    assert!(session.begin_load("r", tokens(0), tokens(8)).is_some());
}

pub(crate) fn a_hit_is_loaded_once(of: Implementation) {
    let rig = SessionRig::new(of);
    let session = rig.open(full());
    rig.save(&*session, 1, 8);
    assert_eq!(look_up(&*session, "r", &hashes(1, 8)), hit(8, 8));
    let load = session.begin_load("r", tokens(0), tokens(8)).unwrap();
    assert_eq!(session.begin_load("r", tokens(0), tokens(8)), None);
    session.end_transfer(load.id, true);
    // A request that comes back from preemption asks again.
    assert_eq!(look_up(&*session, "r", &hashes(1, 8)), hit(8, 8));
    assert!(session.begin_load("r", tokens(0), tokens(8)).is_some());
}

pub(crate) fn a_load_continues_when_its_request_has_finished(of: Implementation) {
    let rig = SessionRig::new(of);
    let session = rig.open(full());
    rig.save(&*session, 1, 32);
    assert_eq!(look_up(&*session, "r", &hashes(1, 32)), hit(32, 32));
    let load = session.begin_load("r", tokens(0), tokens(32)).unwrap();
    session.finish_request("r".into());
    session.finish_request("r".into());
    rig.sync(&*session);
    rig.evict_all();
    assert!(rig.holds(&load.extents, 1));
    session.end_transfer(load.id, false);
    rig.sync(&*session);
    assert_eq!(rig.in_use()[2..], [0, 0, 0]);
    // The failure of a request that has finished concerns no other, not even of the same name.
    rig.save(&*session, 2, 8);
    assert_eq!(look_up(&*session, "r", &hashes(2, 8)), hit(8, 8));
}

pub(crate) fn a_failed_load_makes_later_lookups_of_its_request_misses(of: Implementation) {
    let rig = SessionRig::new(of);
    let session = rig.open(full());
    rig.save(&*session, 1, 8);
    assert_eq!(look_up(&*session, "r", &hashes(1, 8)), hit(8, 8));
    let load = session.begin_load("r", tokens(0), tokens(8)).unwrap();
    session.end_transfer(load.id, false);
    for _ in 0..2 {
        let found = look_up(&*session, "r", &hashes(1, 8));
        assert_eq!(found.tokens(), Some(tokens(0)), "{found:?}");
    }
    assert_eq!(look_up(&*session, "other", &hashes(1, 8)), hit(8, 8));
}

pub(crate) fn transfers_that_are_unknown_are_ignored(of: Implementation) {
    let rig = SessionRig::new(of);
    let session = rig.open(full());
    rig.save(&*session, 1, 8);
    for prompt in ["r", "s"] {
        assert_eq!(look_up(&*session, prompt, &hashes(1, 8)), hit(8, 8));
    }
    let first = session.begin_load("r", tokens(0), tokens(8)).unwrap();
    session.end_transfer(first.id, true);
    let second = session.begin_load("s", tokens(0), tokens(8)).unwrap();
    for (id, ok) in [(first.id, false), (TransferId(12_345), true)] {
        session.end_transfer(id, ok);
    }
    rig.sync(&*session);
    assert_eq!(rig.in_use()[2], 1, "the second load goes on");
    assert_eq!(look_up(&*session, "r", &hashes(1, 8)), hit(8, 8));
    session.end_transfer(second.id, true);
    rig.sync(&*session);
    assert_eq!(rig.in_use()[2], 0);
}
