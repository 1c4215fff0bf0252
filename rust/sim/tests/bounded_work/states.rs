//! A model of states alone: thousands of blocks without a payload lead to one state.

use undercroft_contract::key::BlockHash;
use undercroft_contract::namespace::{GroupKind, NamespaceSpec};
use undercroft_contract::session::Offer;
use undercroft_engine::SessionId;

use crate::rig::{self, Rig, chain, namespace};

/// Blocks of a prompt of 131,072 tokens.
const LENGTH: u64 = 8_192;
const STATE_BYTES: u32 = 16 << 20;
/// Number of states that fit the arena, and that fit the disk. The disk has room for the records of a chain.
const HOST: u64 = 64;
const DISK: u64 = 128;

fn states(bytes: u32) -> NamespaceSpec {
    let mut spec = namespace("states");
    spec.groups[0].kind = GroupKind::State;
    spec.groups[0].payload_bytes = bytes;
    spec
}

/// Saves the state at the end of a prompt.
fn save(rig: &mut Rig, session: SessionId, prompt: &[BlockHash]) {
    let end = prompt.len() as u32;
    let state = Offer {
        group: 0,
        first_block: end - 1,
        end_block: end,
    };
    assert_eq!(rig.save_with(session, prompt, &[state]), 1);
}

fn open(disk: u64) -> (Rig, SessionId) {
    let blocks = u64::from(STATE_BYTES / rig::PAYLOAD);
    let mut rig = Rig::new(HOST * blocks, disk * blocks);
    let session = rig.open(states(STATE_BYTES));
    (rig, session)
}

/// Saves short prompts until only their states are left.
fn push_out(rig: &mut Rig, session: SessionId, states: u64) {
    for number in 0..states {
        save(rig, session, &chain(1 + number, 1));
        rig.pump();
    }
    rig.engine().inspect().check().unwrap();
    assert_eq!(rig.engine().gauges().nodes, states);
}

#[test]
fn a_chain_is_evicted_with_its_only_state_in_steps() {
    let (mut rig, session) = open(0);
    save(&mut rig, session, &chain(0, LENGTH));
    assert_eq!(rig.engine().gauges().nodes, LENGTH);
    push_out(&mut rig, session, HOST);
}

#[test]
fn a_chain_is_written_found_again_and_evicted_from_disk_in_steps() {
    let (mut rig, session) = open(DISK);
    let prompt = chain(0, LENGTH);
    save(&mut rig, session, &prompt);
    rig.flush();
    rig.engine().inspect().check().unwrap();
    rig.restart(HOST * u64::from(STATE_BYTES / rig::PAYLOAD));
    let session = rig.open(states(STATE_BYTES));
    let hit = rig.lookup(session, &prompt);
    assert_eq!(hit, LENGTH as u32 * rig::BLOCK, "all of it is found again");
    push_out(&mut rig, session, DISK);
}

#[test]
fn a_write_of_a_state_that_fails_takes_the_chain_along_in_steps() {
    let (mut rig, session) = open(DISK);
    rig.fault = rig::Fault::Writes;
    save(&mut rig, session, &chain(0, LENGTH));
    rig.pump();
    rig.engine().inspect().check().unwrap();
    rig.fault = rig::Fault::None;
    push_out(&mut rig, session, HOST);
}
