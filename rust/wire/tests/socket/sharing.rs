//! Lookups, loads and saves through a server.

use undercroft_wire::LinkState;

use crate::rig::{PATIENCE, Rig, TOKENS, client, hashes, save, until};

#[test]
fn what_one_client_saves_another_loads() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("run/serve.sock");
    let rig = Rig::start(&socket, None, 1);
    let (writer, reader) = (client(&socket), client(&socket));
    for client in [&writer, &reader] {
        assert_eq!(client.wait_for_link(PATIENCE), LinkState::Up);
    }
    let prompt = hashes(1, 8);
    assert_eq!(reader.poll("r", &prompt, 0, 128, None), Some(0));
    save(&rig, &writer, "w", &prompt);
    until("the save is visible", || {
        reader.poll("r", &prompt, 0, 8 * TOKENS, None) == Some(8 * TOKENS)
    });
    let (load, session, extents) = reader.begin_load("r", 2 * TOKENS, 5 * TOKENS).unwrap();
    assert_eq!(
        (session, extents.len()),
        (reader.link().unwrap().session, 1)
    );
    let (group, first, slots) = &extents[0];
    assert_eq!((*group, *first, slots.len()), (0, 2, 5));
    for (index, &slot) in (*first..).zip(slots) {
        let at = u64::try_from(slot).unwrap();
        assert_eq!(
            rig.arena.read(at, 3).unwrap(),
            [u8::try_from(index).unwrap(); 3]
        );
    }
    until("the load keeps its slots", || rig.in_use()[1] == 1);
    reader.forget("r");
    reader.end_load(load, true);
    until("nothing is left", || rig.in_use() == [0; 4]);
}

#[test]
fn what_the_disk_owes_is_pending_and_its_answer_wakes_who_waits() {
    let dir = tempfile::tempdir().unwrap();
    let (socket, disk) = (dir.path().join("run/s.sock"), dir.path().join("disk"));
    let prompt = hashes(2, 8);
    {
        let rig = Rig::start(&socket, Some(&disk), 1);
        let writer = client(&socket);
        writer.wait_for_link(PATIENCE);
        save(&rig, &writer, "w", &prompt);
        writer.close();
        until("saved", || rig.in_use() == [0; 4]);
        rig.shell.stop(PATIENCE);
    }
    let rig = Rig::start(&socket, Some(&disk), 2);
    let reader = client(&socket);
    reader.wait_for_link(PATIENCE);
    reader.submit("r", &prompt, 0, 8 * TOKENS, None);
    assert!(reader.wait("r", PATIENCE));
    assert_eq!(reader.poll("r", &prompt, 0, 8 * TOKENS, None), Some(128));
    assert_eq!(reader.sources("r", 0, 128), (0, 128));
    assert_eq!(
        rig.shell.enter(|engine| engine.counters().disk_reads),
        Some(8)
    );
    reader.forget("r");
    until("nothing is left", || rig.in_use() == [0; 4]);
}

#[test]
fn a_server_that_comes_late_or_again_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("run/s.sock");
    let client = client(&socket);
    let prompt = hashes(3, 4);
    assert_eq!(client.poll("r", &prompt, 0, 64, None), Some(0));
    for generation in [1, 2] {
        let rig = Rig::start(&socket, None, generation);
        until("connected", || client.state() == LinkState::Up);
        assert_eq!(client.link().unwrap().generation, generation);
        save(&rig, &client, "w", &prompt);
        until("visible", || {
            client.poll("r", &prompt, 0, 64, None) == Some(64)
        });
        drop(rig);
        until("lost", || matches!(client.state(), LinkState::Down(_)));
        assert_eq!(client.poll("r", &prompt, 0, 64, None), Some(0));
        assert_eq!(client.begin_load("r", 0, 64), None);
        assert_eq!(client.begin_save("w", &prompt, 64, &[]), None);
    }
}
