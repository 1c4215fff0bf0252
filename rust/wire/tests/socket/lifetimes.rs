//! Who keeps what, and until when: clients that vanish, workers that still copy, sessions taken up again.

use undercroft_wire::protocol::{Reply, Request};
use undercroft_wire::{AttachError, attach};

use crate::raw::{Raw, joined, register, run};
use crate::rig::{Rig, TOKENS, client, hashes, save, until};

fn rig() -> (tempfile::TempDir, std::path::PathBuf, Rig) {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("run/s.sock");
    let rig = Rig::start(&socket, None, 1);
    (dir, socket, rig)
}

/// A saved prompt that the client has looked up and begun to load.
fn loading(rig: &Rig, socket: &std::path::Path, raw: &mut Raw) {
    let prompt = hashes(1, 4);
    let writer = client(socket);
    until("linked", || writer.link().is_some());
    save(rig, &writer, "w", &prompt);
    writer.close();
    until("saved", || rig.in_use() == [0; 4]);
    raw.submit(7, &prompt);
    match raw.hear() {
        Some(Reply::Answer {
            ready: Some(ready), ..
        }) => assert_eq!(ready.tokens, 4 * TOKENS),
        other => panic!("{other:?}"),
    }
    raw.say(&Request::BeginLoad {
        request: 7,
        load: 70,
        local_tokens: 0,
        external_tokens: 4 * TOKENS,
    });
    assert!(raw.is_served());
}

#[test]
fn a_client_that_vanishes_frees_its_lookups_at_once() {
    let (_dir, socket, rig) = rig();
    let (mut raw, _, _) = Raw::registered(&socket, 0);
    let prompt = hashes(1, 4);
    for request in 0..100 {
        raw.submit(request, &prompt);
    }
    assert!(raw.is_served());
    assert_eq!(rig.in_use()[0], 100);
    drop(raw);
    until("freed", || rig.in_use() == [0; 4]);
}

#[test]
fn what_workers_may_still_copy_is_kept_until_all_of_them_are_gone() {
    let (_dir, socket, rig) = rig();
    let (mut raw, token, _) = Raw::registered(&socket, 0);
    loading(&rig, &socket, &mut raw);
    assert_eq!(raw.save(8, 80, &hashes(2, 3)), 3);
    let workers = [0; 2].map(|_| attach(&socket, token).unwrap());
    drop(raw);
    until("the lookups are freed", || rig.in_use()[0] == 0);
    let [first, second] = workers;
    drop(first);
    until("one worker is left", || rig.server.counters().attached == 1);
    let [_, loads, saves, pinned] = rig.in_use();
    assert_eq!((loads, saves), (1, 1));
    assert!(pinned > 0);
    drop(second);
    until("all is freed", || rig.in_use() == [0; 4]);
    assert_eq!(
        rig.shell.enter(|engine| engine.counters().saved_blocks),
        Some(4)
    );
}

#[test]
fn a_lost_connection_is_taken_up_again_with_its_loads_and_saves() {
    let (_dir, socket, rig) = rig();
    let (mut raw, token, _) = Raw::registered(&socket, 0);
    loading(&rig, &socket, &mut raw);
    assert_eq!(raw.save(8, 80, &hashes(2, 3)), 3);
    let _worker = attach(&socket, token).unwrap();
    drop(raw);
    until("lost", || rig.in_use()[0] == 0);
    let (mut raw, again, resumed) = Raw::registered(&socket, token);
    assert_eq!((again, resumed), (token, true));
    raw.say(&Request::EndLoad { load: 70, ok: true });
    raw.say(&Request::EndSave { save: 80, ok: true });
    assert!(raw.is_served());
    assert_eq!(rig.in_use(), [0; 4]);
    assert_eq!(
        rig.shell.enter(|engine| engine.counters().saved_blocks),
        Some(7)
    );
}

#[test]
fn a_session_in_use_is_not_taken_from_its_client() {
    let (_dir, socket, rig) = rig();
    let (mut owner, token, _) = Raw::registered(&socket, 0);
    let (_, other, resumed) = Raw::registered(&socket, token);
    assert!(!resumed);
    assert_ne!(other, token);
    assert!(owner.is_served());
    drop(rig);
}

#[test]
fn an_unknown_session_has_no_workers() {
    let (_dir, socket, rig) = rig();
    let (raw, token, _) = Raw::registered(&socket, 0);
    drop(raw);
    until("the session has ended", || {
        matches!(attach(&socket, token), Err(AttachError::Incomplete { .. }))
    });
    assert!(rig.server.counters().refused > 0);
}

#[test]
fn nobody_ends_or_reads_what_belongs_to_another() {
    let (_dir, socket, rig) = rig();
    let (mut owner, _, _) = Raw::registered(&socket, 0);
    loading(&rig, &socket, &mut owner);
    assert_eq!(owner.save(8, 80, &hashes(2, 3)), 3);
    let (mut other, _, _) = Raw::registered(&socket, 0);
    other.say(&Request::EndLoad { load: 70, ok: true });
    other.say(&Request::EndSave { save: 80, ok: true });
    other.say(&Request::Forget { request: 7 });
    assert!(other.is_served());
    assert_eq!(rig.in_use()[1..3], [1, 1]);
    assert_eq!(
        rig.shell.enter(|engine| engine.counters().saved_blocks),
        Some(4)
    );
}

#[test]
fn a_load_goes_on_though_its_prefix_was_dropped_meanwhile() {
    let (_dir, socket, rig) = rig();
    let (mut raw, _, _) = Raw::registered(&socket, 0);
    let prompt = hashes(1, 4);
    let writer = client(&socket);
    until("linked", || writer.link().is_some());
    save(&rig, &writer, "w", &prompt);
    until("visible", || {
        raw.submit(7, &[]);
        raw.hear();
        rig.shell.enter(|engine| engine.counters().saved_blocks) == Some(4)
    });
    raw.say(&Request::Forget { request: 7 });
    raw.submit(7, &prompt);
    let ready = match raw.hear() {
        Some(Reply::Answer { ready, .. }) => ready.unwrap(),
        other => panic!("{other:?}"),
    };
    assert!(writer.reset(crate::rig::PATIENCE));
    raw.say(&Request::BeginLoad {
        request: 7,
        load: 70,
        local_tokens: 0,
        external_tokens: 64,
    });
    raw.say(&Request::Forget { request: 7 });
    assert!(raw.is_served());
    // The slots that the answer named are not given to anybody else.
    assert_eq!(rig.in_use()[1], 1);
    let used = |rig: &Rig| rig.shell.enter(|engine| engine.gauges().host_used_bytes);
    assert!(used(&rig) > Some(0));
    assert_eq!(ready.extents[0].2.len(), 4);
    raw.say(&Request::EndLoad { load: 70, ok: true });
    assert!(raw.is_served());
    assert_eq!(used(&rig), Some(0));
}

#[test]
fn a_namespace_that_cannot_be_served_is_refused_with_the_reason() {
    let (_dir, socket, _rig) = rig();
    let mut raw = Raw::connect(&socket);
    let Request::Register { mut spec, .. } = register(0) else {
        unreachable!()
    };
    spec.groups[0].payload_bytes = 512 << 20;
    raw.say(&Request::Register {
        spec,
        dropped_tokens: 0,
        resume: 0,
    });
    match raw.hear() {
        Some(Reply::Refused { reason }) => assert!(reason.contains("host_memory"), "{reason}"),
        other => panic!("{other:?}"),
    }
    // Another one may be.
    raw.say(&register(0));
    assert!(matches!(raw.hear(), Some(Reply::Registered { .. })));
}

#[test]
fn a_number_in_use_ends_the_connection_and_leaks_nothing() {
    let (_dir, socket, rig) = rig();
    let (mut raw, _, _) = Raw::registered(&socket, 0);
    assert_eq!(raw.save(8, 80, &hashes(2, 3)), 3);
    let bytes = joined(&hashes(3, 2));
    raw.say(&Request::BeginSave {
        request: 9,
        save: 80,
        tokens: 2 * TOKENS,
        offers: Vec::new(),
        hashes: run(&bytes),
    });
    assert_eq!(raw.hear(), None);
    until("all is freed", || rig.in_use() == [0; 4]);
    assert_eq!(rig.server.counters().malformed, 1);
}
