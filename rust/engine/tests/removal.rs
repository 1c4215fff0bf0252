//! Removal in steps: payloads in use stay where they are between any two steps.

#![expect(clippy::unwrap_used, reason = "tests")]

use undercroft_contract::key::BlockHash;
use undercroft_contract::namespace::{GroupKind, NamespaceSpec};
use undercroft_contract::session::{LookupRequest, SaveRequest, Tokens};
use undercroft_engine::{Due, Engine, EngineConfig, Room, Started};

const HASH_BLOCK: u32 = 16;
const HOST_BYTES: u64 = 4 << 20;
const PAYLOAD: u64 = 64 << 10;
/// Blocks that fill the arena.
const BLOCKS: u32 = (HOST_BYTES / PAYLOAD) as u32;

fn spec(description: &str, payload_bytes: u64) -> NamespaceSpec {
    NamespaceSpec::uniform(
        description,
        HASH_BLOCK,
        &[(GroupKind::Full, payload_bytes as u32)],
    )
}

fn chain(seed: u8, len: u32) -> Vec<BlockHash> {
    (0..len)
        .map(|depth| {
            let mut hash = [seed; 32];
            hash[..4].copy_from_slice(&depth.to_le_bytes());
            BlockHash::new(&hash).unwrap()
        })
        .collect()
}

#[test]
fn no_page_of_a_load_changes_its_size_class_while_its_namespace_is_removed() {
    let mut engine = Engine::new(EngineConfig {
        removals: 1,
        ..EngineConfig::new(HOST_BYTES)
    });
    let old = engine.open_session(spec("old", PAYLOAD)).unwrap();
    let new = engine.open_session(spec("new", 2 * PAYLOAD)).unwrap();
    let tokens = Tokens(BLOCKS * HASH_BLOCK);
    let loaded = chain(1, BLOCKS);
    let save = engine.begin_save(old, &SaveRequest::new("save", &loaded, tokens));
    engine.end_transfer(save.transfer.unwrap().id, true);
    let hit = engine.lookup(old, &LookupRequest::new("load", &loaded).max(tokens));
    assert_eq!(
        hit.tokens(),
        Some(tokens),
        "the arena holds the whole chain"
    );
    let load = engine.begin_load(old, "load", Tokens(0), tokens).unwrap();
    engine.reset(old);

    let other = chain(2, 1);
    let wanted = SaveRequest::new("other", &other, Tokens(HASH_BLOCK));
    let mut steps = 0;
    while engine.wake() == Due::Now {
        let granted = engine.begin_save(new, &wanted);
        assert_eq!(granted.transfer, None, "after {steps} steps");
        steps += 1;
    }
    assert!(steps > BLOCKS, "it was removed in {steps} steps");
    assert_eq!(engine.begin_save(new, &wanted).transfer, None);

    engine.end_transfer(load.id, true);
    while engine.wake() == Due::Now {
        engine.turn(Room::io(1), &mut Started::default());
    }
    assert!(engine.begin_save(new, &wanted).transfer.is_some());
}
