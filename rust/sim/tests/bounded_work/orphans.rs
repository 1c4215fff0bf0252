//! Nodes that are written again because nodes below them are on disk.

use undercroft_contract::io::{IoCompletion, IoFault};
use undercroft_engine::{Room, Started};

use crate::rig::{Rig, chain, namespace};

/// Many times as many blocks as one entry may queue.
const LEN: u64 = 4_000;

#[test]
fn a_long_chain_above_a_block_on_disk_is_written_again_in_steps() {
    let mut rig = Rig::new(3 * LEN, 2 * LEN);
    let session = rig.open(namespace("model"));
    rig.pump();
    assert_eq!(rig.save(session, &chain(0, LEN)), LEN as usize);
    let mut started = Started::default();
    let mut count = 1;
    while count > 0 {
        let before = started.io.len();
        let room = Room::io(2 * LEN as usize);
        rig.enter(0, |engine| engine.turn(room, &mut started));
        count = started.io.len() - before;
    }
    let writes = started.io;
    assert_eq!(writes.len() as u64, LEN, "all are in flight at once");
    for (at, write) in writes.iter().rev().enumerate() {
        let result = if at == 0 { Ok(7) } else { Err(IoFault::Os(5)) };
        let token = write.token();
        rig.enter(0, |engine| engine.complete(IoCompletion { token, result }));
    }
    assert_eq!(rig.engine().gauges().disk_blocks, 1);
    // Writes are tried again after a pause.
    rig.enter(0, |engine| engine.set_now(60_000_000_000));
    rig.pump();
    assert_eq!(rig.engine().gauges().disk_blocks, LEN);
    rig.engine().inspect().check().unwrap();
    rig.restart(3 * LEN);
    assert_eq!(rig.engine().gauges().disk_blocks, LEN);
}
