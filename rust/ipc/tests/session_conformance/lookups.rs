//! Lookups and their leases.

use std::time::Duration;

use undercroft_contract::explain::Reason;
use undercroft_contract::namespace::{GroupKind, NamespaceSpec};
use undercroft_contract::session::{
    Lookup, LookupRequest, Offer, Save, SaveRequest, SessionSpec, Tokens,
};
use undercroft_driver::EngineAccess;

use crate::rig::{
    BLOCK, Implementation, PATIENCE, SessionRig, answer, full, hashes, hit, look_up, miss, shape,
    tokens, until, with_groups,
};

pub(crate) fn a_prompt_that_was_never_saved_is_a_miss(of: Implementation) {
    let rig = SessionRig::new(of);
    let session = rig.open(full());
    assert_eq!(look_up(&*session, "r", &hashes(1, 8)), miss(0));
    assert_eq!(look_up(&*session, "no hashes", &hashes(1, 0)), miss(0));
    assert_eq!(session.begin_load("r", tokens(0), tokens(1)), None);
}

pub(crate) fn an_answer_says_why_it_has_no_more(of: Implementation) {
    let rig = SessionRig::new(of);
    let session = rig.open(full());
    assert_eq!(session.rest("r"), None);
    let reason = |name| session.rest(name).map(|rest| rest.reason);
    look_up(&*session, "r", &hashes(1, 8));
    assert_eq!(reason("r"), Some(Reason::NeverSeen));
    rig.save(&*session, 1, 8);
    look_up(&*session, "whole", &hashes(1, 8));
    assert_eq!(reason("whole"), Some(Reason::Complete));
    session.finish_request("whole".into());
    rig.evict_all();
    until("it is told as evicted", || {
        look_up(&*session, "r", &hashes(1, 8));
        reason("r") == Some(Reason::EvictedHost)
    });
}

pub(crate) fn a_saved_prompt_is_a_hit_in_every_session_of_the_namespace(of: Implementation) {
    let rig = SessionRig::new(of);
    let (one, other) = (rig.open(full()), rig.open(full()));
    assert_eq!(one.namespace(), full().digest().to_hex());
    rig.save(&*one, 1, 8);
    for session in [&one, &other] {
        assert_eq!(look_up(&**session, "r", &hashes(1, 8)), hit(8, 8));
        // A longer prompt, and one that goes another way.
        assert_eq!(look_up(&**session, "longer", &hashes(1, 9)), hit(8, 8));
        let mut parts = hashes(1, 5);
        parts.extend(hashes(2, 4));
        assert_eq!(look_up(&**session, "parts", &parts), hit(5, 5));
        let load = session.begin_load("r", tokens(0), tokens(8)).unwrap();
        assert_eq!(shape(&load.extents), [(0, 0, 8)]);
        assert!(rig.holds(&load.extents, 1));
        session.end_transfer(load.id, true);
    }
}

pub(crate) fn another_namespace_shares_nothing(of: Implementation) {
    let rig = SessionRig::new(of);
    let other = NamespaceSpec {
        description: "another model".to_owned(),
        ..full()
    };
    let (one, other) = (rig.open(full()), rig.open(other));
    rig.save(&*one, 1, 8);
    assert_ne!(one.namespace(), other.namespace());
    assert_eq!(look_up(&*other, "r", &hashes(1, 8)), miss(0));
    assert_eq!(look_up(&*one, "r", &hashes(1, 8)), hit(8, 8));
}

pub(crate) fn a_hit_ends_at_the_limit_and_at_the_alignment(of: Implementation) {
    let rig = SessionRig::new(of);
    let aligned = NamespaceSpec {
        alignment_tokens: 2 * BLOCK,
        ..full()
    };
    let session = rig.open(aligned);
    rig.save(&*session, 1, 7);
    let prompt = hashes(1, 8);
    let at_most = |name, max| {
        let question = LookupRequest::new(name, &prompt).max(Tokens(max));
        answer(&*session, &question)
    };
    assert_eq!(at_most("all", u32::MAX), hit(6, 7));
    assert_eq!(at_most("within a block", 5 * BLOCK - 1), hit(4, 7));
    assert_eq!(at_most("one token less", 6 * BLOCK - 1), hit(4, 7));
    assert_eq!(at_most("less than the alignment", 2 * BLOCK - 1), miss(7));
}

pub(crate) fn computed_tokens_are_not_fetched(of: Implementation) {
    let rig = SessionRig::new(of);
    let session = rig.open(full());
    rig.save(&*session, 1, 8);
    let prompt = hashes(1, 8);
    let question = LookupRequest::new("r", &prompt).computed(tokens(3));
    assert_eq!(answer(&*session, &question), hit(8, 8));
    let load = session.begin_load("r", tokens(3), tokens(5)).unwrap();
    assert_eq!(shape(&load.extents), [(0, 3, 5)]);
    assert_eq!(load.sources.host, tokens(5));
    assert!(rig.holds(&load.extents, 1));
    for computed in [8, 9] {
        let name = format!("{computed}");
        let question = LookupRequest::new(&name, &prompt).computed(tokens(computed));
        assert_eq!(answer(&*session, &question), miss(8), "{computed}");
    }
    // The same for one request that had a hit before.
    let question = LookupRequest::new("again", &prompt);
    assert_eq!(answer(&*session, &question), hit(8, 8));
    assert_eq!(answer(&*session, &question.computed(tokens(8))), miss(8));
}

pub(crate) fn a_hit_stays_away_from_the_end_by_the_dropped_tokens(of: Implementation) {
    let rig = SessionRig::new(of);
    let spec = SessionSpec {
        dropped_tokens: Tokens(1),
        ..SessionSpec::from(full())
    };
    let (session, plain) = (rig.open(spec), rig.open(full()));
    rig.save(&*session, 1, 8);
    assert_eq!(look_up(&*session, "r", &hashes(1, 8)), hit(7, 8));
    assert_eq!(look_up(&*plain, "r", &hashes(1, 8)), hit(8, 8));
}

pub(crate) fn shared_tokens_count_the_chain_above_a_missing_state(of: Implementation) {
    let rig = SessionRig::new(of);
    let session = rig.open(with_groups(&[GroupKind::Full, GroupKind::State]));
    let (with_state, without) = (hashes(1, 8), hashes(2, 8));
    let states = [Offer {
        group: 1,
        first_block: 3,
        end_block: 4,
    }];
    let save = SaveRequest::new("one", &with_state, tokens(8)).offers(&states);
    rig.save_as(&*session, 1, &save);
    rig.save_as(&*session, 2, &SaveRequest::new("two", &without, tokens(8)));
    assert_eq!(look_up(&*session, "r", &with_state), hit(4, 8));
    assert_eq!(look_up(&*session, "s", &without), miss(8));
    let load = session.begin_load("r", tokens(0), tokens(4)).unwrap();
    assert_eq!(shape(&load.extents), [(0, 0, 4), (1, 3, 1)]);
    assert!(rig.holds(&load.extents, 1));
}

pub(crate) fn a_prefetch_that_was_leased_is_loaded_without_another_lookup(of: Implementation) {
    let rig = SessionRig::new(of);
    let spec = SessionSpec {
        leases_prefetches: true,
        ..SessionSpec::from(full())
    };
    let session = rig.open(spec);
    rig.save(&*session, 1, 8);
    let prompt = hashes(1, 8);
    let question = LookupRequest::new("r", &prompt).prefetch();
    assert_eq!(answer(&*session, &question), hit(8, 8));
    rig.evict_all();
    let load = session.begin_load("r", tokens(0), tokens(8)).unwrap();
    assert!(rig.holds(&load.extents, 1));
    session.end_transfer(load.id, true);
}

pub(crate) fn a_lookup_that_has_ended_leases_nothing(of: Implementation) {
    let rig = SessionRig::new(of);
    let session = rig.open(full());
    for (prompt, finish) in [(1, false), (2, true)] {
        rig.save(&*session, prompt, 8);
        assert_eq!(look_up(&*session, "r", &hashes(prompt, 8)), hit(8, 8));
        for _ in 0..2 {
            if finish {
                session.finish_request("r".into());
            } else {
                session.end_lookup("r");
            }
        }
        assert_eq!(session.begin_load("r", tokens(0), tokens(8)), None);
        rig.sync(&*session);
        rig.evict_all();
        let name = format!("again {prompt}");
        assert_eq!(look_up(&*session, &name, &hashes(prompt, 8)), miss(0));
    }
}

pub(crate) fn requests_that_are_unknown_are_ignored(of: Implementation) {
    let rig = SessionRig::new(of);
    let session = rig.open(full());
    rig.save(&*session, 1, 8);
    assert_eq!(look_up(&*session, "r", &hashes(1, 8)), hit(8, 8));
    session.end_lookup("nobody");
    session.finish_request("nobody".into());
    assert!(session.wait("nobody", PATIENCE), "it is not pending");
    assert_eq!(session.begin_load("nobody", tokens(0), tokens(8)), None);
    assert!(session.begin_load("r", tokens(0), tokens(8)).is_some());
}

pub(crate) fn a_closed_session_keeps_nothing_and_finds_nothing(of: Implementation) {
    let rig = SessionRig::new(of);
    let session = rig.open(full());
    rig.save(&*session, 1, 8);
    let prompt = hashes(1, 8);
    assert_eq!(look_up(&*session, "leased", &prompt), hit(8, 8));
    assert_eq!(look_up(&*session, "loaded", &prompt), hit(8, 8));
    session.begin_load("loaded", tokens(0), tokens(8)).unwrap();
    let (more, save) = (hashes(2, 8), tokens(8));
    session.begin_save(&SaveRequest::new("saved", &more, save));
    rig.sync(&*session);
    let [sessions, lookups, loads, saves, _] = rig.in_use();
    assert_eq!((sessions, loads, saves), (1, 1, 1));
    assert!(lookups >= 1);
    for _ in 0..2 {
        session.close();
        until("the session has ended", || rig.in_use() == [0; 5]);
    }
    assert_eq!(
        session.lookup(&LookupRequest::new("r", &prompt)),
        Lookup::NOTHING
    );
    assert!(session.wait("r", Duration::ZERO));
    assert_eq!(session.begin_load("leased", tokens(0), tokens(8)), None);
    match session.begin_save(&SaveRequest::new("r", &more, save)) {
        Save::Unavailable => {}
        Save::Granted(grant) => assert_eq!(grant.extents, []),
        Save::Pending(id) => panic!("{id:?} is never granted"),
    }
    session.end_lookup("r");
    session.finish_request("r".into());
    assert_eq!(rig.in_use(), [0; 5]);
}

pub(crate) fn a_broken_engine_has_misses(of: Implementation) {
    let rig = SessionRig::new(of);
    let session = rig.open(full());
    rig.save(&*session, 1, 8);
    let prompt = hashes(1, 8);
    assert_eq!(look_up(&*session, "r", &prompt), hit(8, 8));
    let broken: Option<()> = rig.driver.enter(|_| panic!("the test breaks the engine"));
    assert_eq!(broken, None);
    assert_eq!(look_up(&*session, "another", &prompt), Lookup::NOTHING);
    assert_eq!(session.begin_load("another", tokens(0), tokens(8)), None);
    let more = hashes(2, 8);
    match session.begin_save(&SaveRequest::new("save", &more, tokens(8))) {
        Save::Unavailable => {}
        Save::Granted(grant) => assert_eq!(grant.extents, []),
        Save::Pending(id) => {
            let mut grants = Vec::new();
            until("the grant", || {
                grants.extend(session.poll_saves());
                !grants.is_empty()
            });
            assert_eq!((grants[0].id, grants[0].extents.len()), (id, 0));
        }
    }
    assert!(!session.reset(PATIENCE));
    session.close();
}
