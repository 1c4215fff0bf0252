//! Engines with real stores behind a proxy with network faults.

use super::child::{child, free_port, url_of_parent};
use super::proxy::{Fault, Proxy};
use super::server::Redis;
use super::*;

/// All tokens of a prompt, and its segments.
const WHOLE: u32 = BLOCKS * BLOCK;
const SEGMENTS: u64 = 4;
/// Bytes that a store has sent when the fault begins: before the first answer, within the first object, and late.
const BEGINS: [u64; 3] = [0, 500_000, 3_000_000];

pub(super) fn redis() -> Option<Redis> {
    let server = Redis::start(&[]);
    server
        .inspect_err(|reason| eprintln!("skipped: {reason}"))
        .ok()
}

fn host(root: &Path, name: &str, url: &str) -> Host {
    Host::start(root, name, |config| config.remote = url.to_owned())
}

/// Computes a prompt, and waits until it is in the store.
fn write(host: &Host, prompt: u32) {
    let is_done = |host: &Host| host.stat("remote_puts") + host.stat("remote_puts_known");
    let goal = is_done(host) + SEGMENTS;
    host.compute(prompt);
    host.wait_for("a prompt is in the store", |host| is_done(host) >= goal);
}

/// One engine writes a prompt. Another engine reads it and computes another prompt meanwhile. The store fails after
/// `after` bytes of its answers, and works again some time later.
fn recovers(url: &str, proxy: &Proxy, fault: Fault, after: u64) {
    let root = tempfile::tempdir().unwrap();
    let writer = host(root.path(), "writer", url);
    write(&writer, 1);
    let reader = host(root.path(), "reader", url);
    reader.wait_for("the store answers", |host| {
        host.engine.info()["remote"]["health"] == "good"
    });
    proxy.set_after(after, fault);
    // The bytes of each hit are compared, whatever its length is.
    reader.hit(1);
    reader.compute(2);
    assert_eq!(reader.hit(2), WHOLE, "host memory is not affected");
    reader.hit(1);
    proxy.set(Fault::None);
    if reader.hit(1) < WHOLE && fault == Fault::Flip {
        // Damaged objects have been removed.
        reader.compute(1);
    }
    reader.wait_for("reads recover", |host| host.hit(1) == WHOLE);
    // A hit offers segments that are not known to be in the store.
    let other = host(root.path(), "other", url);
    reader.wait_for("writes recover", |reader| {
        reader.hit(2);
        other.hit(2) == WHOLE
    });
    assert_eq!(other.hit(1), WHOLE);
}

/// Tests a fault that begins at each of [`BEGINS`], each with a proxy and a prefix of its own.
fn recovers_from(fault: Fault) {
    let Some(server) = redis() else { return };
    std::thread::scope(|scope| {
        for after in BEGINS {
            let port = server.port();
            scope.spawn(move || {
                let proxy = Proxy::start(0, port);
                let url = format!("redis://127.0.0.1:{}/0/{after}", proxy.port());
                recovers(&url, &proxy, fault, after);
            });
        }
    });
}

#[test]
fn a_store_that_freezes_costs_hits_and_is_used_again() {
    recovers_from(Fault::Stall);
}

#[test]
fn a_store_whose_connections_break_costs_hits_and_is_used_again() {
    recovers_from(Fault::Reset);
    recovers_from(Fault::Cut(1000));
}

#[test]
fn a_slow_store_costs_hits_and_is_used_again() {
    recovers_from(Fault::Slow(2 << 20));
    recovers_from(Fault::Delay(Duration::from_millis(300)));
}

#[test]
fn a_store_that_changes_bits_gives_no_wrong_byte() {
    recovers_from(Fault::Flip);
}

#[test]
fn a_store_that_throttles_costs_hits_and_is_used_again() {
    recovers_from(Fault::Answer(
        "-LOADING Redis is loading the dataset in memory\r\n",
    ));
}

/// A server that was killed has lost all objects when it runs again.
#[test]
fn a_store_that_is_killed_is_used_again_once_it_is_back() {
    let Some(server) = redis() else { return };
    let root = tempfile::tempdir().unwrap();
    let (url, port) = (server.url(), server.port().to_string());
    let one = host(root.path(), "one", &url);
    write(&one, 1);
    drop(server);
    let other = host(root.path(), "other", &url);
    assert_eq!(other.hit(1), 0);
    other.compute(2);
    other.wait_for("the failure is told", |host| {
        host.engine.info()["remote"]["health"] == "failed"
    });
    let server = Redis::start(&["--port", &port]).unwrap();
    assert_eq!(server.say("EXISTS any"), ":0\r\n");
    // The server has lost the objects of the first host. A hit on the first host does not offer them again.
    other.wait_for("writes recover", |other| {
        other.hit(2);
        let there = other.stat("remote_puts") + other.stat("remote_puts_known");
        there >= SEGMENTS
    });
    one.wait_for("reads recover", |one| one.hit(2) == WHOLE);
}

#[test]
fn an_engine_starts_with_a_wrong_environment_and_names_the_variable() {
    child(
        "remote_tier::tests::bad_stores::in_a_wrong_environment",
        "",
        &[
            ("REDIS_PASSWORD_FILE", "/no/such/file"),
            ("AWS_ENDPOINT_URL", "http://127.0.0.1:1"),
            ("AWS_ALLOW_HTTP", "false"),
            ("AZURE_STORAGE_ENDPOINT", "http://127.0.0.1:1"),
            ("AZURE_ALLOW_HTTP", "false"),
        ],
    );
}

/// The test above runs this in a process of its own.
#[test]
#[ignore = "a part of another test"]
fn in_a_wrong_environment() {
    for (url, variable) in [
        ("redis://127.0.0.1:1/0", "REDIS_PASSWORD_FILE"),
        ("s3://bucket/prefix", "AWS_ALLOW_HTTP"),
        ("az://container/prefix", "AZURE_ALLOW_HTTP"),
    ] {
        let root = tempfile::tempdir().unwrap();
        let host = host(root.path(), "one", url);
        host.wait_for("the failure is told", |host| {
            host.engine.info()["remote"]["health"] == "failed"
        });
        let said = &host.engine.info()["remote"];
        assert!(said["fault"].as_str().unwrap().contains(variable), "{said}");
        let remedy = said["advice"].as_str().unwrap();
        assert!(remedy.contains("start vLLM again"), "{said}");
        host.compute(1);
        assert_eq!(host.hit(1), WHOLE, "host memory is not affected");
    }
}

/// The same test with S3. The environment of a whole process names its endpoint.
#[test]
fn an_object_store_that_fails_costs_hits_and_is_used_again() {
    let (Ok(url), Ok(endpoint)) = (
        std::env::var("UNDERCROFT_TEST_S3"),
        std::env::var("AWS_ENDPOINT_URL"),
    ) else {
        eprintln!(
            "skipped: UNDERCROFT_TEST_S3 names no bucket; `make test-remote` starts a server with one"
        );
        return;
    };
    let upstream = endpoint.rsplit(':').next().unwrap();
    let port = free_port();
    let server = format!("http://127.0.0.1:{port}");
    child(
        "remote_tier::tests::bad_stores::before_an_object_store",
        &format!("{port} {upstream} {url}"),
        &[("AWS_ENDPOINT_URL", &server)],
    );
}

/// The test above runs this in a process of its own.
#[test]
#[ignore = "a part of another test"]
fn before_an_object_store() {
    let of_parent = url_of_parent();
    let [port, upstream, bucket] = of_parent.split(' ').collect::<Vec<_>>()[..] else {
        panic!("two ports and a bucket: {of_parent}");
    };
    let proxy = Proxy::start(port.parse().unwrap(), upstream.parse().unwrap());
    let busy = "HTTP/1.1 503 x\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
    let faults = [
        Fault::Stall,
        Fault::Reset,
        Fault::Cut(1000),
        Fault::Slow(2 << 20),
        Fault::Flip,
        Fault::Answer(busy),
    ];
    for (index, fault) in faults.into_iter().enumerate() {
        for after in BEGINS {
            eprintln!("{fault:?} after {after} bytes");
            let url = format!("{bucket}/bad-{}-{index}-{after}", std::process::id());
            recovers(&url, &proxy, fault, after);
            proxy.set(Fault::None);
        }
    }
}
