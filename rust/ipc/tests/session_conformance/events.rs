//! Events: a session's news of the tiers.

use std::collections::HashSet;
use std::time::Instant;

use undercroft_contract::key::BlockHash;
use undercroft_contract::session::{EventTier, Session};

use crate::rig::{ARENA_BLOCKS, Implementation, PATIENCE, SessionRig, full, hashes, until};

/// A router's knowledge of a session's tiers.
#[derive(Default)]
struct Router {
    known: HashSet<(BlockHash, bool)>,
    parents: Vec<Option<BlockHash>>,
    cleared: usize,
}

impl Router {
    /// Takes events until the known blocks are `expected`.
    fn follows(&mut self, session: &dyn Session, expected: &HashSet<(BlockHash, bool)>) {
        let start = Instant::now();
        loop {
            let told = session.take_events(false);
            if told.cleared {
                self.known.clear();
                self.cleared += 1;
            }
            for event in told.events {
                let payload = (event.hash, event.tier == EventTier::Disk);
                let changed = if event.stored {
                    self.parents.push(event.parent);
                    self.known.insert(payload)
                } else {
                    self.known.remove(&payload)
                };
                assert!(changed, "told in vain: {payload:?}");
            }
            if self.known == *expected && !told.more {
                return;
            }
            let known = &self.known;
            assert!(start.elapsed() < PATIENCE, "{known:?}, not {expected:?}");
            std::thread::yield_now();
        }
    }
}

fn in_host(prompt: u8, blocks: u32) -> HashSet<(BlockHash, bool)> {
    let blocks = hashes(prompt, blocks).into_iter();
    blocks.map(|hash| (hash, false)).collect()
}

/// Fills the arena with eight prompts from `first` on, which evict all that was there.
fn turn_over(rig: &SessionRig, session: &dyn Session, first: u8) -> HashSet<(BlockHash, bool)> {
    let mut new = HashSet::new();
    for prompt in first..first + 8 {
        rig.save(session, prompt, ARENA_BLOCKS / 8);
        new.extend(in_host(prompt, ARENA_BLOCKS / 8));
    }
    new
}

pub(crate) fn saved_blocks_are_reported_with_their_parents(of: Implementation) {
    let rig = SessionRig::new(of);
    let session = rig.open(full());
    let mut router = Router::default();
    router.follows(&*session, &HashSet::new());
    rig.save(&*session, 1, 3);
    router.follows(&*session, &in_host(1, 3));
    let chain = hashes(1, 3);
    assert_eq!(router.parents, [None, Some(chain[0]), Some(chain[1])]);
    assert_eq!(router.cleared, 0);
}

pub(crate) fn every_session_of_a_namespace_gets_events_of_old_and_new_blocks(of: Implementation) {
    let rig = SessionRig::new(of);
    let (one, other) = (rig.open(full()), rig.open(full()));
    rig.save(&*one, 1, 8);
    let mut routers = [Router::default(), Router::default()];
    for (router, session) in routers.iter_mut().zip([&one, &other]) {
        router.follows(&**session, &in_host(1, 8));
    }
    rig.save(&*other, 2, 4);
    let both = &in_host(1, 8) | &in_host(2, 4);
    for (router, session) in routers.iter_mut().zip([&one, &other]) {
        router.follows(&**session, &both);
    }
}

pub(crate) fn evicted_blocks_are_reported(of: Implementation) {
    let rig = SessionRig::new(of);
    let session = rig.open(full());
    let mut router = Router::default();
    rig.save(&*session, 1, 8);
    router.follows(&*session, &in_host(1, 8));
    let new = turn_over(&rig, &*session, 2);
    router.follows(&*session, &new);
}

pub(crate) fn blocks_on_disk_are_reported_also_after_a_restart(of: Implementation) {
    let dir = tempfile::tempdir().unwrap();
    let rig = SessionRig::with_disk(of, dir.path());
    let session = rig.open(full());
    let mut router = Router::default();
    rig.save(&*session, 1, 4);
    let on_disk: HashSet<_> = hashes(1, 4).into_iter().map(|hash| (hash, true)).collect();
    router.follows(&*session, &(&in_host(1, 4) | &on_disk));
    session.close();
    rig.stop();
    let rig = SessionRig::with_disk(of, dir.path());
    let session = rig.open(full());
    Router::default().follows(&*session, &on_disk);
}

pub(crate) fn a_reset_clears_all_reported_blocks(of: Implementation) {
    let rig = SessionRig::new(of);
    let session = rig.open(full());
    let mut router = Router::default();
    rig.save(&*session, 1, 8);
    router.follows(&*session, &in_host(1, 8));
    assert!(session.reset(PATIENCE));
    router.follows(&*session, &HashSet::new());
    assert_eq!(router.cleared, 1);
    rig.save(&*session, 2, 2);
    router.follows(&*session, &in_host(2, 2));
}

pub(crate) fn a_restart_of_the_events_reports_all_blocks_and_clears_none(of: Implementation) {
    let rig = SessionRig::new(of);
    let session = rig.open(full());
    let mut router = Router::default();
    rig.save(&*session, 1, 8);
    router.follows(&*session, &in_host(1, 8));
    rig.save(&*session, 2, 4);
    // The router has dropped its blocks, and the events on their way to it.
    router.known.clear();
    let told = session.take_events(true);
    assert!(!told.cleared);
    router
        .known
        .extend(told.events.iter().map(|event| (event.hash, false)));
    router.follows(&*session, &(&in_host(1, 8) | &in_host(2, 4)));
    assert_eq!(router.cleared, 0);
}

pub(crate) fn a_session_that_takes_no_events_for_long_gets_all_blocks_anew(of: Implementation) {
    let rig = SessionRig::new(of);
    let session = rig.open(full());
    let mut router = Router::default();
    router.follows(&*session, &HashSet::new());
    // Each round but the first evicts the blocks of the one before: 512 events.
    let mut new = HashSet::new();
    for round in 0..4 {
        new = turn_over(&rig, &*session, 1 + 8 * round);
    }
    router.follows(&*session, &new);
    assert_eq!(router.cleared, 1);
    until("nothing more", || !session.take_events(false).more);
}
