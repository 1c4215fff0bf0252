//! Changes in the tiers and in the remote store, noted as values for those who listen.
//!
//! Residency and the remote store call no listener: they note a change here, and the engine passes it on
//! ([`Engine::tell_listeners`](super::Engine::tell_listeners)), at the latest when the entry ends. A listener may be told
//! when the node has been freed, or is another block's node. So a change holds all that a listener needs.

use undercroft_contract::explain::Reason;
use undercroft_contract::key::{BlockHash, NamespaceDigest};
use undercroft_contract::session::BlockEvent;

use crate::forest::{NodeId, NsId};

/// Changes whose memory is kept for the next entries.
const KEPT: usize = 1024;

/// A change, for the listeners of its kind.
#[derive(Debug)]
pub(super) enum Change {
    /// For the feeds: a payload has become readable in a tier, or is no longer readable.
    Payload {
        ns: NsId,
        /// The node that had the payload: a replay goes through the nodes in the order of their ids.
        node: NodeId,
        event: BlockEvent,
    },
    /// For the feeds: a block has come to the remote store, or has left it.
    Remote {
        digest: NamespaceDigest,
        /// The block's place in a replay.
        number: u64,
        event: BlockEvent,
    },
    /// For the memory of departures: the last payload of a block has left a tier, or a block was not admitted.
    Departure {
        ns: NsId,
        hash: BlockHash,
        reason: Reason,
    },
}

/// The changes that listeners have not been told, in their order.
#[derive(Debug)]
pub(super) struct Changes {
    list: Vec<Change>,
    /// Whether sessions follow the payloads, and whether departures are remembered. Other changes are not noted.
    pub(super) has_feeds: bool,
    pub(super) has_departures: bool,
}

impl Changes {
    pub(super) fn new(has_departures: bool) -> Self {
        Self {
            list: Vec::new(),
            has_feeds: false,
            has_departures,
        }
    }

    pub(super) fn note(&mut self, change: Change) {
        self.list.push(change);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Tells `listener` of all changes, in their order.
    pub(super) fn drain(&mut self, listener: impl FnMut(Change)) {
        self.list.drain(..).for_each(listener);
        self.list.shrink_to(KEPT);
    }
}
