//! The control groups whose memory limits hold for this process: its own group and all groups above it. Slurm, systemd
//! and nested containers set limits in groups below the root that a process sees.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path, PathBuf};

use super::{field, least};

/// The kernel's two interfaces to control groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

/// A control group with the memory controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Group {
    version: Version,
    directory: PathBuf,
}

/// A limit: the file of the limit, the file of the bytes in use.
type LimitFiles = (&'static str, &'static str);

/// `memory.high` kills nobody, but above it the kernel stops the group's processes again and again.
const LIMITS_2: [LimitFiles; 2] = [
    ("memory.max", "memory.current"),
    ("memory.high", "memory.current"),
];

/// The second limit is that of memory and swap together: bytes in swap leave less of it for memory.
const LIMITS_1: [LimitFiles; 2] = [
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ("memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes"),
];

/// The groups of the process that `proc` (`/proc`) describes, from its own group to the highest one that it sees.
pub(super) fn of_process(proc: &Path) -> Vec<Group> {
    let read = |name| fs::read_to_string(proc.join(name)).unwrap_or_default();
    let (memberships, mounts) = (read("self/cgroup"), read("self/mountinfo"));
    [Version::One, Version::Two]
        .into_iter()
        .flat_map(|version| of_version(version, &memberships, &mounts))
        .collect()
}

fn of_version(version: Version, memberships: &str, mounts: &str) -> Vec<Group> {
    let Some(path) = membership(version, memberships) else {
        return Vec::new();
    };
    let places = mounts.lines().filter_map(|line| mount(version, line));
    let places = places.filter_map(|(root, point)| Some((below(&root, &path)?, point)));
    // Of several mounts the one that shows the most groups.
    let Some((own, point)) = places.max_by_key(|(own, _)| own.components().count()) else {
        return Vec::new();
    };
    own.ancestors()
        .map(|part| Group {
            version,
            directory: point.join(part).components().collect(),
        })
        .collect()
}

/// The path of the process's group, from a line `hierarchy:controllers:path` of /proc/self/cgroup.
fn membership(version: Version, text: &str) -> Option<PathBuf> {
    text.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':');
        let (hierarchy, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let is_it = match version {
            Version::One => controllers.split(',').any(|name| name == "memory"),
            Version::Two => hierarchy == "0" && controllers.is_empty(),
        };
        is_it.then(|| PathBuf::from(path))
    })
}

/// The group that a mount shows as its root, and the mount point, from a line of /proc/self/mountinfo. `None` for a
/// mount of another kind.
fn mount(version: Version, line: &str) -> Option<(PathBuf, PathBuf)> {
    let (left, right) = line.split_once(" - ")?;
    let mut left = left.split(' ').skip(3);
    let (root, point) = (left.next()?, left.next()?);
    let mut right = right.split(' ');
    let is_it = match version {
        Version::One => {
            right.next()? == "cgroup" && right.nth(1)?.split(',').any(|name| name == "memory")
        }
        Version::Two => right.next()? == "cgroup2",
    };
    is_it.then(|| (unescaped(root), unescaped(point)))
}

/// A path of mountinfo, which writes spaces, tabs, line ends and backslashes as `\ooo`.
fn unescaped(text: &str) -> PathBuf {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        let code = after
            .get(..3)
            .and_then(|digits| std::str::from_utf8(digits).ok());
        match code.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(code) if byte == b'\\' => {
                bytes.push(code);
                rest = &after[3..];
            }
            _ => {
                bytes.push(byte);
                rest = after;
            }
        }
    }
    PathBuf::from(OsString::from_vec(bytes))
}

/// `path` relative to the group `root`; empty if only `root` itself can be named. `None` if `path` does not lie in
/// `root`. Both are relative to the root of the process's cgroup namespace, which they leave with `..`.
fn below(root: &Path, path: &Path) -> Option<PathBuf> {
    let (root, path) = (root.strip_prefix("/").ok()?, path.strip_prefix("/").ok()?);
    if let Ok(below) = path.strip_prefix(root) {
        let leaves = below.components().any(|part| part == Component::ParentDir);
        return (!leaves).then(|| below.to_owned());
    }
    // The mount is older than the namespace: it shows a group above the namespace's root, whose name is unknown here.
    let is_above = root.components().all(|part| part == Component::ParentDir);
    (is_above && !path.starts_with("..")).then(PathBuf::new)
}

impl Group {
    pub(super) fn directory(&self) -> &Path {
        &self.directory
    }

    /// The lowest limit of the group; `None` without a limit.
    pub(super) fn limit(&self) -> Option<u64> {
        let limits = self
            .limits()
            .into_iter()
            .filter_map(|(limit, _)| self.number(limit));
        least(limits.min(), self.hidden_limit())
    }

    /// The least that a limit of the group leaves; `None` without a limit. File cache that the kernel can drop does not
    /// count as used.
    pub(super) fn available(&self) -> Option<u64> {
        let cache = match self.version {
            Version::One => self.stat("total_inactive_file"),
            Version::Two => self.stat("inactive_file"),
        };
        let rest =
            |limit: u64, used: u64| limit.saturating_sub(used.saturating_sub(cache.unwrap_or(0)));
        let limits = self.limits().into_iter();
        let own = limits
            .filter_map(|(limit, used)| Some(rest(self.number(limit)?, self.number(used)?)))
            .min();
        let hidden = self.hidden_limit();
        let hidden = hidden.and_then(|limit| Some(rest(limit, self.number(LIMITS_1[0].1)?)));
        least(own, hidden)
    }

    fn limits(&self) -> [LimitFiles; 2] {
        match self.version {
            Version::One => LIMITS_1,
            Version::Two => LIMITS_2,
        }
    }

    /// The lowest limit of the groups above, also of those that the process does not see: a pod's, for example. Only
    /// version 1 reports it.
    fn hidden_limit(&self) -> Option<u64> {
        match self.version {
            Version::One => self.stat("hierarchical_memory_limit"),
            Version::Two => None,
        }
    }

    /// The number that is a file's content; `None` for `max`.
    fn number(&self, name: &str) -> Option<u64> {
        let text = fs::read_to_string(self.directory.join(name)).ok()?;
        text.trim().parse().ok()
    }

    fn stat(&self, name: &str) -> Option<u64> {
        field(
            &fs::read_to_string(self.directory.join("memory.stat")).ok()?,
            name,
        )
    }
}

#[cfg(test)]
mod tests;
