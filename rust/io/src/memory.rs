//! How much memory this process may still take.

mod groups;

use std::fs;
use std::path::{Path, PathBuf};

use groups::Group;

/// Bytes that can be allocated without swapping: the machine's `MemAvailable`, or the least that the limits of the
/// control groups leave, of the process's own group and of every group above it. `None` if the kernel does not report
/// them.
pub fn available() -> Option<u64> {
    available_by(Path::new("/proc"))
}

/// Bytes of the machine's memory, or the lowest limit of the process's control groups, whichever is less. `None` if
/// the kernel does not report them.
pub fn total() -> Option<u64> {
    let limits = groups::of_process(Path::new("/proc"))
        .iter()
        .filter_map(Group::limit)
        .min();
    least(of_machine(Path::new("/proc"), "MemTotal"), limits)
}

/// The control group whose limit determines [`available`]. `None` if no group leaves less than the machine has.
pub fn limiting_group() -> Option<PathBuf> {
    limiting_group_by(Path::new("/proc"))
}

fn available_by(proc: &Path) -> Option<u64> {
    let group = tightest(proc).map(|(rest, _)| rest);
    least(of_machine(proc, "MemAvailable"), group)
}

fn limiting_group_by(proc: &Path) -> Option<PathBuf> {
    let (rest, group) = tightest(proc)?;
    let machine = of_machine(proc, "MemAvailable");
    machine
        .is_none_or(|machine| rest < machine)
        .then(|| group.directory().to_owned())
}

/// The group whose limits leave the least memory, and the bytes that they leave.
fn tightest(proc: &Path) -> Option<(u64, Group)> {
    groups::of_process(proc)
        .into_iter()
        .filter_map(|group| Some((group.available()?, group)))
        .min_by_key(|(rest, _)| *rest)
}

fn of_machine(proc: &Path, name: &str) -> Option<u64> {
    meminfo(&fs::read_to_string(proc.join("meminfo")).ok()?, name)
}

fn least(one: Option<u64>, other: Option<u64>) -> Option<u64> {
    match (one, other) {
        (Some(one), Some(other)) => Some(one.min(other)),
        (one, other) => one.or(other),
    }
}

/// Free huge pages, as (pages, bytes per page); (0, 0) if there are none.
pub fn free_huge_pages() -> (u64, u64) {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let free = field(&text, "HugePages_Free").unwrap_or(0);
    let reserved = field(&text, "HugePages_Rsvd").unwrap_or(0);
    (
        free.saturating_sub(reserved),
        meminfo(&text, "Hugepagesize").unwrap_or(0),
    )
}

/// Whether enough reserved huge pages are free for `size` bytes.
pub fn has_huge_pages(size: u64) -> bool {
    let (pages, page_bytes) = free_huge_pages();
    page_bytes > 0 && size.is_multiple_of(page_bytes) && size / page_bytes <= pages
}

/// A field of /proc/meminfo that is given in KiB, in bytes.
fn meminfo(text: &str, name: &str) -> Option<u64> {
    field(text, name).map(|kib| kib * 1024)
}

fn field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find(|line| {
        line.strip_prefix(name)
            .is_some_and(|rest| rest.starts_with([':', ' ']))
    })?;
    line[name.len()..]
        .trim_start_matches(':')
        .split_whitespace()
        .next()?
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_matched_by_their_whole_name() {
        let text = "MemAvailableX:   7 kB\nMemAvailable:   1024 kB\nHugePages_Free:    3\n";
        assert_eq!(meminfo(text, "MemAvailable"), Some(1 << 20));
        assert_eq!(field(text, "HugePages_Free"), Some(3));
        assert_eq!(field(text, "Mem"), None);
    }

    #[test]
    fn this_machine_answers() {
        assert!(available().is_some_and(|bytes| bytes > 0));
        assert!(total() >= available(), "{:?}", total());
    }
}
