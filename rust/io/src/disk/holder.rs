//! The process that has a directory locked. The lock file names one, but it may have ended: the process that had the
//! directory before, or a process whose child keeps the lock. Its number may be another container's.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::names::LOCK;

/// The process that holds the lock of an open lock file, of those that this process may examine: `named` if it is that
/// one. `None` if there is none: the holder may be in another container, or may have ended meanwhile.
pub(super) fn holder(lock: &File, named: Option<u32>) -> Option<u32> {
    let found = lock.metadata().ok()?;
    let id = (found.dev(), found.ino());
    let is_holder = |pid: &u32| holds(*pid, id);
    named
        .filter(is_holder)
        .or_else(|| processes().find(is_holder))
}

fn processes() -> impl Iterator<Item = u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// Whether a descriptor of the process carries a lock on the file. The kernel tells this for each descriptor
/// (`/proc/PID/fdinfo`), so a process that only reads the file does not count.
fn holds(pid: u32, (dev, ino): (u64, u64)) -> bool {
    let of_process = Path::new("/proc").join(pid.to_string());
    let entries = fs::read_dir(of_process.join("fd")).into_iter().flatten();
    entries.flatten().any(|entry| {
        // The name comes first: a look at a file may wait for its filesystem.
        let is_named =
            fs::read_link(entry.path()).is_ok_and(|to| to.file_name() == Some(LOCK.as_ref()));
        let is_file = || {
            fs::metadata(entry.path()).is_ok_and(|found| (found.dev(), found.ino()) == (dev, ino))
        };
        let is_locked = || {
            let about = fs::read_to_string(of_process.join("fdinfo").join(entry.file_name()));
            about.is_ok_and(|about| about.lines().any(|line| line.starts_with("lock:")))
        };
        is_named && is_file() && is_locked()
    })
}
