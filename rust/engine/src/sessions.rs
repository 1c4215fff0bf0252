//! Sessions, their requests' lookups, and the transfers of their workers.

use std::collections::BTreeMap;

use hashbrown::HashMap;
use hashbrown::hash_map::EntryRef;
use slotmap::SlotMap;
use undercroft_contract::session::{SessionSpec, Tokens};

use crate::forest::{NodeId, NsId};

use super::explain::Answered;
use super::fetch::Planned;
use super::ids::{RequestId, SessionId, TransferKey};
use super::requests::{RequestState, Requests};
use super::returns::NodeAt;
use super::save_cursor::{BlockOffers, SaveCursor};

/// A client's session.
#[derive(Debug)]
pub(super) struct SessionState {
    pub(super) ns: NsId,
    /// The session finds and saves nothing: its weights may differ from the namespace's, and there was no room for another
    /// namespace.
    pub(super) is_barred: bool,
    pub(super) requests: HashMap<Box<str>, RequestId>,
    /// The requests that have saved and have not finished.
    pub(super) saved: HashMap<Box<str>, Saved>,
    /// See [`SessionSpec::dropped_tokens`].
    dropped_tokens: u32,
    /// See [`NamespaceSpec::alignment_tokens`](undercroft_contract::namespace::NamespaceSpec::alignment_tokens).
    alignment_tokens: u32,
    /// See [`SessionSpec::leases_prefetches`].
    pub(super) leases_prefetches: bool,
    /// See [`SessionSpec::tenant_share`].
    tenant_share: u16,
    /// Its loads and saves under way.
    transfers: TransferSums,
    pub(super) totals: SessionTotals,
}

/// The blocks that a request has saved.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Saved {
    /// Hash blocks that it has saved, or found in the index when it saved.
    pub(super) blocks: u32,
    /// The end of its chain after the last save that has ended.
    pub(super) end: Option<NodeAt>,
}

/// Counts of a session's operations since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct SessionTotals {
    /// Answered requests, and answered requests with a hit.
    pub(super) answered: u64,
    pub(super) hits: u64,
    /// Bytes of loads and saves that have succeeded.
    pub(super) loaded_bytes: u64,
    pub(super) saved_bytes: u64,
}

/// Loads and saves under way, and the slot bytes that they copy from or to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct TransferSums {
    pub(super) loads: u64,
    pub(super) saves: u64,
    pub(super) load_bytes: u64,
    pub(super) save_bytes: u64,
}

impl TransferSums {
    fn add(&mut self, transfer: &TransferState) {
        let (count, bytes) = self.of(transfer);
        *count += 1;
        *bytes += transfer.bytes;
    }

    fn remove(&mut self, transfer: &TransferState) {
        let (count, bytes) = self.of(transfer);
        *count -= 1;
        *bytes -= transfer.bytes;
    }

    fn of(&mut self, transfer: &TransferState) -> (&mut u64, &mut u64) {
        if transfer.is_load() {
            (&mut self.loads, &mut self.load_bytes)
        } else {
            (&mut self.saves, &mut self.save_bytes)
        }
    }
}

impl SessionState {
    /// A save of a request begins. Returns the blocks that the request has saved before; `None`: this is its first save.
    pub(super) fn begin_saving(&mut self, request: &str) -> Option<Saved> {
        let before = self.saved.get(request).copied();
        if before.is_none() {
            self.saved.insert(request.into(), Saved::default());
        }
        before
    }
}

/// A load or a save under way.
#[derive(Debug)]
pub(super) struct TransferState {
    pub(super) session: SessionId,
    /// Bytes of the slots that it copies from or to.
    pub(super) bytes: u64,
    pub(super) kind: TransferKind,
}

#[derive(Debug)]
pub(super) enum TransferKind {
    /// Leases the node.
    Load {
        lease: NodeId,
        request: Box<str>,
        promise: LoadPromise,
    },
    Save(SaveTransfer),
}

/// A load's times, in nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LoadPromise {
    pub(super) began_ns: u64,
    /// How long its copies are to take.
    pub(super) copy_ns: f64,
    /// The computing time that it saves, less the wait for it.
    pub(super) saved_ns: f64,
}

/// Payloads being filled.
#[derive(Debug)]
pub(super) struct SaveTransfer {
    /// The payloads of each group, front to back.
    pub(super) payloads: Vec<(NodeId, u8)>,
    /// Number of payloads, from the first on, whose copies have ended.
    pub(super) ended: usize,
    /// `Some` while slots are still being reserved.
    pub(super) cursor: Option<Box<SaveCursor>>,
}

impl TransferState {
    pub(super) fn is_load(&self) -> bool {
        matches!(self.kind, TransferKind::Load { .. })
    }
}

/// Sessions, requests and transfers.
///
/// Invariants: each request belongs to exactly one session, under its name; each transfer belongs to a
/// session that is open; a request's and a load's lease is a live node; the sums add up over the transfers.
#[derive(Debug, Default)]
pub(super) struct Sessions {
    sessions: SlotMap<SessionId, SessionState>,
    /// How many have been opened.
    opened: u64,
    pub(super) requests: Requests,
    transfers: SlotMap<TransferKey, TransferState>,
    sums: TransferSums,
}

impl Sessions {
    pub(super) fn open(&mut self, ns: NsId, spec: &SessionSpec) -> SessionId {
        self.opened += 1;
        self.sessions.insert(SessionState {
            ns,
            is_barred: false,
            requests: HashMap::new(),
            saved: HashMap::new(),
            dropped_tokens: spec.dropped_tokens.0,
            alignment_tokens: spec.namespace.alignment_tokens,
            leases_prefetches: spec.leases_prefetches,
            tenant_share: spec.tenant_share,
            transfers: TransferSums::default(),
            totals: SessionTotals::default(),
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

    /// How many have been opened, those that have ended included.
    pub(super) fn opened(&self) -> u64 {
        self.opened
    }

    /// All sessions, with their namespaces.
    pub(super) fn by_namespace(&self) -> impl Iterator<Item = (NsId, SessionId)> + '_ {
        self.sessions.iter().map(|(id, state)| (state.ns, id))
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

    /// The greatest share that a session of each namespace wants, in the order of the namespaces.
    pub(super) fn shares(&self) -> BTreeMap<NsId, u16> {
        let mut shares = BTreeMap::new();
        for state in self.sessions.values() {
            let share: &mut u16 = shares.entry(state.ns).or_default();
            *share = state.tenant_share.max(*share);
        }
        shares
    }

    /// Moves all sessions of one namespace to another.
    pub(super) fn move_all(&mut self, from: NsId, to: NsId) {
        let sessions = self.sessions.values_mut();
        let of_namespace = sessions.filter(|state| state.ns == from);
        of_namespace.for_each(|state| state.ns = to);
    }

    /// A session's request by its name.
    pub(super) fn request_id(&self, session: SessionId, request: &str) -> Option<RequestId> {
        self.sessions.get(session)?.requests.get(request).copied()
    }

    /// The state of a session's request, by the name of the request.
    pub(super) fn request(&self, session: SessionId, request: &str) -> Option<&RequestState> {
        let id = self.request_id(session, request)?;
        Some(&self.requests[id])
    }

    /// A session's request of that name; adds the request if there is none. `None` if there is no such session.
    pub(super) fn request_or_add(
        &mut self,
        session: SessionId,
        request: &str,
        tick: impl FnOnce() -> u64,
    ) -> Option<RequestId> {
        let state = self.sessions.get_mut(session)?;
        let id = match state.requests.entry_ref(request) {
            EntryRef::Occupied(known) => *known.get(),
            EntryRef::Vacant(unknown) => *unknown.insert(self.requests.insert(RequestState {
                session,
                tick: tick(),
                planned: Planned::default(),
                hit: 0,
                dropped_tokens: state.dropped_tokens,
                alignment_tokens: state.alignment_tokens,
                shared: Tokens(0),
                offers: BlockOffers::default(),
                has_come: request.starts_with('\0'),
                answered: Answered::default(),
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
        // A map's order differs in each process: runs of one seed would differ.
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
        let session = self.sessions.get_mut(transfer.session);
        session
            .expect("a transfer of no session")
            .transfers
            .add(&transfer);
        self.sums.add(&transfer);
        self.transfers.insert(transfer)
    }

    pub(super) fn end_transfer(&mut self, key: TransferKey, ok: bool) -> Option<TransferState> {
        let transfer = self.transfers.remove(key)?;
        if let Some(session) = self.sessions.get_mut(transfer.session) {
            session.transfers.remove(&transfer);
            let bytes = if ok { transfer.bytes } else { 0 };
            if transfer.is_load() {
                session.totals.loaded_bytes += bytes;
            } else {
                session.totals.saved_bytes += bytes;
            }
        }
        self.sums.remove(&transfer);
        Some(transfer)
    }

    /// A save under way, and its session.
    pub(super) fn save_mut(&mut self, key: TransferKey) -> Option<(SessionId, &mut SaveTransfer)> {
        let transfer = self.transfers.get_mut(key)?;
        match &mut transfer.kind {
            TransferKind::Save(save) => Some((transfer.session, save)),
            TransferKind::Load { .. } => None,
        }
    }

    /// Adds the bytes of slots that a save has reserved.
    pub(super) fn add_save_bytes(&mut self, key: TransferKey, bytes: u64) {
        let transfer = &mut self.transfers[key];
        transfer.bytes += bytes;
        let session = self.sessions.get_mut(transfer.session);
        session
            .expect("a transfer of no session")
            .transfers
            .save_bytes += bytes;
        self.sums.save_bytes += bytes;
    }

    /// Loads and saves of a session.
    pub(super) fn transfers_of(&self, session: SessionId) -> TransferSums {
        let session = self.sessions.get(session);
        session.map_or_else(TransferSums::default, |session| session.transfers)
    }

    /// Loads and saves of all sessions.
    pub(super) fn all_transfers(&self) -> TransferSums {
        self.sums
    }

    /// Transfers under way.
    pub(super) fn transfers(&self) -> impl Iterator<Item = (TransferKey, &TransferState)> {
        self.transfers.iter()
    }

    /// All sessions.
    pub(super) fn ids(&self) -> impl Iterator<Item = SessionId> {
        self.sessions.keys()
    }

    #[cfg(feature = "check")]
    pub(super) fn values(&self) -> impl Iterator<Item = &SessionState> {
        self.sessions.values()
    }
}
