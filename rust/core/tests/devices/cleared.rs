//! Blocks that an operator clears while a directory does not answer.

use undercroft_core::disk::Health;
use undercroft_core::engine::{ClearOrder, ClearWhat};

use crate::rig::{Rig, SECOND};
use crate::{SMALL, config, serve_all_but, two_directories};

fn clear_all(rig: &mut Rig) -> bool {
    let order = ClearOrder {
        what: ClearWhat::All,
        erase: true,
    };
    rig.engine.clear(&order).is_ok()
}

#[test]
fn a_clear_ends_without_the_blocks_of_a_directory_that_hangs_and_another_may_follow() {
    let (mut rig, prompts) = two_directories(&config(64 << 20));
    let blocks = prompts.each_ref().map(|of| 30 * of.len() as u64);
    assert!(blocks[0] > 512, "more than may wait: {blocks:?}");
    assert!(clear_all(&mut rig));
    let mut hanging = Vec::new();
    serve_all_but(0, &mut rig, &mut hanging);
    assert!(
        rig.engine.cleared().removing,
        "the directory may answer yet"
    );
    rig.pass(SECOND);
    loop {
        serve_all_but(0, &mut rig, &mut hanging);
        if !rig.engine.has_rest() {
            break;
        }
    }
    assert_eq!(rig.engine.health()[0].0, Health::Stalled);
    assert!(!rig.engine.has_io(), "nothing to do until it answers");
    let cleared = rig.engine.cleared();
    assert_eq!(rig.engine.disk_blocks_by_device(), [blocks[0], 0]);
    assert_eq!(cleared.erased_bytes, blocks[1] * u64::from(SMALL));
    assert_eq!((cleared.removing, cleared.durable), (false, false));
    assert_eq!(cleared.pending, blocks[0]);
    assert_eq!(rig.ask(prompts[0][0], 30), Some(0), "no lookup finds them");
    rig.leave(prompts[0][0], 0);

    rig.save(100, 30);
    serve_all_but(0, &mut rig, &mut hanging);
    assert!(clear_all(&mut rig));
    serve_all_but(0, &mut rig, &mut hanging);
    assert_eq!(rig.engine.disk_blocks_by_device(), [blocks[0], 0]);

    hanging.into_iter().for_each(|request| rig.end(request));
    rig.settle();
    let cleared = rig.engine.cleared();
    assert_eq!((cleared.removing, cleared.durable), (false, true));
    assert_eq!(rig.engine.disk_blocks_by_device(), [0, 0]);
    assert_eq!(cleared.erase_failures, 0);
}
