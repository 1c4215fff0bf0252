//! Requests: the engine's state of each lookup, and of its promotions.

use slotmap::SlotMap;

use crate::forest::{NONE, NodeId};
use crate::session::{Priority, PromotionWait, Tokens};

use super::explain::Answered;
use super::ids::{RequestId, SessionId};
use super::planner::ReadShare;
use super::plans::Planned;
use super::promotions::QueuePlace;
use super::remote::RemoteShare;
use super::residency::Residency;
use super::save_cursor::BlockOffers;

/// The lookups of all sessions.
pub(super) type Requests = SlotMap<RequestId, RequestState>;

/// One request's lookup.
#[derive(Debug)]
pub(super) struct RequestState {
    pub(super) session: SessionId,
    /// Tick of its arrival.
    pub(super) tick: u64,
    /// Leased node at the boundary of the last answer, or `NONE`.
    pub(super) lease: NodeId,
    /// While the last answer is a hit: the lease keeps the payloads after this many hash blocks in the arena.
    pub(super) hit_after: Option<u32>,
    pub(super) promotions: RequestPromotions,
    pub(super) remote: RemoteShare,
    /// How long the request waits for promotions; `None` if
    /// [`EngineConfig::promotion_wait`](super::EngineConfig::promotion_wait) applies.
    pub(super) wait: Option<PromotionWait>,
    /// Time since which the scheduler waits for an answer.
    pub(super) demanded_ns: Option<u64>,
    pub(super) planned: Planned,
    /// A load failed: all further lookups of this request are misses.
    pub(super) failed: bool,
    /// The request's hit was counted.
    pub(super) touched: bool,
    /// See [`SessionSpec::dropped_tokens`].
    pub(super) dropped_tokens: u32,
    /// Tokens of the chain that the last lookup found, whether a hit may end there or not.
    pub(super) shared: Tokens,
    pub(super) offers: BlockOffers,
    /// Why the last answer has no more tokens.
    pub(super) answered: Answered,
}

impl RequestState {
    /// Moves the lease to `node` (`NONE`: to nothing).
    pub(super) fn move_lease(&mut self, node: NodeId, residency: &mut Residency) {
        self.hit_after = None;
        let old = std::mem::replace(&mut self.lease, node);
        if old == node {
            return;
        }
        // The new lease begins before the old one ends: the leases may share nodes, which must not become
        // evictable.
        if node != NONE {
            residency.pin_hit(node);
        }
        if old != NONE {
            residency.unpin_hit(old);
        }
        // The lease keeps the payloads, so they stay verified until the lease moves.
        let verified = self.promotions.verified;
        self.promotions.verified = verified.filter(|verified| verified.node == node);
    }
}

/// One request's promotion. The request's own lease keeps the target. The promotion leases the node of the deepest
/// payload that it has reached, which keeps all payloads before in the arena.
#[derive(Debug)]
pub(super) struct Promotion {
    /// Payloads that the load will need, front to back.
    pub(super) payloads: Vec<(NodeId, u8)>,
    /// Index of the first payload that was not looked at yet.
    pub(super) next: usize,
    /// Reads that this request waits for.
    pub(super) waiting: u32,
    /// Leased node, or `NONE`.
    pub(super) reached: NodeId,
    /// The boundary, in hash blocks, if all reads succeed.
    pub(super) boundary: u32,
    /// The tokens that the promotion brings if all reads succeed.
    pub(super) goal: Verified,
    /// The promotion was given up before its end.
    pub(super) is_cut: bool,
    /// Bytes that were only on disk when the promotion started, less the bytes of started reads.
    pub(super) unread: u64,
    /// Where the promotion waits for its next read; `None` once all reads are issued.
    pub(super) place: Option<QueuePlace>,
    /// Its reads by device, for the planner.
    pub(super) shares: Vec<ReadShare>,
    /// The payloads before this index were in the arena at the last look.
    pub(super) front: usize,
    /// Its predicted time in nanoseconds, if there was a prediction.
    pub(super) predicted_ns: Option<u64>,
    /// Bytes that the budget has reserved for the next reads; `None` before the reservation.
    pub(super) reserved: Option<u64>,
    /// The request holds bytes of an earlier promotion.
    pub(super) continues: bool,
    /// The promotion was cut because a device did not answer.
    pub(super) silent: bool,
    pub(super) started_ns: u64,
    /// Since when the promotion's next read lacks only memory to start.
    pub(super) short_ns: Option<u64>,
}

impl Promotion {
    /// Whether the promotion has no more reads to start.
    pub(super) fn is_issued(&self) -> bool {
        self.next == self.payloads.len()
    }

    /// Whether every payload is in the arena: none is being read, and none was given up.
    pub(super) fn is_complete(&self) -> bool {
        self.is_issued() && self.waiting == 0 && !self.is_cut
    }

    pub(super) fn boundary(&self) -> u32 {
        self.boundary
    }

    #[cfg(feature = "check")]
    pub(super) fn reached(&self) -> NodeId {
        self.reached
    }

    /// Gives up the payloads that were not looked at yet.
    pub(super) fn cut(&mut self) {
        self.payloads.truncate(self.next);
        self.is_cut = true;
    }
}

/// A range of tokens, after `local` hash blocks and up to `node`: the checksums of the payloads that its load needs
/// were compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Verified {
    pub(super) node: NodeId,
    pub(super) local: u32,
}

/// A request's share in the promotions.
#[derive(Debug, Default)]
pub(super) struct RequestPromotions {
    /// The promotion under way.
    pub(super) active: Option<Promotion>,
    /// Number of promotions started. Tells the waiters of one promotion from those of another.
    pub(super) started: u32,
    /// Number of promotions started since the last answer.
    pub(super) tries: u32,
    /// The tokens that the last promotion brought. The request leases the node.
    pub(super) verified: Option<Verified>,
    /// Arena bytes that the request holds until they are loaded, and bytes reserved for it.
    pub(super) bytes: u64,
    /// Depths (exclusive, inclusive) that were brought from disk, for metrics.
    pub(super) from_disk: Option<(u32, u32)>,
    /// The scheduler has asked: the request is no longer a prefetch.
    pub(super) demanded: bool,
    /// The client has an answer that relies on the lease, although no demanded lookup has come.
    pub(super) reserved: bool,
}

impl RequestPromotions {
    pub(super) fn priority(&self) -> Priority {
        if self.demanded {
            Priority::Demand
        } else {
            Priority::Prefetch
        }
    }
}
