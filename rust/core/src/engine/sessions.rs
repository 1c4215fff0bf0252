//! Sessions, their requests' lookups, and the transfers of their workers.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use slotmap::SlotMap;

use crate::forest::{NONE, NodeId, NsId};
use crate::session::{SessionSpec, Tokens};

use super::requests::{BlockOffers, RequestId, RequestPromotions, RequestState, Requests};

slotmap::new_key_type! {
    /// One client's use of one namespace.
    pub struct SessionId;
    /// A load or a save under way.
    pub(super) struct TransferKey;
}

/// A client's session.
#[derive(Debug)]
pub(super) struct SessionState {
    pub(super) ns: NsId,
    pub(super) requests: HashMap<Box<str>, RequestId>,
    /// How many hash blocks each request has saved, or found in the index when it did.
    pub(super) saved: HashMap<Box<str>, u32>,
    /// See [`SessionSpec::dropped_tokens`].
    dropped_tokens: u32,
    /// See [`SessionSpec::leases_prefetches`].
    pub(super) leases_prefetches: bool,
}

/// A load or a save under way.
#[derive(Debug)]
pub(super) struct TransferState {
    pub(super) session: SessionId,
    /// Of the slots that it copies from or to.
    pub(super) bytes: u64,
    pub(super) kind: TransferKind,
}

#[derive(Debug)]
pub(super) enum TransferKind {
    /// Leases the node.
    Load { lease: NodeId, request: Box<str> },
    /// Payloads being filled, front to back.
    Save { payloads: Vec<(NodeId, u8)> },
}

impl TransferState {
    pub(super) fn is_load(&self) -> bool {
        matches!(self.kind, TransferKind::Load { .. })
    }
}

/// Sessions, requests and transfers.
///
/// Invariants: each request belongs to exactly one session, under its name; each transfer belongs to a
/// session that is open; a request's and a load's lease is a live node.
#[derive(Debug, Default)]
pub(super) struct Sessions {
    sessions: SlotMap<SessionId, SessionState>,
    pub(super) requests: Requests,
    transfers: SlotMap<TransferKey, TransferState>,
}

impl Sessions {
    pub(super) fn open(&mut self, ns: NsId, spec: &SessionSpec) -> SessionId {
        self.sessions.insert(SessionState {
            ns,
            requests: HashMap::new(),
            saved: HashMap::new(),
            dropped_tokens: spec.dropped_tokens.0,
            leases_prefetches: spec.leases_prefetches,
        })
    }

    /// Removes a session without requests and transfers.
    pub(super) fn close(&mut self, session: SessionId) -> Option<SessionState> {
        let state = self.sessions.remove(session)?;
        assert!(
            state.requests.is_empty(),
            "a session is closed before its lookups end"
        );
        Some(state)
    }

    pub(super) fn get(&self, session: SessionId) -> Option<&SessionState> {
        self.sessions.get(session)
    }

    pub(super) fn get_mut(&mut self, session: SessionId) -> Option<&mut SessionState> {
        self.sessions.get_mut(session)
    }

    pub(super) fn len(&self) -> usize {
        self.sessions.len()
    }

    /// Whether any session uses a namespace.
    pub(super) fn uses(&self, ns: NsId) -> bool {
        self.sessions.values().any(|state| state.ns == ns)
    }

    /// Sessions of one namespace use another.
    pub(super) fn move_all(&mut self, from: NsId, to: NsId) {
        let sessions = self.sessions.values_mut();
        let of_namespace = sessions.filter(|state| state.ns == from);
        of_namespace.for_each(|state| state.ns = to);
    }

    /// A session's request by its name.
    pub(super) fn request_id(&self, session: SessionId, request: &str) -> Option<RequestId> {
        self.sessions.get(session)?.requests.get(request).copied()
    }

    /// As [`Sessions::request_id`], its state.
    pub(super) fn request(&self, session: SessionId, request: &str) -> Option<&RequestState> {
        let id = self.request_id(session, request)?;
        Some(&self.requests[id])
    }

    /// A session's request of that name; it is added if there is none. `None` if there is no such session.
    pub(super) fn request_or_add(
        &mut self,
        session: SessionId,
        request: &str,
        tick: impl FnOnce() -> u64,
    ) -> Option<RequestId> {
        let state = self.sessions.get_mut(session)?;
        let id = match state.requests.entry(request.into()) {
            Entry::Occupied(known) => *known.get(),
            Entry::Vacant(unknown) => *unknown.insert(self.requests.insert(RequestState {
                tick: tick(),
                lease: NONE,
                promotions: RequestPromotions::default(),
                wait: None,
                demanded_ns: None,
                failed: false,
                touched: false,
                dropped_tokens: state.dropped_tokens,
                shared: Tokens(0),
                offers: BlockOffers::default(),
            })),
        };
        Some(id)
    }

    /// Requests of a session, in the order of their arrival.
    pub(super) fn requests_of(&self, session: SessionId) -> Vec<RequestId> {
        let Some(state) = self.sessions.get(session) else {
            return Vec::new();
        };
        let mut ids: Vec<RequestId> = state.requests.values().copied().collect();
        // A map's order is another in each process: lives of one seed would differ.
        ids.sort_unstable_by_key(|&id| self.requests[id].tick);
        ids
    }

    /// Forgets the names of requests that were removed.
    pub(super) fn forget_removed(&mut self, session: SessionId) {
        if let Some(state) = self.sessions.get_mut(session) {
            let requests = &self.requests;
            state
                .requests
                .retain(|_, &mut id| requests.contains_key(id));
        }
    }

    pub(super) fn begin_transfer(&mut self, transfer: TransferState) -> TransferKey {
        assert!(
            self.sessions.contains_key(transfer.session),
            "a transfer of no session"
        );
        self.transfers.insert(transfer)
    }

    pub(super) fn end_transfer(&mut self, key: TransferKey) -> Option<TransferState> {
        self.transfers.remove(key)
    }

    /// Transfers under way.
    pub(super) fn transfers(&self) -> impl Iterator<Item = (TransferKey, &TransferState)> {
        self.transfers.iter()
    }

    #[cfg(feature = "check")]
    pub(super) fn values(&self) -> impl Iterator<Item = &SessionState> {
        self.sessions.values()
    }
}
