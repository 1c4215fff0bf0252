//! Tests of a Redis server alone.

use std::time::Duration;

use undercroft_remote::{Location, ObjectBody, Objects, Receiver};

use crate::rig::{options, reads_only};
use crate::server::Redis;

fn start(ttl: Duration) -> Option<(Redis, std::sync::Arc<dyn Objects>)> {
    let server = Redis::start(&[]).inspect_err(|reason| eprintln!("skipped: {reason}"));
    let server = server.ok()?;
    let location = Location::parse(&server.url()).unwrap();
    let objects = undercroft_remote::open(&location, options(ttl)).unwrap();
    Some((server, objects))
}

#[test]
fn an_object_expires_and_one_that_is_read_does_so_later() {
    let Some((server, objects)) = start(Duration::from_secs(1000)) else {
        return;
    };
    objects
        .put("1/a", &ObjectBody::bytes(b"bytes"), true)
        .unwrap();
    let left = || -> u64 {
        let answer = server.say("TTL test/1/a");
        answer.trim_start_matches(':').trim().parse().unwrap()
    };
    assert!((900..=1000).contains(&left()), "{}", left());
    server.say("EXPIRE test/1/a 100");
    assert!(left() <= 100);
    objects.get("1/a", &mut Receiver::bytes(5)).unwrap();
    assert!((900..=1000).contains(&left()), "{}", left());
}

/// The user of such a host may have no permission to write.
#[test]
fn a_host_that_only_reads_changes_no_time_to_live() {
    let Some((server, objects)) = start(Duration::from_secs(1000)) else {
        return;
    };
    objects
        .put("1/a", &ObjectBody::bytes(b"bytes"), true)
        .unwrap();
    server.say("EXPIRE test/1/a 100");
    server.say("ACL SETUSER default resetkeys %R~*");
    let location = Location::parse(&server.url()).unwrap();
    let reader = undercroft_remote::open(&location, reads_only()).unwrap();
    let mut receiver = Receiver::bytes(5);
    reader.get("1/a", &mut receiver).unwrap();
    assert_eq!(receiver.into_bytes(), b"bytes");
    let left = server.say("TTL test/1/a");
    let left: u64 = left.trim_start_matches(':').trim().parse().unwrap();
    assert!(left <= 100, "{left}");
}

/// A server lists its keys in pages.
#[test]
fn a_list_has_all_of_many_objects() {
    let Some((_server, objects)) = start(Duration::from_secs(1000)) else {
        return;
    };
    let path = |number: u32| format!("1/ns/aa/{number}");
    for number in 0..3000 {
        objects
            .put(&path(number), &ObjectBody::bytes(b"x"), true)
            .unwrap();
    }
    let mut found = std::collections::BTreeSet::new();
    objects
        .list("", &mut |entry| {
            found.insert(entry.path);
            true
        })
        .unwrap();
    assert_eq!(found, (0..3000).map(path).collect());
}
