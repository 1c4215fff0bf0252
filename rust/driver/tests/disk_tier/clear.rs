//! Blocks that an operator clears; an engine that drains.

use std::path::Path;

use undercroft_contract::key::BlockHash;
use undercroft_contract::session::{LookupRequest, Tokens};
use undercroft_engine::{ClearOrder, ClearRefusal, ClearWhat, Cleared};
use undercroft_io::fault_hook::Direct;

use crate::rig::{Io, MODEL, Model, Open, Rig, SECOND, dir};

const OTHER: Model = Model {
    id: 2,
    payload_bytes: 8_000,
};
const LEN: u32 = 5;
const PAYLOAD: u64 = MODEL.payload_bytes as u64;

impl Rig {
    /// Gives an order, and does what can be done at once.
    fn clear(&mut self, what: ClearWhat, erase: bool) -> Cleared {
        self.engine.clear(&ClearOrder { what, erase }).unwrap();
        self.pump();
        self.engine.cleared()
    }
}

/// How many of a prompt's payloads are in the data file, wherever.
fn bytes_left(store: &Path, model: &Model, prompt: u64) -> usize {
    bytes_of(store, model, prompt, LEN)
}

fn bytes_of(store: &Path, model: &Model, prompt: u64, len: u32) -> usize {
    let data = std::fs::read(store.join("data")).unwrap();
    // Any piece counts: no end of an erased slot may stay.
    let is_left = |hash: &BlockHash| {
        let payload = model.payload(hash);
        let mut pieces = payload.chunks(4096);
        pieces.any(|piece| data.chunks(4096).any(|of| of.starts_with(piece)))
    };
    let hashes = Model::hashes(prompt, len);
    hashes.iter().filter(|hash| is_left(hash)).count()
}

#[test]
fn a_cleared_namespace_is_gone_at_once_and_after_a_restart_and_the_others_stay() {
    for io in Io::all() {
        for erase in [false, true] {
            let (_guard, store) = dir();
            let dirs = [store];
            let mut rig = Open::new(&dirs).with(io, Direct);
            rig.save(1, LEN);
            rig.save_of(&OTHER, 2, LEN);
            let digest = MODEL.spec().digest().to_hex();
            let order = ClearOrder {
                what: ClearWhat::Namespace(digest[..8].to_owned()),
                erase,
            };
            rig.engine.clear(&order).unwrap();
            assert_eq!(rig.hit(1, LEN), 0, "not one entry later");
            rig.pump();
            let cleared = rig.engine.cleared();
            let (blocks, bytes) = (u64::from(LEN), u64::from(LEN) * PAYLOAD);
            assert_eq!((cleared.host_blocks, cleared.host_bytes), (blocks, bytes));
            assert_eq!((cleared.disk_blocks, cleared.disk_bytes), (blocks, bytes));
            assert_eq!(cleared.erased_bytes, if erase { bytes } else { 0 });
            assert_eq!((cleared.pending, cleared.removing), (0, false));
            assert!(cleared.durable && cleared.erase_failures == 0);
            // A slot that is erased stays as long as the rest of the file.
            let left = bytes_left(&dirs[0], &MODEL, 1);
            assert_eq!(left, if erase { 0 } else { LEN as usize });
            assert_eq!(bytes_left(&dirs[0], &OTHER, 2), LEN as usize);
            // The session goes on, and the same prompt is found again.
            assert_eq!(rig.hit_of(&OTHER, 2, LEN), LEN);
            rig.save(3, LEN);
            drop(rig);
            let mut rig = Open::new(&dirs).with(io, Direct);
            assert_eq!((rig.hit(1, LEN), rig.hit(3, LEN)), (0, LEN));
            assert_eq!(rig.hit_of(&OTHER, 2, LEN), LEN);
        }
    }
}

#[test]
fn blocks_in_use_are_loaded_to_the_end_and_go_then() {
    let (_guard, store) = dir();
    let dirs = [store];
    let mut rig = Open::new(&dirs).plain();
    rig.save(1, LEN);
    let session = rig.session(&MODEL);
    let hashes = Model::hashes(1, LEN);
    let found = rig
        .engine
        .lookup(session, &LookupRequest::new("r", &hashes));
    let tokens = found.tokens().unwrap();
    assert!(tokens > Tokens(0));
    let cleared = rig.clear(ClearWhat::All, true);
    assert_eq!((cleared.pending, cleared.removing), (u64::from(LEN), false));
    assert_eq!(bytes_left(&dirs[0], &MODEL, 1), LEN as usize);
    let load = rig.engine.begin_load(session, "r", Tokens(0), tokens);
    let load = load.unwrap();
    assert_eq!(MODEL.verify(&rig.arena, &hashes, &load.extents), LEN);
    rig.engine.end_transfer(load.id, true);
    rig.engine.finish_request(session, "r");
    rig.pump();
    let cleared = rig.engine.cleared();
    assert_eq!((cleared.pending, cleared.removing), (0, false));
    assert_eq!(bytes_left(&dirs[0], &MODEL, 1), 0);
}

#[test]
fn blocks_by_age_go_unless_they_are_used_and_no_restart_finds_them() {
    let (_guard, store) = dir();
    let dirs = [store];
    let mut rig = Open::new(&dirs).plain();
    rig.pass(SECOND);
    rig.save(1, LEN);
    rig.save(2, LEN);
    rig.pass(3600 * SECOND);
    assert_eq!(rig.hit(2, LEN), LEN);
    rig.save(3, LEN);
    rig.pass(60 * SECOND);
    let cleared = rig.clear(ClearWhat::OlderThan(1800), false);
    assert_eq!(cleared.disk_blocks, u64::from(LEN));
    assert_eq!((cleared.pending, cleared.removing), (0, false));
    let found = [1, 2, 3].map(|prompt| rig.hit(prompt, LEN));
    assert_eq!(found, [0, LEN, LEN]);
    rig.pass(2 * SECOND);
    rig.pump();
    drop(rig);
    let mut rig = Open::new(&dirs).plain();
    assert_eq!([1, 2, 3].map(|prompt| rig.hit(prompt, LEN)), [0, LEN, LEN]);
}

#[test]
fn old_blocks_in_use_are_pending_and_go_when_their_use_has_ended() {
    let (_guard, store) = dir();
    let dirs = [store];
    let mut rig = Open::new(&dirs).plain();
    rig.pass(SECOND);
    rig.save(1, LEN);
    let (session, hashes) = (rig.session(&MODEL), Model::hashes(1, LEN));
    let question = LookupRequest::new("r", &hashes);
    assert!(rig.engine.lookup(session, &question).tokens() > Some(Tokens(0)));
    rig.pass(3600 * SECOND);
    let cleared = rig.clear(ClearWhat::OlderThan(1800), false);
    assert!(
        cleared.pending > 0 && cleared.disk_blocks == 0,
        "{cleared:?}"
    );
    rig.engine.finish_request(session, "r");
    rig.pass(2 * SECOND);
    rig.pump();
    let cleared = rig.engine.cleared();
    assert_eq!((cleared.pending, cleared.disk_blocks), (0, u64::from(LEN)));
    assert_eq!(rig.hit(1, LEN), 0);
}

#[test]
fn nothing_of_the_old_blocks_is_left_in_the_files_beside_the_young_ones() {
    for erase in [false, true] {
        let (_guard, store) = dir();
        let dirs = [store];
        let mut rig = Open::new(&dirs).plain();
        rig.pass(SECOND);
        // Old and young blocks share pages, so that no page is freed as a whole.
        let pairs: Vec<(u64, u64)> = (0..64).map(|at| (100 + at, 200 + at)).collect();
        for &(old, young) in &pairs {
            rig.save(old, 1);
            rig.save(young, 1);
        }
        rig.pass(3600 * SECOND);
        for &(_, young) in &pairs {
            assert_eq!(rig.hit(young, 1), 1);
        }
        for _ in 0..5 {
            rig.pass(2 * SECOND);
            rig.pump();
        }
        let (old, young): (Vec<u64>, Vec<u64>) = pairs.into_iter().unzip();
        assert_eq!(found_in(&dirs[0], &old), (64, 64));
        let cleared = rig.clear(ClearWhat::OlderThan(1800), erase);
        assert_eq!((cleared.disk_blocks, cleared.pending), (64, 0));
        rig.pass(2 * SECOND);
        rig.pump();
        assert_eq!(found_in(&dirs[0], &old), (0, if erase { 0 } else { 64 }));
        assert_eq!(found_in(&dirs[0], &young), (64, 64));
    }
}

/// Of how many prompts of one block the record is in the table, and of how many the payload in the data file.
fn found_in(store: &Path, prompts: &[u64]) -> (usize, usize) {
    let table = std::fs::read(store.join("table")).unwrap();
    let is_recorded = |&&prompt: &&u64| {
        let hash = Model::hashes(prompt, 1)[0];
        let mut windows = table.windows(hash.as_bytes().len());
        windows.any(|bytes| bytes == hash.as_bytes())
    };
    let payloads = prompts
        .iter()
        .map(|&prompt| bytes_of(store, &MODEL, prompt, 1));
    (prompts.iter().filter(is_recorded).count(), payloads.sum())
}

#[test]
fn an_order_without_a_namespace_or_beside_another_is_refused() {
    let (_guard, store) = dir();
    let dirs = [store];
    let mut rig = Open::new(&dirs).plain();
    rig.save(1, LEN);
    let refused = |rig: &mut Rig, what| {
        let order = ClearOrder { what, erase: false };
        rig.engine.clear(&order).unwrap_err()
    };
    let unknown = ClearWhat::Namespace("00000000".to_owned());
    assert!(matches!(
        refused(&mut rig, unknown),
        ClearRefusal::Unknown(_)
    ));
    for digits in ["", "1234567", "nonsense"] {
        let what = ClearWhat::Namespace(digits.to_owned());
        assert!(matches!(refused(&mut rig, what), ClearRefusal::Digits(_)));
    }
    let all = ClearOrder {
        what: ClearWhat::All,
        erase: false,
    };
    rig.engine.clear(&all).unwrap();
    assert_eq!(refused(&mut rig, ClearWhat::All), ClearRefusal::Busy);
    rig.pump();
    assert_eq!(rig.clear(ClearWhat::All, false).disk_blocks, 0);
}

#[test]
fn a_draining_engine_refuses_saves_and_serves_host_memory_only() {
    let (_guard, store) = dir();
    let dirs = [store];
    let mut rig = Open::new(&dirs).plain();
    rig.save(1, LEN);
    drop(rig);
    let mut rig = Open::new(&dirs).plain();
    rig.save(2, LEN);
    let begun = rig.engine.drain(false);
    assert!(begun.draining);
    rig.save(3, LEN);
    // 1 is on disk only.
    assert_eq!([1, 2, 3].map(|prompt| rig.hit(prompt, LEN)), [0, LEN, 0]);
    assert_eq!(rig.engine.counters().misses_draining, 1);
    assert!(rig.engine.drained().clean);
    assert_eq!(rig.engine.gauges().draining, 1);
    let ended = rig.engine.drain(true);
    assert!(!ended.draining && !ended.clean);
    rig.save(3, LEN);
    assert_eq!([1, 2, 3].map(|prompt| rig.hit(prompt, LEN)), [LEN; 3]);
}
