//! vLLM's habits, without a server: hundreds of polls, other numbers of tokens, names used again, aborts,
//! answers that come too late.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use undercroft_core::key::BlockHash;
use undercroft_core::namespace::{GroupKind, GroupSpec, NamespaceSpec};

use super::{Grant, Link, Polled, Table};
use crate::frame;
use crate::protocol::{REQUESTS_MAX, Ready, Reply, Request};

const DEADLINE: Duration = Duration::from_millis(5);
const MS: Duration = Duration::from_millis(1);

fn link(generation: u64) -> Link {
    Link {
        socket: PathBuf::from("/s"),
        generation,
        session: 9,
    }
}

/// A table with a clock, and what it has sent.
struct World {
    table: Table,
    now: Instant,
}

impl World {
    fn new() -> Self {
        let spec = NamespaceSpec {
            description: String::new(),
            hash_block_tokens: 16,
            alignment_tokens: 16,
            groups: vec![GroupSpec {
                kind: GroupKind::Full,
                block_tokens: 16,
                payload_bytes: 1,
            }],
        };
        let mut table = Table::new(spec, DEADLINE);
        table.registered(link(1), false, String::new());
        Self {
            table,
            now: Instant::now(),
        }
    }

    fn poll(&mut self, name: &str, local: u32, max: u32) -> Polled {
        self.table
            .poll(name, &hashes(8), (local, max), None, self.now)
    }

    /// What was sent since the last call, shortly.
    fn sent(&mut self) -> Vec<String> {
        let bytes = std::mem::take(&mut self.table.outbox);
        let (mut at, mut all) = (0, Vec::new());
        while let Some((_, body, len)) = frame::first(&bytes[at..]).unwrap() {
            let request = Request::decode(body).unwrap();
            all.push(match request {
                Request::Submit {
                    request,
                    version,
                    hashes,
                    local_tokens,
                    asked,
                    ..
                } => format!(
                    "submit {request}.{version} {}+{} local {local_tokens} asked {asked}",
                    hashes.known,
                    hashes.bytes.len() / usize::from(hashes.hash_bytes)
                ),
                Request::BeginSave {
                    request,
                    save,
                    hashes,
                    ..
                } => format!("save {save} of {request} {}+", hashes.known),
                other => format!("{other:?}"),
            });
            at += len;
        }
        all
    }

    fn answer(&mut self, request: u64, version: u32, direct: bool, tokens: Option<u32>) -> bool {
        let ready = tokens.map(|tokens| Ready {
            tokens,
            shared_tokens: tokens,
            from_disk: None,
            extents: vec![(0, 0, (0..i64::from(tokens / 16)).collect())],
        });
        let reply = Reply::Answer {
            request,
            version,
            direct,
            ready,
        };
        self.table.reply(reply, self.now)
    }
}

fn hashes(blocks: u8) -> Vec<BlockHash> {
    let hash = |block| BlockHash::new(&[block; 32]).unwrap();
    (1..=blocks).map(hash).collect()
}

#[test]
fn a_request_is_asked_for_once_however_often_it_is_polled() {
    let mut world = World::new();
    world
        .table
        .submit("a", &hashes(8), (0, 128), None, world.now);
    world
        .table
        .submit("a", &hashes(8), (0, 128), None, world.now);
    assert_eq!(world.poll("a", 0, 128), Polled::Soon);
    world.table.waited("a");
    for _ in 0..100 {
        assert_eq!(world.poll("a", 0, 128), Polled::Pending);
    }
    assert_eq!(world.sent(), ["submit 2.1 0+8 local 0 asked false"]);
    assert!(world.answer(2, 1, true, None));
    for _ in 0..100 {
        assert_eq!(world.poll("a", 0, 128), Polled::Pending);
    }
    assert_eq!(
        world.sent(),
        ["Ask { request: 2 }"],
        "it is no prefetch any more"
    );
    assert!(world.answer(2, 1, false, Some(64)));
    for _ in 0..100 {
        assert_eq!(world.poll("a", 0, 128), Polled::Ready(64));
        assert_eq!(world.poll("a", 48, 128), Polled::Ready(64));
    }
    assert_eq!(world.sent(), [""; 0]);
}

#[test]
fn an_answer_is_consumed_once() {
    let mut world = World::new();
    world.poll("a", 16, 128);
    world.answer(2, 1, true, Some(96));
    let (load, session, extents) = world.table.begin_load("a", 32, 48).unwrap();
    assert_eq!((load, session), (3, 9));
    assert_eq!(extents, [(0, 2, vec![2, 3, 4])]);
    assert_eq!(world.table.begin_load("a", 32, 48), None);
    assert_eq!(world.sent().len(), 2);
    world.table.end_load(load, true);
    world.table.end_load(load, true);
    assert_eq!(world.sent(), ["EndLoad { load: 3, ok: true }"]);
}

#[test]
fn what_an_answer_does_not_cover_is_not_loaded() {
    let mut world = World::new();
    world.poll("a", 32, 128);
    world.answer(2, 1, true, Some(96));
    for (local, external) in [(16, 80), (32, 80), (32, 0), (32, 50), (u32::MAX, 16)] {
        assert_eq!(world.table.begin_load("a", local, external), None);
    }
    assert_eq!(world.table.begin_load("b", 0, 16), None);
}

#[test]
fn less_on_the_device_or_more_tokens_ask_anew_and_void_what_was_said() {
    let mut world = World::new();
    world.poll("a", 32, 128);
    world.answer(2, 1, true, Some(96));
    // The device has lost its blocks.
    assert_eq!(world.poll("a", 0, 128), Polled::Soon);
    assert_eq!(world.table.begin_load("a", 32, 64), None);
    // The request has come back from preemption with more tokens.
    world.answer(2, 2, true, Some(96));
    assert_eq!(world.poll("a", 0, 128), Polled::Ready(96));
    assert_eq!(world.poll("a", 0, 144), Polled::Soon);
    world.answer(2, 2, false, Some(96));
    world.table.waited("a");
    assert_eq!(
        world.poll("a", 0, 144),
        Polled::Pending,
        "an answer to an older lookup"
    );
    world.answer(2, 3, true, Some(112));
    assert_eq!(world.poll("a", 0, 144), Polled::Ready(112));
    let sent = world.sent();
    assert_eq!(
        sent[1], "submit 2.2 8+0 local 0 asked true",
        "the hashes are there"
    );
}

#[test]
fn a_name_that_is_used_again_is_another_request() {
    let mut world = World::new();
    world.poll("a", 0, 128);
    world.table.forget("a");
    world.table.forget("a");
    assert_eq!(world.poll("a", 0, 128), Polled::Soon);
    assert_eq!(
        world.sent(),
        [
            "submit 2.1 0+8 local 0 asked true",
            "Forget { request: 2 }",
            "submit 3.1 0+8 local 0 asked true",
        ]
    );
    // The answer to the one that was aborted.
    assert!(world.answer(2, 1, true, Some(128)));
    world.table.waited("a");
    assert_eq!(world.poll("a", 0, 128), Polled::Pending);
    world.answer(3, 1, true, Some(16));
    assert_eq!(world.poll("a", 0, 128), Polled::Ready(16));
    // Another prompt under the same name, without a word in between.
    world.table.poll("a", &hashes(2), (0, 64), None, world.now);
    world.table.poll("a", &hashes(2), (0, 144), None, world.now);
    assert!(
        world
            .sent()
            .contains(&"submit 4.1 0+2 local 0 asked true".to_owned())
    );
}

#[test]
fn a_released_lookup_keeps_its_hashes_and_voids_its_answer() {
    let mut world = World::new();
    world.poll("a", 0, 128);
    world.table.release("a");
    world.table.release("a");
    world.answer(2, 1, true, Some(128));
    assert_eq!(world.table.begin_load("a", 0, 128), None);
    assert_eq!(
        world.table.begin_save("a", &hashes(9), 144, &[], world.now),
        Some(3)
    );
    let sent = world.sent();
    assert_eq!(sent[1..], ["Release { request: 2 }", "save 3 of 2 8+"]);
}

#[test]
fn a_miss_is_looked_at_again_when_it_is_old_but_not_waited_for() {
    let mut world = World::new();
    world.poll("a", 0, 128);
    world.answer(2, 1, true, Some(0));
    assert_eq!(world.poll("a", 0, 128), Polled::Ready(0));
    world.now += 6 * MS;
    assert_eq!(world.poll("a", 0, 128), Polled::Soon);
    world.table.waited("a");
    assert_eq!(world.poll("a", 0, 128), Polled::Ready(0));
    world.answer(2, 2, true, Some(128));
    assert_eq!(world.poll("a", 0, 128), Polled::Ready(128));
}

#[test]
fn a_server_that_is_late_is_not_waited_for_and_not_asked() {
    let mut world = World::new();
    world.poll("a", 0, 128);
    world.poll("b", 0, 128);
    world.answer(2, 1, true, None);
    world.sent();
    world.now += DEADLINE + MS;
    assert_eq!(world.poll("b", 0, 128), Polled::Ready(0));
    assert_eq!(world.poll("c", 0, 128), Polled::Ready(0));
    world
        .table
        .submit("d", &hashes(8), (0, 128), None, world.now);
    assert_eq!(
        world.table.begin_save("a", &hashes(8), 128, &[], world.now),
        None
    );
    assert_eq!(world.sent(), [""; 0]);
    assert_eq!(
        world.poll("a", 0, 128),
        Polled::Pending,
        "the disk may take longer"
    );
    world.now += Duration::from_millis(100);
    assert_eq!(world.poll("a", 0, 128), Polled::Ready(0));
    // It was only slow.
    world.answer(3, 1, true, Some(64));
    assert_eq!(world.poll("b", 0, 128), Polled::Ready(64));
    assert_eq!(world.poll("c", 0, 128), Polled::Soon);
}

#[test]
fn a_frozen_server_is_noticed_while_a_request_waits_for_the_disk() {
    let mut world = World::new();
    world.poll("a", 0, 128);
    world.answer(2, 1, true, None);
    world.sent();
    assert_eq!(world.table.tick(world.now), Duration::from_millis(50));
    assert_eq!(world.sent(), ["Ping"]);
    world.table.tick(world.now + 60 * MS);
    assert_eq!(world.sent(), [""; 0], "one at a time");
    world.now += 101 * MS;
    assert_eq!(world.poll("a", 0, 128), Polled::Ready(0));
    let stats = String::new();
    assert!(world.table.reply(Reply::Pong { stats }, world.now));
    assert_eq!(world.poll("a", 0, 128), Polled::Pending);
}

#[test]
fn a_lost_connection_voids_answers_and_ends_saves_that_wait() {
    let mut world = World::new();
    world.poll("a", 0, 128);
    world.answer(2, 1, true, Some(128));
    let waiting = world.table.begin_save("a", &hashes(8), 128, &[], world.now);
    world.table.lost("gone".to_owned());
    assert_eq!(world.table.begin_load("a", 0, 128), None);
    assert_eq!(world.poll("a", 0, 128), Polled::Ready(0));
    assert!(world.table.is_answered("a"));
    let grants = world.table.take_grants();
    assert_eq!(grants.len(), 1);
    assert_eq!(
        (Some(grants[0].save), grants[0].extents.len()),
        (waiting, 0)
    );
    world.table.registered(link(2), false, String::new());
    assert_eq!(world.poll("a", 0, 128), Polled::Soon);
    assert_eq!(world.sent(), ["submit 4.1 0+8 local 0 asked true"]);
}

#[test]
fn what_the_last_server_counted_is_not_taken_for_the_next_ones() {
    let mut world = World::new();
    world.table.tick(world.now);
    let stats = "{}".to_owned();
    assert!(world.table.reply(Reply::Pong { stats }, world.now));
    assert_eq!(world.table.stats, "{}");
    world.table.lost("gone".to_owned());
    assert_eq!(world.table.stats, "");
    world.table.registered(link(2), false, String::new());
    assert_eq!(world.table.stats, "");
}

/// A save with slots and a load, then a lost connection.
fn interrupted(world: &mut World) -> (u64, u64) {
    world.poll("a", 0, 128);
    world.answer(2, 1, true, Some(128));
    let (load, ..) = world.table.begin_load("a", 0, 128).unwrap();
    let save = world
        .table
        .begin_save("a", &hashes(8), 128, &[], world.now)
        .unwrap();
    let granted = Reply::Granted {
        save,
        refused: false,
        extents: vec![(0, 0, vec![0])],
    };
    assert!(world.table.reply(granted, world.now));
    world.table.lost(String::new());
    assert_eq!(world.table.take_grants().len(), 1);
    (load, save)
}

#[test]
fn another_session_is_told_nothing_of_the_last_ones_loads_and_saves() {
    let mut world = World::new();
    let (load, save) = interrupted(&mut world);
    world.table.registered(link(1), false, String::new());
    world.table.end_load(load, true);
    world.table.end_save(save, true);
    assert_eq!(world.sent(), [""; 0]);
}

#[test]
fn a_reset_of_a_server_that_is_not_there_keeps_to_itself_whatever_comes() {
    let mut world = World::new();
    assert!(!world.table.private);
    world.table.lost("gone".to_owned());
    assert_eq!(world.table.reset(), None);
    assert!(world.table.private, "as the next session is opened");
    world.table.registered(link(2), true, String::new());
    assert_eq!(world.sent(), [""; 0]);
    // Asked for while the session was being opened.
    world.table.lost("gone".to_owned());
    world.table.registered(link(3), false, String::new());
    let [sent] = &world.sent()[..] else {
        panic!("one frame")
    };
    assert!(sent.starts_with("Reset"), "{sent}");
}

#[test]
fn a_reset_of_a_late_server_waits_its_turn() {
    let mut world = World::new();
    world.poll("a", 0, 128);
    world.now += 10 * DEADLINE;
    assert!(world.table.is_late(world.now));
    world.sent();
    assert!(world.table.reset().is_some());
    assert_eq!(world.sent().len(), 2, "the lookup is released");
}

#[test]
fn more_requests_than_a_session_may_have_are_misses() {
    let mut world = World::new();
    for number in 0..REQUESTS_MAX {
        let name = number.to_string();
        world
            .table
            .submit(&name, &hashes(1), (0, 16), None, world.now);
    }
    world.sent();
    assert_eq!(world.poll("one more", 0, 128), Polled::Ready(0));
    let save = world
        .table
        .begin_save("one more", &hashes(8), 128, &[], world.now);
    assert_eq!((save, world.sent()), (None, Vec::new()));
    world.table.forget("7");
    assert_eq!(world.poll("one more", 0, 128), Polled::Soon);
}

#[test]
fn other_hashes_under_the_same_name_are_another_prompt() {
    let mut world = World::new();
    world.poll("a", 0, 128);
    world.sent();
    let mut changed = hashes(9);
    changed.swap(7, 8);
    let span = (0, 144);
    world.table.poll("a", &changed, span, None, world.now);
    let sent = world.sent();
    assert_eq!(sent.len(), 2, "{sent:?}");
    assert!(sent[0].starts_with("Forget"), "{sent:?}");
    assert!(sent[1].contains(" 0+9 "), "{sent:?}");
}

#[test]
fn slots_for_a_save_that_nobody_wants_any_more_are_given_back() {
    let mut world = World::new();
    let save = world
        .table
        .begin_save("a", &hashes(8), 128, &[], world.now)
        .unwrap();
    world.table.end_save(save, false);
    world.sent();
    let granted = Reply::Granted {
        save,
        refused: false,
        extents: vec![(0, 0, vec![0])],
    };
    world.table.reply(granted, world.now);
    assert_eq!(world.table.take_grants(), Vec::<Grant>::new());
    assert_eq!(
        world.sent(),
        [format!("EndSave {{ save: {save}, ok: false }}")]
    );
}

#[test]
fn a_reset_voids_every_answer() {
    let mut world = World::new();
    world.poll("a", 0, 128);
    world.answer(2, 1, true, Some(128));
    let ticket = world.table.reset().unwrap();
    assert_eq!(world.table.begin_load("a", 0, 128), None);
    assert_eq!(world.table.take_reset(ticket), None);
    world
        .table
        .reply(Reply::Reset { ticket, ok: true }, world.now);
    assert_eq!(world.table.take_reset(ticket), Some(true));
    assert_eq!(world.table.take_reset(ticket), Some(false), "once");
}

#[test]
fn replies_that_nobody_asked_for_are_no_replies() {
    let mut world = World::new();
    assert!(!world.answer(1, 1, true, Some(16)));
    let stats = String::new();
    assert!(!world.table.reply(Reply::Pong { stats }, world.now));
    let json = String::new();
    assert!(!world.table.reply(Reply::Status { json }, world.now));
}

#[test]
fn a_burst_of_long_prompts_asks_no_more_than_can_be_sent() {
    let mut world = World::new();
    world.table.deadline = Duration::from_secs(60);
    let prompt = hashes(80).repeat(100);
    for index in 0..1000 {
        let name = format!("burst {index}");
        world
            .table
            .submit(&name, &prompt, (0, 128_000), None, world.now);
    }
    assert!(!world.table.is_overfull(), "the session would be lost");
    // What was not asked is a miss, and a save that was not asked for is asked for later.
    assert_eq!(
        world
            .table
            .poll("burst 999", &prompt, (0, 128_000), None, world.now),
        Polled::Ready(0)
    );
    let save = world
        .table
        .begin_save("burst 0", &prompt, 128_000, &[], world.now);
    assert_eq!(save, None);
    world.sent();
    world
        .table
        .submit("later", &prompt, (0, 128_000), None, world.now);
    assert_eq!(world.sent().len(), 1);
}
