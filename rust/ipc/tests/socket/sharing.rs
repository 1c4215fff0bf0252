//! Lookups, loads and saves through a server.

use undercroft_contract::explain::ExplainQuery;
use undercroft_contract::key::BlockHash;
use undercroft_contract::session::{
    Load, LookupRequest, Save, SaveRequest, Session, Sources, Tokens,
};
use undercroft_driver::EngineAccess;
use undercroft_ipc::{ConnectionState, OperatorHint, OperatorRequest, operate};

use crate::rig::{PATIENCE, Rig, TOKENS, client, hashes, lookup, save, until};

#[test]
fn one_client_loads_blocks_that_another_saves() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("run/serve.sock");
    let rig = Rig::start(&socket, None, 1);
    let (writer, reader) = (client(&socket), client(&socket));
    for client in [&writer, &reader] {
        assert_eq!(client.wait_for_connection(PATIENCE), ConnectionState::Up);
    }
    let prompt = hashes(1, 8);
    assert_eq!(lookup(&reader, "r", &prompt), Some(0));
    save(&rig, &writer, "w", &prompt);
    until("the save is visible", || {
        lookup(&reader, "r", &prompt) == Some(8 * TOKENS)
    });
    let load = reader.begin_load("r", Tokens(2 * TOKENS), Tokens(5 * TOKENS));
    let Load {
        id,
        session,
        extents,
        ..
    } = load.unwrap();
    assert_eq!(
        (session, extents.len()),
        (reader.address().unwrap().session, 1)
    );
    let extent = &extents[0];
    assert_eq!(
        (extent.group, extent.first_block, extent.offsets.len()),
        (0, 2, 5)
    );
    for (index, offset) in (extent.first_block..).zip(&extent.offsets) {
        let at = offset.get().unwrap();
        assert_eq!(
            rig.arena.read(at, 3).unwrap(),
            [u8::try_from(index).unwrap(); 3]
        );
    }
    until("the load keeps its slots", || rig.in_use()[1] == 1);
    reader.finish_request("r".into());
    reader.end_transfer(id, true);
    until("nothing is left", || rig.in_use() == [0; 4]);
}

#[test]
fn an_answer_from_disk_is_pending_and_wakes_the_caller_that_waits() {
    let dir = tempfile::tempdir().unwrap();
    let (socket, disk) = (dir.path().join("run/s.sock"), dir.path().join("disk"));
    let prompt = hashes(2, 8);
    {
        let rig = Rig::start(&socket, Some(&disk), 1);
        let writer = client(&socket);
        writer.wait_for_connection(PATIENCE);
        save(&rig, &writer, "w", &prompt);
        writer.close();
        until("saved", || rig.in_use() == [0; 4]);
        rig.driver.stop(PATIENCE);
    }
    let rig = Rig::start(&socket, Some(&disk), 2);
    let reader = client(&socket);
    reader.wait_for_connection(PATIENCE);
    reader.lookup(&LookupRequest::new("r", &prompt).prefetch());
    assert!(reader.wait("r", PATIENCE));
    assert_eq!(lookup(&reader, "r", &prompt), Some(128));
    let load = reader.begin_load("r", Tokens(0), Tokens(128)).unwrap();
    let (host, disk, remote) = (Tokens(0), Tokens(128), Tokens(0));
    assert_eq!(load.sources, Sources { host, disk, remote });
    reader.end_transfer(load.id, true);
    assert_eq!(
        rig.driver.enter(|engine| engine.counters().disk_reads),
        Some(8)
    );
    reader.finish_request("r".into());
    until("nothing is left", || rig.in_use() == [0; 4]);
}

#[test]
fn a_server_that_comes_late_or_again_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("run/s.sock");
    let client = client(&socket);
    let prompt = hashes(3, 4);
    assert_eq!(lookup(&client, "r", &prompt), Some(0));
    for arena_id in [1, 2] {
        let rig = Rig::start(&socket, None, arena_id);
        until("connected", || client.connection() == ConnectionState::Up);
        assert_eq!(client.address().unwrap().arena_id, arena_id);
        save(&rig, &client, "w", &prompt);
        until("visible", || lookup(&client, "r", &prompt) == Some(64));
        drop(rig);
        until("lost", || {
            matches!(client.connection(), ConnectionState::Down(_))
        });
        assert_eq!(lookup(&client, "r", &prompt), Some(0));
        assert_eq!(client.begin_load("r", Tokens(0), Tokens(64)), None);
        assert_eq!(
            client.begin_save(&SaveRequest::new("w", &prompt, Tokens(64))),
            Save::Unavailable
        );
    }
}

#[test]
fn an_operator_gets_the_last_lookups_by_the_names_of_their_requests() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("run/serve.sock");
    let rig = Rig::start(&socket, None, 1);
    let client = client(&socket);
    assert_eq!(client.wait_for_connection(PATIENCE), ConnectionState::Up);
    let prompt = hashes(1, 8);
    assert_eq!(lookup(&client, "chatcmpl-one", &prompt), Some(0));
    save(&rig, &client, "w", &prompt);
    until("the save is visible", || {
        lookup(&client, "chatcmpl-two", &prompt) == Some(8 * TOKENS)
    });
    let explain = |query| {
        let json = operate(&socket, OperatorRequest::Explain(query), PATIENCE).unwrap();
        let told: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert!(told["before"].is_null());
        told["lookups"].as_array().unwrap().clone()
    };
    let misses = explain(ExplainQuery {
        misses: true,
        request: "chatcmpl-one".to_owned(),
        before: None,
    });
    assert_eq!(misses.len(), 1);
    assert_eq!(misses[0]["reason"], "never_seen");
    assert_eq!(misses[0]["asked_tokens"], 8 * TOKENS);
    let all = explain(ExplainQuery::default());
    let names: Vec<&str> = all.iter().filter_map(|of| of["request"].as_str()).collect();
    assert!(names.contains(&"chatcmpl-two"), "{names:?}");
    drop((client, rig));
}

#[test]
fn an_operator_pins_blocks_by_their_hashes_and_ends_the_pin() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("run/serve.sock");
    let rig = Rig::start(&socket, None, 1);
    let client = client(&socket);
    assert_eq!(client.wait_for_connection(PATIENCE), ConnectionState::Up);
    let prompt = hashes(1, 8);
    save(&rig, &client, "w", &prompt);
    until("the save is visible", || {
        lookup(&client, "r", &prompt) == Some(8 * TOKENS)
    });
    let hex = |hash: &BlockHash| {
        let digits = hash.as_bytes().iter().map(|byte| format!("{byte:02x}"));
        digits.collect::<String>()
    };
    let pin = OperatorHint {
        verb: "pin".to_owned(),
        hashes: prompt.iter().map(hex).collect(),
        ttl_ns: 60_000_000_000,
        name: "system".to_owned(),
        ..OperatorHint::default()
    };
    let give = |hint: &OperatorHint| -> serde_json::Value {
        let json = operate(&socket, OperatorRequest::Hint(hint.clone()), PATIENCE).unwrap();
        serde_json::from_str(&json).unwrap()
    };
    let accepted = serde_json::json!({"answer": "accepted", "tokens": 8 * TOKENS});
    assert_eq!(give(&pin), accepted);
    let pins = || rig.driver.enter(|engine| engine.gauges().pins).unwrap();
    assert_eq!(pins(), 1);
    let release = OperatorHint {
        verb: "release".to_owned(),
        hashes: Vec::new(),
        ..pin.clone()
    };
    assert_eq!(give(&release), accepted);
    assert_eq!(pins(), 0);
    assert_eq!(give(&release)["reason"], "not_pinned");
    let namespace = "nobody's".to_owned();
    let said = give(&OperatorHint { namespace, ..pin })["error"].to_string();
    assert!(
        said.contains("allowed is the beginning of one digest"),
        "{said}"
    );
}
