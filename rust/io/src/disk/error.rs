//! Errors of a disk directory. Messages name the finding and the remedy.

use std::path::PathBuf;
use std::time::Duration;

use rustix::io::Errno;
use thiserror::Error;
use undercroft_contract::size::Bytes;

/// A disk directory cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The operating system refused.
    #[error("disk_path {path}: cannot {action}: {source}{hint}")]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// The operation that failed.
        action: &'static str,
        /// The reason.
        source: std::io::Error,
        /// The remedy, starting with "; ", or empty.
        hint: &'static str,
    },
    /// The filesystem does not answer.
    #[error(
        "disk_path {path}: its filesystem has not answered for {} s; let it answer (fsfreeze --unfreeze for a frozen \
         one, the server for NFS), or choose another disk_path",
        .waited.as_secs()
    )]
    Hangs {
        /// The directory.
        path: PathBuf,
        /// How long it was waited for.
        waited: Duration,
    },
    /// Another live engine owns the directory.
    #[error(
        "disk_path {path} is in use by {}; stop that process, or choose another disk_path",
        process(*pid)
    )]
    InUse {
        /// The directory.
        path: PathBuf,
        /// The process that holds the lock; 0 if this process cannot see it.
        pid: u32,
        /// The socket at which the owner's engine serves clients, once it serves them.
        socket: Option<PathBuf>,
    },
    /// The directory holds other files, and no store.
    #[error(
        "disk_path {path} is not empty and holds no undercroft store (found {found}); choose an empty directory or an \
         existing store. Nothing was changed"
    )]
    Foreign {
        /// The directory.
        path: PathBuf,
        /// One of the files found.
        found: String,
    },
    /// A file in the directory was not made by an engine.
    #[error(
        "disk_path {path}: its file {name} cannot be trusted: {reason}; remove that file. Nothing was changed"
    )]
    Untrusted {
        /// The directory.
        path: PathBuf,
        /// The file.
        name: &'static str,
        /// Why the file cannot be trusted.
        reason: String,
    },
    /// The superblock is damaged.
    #[error(
        "disk_path {path}: the superblock is damaged ({reason}); if its cache may be lost, delete the directory. Nothing was \
         changed"
    )]
    Damaged {
        /// The directory.
        path: PathBuf,
        /// The defect.
        reason: String,
    },
    /// The store has another format version.
    #[error(
        "disk_path {path} has format version {found}, this undercroft reads version {supported}; use the undercroft that wrote \
         it, or set disk_on_other_version to \"discard\" or \"set_aside\" to start empty. Nothing was changed"
    )]
    Version {
        /// The directory.
        path: PathBuf,
        /// The version in the file.
        found: u32,
        /// The version that this code reads.
        supported: u32,
    },
    /// The store is encrypted and there is no key, or the store is plain and there is a key.
    #[error(
        "disk_path {path} {reason}; change key_file, choose another disk_path, or set disk_on_other_version to \"discard\" or \
         \"set_aside\" to start empty. Nothing was changed"
    )]
    Encryption {
        /// The directory.
        path: PathBuf,
        /// The mismatch, in words.
        reason: String,
    },
    /// The directory belongs to another user.
    #[error(
        "disk_path {path} belongs to uid {owner}, this process runs as uid {uid}; choose another disk_path, \
         such as a new directory in it, which undercroft creates for this user"
    )]
    Owner {
        /// The directory.
        path: PathBuf,
        /// The directory's owner.
        owner: u32,
        /// The user of this process.
        uid: u32,
    },
    /// Another user's link leads to the directory.
    #[error(
        "disk_path {path}: the symbolic link {link} on the way belongs to uid {owner}, this process runs as uid {uid}; \
         its owner may let it lead elsewhere: name its target instead"
    )]
    Link {
        /// The directory.
        path: PathBuf,
        /// The link.
        link: PathBuf,
        /// The link's owner.
        owner: u32,
        /// The user of this process.
        uid: u32,
    },
    /// Other users may put files into the directory.
    #[error(
        "disk_path {path} has mode {mode:04o}: other users can write to it; choose another disk_path, or, if no other \
         user has put files there, run: chmod 700 {path}"
    )]
    Mode {
        /// The directory.
        path: PathBuf,
        /// The directory's permission bits.
        mode: u32,
    },
    /// The filesystem has no room for the smallest store.
    #[error(
        "disk_path {path}: its filesystem is full: {} of {} are free, and a reserve of {} stays free; free space \
         there, or choose another disk_path",
        Bytes(*free),
        Bytes(*total),
        Bytes(*reserve)
    )]
    Full {
        /// The directory.
        path: PathBuf,
        /// Free space.
        free: u64,
        /// Size of the filesystem.
        total: u64,
        /// The bytes that stay free.
        reserve: u64,
    },
    /// The filesystem has not enough room for the capacity now.
    #[error(
        "disk_capacity {} for {path}: only {} can be used now (free space less a reserve of {}); free space there, or set \
         disk_capacity to at most that",
        Bytes(*capacity),
        Bytes(*available),
        Bytes(*reserve)
    )]
    NoSpace {
        /// The directory.
        path: PathBuf,
        /// The requested capacity.
        capacity: u64,
        /// The available amount.
        available: u64,
        /// The bytes that stay free.
        reserve: u64,
    },
    /// The capacity exceeds the size of the filesystem.
    #[error(
        "disk_capacity {} for {path} is more than its filesystem has ({}); {} can be used now: set disk_capacity to at most \
         that, or to a percentage such as \"50%\"",
        Bytes(*capacity),
        Bytes(*total),
        Bytes(*available)
    )]
    TooLarge {
        /// The directory.
        path: PathBuf,
        /// The requested capacity.
        capacity: u64,
        /// Size of the filesystem.
        total: u64,
        /// The amount that can be used now.
        available: u64,
    },
    /// The capacity is too small.
    #[error(
        "disk_capacity {} for {path} is too small; allowed: at least {}",
        Bytes(*capacity),
        Bytes(*minimum)
    )]
    TooSmall {
        /// The directory.
        path: PathBuf,
        /// The requested capacity.
        capacity: u64,
        /// The least capacity.
        minimum: u64,
    },
}

/// The process with this number, in a message; 0 is one that this process cannot see.
fn process(pid: u32) -> String {
    match pid {
        0 => "a process that cannot be seen from here, such as one of another container".to_owned(),
        pid => format!("process {pid}"),
    }
}

impl StoreError {
    /// Whether the cause is the device or its contents, not the configuration. If so, an engine can start without
    /// the directory, which may become usable later.
    pub fn may_pass(&self) -> bool {
        match self {
            Self::Io { source, .. } => !is_misconfigured(source),
            Self::Hangs { .. }
            | Self::Untrusted { .. }
            | Self::Damaged { .. }
            | Self::Version { .. }
            | Self::Encryption { .. }
            | Self::Full { .. }
            | Self::NoSpace { .. } => true,
            Self::InUse { .. }
            | Self::Foreign { .. }
            | Self::Owner { .. }
            | Self::Link { .. }
            | Self::Mode { .. }
            | Self::TooLarge { .. }
            | Self::TooSmall { .. } => false,
        }
    }
}

/// Whether the operating system refused because of an operator's setting: rights, or a path that
/// does not exist.
fn is_misconfigured(source: &std::io::Error) -> bool {
    let by_setting = [
        Errno::ACCESS,
        Errno::PERM,
        Errno::NOTDIR,
        Errno::EXIST,
        Errno::LOOP,
        Errno::NAMETOOLONG,
        Errno::INVAL,
    ];
    let errno = source.raw_os_error();
    by_setting.iter().any(|by| errno == Some(by.raw_os_error()))
}
