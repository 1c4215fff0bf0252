//! Each request's share in the fetches.

use slotmap::SecondaryMap;
use undercroft_contract::session::{Brought, Priority, PromotionWait, Tokens};

use crate::forest::{NONE, NodeId};

use super::super::ids::{FlightId, RequestId};
use super::super::planner::{FetchSource, ReadShare};
use super::super::promotions::QueuePlace;
use super::super::residency::Residency;

/// The shares of all requests.
pub(crate) type Shares = SecondaryMap<RequestId, Share>;

/// The waits of one request, and its payloads in the arena.
#[derive(Debug)]
pub(crate) struct Share {
    /// Leased node, or `NONE`: where the hit ends, or where it is to end after the promotion under way.
    pub(crate) lease: NodeId,
    pub(crate) answer: LastAnswer,
    pub(crate) waits: Waits,
    /// The scheduler has asked: the request is no longer a prefetch.
    pub(crate) demanded: bool,
    /// Arena bytes that the request holds until they are loaded, and bytes reserved for it.
    pub(crate) bytes: u64,
    /// Number of promotions started. Tells the waiters of one promotion from those of another.
    pub(crate) started: u32,
    /// The tokens that the last promotion brought. The request leases the node.
    pub(crate) verified: Option<Verified>,
    /// Depths (exclusive, inclusive) that were brought from disk, and by flights.
    pub(crate) from_disk: Option<(u32, u32)>,
    pub(crate) from_remote: Option<(u32, u32)>,
    /// Segments that the store probably has were not fetched, since computing takes less time.
    pub(crate) is_left: bool,
    pub(crate) plans: Plans,
}

/// The planner's last decisions for a request, by source.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Plans {
    pub(crate) disk: Plan,
    pub(crate) remote: Plan,
}

impl Plans {
    pub(crate) fn of(&mut self, source: FetchSource) -> &mut Plan {
        match source {
            FetchSource::Disk => &mut self.disk,
            FetchSource::Remote => &mut self.remote,
        }
    }
}

/// The planner's last decision for a request and a source.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Plan {
    /// How long a promotion was to take, in nanoseconds, if that was predicted. A flight knows its own.
    pub(crate) predicted_ns: Option<u64>,
    /// The fetch was begun to measure, so it goes on against the prediction.
    pub(crate) ignores_prediction: bool,
    /// The decision was counted.
    pub(crate) is_counted: bool,
}

/// What a request waits for. The waits for disk and for the remote store do not exclude each other: the beginning of a
/// prompt may be read from disk while its end comes from the store.
#[derive(Debug, Default)]
pub(crate) struct Waits {
    /// The promotion under way.
    pub(crate) disk: Option<Promotion>,
    /// The flight that the request waits for, or whose segments are leased until the request has looked again.
    pub(crate) remote: Option<FlightId>,
    /// How long the request waits; `None` if
    /// [`EngineConfig::promotion_wait`](super::super::EngineConfig::promotion_wait) applies.
    pub(crate) limit: Option<PromotionWait>,
    /// Time since which the scheduler waits for an answer.
    pub(crate) since_ns: Option<u64>,
    /// Number of promotions started since the last answer, and number of flights that the request has joined.
    pub(crate) promotions: u32,
    pub(crate) flights: u8,
    /// The request has waited for the store for long enough, or shall not wait: it joins no other flight.
    pub(crate) gave_up: bool,
}

/// The last answer, as far as later entries depend on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum LastAnswer {
    /// There is no hit to load.
    #[default]
    None,
    /// A hit that ends at the leased node. The lease keeps the payloads after `after` hash blocks in the arena.
    Hit {
        after: u32,
        /// The client relies on the lease, although no demanded lookup has come.
        is_reserved: bool,
    },
    /// A load failed: all further lookups of this request are misses.
    Failed,
}

impl Share {
    /// The share of a request that waits for nothing and holds nothing.
    pub(crate) fn new() -> Self {
        Self {
            lease: NONE,
            answer: LastAnswer::None,
            waits: Waits::default(),
            demanded: false,
            bytes: 0,
            started: 0,
            verified: None,
            from_disk: None,
            from_remote: None,
            is_left: false,
            plans: Plans::default(),
        }
    }

    /// The part of the prompt that was brought for the request, in tokens.
    pub(crate) fn brought(&self, hash_block_size: u32) -> Brought {
        let tokens = |(after, to): (u32, u32)| {
            (
                Tokens(after * hash_block_size),
                Tokens(to * hash_block_size),
            )
        };
        Brought {
            disk: self.from_disk.map(tokens),
            remote: self.from_remote.map(tokens),
        }
    }

    /// Moves the lease to `node` (`NONE`: to nothing). A hit that the lease kept is no answer any more.
    pub(crate) fn move_lease(&mut self, node: NodeId, residency: &mut Residency) {
        if self.answer != LastAnswer::Failed {
            self.answer = LastAnswer::None;
        }
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
        self.verified = self.verified.filter(|verified| verified.node == node);
    }

    /// Whether the client relies on the lease, although no demanded lookup has come.
    pub(crate) fn is_reserved(&self) -> bool {
        matches!(self.answer, LastAnswer::Hit { is_reserved, .. } if is_reserved)
    }

    pub(crate) fn priority(&self) -> Priority {
        if self.demanded {
            Priority::Demand
        } else {
            Priority::Prefetch
        }
    }
}

/// One request's promotion. The request's own lease keeps the target. The promotion leases the node of the deepest
/// payload that it has reached, which keeps all payloads before in the arena.
#[derive(Debug)]
pub(crate) struct Promotion {
    /// Payloads that the load will need, front to back.
    pub(crate) payloads: Vec<(NodeId, u8)>,
    /// Index of the first payload that was not looked at yet.
    pub(crate) next: usize,
    /// Reads that this request waits for.
    pub(crate) waiting: u32,
    /// Leased node, or `NONE`.
    pub(crate) reached: NodeId,
    /// The boundary, in hash blocks, if all reads succeed.
    pub(crate) boundary: u32,
    /// The tokens that the promotion brings if all reads succeed.
    pub(crate) goal: Verified,
    /// The promotion was given up before its end.
    pub(crate) is_cut: bool,
    /// Bytes that were only on disk when the promotion started, less the bytes of started reads.
    pub(crate) unread: u64,
    /// Where the promotion waits for its next read; `None` once all reads are issued.
    pub(crate) place: Option<QueuePlace>,
    /// Its reads by device, for the planner.
    pub(crate) shares: Vec<ReadShare>,
    /// The payloads before this index were in the arena at the last look.
    pub(crate) front: usize,
    /// Its predicted time in nanoseconds, if there was a prediction.
    pub(crate) predicted_ns: Option<u64>,
    /// Bytes that the budget has reserved for the next reads; `None` before the reservation.
    pub(crate) reserved: Option<u64>,
    /// The request holds bytes of an earlier promotion.
    pub(crate) continues: bool,
    /// The promotion was cut because a device did not answer.
    pub(crate) silent: bool,
    pub(crate) started_ns: u64,
    /// Since when the promotion's next read lacks only memory to start.
    pub(crate) short_ns: Option<u64>,
}

impl Promotion {
    /// Whether the promotion has no more reads to start.
    pub(crate) fn is_issued(&self) -> bool {
        self.next == self.payloads.len()
    }

    /// Whether every payload is in the arena: none is being read, and none was given up.
    pub(crate) fn is_complete(&self) -> bool {
        self.is_issued() && self.waiting == 0 && !self.is_cut
    }

    pub(crate) fn boundary(&self) -> u32 {
        self.boundary
    }

    #[cfg(feature = "check")]
    pub(crate) fn reached(&self) -> NodeId {
        self.reached
    }

    /// Gives up the payloads that were not looked at yet.
    pub(crate) fn cut(&mut self) {
        self.payloads.truncate(self.next);
        self.is_cut = true;
    }
}

/// A range of tokens, after `local` hash blocks and up to `node`: the checksums of the payloads that its load needs
/// were compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Verified {
    pub(crate) node: NodeId,
    pub(crate) local: u32,
}
