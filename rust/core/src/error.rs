//! Errors, one enum for each family of operations. Messages name what was found and what to do.

use std::path::PathBuf;

use thiserror::Error;

use crate::size::Bytes;

/// A namespace cannot be registered.
#[derive(Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum RegisterError {
    /// A number makes no sense.
    #[error("{key} is {value}; allowed: {allowed}")]
    Value {
        /// Name of the value.
        key: &'static str,
        /// What was given.
        value: u64,
        /// What is allowed.
        allowed: &'static str,
    },
    /// A payload is larger than a page of the region that should hold it.
    #[error(
        "group {group} has payloads of {} (one block, all ranks), and the largest slot of {region} has {}; raise {option}",
        Bytes(*payload_bytes),
        Bytes(*page_bytes)
    )]
    PayloadTooLarge {
        /// Index of the group.
        group: usize,
        /// Its payload.
        payload_bytes: u64,
        /// "the arena" or the data file.
        region: &'static str,
        /// What would fit.
        page_bytes: u64,
        /// The option to change.
        option: &'static str,
    },
    /// Another description with the same digest, or other numbers for the same description.
    #[error("namespace {digest} is registered with other groups; use another namespace_salt")]
    Conflict {
        /// The digest, hexadecimal.
        digest: String,
    },
    /// The description is too long for a directory's namespace table.
    #[error(
        "the description of the namespace has {bytes} bytes and does not fit an entry of {entry_bytes} bytes; describe its \
         longest parts by a digest"
    )]
    DescriptionTooLong {
        /// Bytes of the description.
        bytes: usize,
        /// Size of an entry.
        entry_bytes: usize,
    },
    /// No room for another one.
    #[error(
        "sessions use all of the {count} namespaces that an engine has at most; end some of them, or use another engine"
    )]
    TooMany {
        /// How many there are.
        count: usize,
    },
    /// The engine has panicked and is not entered any more.
    #[error("the engine has failed; its panic is in the log")]
    Broken,
}

/// A disk directory cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The operating system refused.
    #[error("disk_path {path}: cannot {action}: {source}{hint}")]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// The reason.
        source: std::io::Error,
        /// What to do, starting with "; ", or empty.
        hint: &'static str,
    },
    /// Another live engine owns it.
    #[error(
        "disk_path {path} is in use by process {pid}; stop that process, or choose another disk_path"
    )]
    InUse {
        /// The directory.
        path: PathBuf,
        /// Owner of the lock (0 if it could not be read).
        pid: u32,
        /// Where the owner's engine serves others, once it does.
        socket: Option<PathBuf>,
    },
    /// It holds other files, and no store.
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
    /// The superblock is damaged.
    #[error(
        "disk_path {path}: the superblock is damaged ({reason}); if its cache may be lost, delete the directory. Nothing was \
         changed"
    )]
    Damaged {
        /// The directory.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// Written by another format version.
    #[error(
        "disk_path {path} has format version {found}, this undercroft reads version {supported}; use the undercroft that wrote \
         it, or delete the directory to start empty. Nothing was changed"
    )]
    Version {
        /// The directory.
        path: PathBuf,
        /// What it says.
        found: u32,
        /// What this code reads.
        supported: u32,
    },
    /// The directory belongs to somebody else.
    #[error(
        "disk_path {path} belongs to uid {owner}, this process runs as uid {uid}; choose another disk_path"
    )]
    Owner {
        /// The directory.
        path: PathBuf,
        /// Its owner.
        owner: u32,
        /// Ours.
        uid: u32,
    },
    /// The filesystem has no room for it.
    #[error(
        "disk_capacity {} for {path}: only {} can be used (free space less a reserve of {}); set disk_capacity to at most \
         that",
        Bytes(*capacity),
        Bytes(*available),
        Bytes(*reserve)
    )]
    NoSpace {
        /// The directory.
        path: PathBuf,
        /// What was asked for.
        capacity: u64,
        /// What there is.
        available: u64,
        /// What is left alone.
        reserve: u64,
    },
    /// Too small to be of use.
    #[error(
        "disk_capacity {} for {path} is too small; allowed: at least {}",
        Bytes(*capacity),
        Bytes(*minimum)
    )]
    TooSmall {
        /// The directory.
        path: PathBuf,
        /// What was asked for.
        capacity: u64,
        /// The least.
        minimum: u64,
    },
}
