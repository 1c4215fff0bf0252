//! Any number of branches below a block that arrives late: their nodes become visible in steps.

use undercroft_contract::key::BlockHash;
use undercroft_contract::session::{SaveRequest, Tokens};
use undercroft_engine::{Engine, SessionId};

use crate::rig::{self, Rig, chain, hash, namespace};

/// Few enough nodes to check all invariants.
const FEW: u64 = 3_000;
const MANY: u64 = 100_000;

/// Begins to save a prompt. Returns the function that ends the save.
fn begin(
    rig: &mut Rig,
    session: SessionId,
    prompt: &[BlockHash],
) -> impl FnOnce(&mut Rig, u64) + use<> {
    let hashes = prompt.to_vec();
    let tokens = Tokens(hashes.len() as u32 * rig::BLOCK);
    let save = |engine: &mut Engine| {
        engine.begin_save(session, &SaveRequest::new("first", &hashes, tokens))
    };
    let transfer = rig.enter(prompt.len() as u64, save).transfer.unwrap();
    move |rig, named| rig.enter(named, |engine| engine.end_transfer(transfer.id, true))
}

#[test]
fn nodes_on_a_payload_that_arrives_late_become_visible_in_steps() {
    for nodes in [FEW, MANY] {
        for branches in [1, 100, nodes] {
            becomes_visible_in_steps(nodes, branches);
        }
    }
}

fn becomes_visible_in_steps(nodes: u64, branches: u64) {
    let check = |rig: &Rig| {
        if nodes <= FEW {
            rig.engine().inspect().check().unwrap();
        }
    };
    let mut rig = Rig::new(4 * nodes, 4 * nodes);
    let session = rig.open(namespace("model"));
    let other = rig.open(namespace("model"));
    let stem = chain(0, 1);
    let end = begin(&mut rig, session, &stem);
    // Other prompts are saved below the block that is still being copied.
    let length = nodes / branches;
    let with = |branch: u64| -> Vec<BlockHash> {
        let rest = (0..length).map(|block| hash(1 + branch, block));
        stem.iter().copied().chain(rest).collect()
    };
    for branch in 0..branches {
        assert_eq!(rig.save(other, &with(branch)), length as usize);
    }
    assert_eq!(rig.lookup(session, &with(0)), 0);
    end(&mut rig, 1);
    check(&rig);
    rig.pump();
    for branch in [0, branches / 2, branches - 1] {
        let tokens = (length as u32 + 1) * rig::BLOCK;
        assert_eq!(rig.lookup(session, &with(branch)), tokens);
    }
    assert_eq!(rig.engine().gauges().disk_blocks, nodes + 1);
    check(&rig);
}
