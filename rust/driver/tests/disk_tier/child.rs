//! Tests that need a process of their own: the test binary runs itself.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

const STORE: &str = "UNDERCROFT_TEST_STORE";
/// The command that runs a binary for another processor, if this one runs by it.
const RUNNER: &str = "UNDERCROFT_TEST_RUNNER";

/// The directory that a child works on; `None` if this is no child.
pub(crate) fn store() -> Option<PathBuf> {
    std::env::var_os(STORE).map(PathBuf::from)
}

/// Starts an ignored test of this binary as a process of its own.
pub(crate) fn start(test: &str, store: &Path, umask: &str) -> Child {
    let test_binary = std::env::current_exe().unwrap();
    let runner = std::env::var(RUNNER).unwrap_or_default();
    Command::new("sh")
        .args(["-c", "umask \"$1\"; shift; exec \"$@\"", "sh", umask])
        .args(runner.split_whitespace())
        .arg(test_binary)
        .args([test, "--exact", "--ignored", "--nocapture"])
        .env(STORE, store)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

/// The same, to its end, which must be good.
pub(crate) fn run(test: &str, store: &Path, umask: &str) {
    let output = start(test, store, umask).wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && said.contains("1 passed"),
        "{said}"
    );
}
