//! The participants of a life: clients with their requests, and the copies of their workers.

use undercroft_core::engine::SessionId;
use undercroft_core::key::BlockHash;
use undercroft_core::session::{Session, Tokens, TransferId};

use crate::content::{PrefixKey, SavedPayload};
use crate::hints::RouterIndex;

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
    /// Whether the client loads the hits of its prefetches.
    pub(crate) served: bool,
    pub(crate) requests: Vec<ClientRequest>,
    pub(crate) loads: Vec<ClientLoad>,
    pub(crate) saves: Vec<ClientSave>,
    /// A router's index, by its events.
    pub(crate) router: RouterIndex,
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
