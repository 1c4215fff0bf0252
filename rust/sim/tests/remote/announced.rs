//! The blocks that a host announces as being in the store.

use std::collections::HashSet;

use undercroft_contract::key::BlockHash;
use undercroft_contract::remote::RemoteWrite;
use undercroft_contract::session::EventTier;
use undercroft_engine::SessionId;

use crate::rig::{BLOCK, Host, Random, SLOT, chain, config};
use crate::store::Objects;
use crate::{MODEL, computed, host};

const SEGMENT: u64 = 4;

/// A router that takes a session's events.
#[derive(Default)]
struct Router {
    blocks: HashSet<BlockHash>,
}

impl Router {
    /// Takes all events. Returns the blocks of a chain that are in the store by all events so far.
    fn take(&mut self, host: &mut Host, session: SessionId, hashes: &[BlockHash]) -> Vec<usize> {
        loop {
            let taken = host.enter(|engine| engine.take_events(session, false));
            for event in &taken.events {
                let is_remote = event.tier == EventTier::Remote;
                match event.stored {
                    true if is_remote => assert!(self.blocks.insert(event.hash), "told twice"),
                    false if is_remote => assert!(self.blocks.remove(&event.hash)),
                    _ => {}
                }
            }
            if !taken.more {
                break;
            }
        }
        let known = host.engine.inspect().announced_remote(session);
        let known: HashSet<BlockHash> = known.iter().map(|event| event.hash).collect();
        assert_eq!(known, self.blocks);
        (0..hashes.len())
            .filter(|&at| self.blocks.contains(&hashes[at]))
            .collect()
    }
}

/// A host that has fetched a prompt, all of which it announces, and then has saved so many other blocks.
fn fetched(hashes: &[BlockHash], others: u64, objects: &mut Objects) -> (Host, SessionId, Router) {
    let mut config = config(64, SEGMENT);
    config.remote.as_mut().expect("it is set").write = RemoteWrite::None;
    config.promotion_bytes = config.host_bytes;
    assert_eq!(config.host_bytes / SLOT, 64);
    let (mut reader, session) = host(config);
    let mut router = Router::default();
    assert!(router.take(&mut reader, session, hashes).is_empty());
    let (tokens, _) = reader.ask(session, "r", hashes, objects, &mut Random(1));
    assert_eq!(tokens, hashes.len() as u32 * BLOCK);
    reader.load((session, "r"), tokens, hashes, MODEL);
    let all: Vec<usize> = (0..hashes.len()).collect();
    assert_eq!(router.take(&mut reader, session, hashes), all);
    for other in 0..others {
        assert_eq!(
            reader.save((session, "o"), &chain(&[(100 + other, 1)]), MODEL),
            1
        );
    }
    reader.check();
    (reader, session, router)
}

#[test]
fn a_get_that_finds_no_object_retracts_the_blocks_that_were_not_missing_too() {
    let hashes = chain(&[(1, 4)]);
    let mut objects = computed(&config(256, SEGMENT), &hashes);
    let (mut reader, session, mut router) = fetched(&hashes, 63, &mut objects);
    objects.by_name.clear();
    let (tokens, _) = reader.ask(session, "s", &hashes, &mut objects, &mut Random(1));
    assert_eq!(tokens, BLOCK, "the first block is in the arena");
    assert!(router.take(&mut reader, session, &hashes).is_empty());
    reader.check();
}

#[test]
fn a_probe_that_finds_objects_absent_retracts_their_blocks() {
    let hashes = chain(&[(1, 24)]);
    let mut objects = computed(&config(256, SEGMENT), &hashes);
    let (mut reader, session, mut router) = fetched(&hashes, 64, &mut objects);
    let ends: Vec<String> = hashes[..12].iter().map(crate::hex).collect();
    let is_kept = |name: &String| ends.iter().any(|end| name.contains(end));
    objects.by_name.retain(|name, _| is_kept(name));
    let gets = objects.gets;
    let (tokens, _) = reader.ask(session, "s", &hashes, &mut objects, &mut Random(1));
    assert_eq!(
        (tokens, objects.gets - gets),
        (12 * BLOCK, 3),
        "no absent object is fetched"
    );
    let left: Vec<usize> = (0..12).collect();
    assert_eq!(router.take(&mut reader, session, &hashes), left);
    reader.check();
}
