//! What the server keeps of each session.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use undercroft_contract::session::TransferId;
use undercroft_engine::{ChainBytes, SessionId};

use super::held::{HeldChain, HeldChains};
use super::job::Job;
use super::request::ServedRequest;
use crate::budget::Budget;
use crate::orders::Caller;

/// Memory of all sessions.
#[derive(Debug)]
pub(super) struct Budgets {
    /// Hashes of requests.
    pub(super) hashes: Budget,
    /// Extents of hits that are being collected.
    pub(super) answers: Budget,
    /// Host memory that hits and loads keep.
    pub(super) held: HeldChains,
}

#[derive(Debug)]
pub(super) struct ServedSession {
    pub(super) id: SessionId,
    /// Digest of the namespace, hexadecimal.
    pub(super) namespace: Arc<str>,
    /// The namespace, or a name of its own for a session that shares no blocks.
    pub(super) scope: Arc<str>,
    pub(super) chain_bytes: Arc<ChainBytes>,
    /// Host memory that the session's hits and loads keep.
    pub(super) held: HeldChains,
    pub(super) connected: bool,
    /// Workers that have the arena mapped.
    pub(super) workers: usize,
    pub(super) requests: HashMap<u64, ServedRequest>,
    /// Bytes of the requests.
    pub(super) request_bytes: u64,
    /// Bytes of the extents that are being collected.
    pub(super) answer_bytes: u64,
    /// Requests whose lookup is pending.
    pub(super) pending: VecDeque<u64>,
    /// Loads and saves under way, by the client's numbers.
    pub(super) transfers: HashMap<u64, ServedTransfer>,
    /// The client's process.
    pub(super) caller: Caller,
    /// Resets that have not been answered.
    pub(super) resets: Vec<u64>,
    pub(super) jobs: VecDeque<Job>,
    /// Requests of a client whose connection has ended: the engine's names, and the chains of their hits.
    pub(super) left_behind: Vec<(String, Option<Arc<HeldChain>>)>,
}

/// A load or a save under way.
#[derive(Debug)]
pub(super) struct ServedTransfer {
    pub(super) id: TransferId,
    /// The chain that a load keeps.
    pub(super) held: Option<Arc<HeldChain>>,
}

impl ServedSession {
    pub(super) fn new(
        id: SessionId,
        namespace: &str,
        private: bool,
        chain_bytes: ChainBytes,
    ) -> Self {
        let namespace = Arc::from(namespace);
        let mut session = Self {
            id,
            scope: Arc::clone(&namespace),
            namespace,
            chain_bytes: Arc::new(chain_bytes),
            held: HeldChains::default(),
            connected: true,
            workers: 0,
            requests: HashMap::new(),
            request_bytes: 0,
            answer_bytes: 0,
            pending: VecDeque::new(),
            transfers: HashMap::new(),
            caller: Caller::default(),
            resets: Vec::new(),
            jobs: VecDeque::new(),
            left_behind: Vec::new(),
        };
        if private {
            session.leave_scope();
        }
        session
    }

    /// The session of this process.
    pub(super) fn of(self, caller: Caller) -> Self {
        Self { caller, ..self }
    }

    /// From now on, the session shares no blocks with other sessions.
    pub(super) fn leave_scope(&mut self) {
        self.scope = format!("{} of {:?}", self.namespace, self.id).into();
    }
}
