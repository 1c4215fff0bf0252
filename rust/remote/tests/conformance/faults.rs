//! Bad networks and servers: each failure has the right error, no call takes long, and the store recovers.

use std::time::{Duration, Instant};

use undercroft_contract::remote::{RemoteDone, RemoteError};

use crate::child::{child, url_of_parent};
use crate::proxy::{Fault, Proxy};
use crate::rig::{Rig, Segment};

/// A call without an answer ends within this time, even on a busy machine.
const SOON: Duration = Duration::from_secs(10);

/// The result of a get, a put and a probe.
type All = [Result<RemoteDone, RemoteError>; 3];

fn all(rig: &mut Rig, segment: &Segment) -> All {
    let started = Instant::now();
    let results = [
        rig.get_all(segment),
        rig.put(segment, false),
        rig.probe(vec![segment.key]),
    ];
    assert!(started.elapsed() < 3 * SOON, "{results:?}");
    results
}

fn failed(error: RemoteError) -> All {
    [Err(error), Err(error), Err(error)]
}

fn is_well(rig: &mut Rig, segment: &Segment) {
    rig.put(segment, true).unwrap();
    rig.get_all(segment).unwrap();
    let found = rig.probe(vec![segment.key]);
    assert_eq!(found, Ok(RemoteDone::Present(1)));
}

/// Faults of a connection while an object arrives.
fn is_slow_or_damaged(proxy: &Proxy, rig: &mut Rig, segment: &Segment) {
    for fault in [Fault::Reset, Fault::Cut(1)] {
        proxy.set_after(100_000, fault);
        let cut = rig.get_all(segment);
        assert_eq!(cut, Err(RemoteError::Unreachable), "{fault:?} in between");
    }
    proxy.set_after(100_000, Fault::Stall);
    assert_eq!(rig.get_all(segment), Err(RemoteError::Late));
    for fault in [
        Fault::Delay(Duration::from_millis(20)),
        Fault::Slow(10 << 20),
    ] {
        proxy.set(fault);
        is_well(rig, segment);
    }
    proxy.set(Fault::Flip);
    let damaged = rig.get_all(segment);
    assert_eq!(damaged, Err(RemoteError::Corrupt), "a bit that flips");
    proxy.set(Fault::None);
    rig.wait_until_gone(&segment.key.path());
    is_well(rig, segment);
}

#[cfg(feature = "redis")]
mod redis {
    use undercroft_contract::remote::RemoteRequest;
    use undercroft_remote::{ObjectBody, StoreHealth};

    use super::*;
    use crate::server::Redis;

    fn start(arguments: &[&str]) -> Option<Redis> {
        Redis::start(arguments)
            .inspect_err(|reason| eprintln!("skipped: {reason}"))
            .ok()
    }

    #[test]
    fn requests_fail_on_a_bad_network_and_recover() {
        let Some(server) = start(&[]) else { return };
        let proxy = Proxy::start(0, server.port());
        let url = format!("redis://127.0.0.1:{}", proxy.port());
        let mut rig = Rig::new(&url, Box::new(server)).unwrap();
        let segment = Segment::new(1);
        is_well(&mut rig, &segment);
        for (fault, error) in [
            (Fault::Stall, RemoteError::Late),
            (Fault::Reset, RemoteError::Unreachable),
            (Fault::Cut(1), RemoteError::Unreachable),
        ] {
            proxy.set(fault);
            assert_eq!(all(&mut rig, &segment), failed(error), "{fault:?}");
            proxy.set(Fault::None);
            is_well(&mut rig, &segment);
        }
        is_slow_or_damaged(&proxy, &mut rig, &segment);
    }

    /// The deadline is for the call, not for each of its answers.
    #[test]
    fn a_probe_of_many_ends_as_soon_as_one_of_few() {
        let Some(server) = start(&[]) else { return };
        let proxy = Proxy::start(0, server.port());
        let url = format!("redis://127.0.0.1:{}", proxy.port());
        let mut rig = Rig::new(&url, Box::new(server)).unwrap();
        let keys: Vec<_> = (0..64).map(|number| Segment::new(number).key).collect();
        assert_eq!(rig.probe(keys.clone()), Ok(RemoteDone::Present(0)));
        proxy.set(Fault::Stall);
        let started = Instant::now();
        assert_eq!(rig.probe(keys), Err(RemoteError::Late));
        assert!(started.elapsed() < SOON, "{:?}", started.elapsed());
    }

    /// A router forgets connections that are unused for long, and drops their packets.
    #[test]
    fn connections_that_are_dead_fail_one_call() {
        let Some(server) = start(&[]) else { return };
        let proxy = Proxy::start(0, server.port());
        let url = format!("redis://127.0.0.1:{}", proxy.port());
        let mut rig = Rig::new(&url, Box::new(server)).unwrap();
        let key = Segment::new(1).key;
        // Calls at the same time have a connection each.
        proxy.set(Fault::Delay(Duration::from_millis(100)));
        let mut open = rig.objects.parallel();
        for _ in 0..open {
            let keys = vec![key];
            rig.submit(|token| RemoteRequest::Probe { token, keys });
        }
        while open > 0 {
            open -= rig.wait().len();
        }
        proxy.set(Fault::None);
        proxy.forget_connections();
        assert_eq!(rig.probe(vec![key]), Err(RemoteError::Late));
        assert_eq!(rig.probe(vec![key]), Ok(RemoteDone::Present(0)));
    }

    #[test]
    fn a_server_that_ends_is_unreachable() {
        let Some(server) = start(&[]) else { return };
        let mut rig = Rig::new(&server.url(), Box::new(())).unwrap();
        is_well(&mut rig, &Segment::new(2));
        drop(server);
        let results = all(&mut rig, &Segment::new(2));
        assert_eq!(results, failed(RemoteError::Unreachable));
    }

    #[test]
    fn a_value_that_is_larger_than_the_object_is_corrupt_and_removed() {
        let Some(server) = start(&[]) else { return };
        let mut rig = Rig::new(&server.url(), Box::new(server)).unwrap();
        let segment = Segment::new(1);
        let path = segment.key.path();
        let larger = [segment.bytes(), vec![0; 1 << 20]].concat();
        rig.objects
            .put(&path, &ObjectBody::bytes(&larger), false)
            .unwrap();
        assert_eq!(rig.get_all(&segment), Err(RemoteError::Corrupt));
        rig.wait_until_gone(&path);
        is_well(&mut rig, &segment);
    }

    #[test]
    fn a_full_server_is_reported() {
        let arguments = ["--maxmemory", "1mb", "--maxmemory-policy", "noeviction"];
        let Some(server) = start(&arguments) else {
            return;
        };
        let mut rig = Rig::new(&server.url(), Box::new(server)).unwrap();
        let results: Vec<_> = (0..8)
            .map(|number| rig.put(&Segment::new(number), true))
            .collect();
        assert_eq!(results.last(), Some(&Err(RemoteError::Full)), "{results:?}");
        let full = rig
            .objects
            .put("x", &ObjectBody::bytes(&[0; 1 << 20]), false);
        let remedy = full.unwrap_err().advice();
        // Redis removes objects itself.
        assert!(
            remedy.contains("maxmemory-policy") && !remedy.contains("gc"),
            "{remedy}"
        );
    }

    /// Otherwise the log of an engine would say again and again that the store fails, and that it works again.
    #[test]
    fn a_server_that_refuses_writes_counts_as_failed_until_it_takes_one() {
        let arguments = ["--maxmemory", "1mb", "--maxmemory-policy", "noeviction"];
        let Some(server) = start(&arguments) else {
            return;
        };
        let mut rig = Rig::new(&server.url(), Box::new(())).unwrap();
        let segment = Segment::new(1);
        assert_eq!(rig.put(&segment, true), Err(RemoteError::Full));
        let last = rig.pool.as_ref().unwrap().last_result();
        assert_eq!(rig.probe(vec![segment.key]), Ok(RemoteDone::Present(0)));
        assert_eq!(rig.get_all(&segment), Err(RemoteError::NotFound));
        let StoreHealth::Failed(error) = last.get() else {
            panic!("the server is still full");
        };
        let said = error.to_string();
        assert!(
            said.starts_with("the store is full (writes only: "),
            "{said}"
        );
        server.say("CONFIG SET maxmemory 0");
        assert_eq!(rig.put(&segment, true), Ok(RemoteDone::Stored));
        assert_eq!(last.get(), StoreHealth::Good);
    }

    #[test]
    fn a_database_that_cannot_be_selected_is_reported_with_the_remedy() {
        let Some(server) = start(&["--requirepass", "hunter2"]) else {
            return;
        };
        let refused = |url: &str| {
            let rig = Rig::new(url, Box::new(())).unwrap();
            rig.objects.greet().unwrap_err()
        };
        let denied = refused(&format!("redis://127.0.0.1:{}/1", server.port()));
        assert_eq!(denied.kind, RemoteError::Denied, "{denied}");
        assert!(denied.advice().contains("REDIS_PASSWORD"), "{denied}");
        let Some(server) = start(&[]) else { return };
        let missing = refused(&format!("redis://127.0.0.1:{}/99", server.port()));
        assert!(missing.to_string().contains("out of range"), "{missing}");
        assert!(missing.advice().contains("database"), "{missing}");
    }

    #[test]
    fn a_server_that_wants_a_password_gets_that_of_the_environment() {
        let Some(server) = start(&["--requirepass", "hunter2"]) else {
            return;
        };
        let url = server.url();
        let mut rig = Rig::new(&url, Box::new(())).unwrap();
        let results = all(&mut rig, &Segment::new(3));
        assert_eq!(results, failed(RemoteError::Denied));
        let refused = rig.objects.greet().unwrap_err();
        assert!(refused.advice().contains("REDIS_PASSWORD"), "{refused}");
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "hunter2\n").unwrap();
        let path = file.path().to_str().unwrap();
        for variables in [
            [("REDIS_PASSWORD", "hunter2")],
            [("REDIS_PASSWORD_FILE", path)],
        ] {
            child("faults::redis::with_the_password", &url, &variables);
        }
    }

    /// The test above runs this one.
    #[test]
    #[ignore = "a part of another test"]
    fn with_the_password() {
        let mut rig = Rig::new(&url_of_parent(), Box::new(())).unwrap();
        is_well(&mut rig, &Segment::new(3));
    }
}

#[cfg(feature = "s3")]
mod s3 {
    use undercroft_remote::StoreHealth;

    use super::*;
    use crate::child::free_port;
    use crate::fakes::{AZURE, GOOGLE};
    use crate::rig::s3_url;

    macro_rules! answer {
        ($status:literal) => {
            concat!(
                "HTTP/1.1 ",
                $status,
                " x\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            )
        };
    }

    /// The answer of a server whose clock differs from this machine's clock.
    const SKEWED: &str = "HTTP/1.1 403 x\r\ncontent-length: 72\r\nconnection: close\r\n\r\n\
        <Error><Code>RequestTimeTooSkewed</Code><Message>late</Message></Error>\n";

    /// The answer with an object whose body ends early.
    const CUT: &str = "HTTP/1.1 206 x\r\ncontent-length: 320480\r\ncontent-range: bytes 0-320479/323584\r\n\
        etag: \"a\"\r\nlast-modified: Mon, 23 Nov 2026 05:00:00 GMT\r\nconnection: close\r\n\r\nUNDRSEGM";

    /// Runs the test below. The variables name the server and some credentials.
    fn run_before_bad_server(url: &str, endpoint: &str, variables: &[(&str, &str)]) {
        run_with_proxy_port("before_a_bad_server", url, endpoint, variables);
    }

    /// Runs a test in a process of its own, with the port of the proxy that the test is to start.
    fn run_with_proxy_port(test: &str, words: &str, endpoint: &str, variables: &[(&str, &str)]) {
        let port = free_port();
        let server = format!("http://127.0.0.1:{port}");
        let variables = [&[(endpoint, server.as_str())], variables].concat();
        let (test, of_child) = (format!("faults::s3::{test}"), format!("{port} {words}"));
        child(&test, &of_child, &variables);
    }

    #[test]
    fn faults_of_an_s3_server_are_reported_by_kind() {
        let variables = [
            ("AWS_ALLOW_HTTP", "true"),
            ("AWS_ACCESS_KEY_ID", "key"),
            ("AWS_SECRET_ACCESS_KEY", "secret"),
        ];
        run_before_bad_server("s3://bucket/prefix", "AWS_ENDPOINT_URL", &variables);
    }

    #[test]
    fn faults_of_a_google_cloud_server_are_reported_by_kind() {
        run_before_bad_server("gs://bucket/prefix", "GOOGLE_BASE_URL", &GOOGLE);
    }

    #[test]
    fn faults_of_an_azure_server_are_reported_by_kind() {
        run_before_bad_server("az://container/prefix", "AZURE_STORAGE_ENDPOINT", &AZURE);
    }

    #[test]
    fn requests_to_a_real_server_fail_on_a_bad_network_and_recover() {
        let Ok(url) = s3_url().inspect_err(|reason| eprintln!("skipped: {reason}")) else {
            return;
        };
        let endpoint = std::env::var("AWS_ENDPOINT_URL").unwrap_or_default();
        let port = endpoint.strip_prefix("http://127.0.0.1:");
        let Some(port) = port.and_then(|port| port.parse::<u16>().ok()) else {
            eprintln!("skipped: AWS_ENDPOINT_URL {endpoint:?} is no server of this machine");
            return;
        };
        let of_child = format!("{port} {url}");
        run_with_proxy_port("over_a_bad_network", &of_child, "AWS_ENDPOINT_URL", &[]);
    }

    /// The test above runs this one.
    #[test]
    #[ignore = "a part of another test"]
    fn over_a_bad_network() {
        let of_parent = url_of_parent();
        let mut words = of_parent.split(' ');
        let mut port = || words.next().unwrap().parse().unwrap();
        let (listening, server) = (port(), port());
        let proxy = Proxy::start(listening, server);
        let mut rig = Rig::new(words.next().unwrap(), Box::new(())).unwrap();
        let segment = Segment::new(1);
        is_well(&mut rig, &segment);
        for (fault, error) in [
            (Fault::Stall, RemoteError::Late),
            (Fault::Reset, RemoteError::Unreachable),
            (Fault::Cut(1), RemoteError::Unreachable),
            (Fault::Answer(answer!("503")), RemoteError::Throttled),
        ] {
            proxy.set(fault);
            assert_eq!(all(&mut rig, &segment), failed(error), "{fault:?}");
            proxy.set(Fault::None);
            is_well(&mut rig, &segment);
        }
        is_slow_or_damaged(&proxy, &mut rig, &segment);
        crate::collecting::a_collection_completes_after_a_fault(&*rig.objects, |is_bad| {
            proxy.set(if is_bad { Fault::Reset } else { Fault::None });
        });
    }

    #[test]
    fn a_store_without_credentials_says_how_they_are_given() {
        let variables = [("GOOGLE_APPLICATION_CREDENTIALS", "/no/such/file.json")];
        child(
            "faults::s3::without_credentials",
            "gs://bucket/prefix GOOGLE_APPLICATION_CREDENTIALS",
            &variables,
        );
        let variables = [("AZURE_STORAGE_ACCOUNT_KEY", "c2VjcmV0")];
        child(
            "faults::s3::without_credentials",
            "az://container/prefix AZURE_STORAGE_ACCOUNT_NAME",
            &variables,
        );
    }

    #[test]
    fn an_address_that_is_none_is_refused_with_its_variable() {
        for (address, words) in [
            (
                "127.0.0.1:80",
                "AWS_ENDPOINT_URL is \"127.0.0.1:80\": not an address",
            ),
            ("http://127.0.0.1:80", "AWS_ALLOW_HTTP=true"),
        ] {
            let variables = [("AWS_ENDPOINT_URL", address), ("AWS_ALLOW_HTTP", "false")];
            let of_child = format!("s3://bucket/prefix {words}");
            child("faults::s3::refused_with", &of_child, &variables);
        }
    }

    /// The test above runs this one.
    #[test]
    #[ignore = "a part of another test"]
    fn refused_with() {
        let of_parent = url_of_parent();
        let (url, words) = of_parent.split_once(' ').unwrap();
        let refused = Rig::new(url, Box::new(())).err().unwrap();
        assert!(
            refused.contains(words) && refused.contains(url),
            "{refused}"
        );
    }

    /// The test above runs this one.
    #[test]
    #[ignore = "a part of another test"]
    fn without_credentials() {
        let of_parent = url_of_parent();
        let (url, variable) = of_parent.split_once(' ').unwrap();
        let refused = Rig::new(url, Box::new(())).err().unwrap();
        let words = format!("; set {variable}");
        assert!(
            refused.contains(&words) && refused.contains(url),
            "{refused}"
        );
    }

    /// The tests above run this one.
    #[test]
    #[ignore = "a part of another test"]
    fn before_a_bad_server() {
        let of_parent = url_of_parent();
        let (port, url) = of_parent.split_once(' ').unwrap();
        let proxy = Proxy::start(port.parse().unwrap(), 1);
        let mut rig = Rig::new(url, Box::new(())).unwrap();
        let segment = Segment::new(1);
        for (fault, error) in [
            (Fault::Answer(answer!("503")), RemoteError::Throttled),
            (Fault::Answer(answer!("429")), RemoteError::Throttled),
            (Fault::Answer(answer!("403")), RemoteError::Denied),
            (Fault::Answer(answer!("401")), RemoteError::Denied),
            (Fault::Answer(answer!("500")), RemoteError::Unreachable),
            (Fault::Answer(answer!("507")), RemoteError::Full),
            (Fault::Answer("no HTTP"), RemoteError::Unreachable),
            (Fault::Stall, RemoteError::Late),
            (Fault::Reset, RemoteError::Unreachable),
        ] {
            proxy.set(fault);
            assert_eq!(all(&mut rig, &segment), failed(error), "{fault:?}");
            let last = rig.pool.as_ref().unwrap().last_result().get();
            let StoreHealth::Failed(last) = last else {
                panic!("{last:?}");
            };
            let names_variables = last.advice().starts_with("set ");
            assert_eq!(names_variables, error == RemoteError::Denied, "{last}");
        }
        proxy.set(Fault::Answer(SKEWED));
        let skewed = rig.objects.greet().unwrap_err();
        assert!(skewed.advice().contains("clock by NTP"), "{skewed}");
        assert_eq!(skewed.detail, "403 Forbidden: RequestTimeTooSkewed: late");
        proxy.set(Fault::Answer(answer!("404")));
        assert_eq!(rig.get_all(&segment), Err(RemoteError::NotFound));
        assert_eq!(rig.probe(vec![segment.key]), Ok(RemoteDone::Present(0)));
        proxy.set(Fault::Answer(answer!("412")));
        assert_eq!(rig.put(&segment, true), Ok(RemoteDone::AlreadyThere));
        proxy.set(Fault::Answer(CUT));
        assert_eq!(
            rig.get_all(&segment),
            Err(RemoteError::Unreachable),
            "a body that ends early"
        );
    }
}
