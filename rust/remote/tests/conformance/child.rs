//! Tests that run in a process of their own, for their environment.

use std::process::Command;

/// Runs a test of this program with variables of the environment, which a test cannot set for itself.
pub(crate) fn child(test: &str, url: &str, variables: &[(&str, &str)]) {
    // The command that runs a binary for another processor, if this one runs by it.
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
