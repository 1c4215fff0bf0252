//! A long conversation is read before it comes back, in steps.

use crate::rig::{BLOCK, Rig, chain, namespace};

const BLOCKS: u64 = 6_000;
const HOST: u64 = 30_000;
const SECOND: u64 = 1_000_000_000;

#[test]
fn a_long_conversation_is_read_in_steps_before_it_comes_back() {
    let mut rig = Rig::new(HOST, 4 * HOST);
    let session = rig.open(namespace("model"));
    let long = chain(0, BLOCKS);
    let mut now_s = 0;
    rig.save(session, &long);
    for _ in 0..5 {
        now_s += 100;
        rig.enter(0, |engine| engine.set_now(now_s * SECOND));
        assert_eq!(rig.lookup(session, &long), BLOCKS as u32 * BLOCK);
        rig.save(session, &long);
        rig.flush();
    }
    for of in 1..=HOST / 500 {
        rig.save(session, &chain(of, 500));
        rig.flush();
    }
    let before = rig.engine().counters().disk_reads;
    rig.enter(0, |engine| engine.set_now((now_s + 95) * SECOND));
    rig.idle(2);
    rig.pump();
    rig.flush();
    let read = rig.engine().counters().disk_reads - before;
    assert!(read > BLOCKS - 64, "{read} reads");
    rig.enter(0, |engine| engine.set_now((now_s + 100) * SECOND));
    assert_eq!(rig.lookup(session, &long), BLOCKS as u32 * BLOCK);
    assert_eq!(rig.engine().counters().disk_reads, before + read);
    assert_eq!(rig.engine().counters().return_reads_used, 1);
    rig.engine().inspect().check().unwrap();
}
