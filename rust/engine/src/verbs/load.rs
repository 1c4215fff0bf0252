//! Loads: workers copy a hit's payloads from the arena to the device.

use slotmap::KeyData;
use undercroft_contract::session::{
    Brought, GiveUp, Load, SessionToken, Sources, Tokens, TransferEnd, TransferId,
};

use crate::forest::{NONE, NodeId};
use crate::metrics::Counters;

use super::super::fetch::LastAnswer;
use super::super::ids::{RequestId, SessionId, TransferKey, id_of};
use super::super::sessions::{TransferKind, TransferState};
use super::engine::Engine;

impl Engine {
    /// Begins the load of `external` tokens after `computed`, see
    /// [`Session::begin_load`](undercroft_contract::session::Session::begin_load). The caller adds the session's token.
    ///
    /// The lease keeps the payloads, so a load may begin although the prefix has left the index since.
    pub fn begin_load(
        &mut self,
        session: SessionId,
        request: &str,
        computed: Tokens,
        external: Tokens,
    ) -> Option<Load> {
        let load = self.try_begin_load(session, request, computed, external);
        if load.is_none() {
            self.counters.load_failures += 1;
        }
        load
    }

    /// The part of a request's prompt that was brought into host memory for it; nothing for an unknown request.
    pub fn brought(&self, session: SessionId, request: &str) -> Brought {
        let Some(ns) = self.sessions.get(session).map(|session| session.ns) else {
            return Brought::default();
        };
        let id = self.sessions.request_id(session, request);
        id.map_or_else(Brought::default, |id| {
            self.shares[id].brought(self.residency.hash_block_size(ns))
        })
    }

    fn try_begin_load(
        &mut self,
        session: SessionId,
        request: &str,
        computed: Tokens,
        external: Tokens,
    ) -> Option<Load> {
        let sources = Sources::of(computed, external, self.brought(session, request));
        let id = self.sessions.request_id(session, request)?;
        let (target, payloads) = self.load_of(id, computed, external)?;
        let extents = self.residency.extents(&payloads);
        let bytes = self.residency.slot_bytes_of(&payloads);
        let key = self.start_load((id, request), (target, bytes), (computed, external));
        Some(Load {
            id: id_of(key),
            session: SessionToken::default(),
            extents,
            sources,
        })
    }

    /// Starts the load of a request's hit up to `target`, which leases the payloads instead of the request.
    pub(super) fn start_load(
        &mut self,
        (id, request): (RequestId, &str),
        (target, bytes): (NodeId, u64),
        (computed, external): (Tokens, Tokens),
    ) -> TransferKey {
        let state = &self.sessions.requests[id];
        let (session, promise) = (state.session, self.promise(state, computed, external));
        self.note_load(id);
        let hash_block_size = self.residency.spec_of(target).hash_block_size;
        self.count_remote_tokens(id, hash_block_size, (computed, external));
        // The load's lease begins before the request's ends: a promotion may depend on the latter.
        self.residency.pin_hit(target);
        self.release_hit(id);
        let kind = TransferKind::Load {
            lease: target,
            request: request.into(),
            promise,
        };
        self.sessions.begin_transfer(TransferState {
            session,
            bytes,
            kind,
        })
    }

    /// The node at the end of a load, and the load's payloads; `None` unless the request's hit covers the load.
    fn load_of(
        &self,
        id: RequestId,
        computed: Tokens,
        external: Tokens,
    ) -> Option<(NodeId, Vec<(NodeId, u8)>)> {
        let lease = self.shares[id].lease;
        if lease == NONE {
            return None;
        }
        let spec = self.residency.spec_of(lease);
        let end = computed.0.checked_add(external.0)?;
        let (boundary, local) = (
            end / spec.hash_block_size,
            computed.0 / spec.hash_block_size,
        );
        if end % spec.hash_block_size != 0 || !spec.may_end(boundary) {
            return None;
        }
        if boundary > self.residency.node(lease).depth || boundary <= local {
            return None;
        }
        let target = self.residency.forest().ancestor(lease, boundary);
        let payloads = self.residency.needed_payloads(target, local);
        // A promotion may still be under way.
        let all_here = self.residency.all_in_host(&payloads);
        let is_verified = !self.config.verify_host || self.is_verified(id, target, local);
        (all_here && is_verified).then_some((target, payloads))
    }

    /// Whether the payloads of a load after `local` hash blocks, up to `target`, were compared with
    /// their checksums for the request's hit.
    fn is_verified(&self, id: RequestId, target: NodeId, local: u32) -> bool {
        let Some(verified) = self.shares[id].verified else {
            return false;
        };
        let node = self.residency.node(target);
        let spec = self.residency.spec(node.ns);
        let verified_depth = self.residency.node(verified.node).depth;
        node.depth <= verified_depth
            && node.groups().map(usize::from).all(|group| {
                let needed = spec.needed_after(group, node.depth).max(local);
                let compared = spec.needed_after(group, verified_depth).max(verified.local);
                compared <= needed
            })
    }

    /// Ends a transfer whose copies all ranks have ended. Unknown ids are ignored: an acknowledgement
    /// may come twice.
    pub fn end_transfer(&mut self, id: TransferId, end: impl Into<TransferEnd>) {
        let end = end.into();
        while !self.step_end_of_transfer(id, end, usize::MAX) {}
    }

    /// Continues [`Engine::end_transfer`] for at most `blocks` blocks. Returns whether the
    /// transfer has ended.
    pub fn step_end_of_transfer(
        &mut self,
        id: TransferId,
        end: impl Into<TransferEnd>,
        blocks: usize,
    ) -> bool {
        let end = end.into();
        let ok = end == TransferEnd::Done;
        let key = TransferKey::from(KeyData::from_ffi(id.0));
        if let Some((_, save)) = self.sessions.save_mut(key) {
            let cursor = save.cursor.take();
            let upto = save.payloads.len().min(save.ended.saturating_add(blocks));
            let payloads = save.payloads[save.ended..upto].to_vec();
            save.ended = upto;
            let is_last = upto == save.payloads.len();
            let tail = cursor.map_or(NONE, |cursor| cursor.tail);
            self.end_saved(&payloads, ok);
            if tail != NONE {
                self.residency.unpin(tail);
            }
            if is_last {
                count_end(&mut self.counters, false, end);
                self.sessions.end_transfer(key, ok);
            }
            return is_last;
        }
        let Some(transfer) = self.sessions.end_transfer(key, ok) else {
            return true;
        };
        let TransferKind::Load {
            lease,
            request,
            promise,
        } = transfer.kind
        else {
            return true;
        };
        self.residency.unpin_hit(lease);
        count_end(&mut self.counters, true, end);
        if ok {
            self.load_ended(transfer.session, transfer.bytes, &promise);
        }
        if end == TransferEnd::Failed {
            let request = self.sessions.request_id(transfer.session, &request);
            if let Some(request) = request {
                self.shares[request].answer = LastAnswer::Failed;
                // The request may have looked up again meanwhile. Its lookups are misses from now on: a promotion would
                // only hold a part of the budget.
                self.release_hit(request);
            }
        }
        true
    }
}

/// Counts a load or a save that has ended, unless it has succeeded.
fn count_end(counters: &mut Counters, is_load: bool, end: TransferEnd) {
    let counter = match (is_load, end) {
        (_, TransferEnd::Done) => return,
        (true, TransferEnd::Failed) => &mut counters.load_failures,
        (false, TransferEnd::Failed) => &mut counters.save_failures,
        (true, TransferEnd::GivenUp(GiveUp::Closed)) => &mut counters.given_up_loads_closed,
        // No client gives up a load for other reasons.
        (true, TransferEnd::GivenUp(_)) => &mut counters.given_up_loads_reset,
        (false, TransferEnd::GivenUp(GiveUp::Reset)) => &mut counters.given_up_saves_reset,
        (false, TransferEnd::GivenUp(GiveUp::Weights)) => &mut counters.given_up_saves_weights,
        (false, TransferEnd::GivenUp(GiveUp::Closed)) => &mut counters.given_up_saves_closed,
        (false, TransferEnd::GivenUp(GiveUp::Retry)) => &mut counters.given_up_saves_retry,
    };
    *counter += 1;
}
