//! Why the tokens of a prompt were not loaded, as an engine reports it.

use serde::{Deserialize, Serialize};

/// Why a hit ends where it does, or why there is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// Nothing is missing: the hit covers the whole request, or the device has all tokens.
    #[default]
    Complete,
    /// The first missing block is neither in the index nor among those that the engine remembers.
    NeverSeen,
    /// The first missing block was not saved: all that full host memory held was worth more, and there is no disk.
    NotAdmitted,
    /// The first missing block was evicted from host memory, and was not on disk.
    EvictedHost,
    /// The first missing block was evicted from disk, and was not in host memory.
    EvictedDisk,
    /// The first missing block was lost: unreadable, on a directory that was given up, or below a block that was
    /// removed.
    Lost,
    /// The first missing block is being saved, or was saved without one of its ancestors.
    Incomplete,
    /// The first missing block is in the cache under another identity: another model, weights or layout.
    OtherIdentity,
    /// The chain is in the index, but a window or a state that every hit there needs is missing.
    NoBoundary,
    /// A hit gains fewer tokens than are worth a load.
    TooFew,
    /// By prediction, computing takes less time than loading.
    Planned,
    /// By prediction, or by its progress, computing takes less time than fetching from the remote store.
    RemotePlanned,
    /// The wait for the disk was over.
    TimedOut,
    /// The disk did not answer.
    DiskSilent,
    /// Reads from disk for other requests take all of `promotion_memory`, or the hits and loads of a server's client keep
    /// its whole share of the host memory.
    Budget,
    /// The blocks were read from disk several times, and evicted or lost before the load.
    Repeated,
    /// No hit reaches the least boundary that the request can use.
    Threshold,
    /// A load for this request failed before.
    LoadFailed,
    /// The engine drains: nothing is read from disk.
    Draining,
    /// The server did not answer in time, or there is no connection to it.
    NoServer,
}

impl Reason {
    /// The name for programs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Complete => "complete",
            Self::NeverSeen => "never_seen",
            Self::NotAdmitted => "not_admitted",
            Self::EvictedHost => "evicted_host",
            Self::EvictedDisk => "evicted_disk",
            Self::Lost => "lost",
            Self::Incomplete => "incomplete",
            Self::OtherIdentity => "other_identity",
            Self::NoBoundary => "no_boundary",
            Self::TooFew => "too_few",
            Self::Planned => "planned",
            Self::RemotePlanned => "remote_planned",
            Self::TimedOut => "timed_out",
            Self::DiskSilent => "disk_silent",
            Self::Budget => "budget",
            Self::Repeated => "repeated",
            Self::Threshold => "threshold",
            Self::LoadFailed => "load_failed",
            Self::Draining => "draining",
            Self::NoServer => "no_server",
        }
    }
}

/// The blocks after a hit, or after the computed tokens where there is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rest {
    /// Why the blocks were not loaded.
    pub reason: Reason,
    /// For a block that was evicted, lost or not admitted: how long before, in seconds.
    pub ago_s: Option<u32>,
}

impl From<Reason> for Rest {
    fn from(reason: Reason) -> Self {
        Self {
            reason,
            ago_s: None,
        }
    }
}

/// One lookup that was answered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Explained {
    /// The lookup's place in the order of all lookups of the engine.
    pub position: u64,
    /// vLLM's id of the request; a very long id is cut off.
    pub request: String,
    /// Digest of the namespace, hexadecimal.
    pub namespace: String,
    /// How long ago the lookup was answered, in seconds.
    pub age_s: u64,
    /// Tokens that a hit could have: the tokens of the prompt's whole hash blocks.
    pub asked_tokens: u32,
    /// Tokens that the device had.
    pub device_tokens: u32,
    /// Tokens of the deepest block of the prompt that was in the index.
    pub found_tokens: u32,
    /// Where the hit ended; 0 without one.
    pub hit_tokens: u32,
    /// Tokens of the hit that were read from disk for it.
    pub disk_tokens: u32,
    /// Tokens of the hit that were read from the remote store for it.
    #[serde(default)]
    pub remote_tokens: u32,
    /// How long the scheduler waited for the answer, in milliseconds.
    pub waited_ms: u64,
    /// Whether a load of the hit began.
    pub loaded: bool,
    /// The beginning of the first block hash that was not found, hexadecimal; empty if all were found.
    pub missing_block: String,
    /// Digest of a namespace that has this block, if the reason is another identity; else empty.
    #[serde(default)]
    pub other_namespace: String,
    /// The blocks that were not loaded.
    #[serde(flatten)]
    pub rest: Rest,
}

/// Which lookups to list.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ExplainQuery {
    /// Lookups of requests whose id begins with this.
    pub request: String,
    /// Only lookups whose answer does not cover the whole prompt.
    pub misses: bool,
    /// Lookups before this place in the order; `None` for all lookups.
    pub before: Option<u64>,
}
