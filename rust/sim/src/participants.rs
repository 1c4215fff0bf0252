//! The participants of a life: clients with their requests and pins, the copies of their workers, routers, and an operator.

use std::collections::{BTreeMap, HashMap, HashSet};

use undercroft_contract::key::{BlockHash, NamespaceDigest};
use undercroft_contract::session::{
    BlockEvent, BlockEvents, GiveUp, Session, Tokens, TransferEnd, TransferId,
};
use undercroft_engine::SessionId;

use crate::content::{PrefixKey, SavedPayload, Token};

/// One request of a client.
#[derive(Debug)]
pub(crate) struct ClientRequest {
    pub(crate) name: String,
    pub(crate) keys: Vec<PrefixKey>,
    pub(crate) hashes: Vec<BlockHash>,
    pub(crate) tokens: u32,
    /// Time since which the request waits for an answer.
    pub(crate) asked_ns: Option<u64>,
    /// Times that a promotion may have started: there is a limit.
    pub(crate) promotions: u32,
    pub(crate) ready: Option<ClientHit>,
    /// The places of the payloads of `ready`, which stay while the request keeps its hit.
    pub(crate) promise: Option<Vec<ClientBlock>>,
    /// The weights of its namespace at its lookups, each once.
    pub(crate) looked: Vec<u64>,
    /// The least boundary that the request can use.
    pub(crate) min: Tokens,
    /// Tokens whose save the request has requested.
    pub(crate) saved_tokens: u32,
    /// Whether a load of the request failed: its later lookups are misses.
    pub(crate) failed: bool,
}

/// An answer that promised a hit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ClientHit {
    pub(crate) local: u32,
    pub(crate) tokens: u32,
    /// The weights of the hit's bytes, even if another session has reset the namespace since.
    pub(crate) epoch: u64,
}

/// One client.
#[derive(Debug)]
pub(crate) struct SimClient {
    /// The engine's name for the session.
    pub(crate) id: SessionId,
    pub(crate) session: Box<dyn Session>,
    pub(crate) namespace: usize,
    /// The share of the tiers that it wants, in thousandths.
    pub(crate) tenant_share: u16,
    /// Whether the client loads the hits of its prefetches.
    pub(crate) served: bool,
    pub(crate) requests: Vec<ClientRequest>,
    pub(crate) loads: Vec<ClientLoad>,
    pub(crate) saves: Vec<ClientSave>,
    /// A router's index, by its events.
    pub(crate) router: RouterIndex,
    /// The lookups that are pending as far as the session has told, each with its computed tokens.
    pub(crate) waits: HashMap<String, u32>,
}

/// A block and its slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ClientBlock {
    pub(crate) payload: SavedPayload,
    pub(crate) offset: u64,
}

/// A load in progress.
#[derive(Debug)]
pub(crate) struct ClientLoad {
    pub(crate) id: TransferId,
    pub(crate) request: String,
    pub(crate) blocks: Vec<ClientBlock>,
    pub(crate) copied: usize,
    /// Whether the engine has forgotten its request since.
    pub(crate) outlived: bool,
}

/// A save in progress.
#[derive(Debug)]
pub(crate) struct ClientSave {
    pub(crate) id: TransferId,
    pub(crate) blocks: Vec<ClientBlock>,
    pub(crate) filled: usize,
    /// Whether the engine has forgotten its namespace since.
    pub(crate) lost: bool,
}

/// The ends of transfers in one life.
#[derive(Debug, Default)]
pub(crate) struct Ends {
    /// Some of the transfers that have ended.
    pub(crate) known: Vec<TransferId>,
    pub(crate) failed_saves: u64,
    /// Numbers of transfers that were given up, by direction and reason.
    pub(crate) given_up: BTreeMap<(&'static str, &'static str), u64>,
}

impl Ends {
    pub(crate) fn count(&mut self, direction: &'static str, end: TransferEnd) {
        let reason = match end {
            TransferEnd::Done => return,
            TransferEnd::Failed => {
                self.failed_saves += u64::from(direction == "save");
                return;
            }
            TransferEnd::GivenUp(GiveUp::Reset) => "reset",
            TransferEnd::GivenUp(GiveUp::Weights) => "weights",
            TransferEnd::GivenUp(GiveUp::Closed) => "closed",
            TransferEnd::GivenUp(GiveUp::Retry) => "retry",
        };
        *self.given_up.entry((direction, reason)).or_insert(0) += 1;
    }

    /// A session is closed: its transfers are given up.
    pub(crate) fn count_closed(&mut self, session: &SimClient) {
        let end = TransferEnd::GivenUp(GiveUp::Closed);
        session.loads.iter().for_each(|_| self.count("load", end));
        session.saves.iter().for_each(|_| self.count("save", end));
    }
}

/// A pin, and the payloads that it keeps.
#[derive(Debug)]
pub(crate) struct SimPin {
    pub(crate) namespace: usize,
    pub(crate) epoch: u64,
    pub(crate) payloads: Vec<(BlockHash, u8)>,
    pub(crate) ends_ns: u64,
}

/// The pins of one life, unless a pin has ended before its time.
#[derive(Debug, Default)]
pub(crate) struct SimPins {
    pub(crate) pins: Vec<SimPin>,
    pub(crate) ended: u64,
}

impl SimPins {
    /// A namespace was cleared: its pins have lost their blocks.
    pub(crate) fn forget(&mut self, namespace: usize) {
        self.pins.retain(|pin| pin.namespace != namespace);
    }
}

/// The index of a router: payloads by hash, group and tier.
#[derive(Debug, Default)]
pub(crate) struct RouterIndex {
    pub(crate) payloads: HashSet<(BlockHash, u8, u8)>,
    /// Whether the last call left no further events.
    pub(crate) is_complete: bool,
    /// Whether the router's client has taken events.
    pub(crate) listens: bool,
}

pub(crate) fn payload_named(event: &BlockEvent) -> (BlockHash, u8, u8) {
    (event.hash, event.group, event.tier as u8)
}

impl RouterIndex {
    /// Applies events. No payload is announced twice, and no payload is removed that was not
    /// announced.
    pub(crate) fn apply(&mut self, told: &BlockEvents) -> Result<(), String> {
        if told.cleared {
            self.payloads.clear();
        }
        for event in &told.events {
            let changed = if event.stored {
                self.payloads.insert(payload_named(event))
            } else {
                self.payloads.remove(&payload_named(event))
            };
            if !changed {
                return Err(format!("told in vain: {event:?}"));
            }
        }
        self.is_complete = !told.more;
        Ok(())
    }
}

/// A payload by its namespace, hash and group.
pub(crate) type PayloadName = (NamespaceDigest, BlockHash, u8);

/// The last order to clear, until its promise has been checked.
#[derive(Debug)]
pub(crate) struct Promise {
    pub(crate) order: u64,
    pub(crate) erases: bool,
    /// Whether the order selected the blocks by their age: blocks in use are not among them.
    pub(crate) by_age: bool,
    /// The payloads that a restart would have found.
    pub(crate) before: HashSet<PayloadName>,
    /// The payloads' bytes on disk: directory, offset, sectors.
    pub(crate) bytes: Vec<(PayloadName, usize, u64, Vec<Token>)>,
    /// Payloads that were saved since.
    pub(crate) saved: HashSet<PayloadName>,
}
