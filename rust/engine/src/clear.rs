//! Blocks that an operator has cleared.
//!
//! A namespace that is cleared begins another life, as at a reset: no lookup finds any of its blocks from that entry
//! on, nor does a restart. A clear by age searches all nodes in a pass. Both remove blocks from the leaves up, in
//! steps. Blocks in use are removed when their last use ends.

use serde::{Deserialize, Serialize};

use crate::forest::NsId;

use super::residency::Sweep;

/// Most erasures that one entry starts, and that a device has at once: a filesystem delays other work on the file
/// meanwhile.
pub(super) const ERASURES: usize = 4;
/// Fewer digits of a digest could name another namespace by mistake.
pub(super) const DIGITS_MIN: usize = 8;

/// Which blocks to clear.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ClearWhat {
    /// All blocks of all namespaces.
    All,
    /// The blocks of the namespaces whose digest begins with these hexadecimal digits, eight or more.
    Namespace(String),
    /// Blocks that no request has used for this many seconds.
    OlderThan(u32),
}

/// An order to clear.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClearOrder {
    /// Which blocks.
    pub what: ClearWhat,
    /// The blocks' bytes on disk are erased, too.
    pub erase: bool,
}

/// The result of the last order so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Cleared {
    /// Number of the order; 0 before the first.
    pub order: u64,
    /// Payloads in host memory that no lookup finds any more.
    pub host_blocks: u64,
    /// Their bytes.
    pub host_bytes: u64,
    /// Payloads on disk that no lookup finds any more.
    pub disk_blocks: u64,
    /// Their bytes.
    pub disk_bytes: u64,
    /// Bytes erased from the data files, durably.
    pub erased_bytes: u64,
    /// Writes whose bytes were not erased: the erasure or the write itself failed, or the block left the disk before, to
    /// make room or with its directory. A write that is tried again counts again, since it may have gone elsewhere.
    pub erase_failures: u64,
    /// Hash blocks that are left: not reached, in use, or being erased.
    pub pending: u64,
    /// Whether the engine continues to remove blocks. If not, the pending ones wait for the end of their use, or for a
    /// directory that does not answer.
    pub removing: bool,
    /// Whether no restart finds any of the removed blocks, and their erasure is durable, too. False while a directory is
    /// away or takes no writes.
    pub durable: bool,
}

/// Why an order is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClearRefusal {
    /// Another order is under way.
    #[error("another clear is under way; ask again when it has ended")]
    Busy,
    /// No namespace has such a digest.
    #[error(
        "no namespace has a digest that begins with {0}; undercroft inspect and explain show digests"
    )]
    Unknown(String),
    /// The digest is too short.
    #[error("namespace {0:?}: allowed are {DIGITS_MIN} or more hexadecimal digits of its digest")]
    Digits(String),
}

/// The last order, and the pass under way.
#[derive(Debug, Default)]
pub(super) struct Clearing {
    pub(super) order: u64,
    /// Indices that namespaces had before the order ended their lives.
    pub(super) gone: Vec<NsId>,
    pub(super) sweep: Option<Sweep>,
    /// Nodes that the last pass of the order found in use.
    pub(super) in_use: Option<u64>,
    pub(super) next_pass_ns: u64,
    /// Erased bytes and failures when the order came.
    pub(super) erased_before: (u64, u64),
    /// The bytes on disk are erased.
    pub(super) erases: bool,
    /// A directory could not be opened when the order came. If it is opened later, it is emptied.
    pub(super) is_absent: bool,
    /// The order selects blocks by their age. Namespaces that do not fit the arena keep their blocks.
    pub(super) is_by_age: bool,
}
