//! How much memory this process may still take.

use std::fs;
use std::path::Path;

/// Bytes that can be allocated without swapping: the machine's `MemAvailable`, or the rest of the
/// memory limit of the control group (a container's), whichever is less. `None` if the kernel does
/// not report them.
pub fn available() -> Option<u64> {
    let machine = fs::read_to_string("/proc/meminfo")
        .ok()
        .and_then(|text| meminfo(&text, "MemAvailable"));
    match (machine, cgroup_available(Path::new("/sys/fs/cgroup"))) {
        (Some(machine), Some(group)) => Some(machine.min(group)),
        (machine, group) => machine.or(group),
    }
}

/// Bytes of the machine's memory, or the memory limit of the control group, whichever is less. `None` if the kernel
/// does not report them.
pub fn total() -> Option<u64> {
    let machine = fs::read_to_string("/proc/meminfo")
        .ok()
        .and_then(|text| meminfo(&text, "MemTotal"));
    match (machine, cgroup_limit(Path::new("/sys/fs/cgroup"))) {
        (Some(machine), Some(group)) => Some(machine.min(group)),
        (machine, group) => machine.or(group),
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

/// The group's limit; `None` without a limit.
fn cgroup_limit(root: &Path) -> Option<u64> {
    number(root, "memory.max").or_else(|| number(root, "memory/memory.limit_in_bytes"))
}

/// The number that is a file's content.
fn number(root: &Path, path: &str) -> Option<u64> {
    let text = fs::read_to_string(root.join(path)).ok()?;
    text.trim().parse().ok()
}

/// The rest of the group's limit. File cache that the kernel can drop does not count as used.
fn cgroup_available(root: &Path) -> Option<u64> {
    let number = |path| number(root, path);
    let stat = |path: &str, name| field(&fs::read_to_string(root.join(path)).ok()?, name);
    let limit = cgroup_limit(root)?;
    let (used, cache) = match number("memory.max") {
        Some(_) => (
            number("memory.current")?,
            stat("memory.stat", "inactive_file"),
        ),
        None => (
            number("memory/memory.usage_in_bytes")?,
            stat("memory/memory.stat", "total_inactive_file"),
        ),
    };
    Some(limit.saturating_sub(used.saturating_sub(cache.unwrap_or(0))))
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
    fn a_control_group_limit_leaves_what_is_not_used() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(cgroup_available(root.path()), None);
        let write = |name: &str, text: &str| fs::write(root.path().join(name), text).unwrap();
        write("memory.max", "max\n");
        assert_eq!(cgroup_available(root.path()), None, "no limit");
        assert_eq!(cgroup_limit(root.path()), None);
        write("memory.max", "1000\n");
        write("memory.current", "600\n");
        assert_eq!(cgroup_available(root.path()), Some(400));
        write("memory.stat", "anon 1\ninactive_file 250\n");
        assert_eq!(cgroup_available(root.path()), Some(650));
        write("memory.current", "2000\n");
        assert_eq!(cgroup_available(root.path()), Some(0), "over its limit");
        assert_eq!(cgroup_limit(root.path()), Some(1000));
    }

    #[test]
    fn a_control_group_of_version_1_counts_too() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("memory")).unwrap();
        let write = |name: &str, text: &str| {
            fs::write(root.path().join("memory").join(name), text).unwrap()
        };
        write("memory.limit_in_bytes", "1000\n");
        write("memory.usage_in_bytes", "600\n");
        assert_eq!(cgroup_limit(root.path()), Some(1000));
        assert_eq!(cgroup_available(root.path()), Some(400));
        write("memory.stat", "inactive_file 7\ntotal_inactive_file 250\n");
        assert_eq!(cgroup_available(root.path()), Some(650));
    }

    #[test]
    fn this_machine_answers() {
        assert!(available().is_some_and(|bytes| bytes > 0));
        assert!(total() >= available(), "{:?}", total());
    }
}
