//! A flight: the segments of one chain on their way from the store, for the requests that wait for them.

use crate::forest::{NodeId, NsId};
use crate::key::{BlockHash, NamespaceDigest};

use super::super::requests::RequestId;
use super::search::Search;
use super::spaces::Space;

slotmap::new_key_type! {
    pub(in crate::engine) struct FlightId;
}

/// The segments of one chain, from the first that the tiers lack.
#[derive(Debug)]
pub(super) struct Flight {
    pub(super) ns: NsId,
    pub(super) space: Space,
    /// Hash blocks of the chain that were in the tiers.
    pub(super) found: u32,
    /// Segments of the chain before the first.
    pub(super) skipped: u32,
    /// The block hashes from the first segment on, and the hash before them.
    pub(super) hashes: Box<[BlockHash]>,
    pub(super) before: Option<BlockHash>,
    pub(super) search: Search,
    /// When the round of probes was sent that is being answered.
    pub(super) asked_ns: Option<u64>,
    /// Whether each segment has come, or need not.
    pub(super) here: Vec<bool>,
    /// How many segments, front to back, have come.
    pub(super) arrived: u32,
    /// The next segment to be fetched.
    pub(super) next: u32,
    /// Gets in flight.
    pub(super) gets: u32,
    /// The nodes at the end of the first segments: those whose gets have begun. The lease keeps them.
    pub(super) ends: Vec<NodeId>,
    /// Leased: the deepest node that the flight has made, or stands on; `NONE` if there is none.
    pub(super) lease: NodeId,
    /// Slot bytes that it has filled or is filling, which the lease keeps.
    pub(super) bytes: u64,
    /// Nothing more is fetched.
    pub(super) is_cut: bool,
    /// The store does not answer, or fails.
    pub(super) is_failed: bool,
    /// It has ended; the lease goes on while requests are to look.
    pub(super) is_over: bool,
    pub(super) waiters: Vec<RequestId>,
    /// It measures the store: no request needs to wait for it.
    pub(super) is_measure: bool,
    /// Gets in flight at most: the first segments come before the others, where gets share the store.
    pub(super) width: u32,
    pub(super) began_ns: u64,
    /// When its last get was sent.
    pub(super) sent_ns: u64,
    /// How long it was to take, in nanoseconds, if that was predicted.
    pub(super) predicted_ns: Option<u64>,
}

impl Flight {
    pub(super) fn segments(&self) -> u32 {
        self.here.len() as u32
    }

    /// The block hashes of a segment.
    pub(super) fn hashes_of(&self, segment: u32) -> &[BlockHash] {
        let size = self.space.hash_blocks as usize;
        let from = segment as usize * size;
        &self.hashes[from..from + size]
    }

    /// The block hash at the end of a segment.
    pub(super) fn end_of(&self, segment: u32) -> BlockHash {
        let hashes = self.hashes_of(segment);
        hashes[hashes.len() - 1]
    }

    /// The block hash before a segment; `None` at the start of a chain.
    pub(super) fn parent_of(&self, segment: u32) -> Option<BlockHash> {
        match segment.checked_sub(1) {
            Some(before) => Some(self.end_of(before)),
            None => self.before,
        }
    }

    /// Hash blocks of the chain before a segment.
    pub(super) fn depth_of(&self, segment: u32) -> u32 {
        (self.skipped + segment) * self.space.hash_blocks
    }

    /// Where the chain ends that may be fetched, in segments, by all that is known.
    pub(super) fn end(&self) -> u32 {
        if self.is_cut {
            self.next
        } else {
            self.search.present()
        }
    }

    /// Where the hit of its requests is to end, in segments.
    pub(super) fn goal(&self) -> u32 {
        match self.search.is_over() || self.is_cut {
            true => self.end(),
            false => self.segments(),
        }
    }

    /// Whether a get may be sent, if there is room.
    pub(super) fn has_gets(&self) -> bool {
        let is_needed = !self.is_over && !self.is_cut && self.gets < self.width;
        is_needed && self.next < self.search.present()
    }

    /// Whether a probe is to be sent.
    pub(super) fn has_probes(&self) -> bool {
        !self.is_over && !self.is_cut && !self.search.is_asking() && !self.search.is_over()
    }

    /// Segments whose gets have not been sent.
    pub(super) fn unsent(&self) -> u32 {
        self.goal().saturating_sub(self.next)
    }

    /// Whether nobody needs it any more.
    pub(super) fn is_unused(&self) -> bool {
        self.waiters.is_empty() && (self.is_over || !self.is_measure)
    }

    /// Whether nothing more comes.
    pub(super) fn is_done(&self) -> bool {
        let is_known = self.is_cut || self.search.is_over();
        is_known && self.gets == 0 && !self.has_gets()
    }

    /// A segment has come.
    pub(super) fn came(&mut self, segment: u32) {
        self.here[segment as usize] = true;
        let rest = self.here[self.arrived as usize..].iter();
        self.arrived += rest.take_while(|&&here| here).count() as u32;
    }

    /// A segment does not come, nor do those behind it.
    pub(super) fn ends_at(&mut self, segment: u32) {
        self.search.ends_at(segment);
        self.is_cut |= self.next >= segment;
    }

    /// The digest of its namespace, for names and headers.
    pub(super) fn digest(&self) -> NamespaceDigest {
        self.space.digest
    }
}
