//! Saves of one model evict the payloads of another model, for all sizes, and only while the saves continue.

use undercroft_contract::namespace::{GroupKind, NamespaceSpec};
use undercroft_contract::session::Offer;
use undercroft_engine::SessionId;

use crate::rig::{self, Rig, chain, hybrid, namespace};

/// Blocks of the arena, of [`rig::PAYLOAD`] bytes.
const HOST: u64 = 512;
/// Bytes of a block of the model that is saved.
const CROWD_BYTES: u32 = 256 << 10;
/// Blocks of the model whose payloads are evicted.
const BLOCKS: u64 = 5;

fn sized(mut spec: NamespaceSpec, bytes: &[u32]) -> NamespaceSpec {
    for (group, &bytes) in spec.groups.iter_mut().zip(bytes) {
        group.payload_bytes = bytes;
    }
    spec
}

struct Crowd {
    session: SessionId,
    count: u64,
}

impl Crowd {
    /// Saves prompts of one block, together one and a half times the size of the arena.
    fn push(&mut self, rig: &mut Rig, steps: usize) {
        rig.pump();
        let blocks = HOST * u64::from(rig::PAYLOAD) * 3 / 2 / u64::from(CROWD_BYTES);
        for number in 0..blocks {
            self.count += 1;
            let prompt = chain(1 << 24 | self.count, 1);
            assert_eq!(rig.lookup(self.session, &prompt), 0);
            assert_eq!(rig.save(self.session, &prompt), 1);
            rig.idle(steps);
            if number % 32 == 31 {
                rig.flush();
            }
        }
        rig.flush();
    }
}

fn save_all(rig: &mut Rig, session: SessionId, blocks: u64) {
    let states = Offer {
        group: 1,
        first_block: 0,
        end_block: blocks as u32,
    };
    rig.save_with(session, &chain(1, blocks), &[states]);
    rig.pump();
}

/// Tries each number of hash blocks in host memory, and each number of them that a second lookup uses again.
fn crowd_out(kinds: [u32; 2], steps: usize) {
    let mut rig = Rig::new(HOST, 100 * HOST);
    let model = rig.open(sized(hybrid("model", GroupKind::State), &kinds));
    let session = rig.open(sized(namespace("crowd"), &[CROWD_BYTES]));
    let mut crowd = Crowd { session, count: 0 };
    for length in 1..=BLOCKS {
        save_all(&mut rig, model, length);
    }
    for host in 0..=BLOCKS {
        for again in 0..=host {
            crowd.push(&mut rig, steps);
            let before = rig.engine().inspect().moves().runs;
            rig.idle(100);
            assert_eq!(rig.engine().inspect().moves().runs, before, "nobody asks");
            for length in [host, again] {
                let tokens = length as u32 * rig::BLOCK;
                assert_eq!(rig.lookup(model, &chain(1, length)), tokens);
            }
            rig.idle(100);
            let reads = rig.engine().counters().disk_reads;
            let tokens = BLOCKS as u32 * rig::BLOCK;
            assert_eq!(rig.lookup(model, &chain(1, BLOCKS)), tokens);
            let read = rig.engine().counters().disk_reads - reads;
            assert_eq!(
                read > 0,
                host < BLOCKS,
                "{kinds:?}: {read} read with {host} blocks in host memory, {again} asked for again"
            );
        }
    }
    rig.engine().inspect().check().unwrap();
}

#[test]
fn a_crowd_drives_out_all_that_is_idle_and_nothing_after_it() {
    let sizes = [
        [80 << 10, 80 << 10],
        [320 << 10, 320 << 10],
        [640 << 10, 640 << 10],
        [64 << 10, 512 << 10],
        [CROWD_BYTES, 132 << 10],
    ];
    for kinds in sizes {
        for steps in [0, 1, 3] {
            crowd_out(kinds, steps);
        }
    }
}
