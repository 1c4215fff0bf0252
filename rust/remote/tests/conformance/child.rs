//! Runs tests in a process of their own, with variables of the environment.

use std::net::TcpListener;
use std::process::Command;

/// Runs a test of this program with variables of the environment, which a test cannot set in its own process.
pub(crate) fn child(test: &str, url: &str, variables: &[(&str, &str)]) {
    // The emulator that runs this binary, if the binary is for another processor.
    let runner = std::env::var("UNDERCROFT_TEST_RUNNER").unwrap_or_default();
    let output = Command::new("env")
        .args(runner.split_whitespace())
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", test, "--ignored", "--nocapture"])
        .env("UNDERCROFT_TEST_URL", url)
        .envs(variables.iter().copied())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{text}{errors}"
    );
}

pub(crate) fn url_of_parent() -> String {
    std::env::var("UNDERCROFT_TEST_URL").expect("another test runs this one")
}

/// A port at which nobody listens.
pub(crate) fn free_port() -> u16 {
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    free.local_addr().unwrap().port()
}
