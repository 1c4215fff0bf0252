//! Saves.

use undercroft_contract::namespace::GroupKind;
use undercroft_contract::session::{Offer, Save, SaveGrant, SaveRefusal, SaveRequest};

use crate::rig::{
    ARENA_BLOCKS, BLOCK, Implementation, SessionRig, full, grant, hashes, hit, look_up, miss,
    shape, tokens, until, with_groups,
};

fn window(first_block: u32, end_block: u32) -> Offer {
    Offer {
        group: 1,
        first_block,
        end_block,
    }
}

pub(crate) fn a_save_is_found_when_it_has_ended_and_not_before(of: Implementation) {
    let rig = SessionRig::new(of);
    let session = rig.open(full());
    let prompt = hashes(1, 8);
    let mut within = tokens(8);
    within.0 += BLOCK - 1;
    let grant = grant(&*session, &SaveRequest::new("s", &hashes(1, 9), within));
    assert_eq!(shape(&grant.extents), [(0, 0, 8)], "full blocks");
    assert_eq!(grant.end.refused, None);
    assert_eq!(look_up(&*session, "before", &prompt), miss(0));
    rig.fill(&grant.extents, 1);
    session.end_transfer(grant.id, true);
    assert_eq!(look_up(&*session, "after", &prompt), hit(8, 8));
}

pub(crate) fn a_failed_save_is_not_found(of: Implementation) {
    let rig = SessionRig::new(of);
    let session = rig.open(full());
    let prompt = hashes(1, 8);
    let save = SaveRequest::new("s", &prompt, tokens(8));
    let failed = grant(&*session, &save);
    session.end_transfer(failed.id, false);
    assert_eq!(look_up(&*session, "r", &prompt), miss(0));
    // Another attempt is granted all of it.
    let again = SaveRequest::new("again", &prompt, tokens(8));
    assert_eq!(shape(&grant(&*session, &again).extents), [(0, 0, 8)]);
}

pub(crate) fn a_save_of_cached_blocks_has_nothing_to_copy(of: Implementation) {
    let rig = SessionRig::new(of);
    let session = rig.open(full());
    rig.save(&*session, 1, 8);
    let prompt = hashes(1, 8);
    let grant = grant(&*session, &SaveRequest::new("s", &prompt, tokens(8)));
    assert_eq!((grant.extents.len(), grant.end.refused), (0, None));
    rig.sync(&*session);
    assert_eq!(rig.in_use()[3], 0, "the save has ended");
}

pub(crate) fn a_save_starts_where_the_last_one_of_its_request_ended(of: Implementation) {
    let rig = SessionRig::new(of);
    let session = rig.open(full());
    let prompt = hashes(1, 8);
    for (blocks, expected) in [(3, (0, 0, 3)), (8, (0, 3, 5))] {
        let save = SaveRequest::new("s", &prompt, tokens(blocks));
        let grant = rig.save_as(&*session, 1, &save);
        assert_eq!(shape(&grant.extents), [expected]);
    }
    assert_eq!(look_up(&*session, "r", &prompt), hit(8, 8));
}

pub(crate) fn a_save_without_its_prefix_takes_no_slot(of: Implementation) {
    let rig = SessionRig::new(of);
    let session = rig.open(full());
    rig.save(&*session, 1, 2);
    let prompt = hashes(1, 8);
    let held = |first_block, end_block| Offer {
        group: 0,
        first_block,
        end_block,
    };
    let asked = |name: &str, offers: &[Offer]| {
        let save = SaveRequest::new(name, &prompt, tokens(8));
        let save = save.offers(offers).only_offers(true);
        let grant = rig.save_as(&*session, 1, &save);
        let end = grant.end;
        assert_eq!(end.refused.is_some(), !end.lacks.is_empty());
        (shape(&grant.extents), end.tokens, end.lacks)
    };
    let below = asked("below", &[held(5, 8)]);
    assert_eq!(below, (vec![], tokens(2), vec![held(2, 5)]));
    assert_eq!(rig.in_use()[3], 0, "the save has ended");
    let holes = asked("holes", &[held(1, 4), held(5, 6), held(7, 9)]);
    let lacks = vec![held(4, 5), held(6, 7)];
    assert_eq!(holes, (vec![(0, 2, 2)], tokens(4), lacks));
    let joins = asked("joins", &[held(4, 8)]);
    assert_eq!(joins, (vec![(0, 4, 4)], tokens(8), vec![]));
    let nothing = asked("nothing", &[]);
    assert_eq!(nothing, (vec![], tokens(8), vec![]));
    assert_eq!(look_up(&*session, "r", &prompt), hit(8, 8));
}

pub(crate) fn several_saves_are_under_way_at_a_time(of: Implementation) {
    let rig = SessionRig::new(of);
    let session = rig.open(full());
    let mut grants: Vec<SaveGrant> = Vec::new();
    let mut pending = Vec::new();
    for prompt in 1..=3 {
        let hashes = hashes(prompt, 8);
        let name = format!("s{prompt}");
        match session.begin_save(&SaveRequest::new(&name, &hashes, tokens(8))) {
            Save::Granted(grant) => grants.push(grant),
            Save::Pending(id) => pending.push(id),
            Save::Unavailable => panic!("no engine"),
        }
    }
    until("all grants", || {
        grants.extend(session.poll_saves());
        grants.len() >= 3
    });
    assert_eq!(session.poll_saves(), [], "each grant comes once");
    if !pending.is_empty() {
        let granted: Vec<_> = grants.iter().map(|grant| grant.id).collect();
        assert_eq!(granted, pending, "in order");
    }
    for (prompt, grant) in (1..=3).zip(&grants) {
        rig.fill(&grant.extents, prompt);
    }
    // The second fails.
    for (index, grant) in grants.iter().enumerate() {
        session.end_transfer(grant.id, index != 1);
    }
    for (prompt, expected) in [(1, hit(8, 8)), (2, miss(0)), (3, hit(8, 8))] {
        let name = format!("r{prompt}");
        assert_eq!(look_up(&*session, &name, &hashes(prompt, 8)), expected);
    }
    let load = session.begin_load("r3", tokens(0), tokens(8)).unwrap();
    assert!(rig.holds(&load.extents, 3), "no two saves share slots");
}

pub(crate) fn a_save_without_memory_is_refused_and_granted_later(of: Implementation) {
    let rig = SessionRig::new(of);
    let session = rig.open(full());
    // A server leaves half of the arena to the saves of others.
    let most = match of {
        Implementation::Embedded => ARENA_BLOCKS,
        Implementation::Served => ARENA_BLOCKS / 2,
    };
    let (large, small) = (hashes(1, ARENA_BLOCKS), hashes(2, 8));
    let all = SaveRequest::new("large", &large, tokens(ARENA_BLOCKS));
    let all = grant(&*session, &all);
    assert_eq!(shape(&all.extents), [(0, 0, most as usize)]);
    assert_eq!(all.end.refused.is_some(), most < ARENA_BLOCKS);
    let save = SaveRequest::new("small", &small, tokens(8));
    let refused = grant(&*session, &save);
    let end = refused.end.refused;
    assert_eq!(
        (refused.extents.len(), end),
        (0, Some(SaveRefusal::HostFull))
    );
    session.end_transfer(all.id, false);
    let granted = rig.save_as(&*session, 2, &save);
    assert_eq!(shape(&granted.extents), [(0, 0, 8)]);
    assert_eq!(granted.end.refused, None);
    assert_eq!(look_up(&*session, "r", &small), hit(8, 8));
}

pub(crate) fn offered_blocks_of_a_window_are_saved_with_new_blocks_and_with_cached_ones(
    of: Implementation,
) {
    let rig = SessionRig::new(of);
    let kind = GroupKind::SlidingWindow { tokens: 2 * BLOCK };
    let session = rig.open(with_groups(&[GroupKind::Full, kind]));
    let prompt = hashes(1, 8);
    let save = |name: &str, offers: &[Offer]| {
        let save = SaveRequest::new(name, &prompt, tokens(8)).offers(offers);
        shape(&rig.save_as(&*session, 1, &save).extents)
    };
    assert_eq!(save("new", &[window(5, 8)]), [(0, 0, 8), (1, 5, 3)]);
    assert_eq!(save("cached", &[window(2, 4)]), [(1, 2, 2)]);
    assert_eq!(save("both", &[window(3, 8)]), [(1, 4, 1)]);
    assert_eq!(save("nothing new", &[window(2, 8)]), []);
}

pub(crate) fn a_hit_loads_the_window_before_its_end(of: Implementation) {
    let rig = SessionRig::new(of);
    let kind = GroupKind::SlidingWindow { tokens: 2 * BLOCK };
    let session = rig.open(with_groups(&[GroupKind::Full, kind]));
    let prompt = hashes(1, 8);
    let offers = [window(0, 8)];
    let save = SaveRequest::new("s", &prompt, tokens(8)).offers(&offers);
    rig.save_as(&*session, 1, &save);
    assert_eq!(look_up(&*session, "r", &prompt), hit(8, 8));
    let load = session.begin_load("r", tokens(0), tokens(8)).unwrap();
    assert_eq!(shape(&load.extents), [(0, 0, 8), (1, 6, 2)]);
    assert!(rig.holds(&load.extents, 1));
}
