//! Objects that are written again because they are old, and corrupt objects that are removed: neither keeps a read waiting.

use std::time::{Duration, Instant, SystemTime};

use undercroft_contract::remote::{RemoteDone, RemoteError};
use undercroft_remote::{Location, ObjectBody};

use crate::fakes::{HANGS, Server, URL, of_child, with_server};
use crate::rig::{Rig, Segment, reads_only};

/// More than half of the default time to live.
const OLD: Duration = Duration::from_secs(2 * 24 * 3600);
const PATIENCE: Duration = Duration::from_secs(30);
/// A put or a removal that hangs ends after five seconds at the earliest.
const HANG: Duration = Duration::from_secs(5);

fn started() -> (std::sync::Arc<Server>, Rig) {
    (of_child(), Rig::new(URL, Box::new(())).unwrap())
}

/// Puts segments, and makes them old.
fn old_segments(server: &Server, rig: &mut Rig, count: u8) -> Vec<Segment> {
    let segments: Vec<Segment> = (0..count).map(Segment::new).collect();
    for segment in &segments {
        rig.put(segment, true).unwrap();
    }
    server.age(OLD);
    segments
}

fn wait_until(is_so: impl Fn() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < end);
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Expects reads that take less time than a request that hangs. On a busy machine, some attempts take longer.
fn quickly(mut read: impl FnMut() -> Duration) {
    let mut all = Vec::new();
    while all.last().is_none_or(|elapsed| *elapsed >= HANG) {
        assert!(all.len() < 6, "{all:?}");
        all.push(read());
    }
}

#[test]
fn an_old_object_that_is_read_is_written_again_as_it_was() {
    with_server("renewals::over_a_good_server");
}

/// Run by the test above.
#[test]
#[ignore = "a part of another test"]
fn over_a_good_server() {
    let (server, mut rig) = started();
    let [old] = &old_segments(&server, &mut rig, 1)[..] else {
        panic!("one segment")
    };
    let path = old.key.path();
    // A part of an object does not renew it.
    rig.get(old, old.parts(8)[..1].to_vec()).unwrap();
    rig.get_all(old).unwrap();
    wait_until(|| server.object(&path).1 + OLD / 2 > SystemTime::now());
    assert!(server.object(&path).0 == old.bytes(), "the same bytes");
    rig.get_all(old).unwrap();
    drop(rig.pool.take());
    assert_eq!(server.count("PUT"), 2, "a new object is not written again");
}

#[test]
fn a_renewal_that_hangs_keeps_no_read_waiting() {
    with_server("renewals::over_writes_that_hang");
}

/// Run by the test above.
#[test]
#[ignore = "a part of another test"]
fn over_writes_that_hang() {
    let (server, mut rig) = started();
    // More than the store's threads.
    let segments = old_segments(&server, &mut rig, 40);
    server.fail("PUT", HANGS, usize::MAX);
    quickly(|| {
        let (mut rig, started) = (Rig::new(URL, Box::new(())).unwrap(), Instant::now());
        let before = server.count("PUT");
        for segment in &segments {
            rig.get_all(segment).unwrap();
            let found = rig.probe(vec![segment.key]);
            assert_eq!(found, Ok(RemoteDone::Present(1)));
        }
        let elapsed = started.elapsed();
        wait_until(|| server.count("PUT") > before);
        // The pool's end would wait for the renewals.
        std::mem::forget(rig.pool.take());
        elapsed
    });
}

#[test]
fn credentials_that_only_read_are_not_used_to_renew_each_object() {
    with_server("renewals::over_writes_that_are_denied");
}

/// Run by the test above.
#[test]
#[ignore = "a part of another test"]
fn over_writes_that_are_denied() {
    let (server, mut rig) = started();
    let segments = old_segments(&server, &mut rig, 8);
    server.fail("PUT", 403, usize::MAX);
    rig.get_all(&segments[0]).unwrap();
    wait_until(|| server.count("PUT") > segments.len());
    let last = rig.pool.as_ref().unwrap().last_result();
    for _ in 0..20 {
        assert_eq!(last.get(), undercroft_remote::StoreHealth::Good, "no error");
        std::thread::sleep(Duration::from_millis(10));
    }
    // The answer to the renewal came before the answer to this.
    assert_eq!(rig.put(&segments[0], false), Err(RemoteError::Denied));
    let before = server.count("PUT");
    for segment in &segments {
        rig.get_all(segment).unwrap();
    }
    drop(rig.pool.take());
    // If this machine is busy, another renewal is sent before the first one has ended.
    let sent = server.count("PUT") - before;
    assert!(sent <= 1, "{sent} renewals");
}

#[test]
fn a_host_that_only_reads_writes_no_object_again() {
    with_server("renewals::over_a_host_that_only_reads");
}

/// Run by the test above.
#[test]
#[ignore = "a part of another test"]
fn over_a_host_that_only_reads() {
    let (server, mut rig) = started();
    let segments = old_segments(&server, &mut rig, 4);
    let location = Location::parse(URL).unwrap();
    let objects = undercroft_remote::open(&location, reads_only()).unwrap();
    let mut rig = Rig::over(objects, Box::new(()));
    for segment in &segments {
        rig.get_all(segment).unwrap();
    }
    // Renewals that run end before the pool.
    drop(rig.pool.take());
    assert_eq!(server.count("PUT"), segments.len());
}

#[test]
fn a_removal_that_hangs_keeps_no_read_waiting() {
    with_server("renewals::over_removals_that_hang");
}

/// Run by the test above.
#[test]
#[ignore = "a part of another test"]
fn over_removals_that_hang() {
    let (server, rig) = started();
    let segment = Segment::new(1);
    let (path, bytes) = (segment.key.path(), segment.bytes());
    let cut = ObjectBody::bytes(&bytes[..5000]);
    rig.objects.put(&path, &cut, true).unwrap();
    server.fail("DELETE", HANGS, usize::MAX);
    quickly(|| {
        let (mut rig, started) = (Rig::new(URL, Box::new(())).unwrap(), Instant::now());
        let before = server.count("DELETE");
        assert_eq!(rig.get_all(&segment), Err(RemoteError::Corrupt));
        let elapsed = started.elapsed();
        wait_until(|| server.count("DELETE") > before);
        // The pool's end would wait for the removal.
        std::mem::forget(rig.pool.take());
        elapsed
    });
}

/// Ceph answers so to a read of an object that is being replaced.
#[test]
fn a_request_that_the_server_fails_to_answer_is_sent_once_more() {
    with_server("renewals::over_a_server_with_errors");
}

/// Run by the test above.
#[test]
#[ignore = "a part of another test"]
fn over_a_server_with_errors() {
    let (server, mut rig) = started();
    let segment = Segment::new(1);
    server.fail("PUT", 500, 1);
    assert_eq!(rig.put(&segment, true), Ok(RemoteDone::Stored));
    server.fail("GET", 500, 1);
    rig.get_all(&segment).unwrap();
    server.fail("HEAD", 500, 1);
    let found = rig.probe(vec![segment.key]);
    assert_eq!(found, Ok(RemoteDone::Present(1)));
    server.fail("GET", 500, 2);
    assert_eq!(rig.get_all(&segment), Err(RemoteError::Unreachable));
    rig.get_all(&segment).unwrap();
}
