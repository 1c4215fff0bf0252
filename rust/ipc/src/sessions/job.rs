//! Work of one message that is carried out in steps, so that other clients are served in between.

use std::ops::Range;
use std::sync::Arc;

use undercroft_contract::explain::Rest;
use undercroft_contract::hint::Hint;
use undercroft_contract::session::{
    Brought, Extent, Offer, Tokens, TransferEnd, TransferId, append_extents,
};
use undercroft_engine::HitExtents;

/// Most hashes that one step copies.
pub(super) const HASH_STEP: usize = 4096;

/// Most blocks of a save that one step examines or ends.
pub(super) const SAVE_STEP: u32 = 128;

/// Most nodes of a hit whose extents one step collects.
pub(super) const HIT_STEP: u32 = 512;

/// The remaining work of a message.
#[derive(Debug)]
pub(super) enum Job {
    /// Hashes of a request that are in a frame and have not been copied.
    Hashes(HashJob),
    /// A save whose slots are being reserved.
    Save(SaveJob),
    /// A hit whose extents are being collected.
    Hit(HitJob),
    /// A load or a save that is being ended.
    End {
        transfer: TransferId,
        end: TransferEnd,
    },
}

#[derive(Debug)]
pub(super) struct HashJob {
    pub(super) request: u64,
    pub(super) frame: Arc<Vec<u8>>,
    /// The hashes in the frame.
    pub(super) left: Range<usize>,
    /// Length of each hash in bytes.
    pub(super) hash_bytes: usize,
    /// The request for which the hashes are read.
    pub(super) then: Then,
}

/// A message's request about its hashes.
#[derive(Debug)]
pub(super) enum Then {
    LookUp,
    Save(SaveAsked),
    Hint(HintAsked),
}

/// A hint of a message.
#[derive(Debug)]
pub(super) struct HintAsked {
    /// The client's number of the hint.
    pub(super) number: u64,
    pub(super) max: Tokens,
    pub(super) hint: Hint,
}

/// A requested save.
#[derive(Debug)]
pub(super) struct SaveAsked {
    /// The client's number of the save.
    pub(super) transfer: u64,
    pub(super) tokens: Tokens,
    pub(super) offers: Vec<Offer>,
    pub(super) only_offers: bool,
    pub(super) is_wanted: bool,
}

#[derive(Debug)]
pub(super) struct SaveJob {
    pub(super) request: u64,
    /// The client's number of the save, and the engine's id.
    pub(super) transfer: (u64, TransferId),
    pub(super) tokens: Tokens,
    pub(super) extents: Vec<Extent>,
}

#[derive(Debug)]
pub(super) struct HitJob {
    pub(super) request: u64,
    pub(super) version: u32,
    pub(super) direct: bool,
    pub(super) hit: FoundHit,
}

/// A hit, and the extents that have been collected.
#[derive(Debug)]
pub(super) struct FoundHit {
    pub(super) tokens: Tokens,
    pub(super) shared: Tokens,
    pub(super) rest: Option<Rest>,
    pub(super) brought: Brought,
    /// Bytes of the windows and states at its end.
    pub(super) end_bytes: u64,
    /// Bytes of host memory, and of the saves under way in it.
    pub(super) host_capacity: u64,
    pub(super) save_bytes: u64,
    pub(super) left: HitExtents,
    /// Parts of the extents, from the end of the hit to its begin.
    pub(super) parts: Vec<Vec<Extent>>,
}

impl FoundHit {
    /// The extents, from the begin of the hit to its end.
    pub(super) fn extents(&mut self) -> Vec<Extent> {
        let mut all = Vec::new();
        for part in self.parts.drain(..).rev() {
            append_extents(&mut all, part);
        }
        all
    }
}
