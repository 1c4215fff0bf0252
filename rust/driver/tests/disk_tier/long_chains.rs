//! A chain that is larger than the arena reaches the disk whole: blocks that are written make room for those below them.

use undercroft_contract::session::{SaveEnd, SaveRefusal, SaveRequest, Tokens};
use undercroft_io::fault_hook::Direct;

use crate::rig::{DISK, HASH_BLOCK, HOST, Io, MODEL, Model, Open, Rig, dir};

/// Blocks of a chain that is three times as large as the arena.
const LEN: u32 = (3 * HOST / MODEL.payload_bytes as u64) as u32;

/// Saves as much of a chain as there is memory for.
fn save(rig: &mut Rig, prompt: u64, len: u32) -> SaveEnd {
    let (session, hashes) = (rig.session(&MODEL), Model::hashes(prompt, len));
    let request = SaveRequest::new("save", &hashes, Tokens(len * HASH_BLOCK));
    let granted = rig.engine.begin_save(session, &request);
    if let Some(transfer) = granted.transfer {
        MODEL.fill(&rig.arena, &hashes, &transfer.extents);
        rig.engine.end_transfer(transfer.id, true);
    }
    rig.engine.finish_request(session, "save");
    granted.end
}

/// How many blocks of a chain a restart finds. Loads their beginning.
fn found_again(rig: Rig, open: Open<'_>) -> u64 {
    drop(rig);
    let mut rig = open.with(Io::Pool, Direct);
    let blocks = rig.recovery.blocks;
    assert_eq!(rig.hit(1, 100), 100);
    blocks
}

#[test]
fn pieces_of_a_long_chain_pass_through_a_small_arena() {
    for io in Io::all() {
        let (_guard, store) = dir();
        let dirs = [store];
        let open = || Open {
            capacity: 2 * DISK,
            ..Open::new(&dirs)
        };
        let mut rig = open().with(io, Direct);
        // Other prompts fill the arena first.
        for prompt in 2..8 {
            rig.save(prompt, 64);
        }
        for len in (64..LEN).step_by(64).chain([LEN]) {
            let before = len.saturating_sub(64) * HASH_BLOCK;
            let first = save(&mut rig, 1, len);
            assert!(first.tokens.0 >= before, "it keeps what it has");
            rig.pump();
            // Blocks that found no room in the first place go on below it.
            let end = save(&mut rig, 1, len);
            assert_eq!((end.tokens.0, end.refused), (len * HASH_BLOCK, None));
            rig.pump();
            if len > 100 {
                assert_eq!(rig.hit(1, 100), 100);
            }
        }
        assert_eq!(found_again(rig, open()), u64::from(LEN) + 6 * 64);
    }
}

#[test]
fn a_save_larger_than_the_arena_continues_as_the_disk_writes() {
    let (_guard, store) = dir();
    let dirs = [store];
    let mut rig = Open::new(&dirs).plain();
    let (mut reached, mut tries) = (0, 0);
    while reached < LEN * HASH_BLOCK {
        let end = save(&mut rig, 1, LEN);
        let is_whole = end.tokens.0 == LEN * HASH_BLOCK;
        assert_eq!(end.refused.is_none(), is_whole);
        assert!(end.tokens.0 >= reached, "it keeps what it has");
        reached = end.tokens.0;
        rig.pump();
        tries += 1;
        assert!(tries < 50, "stuck at {reached} tokens");
    }
    assert_eq!(found_again(rig, Open::new(&dirs)), u64::from(LEN));
}

#[test]
fn a_chain_whose_blocks_are_not_written_keeps_them_and_says_how_many() {
    let (_guard, store) = dir();
    let dirs = [store];
    let mut rig = Open::new(&dirs).plain();
    let first = save(&mut rig, 1, LEN);
    assert_eq!(first.refused, Some(SaveRefusal::HostFull));
    for _ in 0..10 {
        // The disk does nothing meanwhile.
        assert_eq!(save(&mut rig, 1, LEN), first);
    }
    assert_eq!(rig.engine.counters().host_evictions, 0);
    assert_eq!(
        rig.hit(1, first.tokens.0 / HASH_BLOCK) * HASH_BLOCK,
        first.tokens.0
    );
}
