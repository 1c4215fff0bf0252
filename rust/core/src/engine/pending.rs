//! Requests whose lookups are pending, read without entering the engine.

use crate::forest::NsId;
use crate::session::{Lookup, Priority, Tokens};

use super::coordinator::Engine;
use super::fetch::LastAnswer;
use super::ids::{RequestId, SessionId};

impl Engine {
    /// The answer [`Lookup::Pending`], if [`Engine::lookup`] would return it again. Changes nothing, so that
    /// many pending requests cost little.
    pub fn still_pending(
        &self,
        session: SessionId,
        request: &str,
        computed: Tokens,
        priority: Priority,
    ) -> Option<Lookup> {
        let ns = self.sessions.get(session)?.ns;
        let id = self.sessions.request_id(session, request)?;
        let (state, share) = (&self.sessions.requests[id], &self.shares[id]);
        let is_promoting = share.waits.disk.is_some();
        let is_pending = match priority {
            Priority::Prefetch => is_promoting || self.waits_for_flight(id, ns, computed),
            Priority::Demand => {
                let gain = self.promised(id, ns, 0).saturating_sub(computed.0);
                // With more computed tokens, computing may serve the request, too: the wait is then weighed against it.
                let needs_hit = state.planned.min > computed.0;
                let is_same = needs_hit == state.planned.needs_hit;
                let has_failed = share.answer == LastAnswer::Failed;
                let waits = share.waits.since_ns.is_some() && !has_failed && is_same;
                waits
                    && match is_promoting {
                        true => gain > 0 && !self.is_late(id, gain),
                        false => self.waits_for_flight(id, ns, computed),
                    }
            }
        };
        let shared = state.shared;
        is_pending.then_some(Lookup::Pending { shared })
    }

    /// Where a request's promotion ends if all reads succeed, in tokens; `otherwise` without a promotion.
    pub(super) fn promised(&self, id: RequestId, ns: NsId, otherwise: u32) -> u32 {
        let promotion = self.shares[id].waits.disk.as_ref();
        promotion.map_or(otherwise, |promotion| {
            promotion.boundary() * self.residency.hash_block_size(ns)
        })
    }

    /// Whether a demanded lookup would be pending: the request waits for a promotion or a flight.
    pub fn is_promoting(&self, session: SessionId, request: &str) -> bool {
        let ns = self.sessions.get(session).map(|session| session.ns);
        let id = self.sessions.request_id(session, request);
        ns.zip(id).is_some_and(|(ns, id)| {
            let share = &self.shares[id];
            let gain = self.promised(id, ns, 0);
            let is_promoting = share.waits.disk.is_some() && !self.is_late(id, gain);
            let computed = Tokens(self.sessions.requests[id].planned.computed);
            share.answer != LastAnswer::Failed
                && (is_promoting || self.waits_for_flight(id, ns, computed))
        })
    }
}
