//! Requests: the engine's state of each lookup, and of its promotions.

use slotmap::SlotMap;

use crate::forest::{NONE, NodeId};
use crate::session::{Priority, PromotionWait, Tokens};

use super::explain::Answered;
use super::planner::ReadShare;
use super::plans::Planned;
use super::promotions::QueuePlace;
use super::remote::RemoteShare;
use super::residency::Residency;
use super::sessions::SessionId;

slotmap::new_key_type! {
    /// One request's lookup.
    pub(super) struct RequestId;
}

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
    /// While the last answer is a hit: the hash blocks before those that the lease keeps in the arena.
    pub(super) hit_after: Option<u32>,
    pub(super) promotions: RequestPromotions,
    pub(super) remote: RemoteShare,
    /// The request's wait, instead of
    /// [`EngineConfig::promotion_wait`](super::EngineConfig::promotion_wait).
    pub(super) wait: Option<PromotionWait>,
    /// Time since which the scheduler waits for an answer.
    pub(super) demanded_ns: Option<u64>,
    pub(super) planned: Planned,
    /// A load failed: all further lookups of this request are misses.
    pub(super) failed: bool,
    /// Its hit was counted.
    pub(super) touched: bool,
    /// See [`SessionSpec::dropped_tokens`].
    pub(super) dropped_tokens: u32,
    /// Tokens of the chain that the last lookup found, whether a hit may end there or not.
    pub(super) shared: Tokens,
    pub(super) offers: BlockOffers,
    /// Why the last answer has no more tokens.
    pub(super) answered: Answered,
}

/// Which blocks of a request the policies have weighed for a save.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct BlockOffers {
    /// Hash blocks, from the first, that were offered to the policies.
    pub(super) offered: u32,
    /// Depth of the block that a policy did not admit, or 0: no block below it is saved.
    pub(super) not_admitted: u32,
}

impl RequestState {
    /// Moves the lease to `node` (`NONE`: to nothing).
    pub(super) fn move_lease(&mut self, node: NodeId, residency: &mut Residency) {
        self.hit_after = None;
        let old = std::mem::replace(&mut self.lease, node);
        if old == node {
            return;
        }
        // The new lease begins first: the leases may share nodes, which must not become evictable
        // in between.
        if node != NONE {
            residency.pin_hit(node);
        }
        if old != NONE {
            residency.unpin_hit(old);
        }
        // The payloads are kept, and so verified once, as long as the lease does not move.
        let verified = self.promotions.verified;
        self.promotions.verified = verified.filter(|verified| verified.node == node);
    }
}

/// One request's promotion. The request's own lease keeps the target; this one leases the deepest
/// payload reached, which keeps all before it in the arena.
#[derive(Debug)]
pub(super) struct Promotion {
    /// Payloads that the load will need, front to back.
    pub(super) payloads: Vec<(NodeId, u8)>,
    /// The first of them that was not looked at yet.
    pub(super) next: usize,
    /// Reads that this request waits for.
    pub(super) waiting: u32,
    /// Leased node, or `NONE`.
    pub(super) reached: NodeId,
    /// The boundary, in hash blocks, if all reads succeed.
    pub(super) boundary: u32,
    /// The tokens that it brings if all reads succeed.
    pub(super) goal: Verified,
    /// It was given up before its end.
    pub(super) is_cut: bool,
    /// Bytes that were on disk only when it started, less those that it has begun to read.
    pub(super) unread: u64,
    /// Where it waits for its next read; `None` once all are issued.
    pub(super) place: Option<QueuePlace>,
    /// Its reads by device, for the planner.
    pub(super) shares: Vec<ReadShare>,
    /// The payloads before this one were there at the last look.
    pub(super) front: usize,
    /// Its predicted time in nanoseconds, if there was a prediction.
    pub(super) predicted_ns: Option<u64>,
    /// Bytes that the budget has reserved for its next reads; `None` until it has.
    pub(super) reserved: Option<u64>,
    /// The request holds bytes of an earlier promotion.
    pub(super) continues: bool,
    /// It was cut because a device did not answer.
    pub(super) silent: bool,
    pub(super) started_ns: u64,
    /// Since when its next read has found no memory, although it could start otherwise.
    pub(super) short_ns: Option<u64>,
}

impl Promotion {
    /// Whether it has no more reads to start.
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

    /// Gives up the payloads that it has not looked at yet.
    pub(super) fn cut(&mut self) {
        self.payloads.truncate(self.next);
        self.is_cut = true;
    }
}

/// The payloads that a load of the tokens after `local` hash blocks, up to a node, needs in the
/// arena: its checksums were compared.
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
    /// The tokens that the last promotion brought. The request's lease is that of the node.
    pub(super) verified: Option<Verified>,
    /// Arena bytes held until they are loaded, and reserved.
    pub(super) bytes: u64,
    /// Depths (exclusive, inclusive) that were brought from disk, for metrics.
    pub(super) from_disk: Option<(u32, u32)>,
    /// The scheduler has asked: the request is no longer a prefetch.
    pub(super) demanded: bool,
    /// The client has an answer that relies on the lease, although the scheduler has not asked.
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
