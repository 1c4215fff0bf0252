//! Blocks that an operator clears while a directory does not answer.

use undercroft_contract::io::{IoFault, IoRequest};
use undercroft_contract::namespace::{GroupKind, NamespaceSpec};
use undercroft_engine::disk::Health;
use undercroft_engine::{ClearOrder, ClearWhat, Due};

use crate::rig::{HASH_BLOCK, Rig, SECOND, group};
use crate::{EIO, ENOSPC, SMALL, config, serve_all_but, two_directories};

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
        if rig.engine.wake() != Due::Now {
            break;
        }
    }
    assert_eq!(rig.engine.devices()[0].health, Health::Stalled);
    assert!(
        rig.engine.wake() < Due::Start,
        "nothing to do until it answers"
    );
    let cleared = rig.engine.cleared();
    assert_eq!(rig.blocks(), [blocks[0], 0]);
    assert_eq!(cleared.erased_bytes, blocks[1] * u64::from(SMALL));
    assert_eq!((cleared.removing, cleared.durable), (false, false));
    assert_eq!(cleared.pending, blocks[0]);
    assert_eq!(rig.ask(prompts[0][0], 30), Some(0), "no lookup finds them");
    rig.leave(prompts[0][0], 0);

    rig.save(100, 30);
    serve_all_but(0, &mut rig, &mut hanging);
    assert!(clear_all(&mut rig));
    serve_all_but(0, &mut rig, &mut hanging);
    assert_eq!(rig.blocks(), [blocks[0], 0]);

    hanging.into_iter().for_each(|request| rig.end(request));
    rig.settle();
    let cleared = rig.engine.cleared();
    assert_eq!((cleared.removing, cleared.durable), (false, true));
    assert_eq!(rig.blocks(), [0, 0]);
    assert_eq!(cleared.erase_failures, 0);
}

#[test]
fn a_directory_that_is_given_up_during_erasures_frees_each_block_once() {
    let (mut rig, prompts) = two_directories(&config(64 << 20));
    // Another namespace, whose blocks are read.
    let read = prompts[0][1];
    assert_eq!(rig.ask(read, 30), None);
    let reads = rig.start(64);
    let (reads, others): (Vec<_>, Vec<_>) = reads.into_iter().partition(IoRequest::is_read);
    others.into_iter().for_each(|request| rig.end(request));
    assert!(clear_all(&mut rig));
    while rig.engine.wake() == Due::Now && !rig.engine.is_quiet() {
        let erasures = rig.start(4);
        if erasures
            .iter()
            .any(|request| matches!(request, IoRequest::Erase { .. }))
        {
            // The reads fail while erasures are under way.
            for request in reads {
                rig.finish(&request, Err(IoFault::Os(EIO)));
            }
            erasures.into_iter().for_each(|request| rig.end(request));
            break;
        }
        erasures.into_iter().for_each(|request| rig.end(request));
    }
    rig.settle();
    assert!(matches!(
        rig.engine.devices()[0].health,
        Health::Failed { .. }
    ));
    assert_eq!(rig.blocks(), [0, 0]);
    assert!(rig.engine.cleared().erase_failures > 0);
}

/// Another model, and the writes of its entry.
fn entry_of_another_model(rig: &mut Rig) -> (NamespaceSpec, Vec<IoRequest>) {
    let spec = NamespaceSpec {
        description: "another model".to_owned(),
        hash_block_size: HASH_BLOCK,
        alignment_tokens: HASH_BLOCK,
        groups: vec![group(GroupKind::Full, SMALL)],
    };
    let session = rig.engine.open_session(spec.clone()).unwrap();
    rig.engine.close_session(session);
    let writes = rig.start(64);
    assert!(!writes.is_empty());
    (spec, writes)
}

#[test]
fn an_entry_whose_write_failed_does_not_return_after_the_namespace_was_cleared() {
    for fails_first in [false, true] {
        let mut rig = Rig::new(config(64 << 20), &[256 << 20], SMALL);
        let (spec, writes) = entry_of_another_model(&mut rig);
        let fail = |rig: &mut Rig| {
            for request in &writes {
                rig.finish(request, Err(IoFault::Os(ENOSPC)));
            }
        };
        if fails_first {
            fail(&mut rig);
            assert!(clear_all(&mut rig));
        } else {
            assert!(clear_all(&mut rig));
            fail(&mut rig);
        }
        for _ in 0..100 {
            rig.pass(SECOND);
            rig.settle();
        }
        assert!(rig.engine.cleared().durable);
        let rig = rig.restart(config(64 << 20));
        let digest = spec.digest();
        let mut known = rig.engine.inspect().shared_namespaces();
        assert!(
            known.all(|(of, _)| *of != digest),
            "fails first: {fails_first}"
        );
    }
}
