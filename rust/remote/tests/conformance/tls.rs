//! Certificates: a server whose certificate no trusted root has signed gets no byte, and no credentials.

use std::path::Path;
use std::process::Command;

use undercroft_contract::remote::RemoteError;
use undercroft_remote::StoreHealth;

use crate::child::{child, free_port, url_of_parent};
use crate::rig::{Rig, Segment};
use crate::server::Redis;

/// Makes a root, and a certificate of this machine that the root signs. False without the program `openssl`.
fn certify(place: &Path) -> bool {
    let run = |arguments: &[&str]| {
        let mut command = Command::new("openssl");
        command.current_dir(place).args(["req", "-x509", "-nodes"]);
        command.args(["-days", "2", "-newkey", "ec", "-pkeyopt"]);
        command.arg("ec_paramgen_curve:prime256v1").args(arguments);
        command.output().is_ok_and(|output| output.status.success())
    };
    run(&["-subj", "/CN=test", "-keyout", "root.key", "-out", "root"])
        && run(&[
            "-subj",
            "/CN=server",
            "-addext",
            "subjectAltName=IP:127.0.0.1",
            "-addext",
            "basicConstraints=critical,CA:FALSE",
            "-keyout",
            "key",
            "-out",
            "cert",
            "-CA",
            "root",
            "-CAkey",
            "root.key",
        ])
}

#[test]
fn a_server_is_used_only_with_a_certificate_that_a_root_vouches_for() {
    let place = tempfile::tempdir().unwrap();
    if !certify(place.path()) {
        eprintln!("skipped: openssl, which makes certificates, is not on PATH");
        return;
    }
    let file = |name: &str| place.path().join(name).to_str().unwrap().to_owned();
    let port = free_port().to_string();
    let server = Redis::start(&[
        "--tls-port",
        &port,
        "--tls-cert-file",
        &file("cert"),
        "--tls-key-file",
        &file("key"),
        "--tls-auth-clients",
        "no",
    ]);
    let Ok(_server) = server.inspect_err(|reason| eprintln!("skipped: {reason}")) else {
        return;
    };
    let (redis, root) = (format!("rediss://127.0.0.1:{port}"), file("root"));
    child(
        "tls::with_its_root",
        &redis,
        &[("SSL_CERT_FILE", root.as_str())],
    );
    child("tls::without_its_root", &redis, &[]);
    #[cfg(feature = "s3")]
    {
        let endpoint = format!("https://127.0.0.1:{port}");
        let variables = [
            ("AWS_ENDPOINT_URL", endpoint.as_str()),
            ("AWS_ACCESS_KEY_ID", "key"),
            ("AWS_SECRET_ACCESS_KEY", "secret"),
        ];
        child("tls::without_its_root", "s3://bucket", &variables);
    }
}

/// The test above runs this one.
#[test]
#[ignore = "a part of another test"]
fn with_its_root() {
    let mut rig = Rig::new(&url_of_parent(), Box::new(())).unwrap();
    let segment = Segment::new(1);
    rig.put(&segment, true).unwrap();
    rig.get_all(&segment).unwrap();
}

/// The test above runs this one.
#[test]
#[ignore = "a part of another test"]
fn without_its_root() {
    let mut rig = Rig::new(&url_of_parent(), Box::new(())).unwrap();
    assert_eq!(rig.get_all(&Segment::new(1)), Err(RemoteError::Unreachable));
    let last = rig.pool.as_ref().unwrap().last_result().get();
    let StoreHealth::Failed(error) = last else {
        panic!("{last:?}");
    };
    assert!(error.detail.contains("certificate"), "{error}");
}
