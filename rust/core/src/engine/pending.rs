//! Requests whose lookups are pending, read without entering the engine.

use crate::forest::NsId;
use crate::session::{Lookup, Priority, Tokens};

use super::coordinator::Engine;
use super::ids::SessionId;
use super::requests::RequestState;

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
        let state = self.sessions.request(session, request)?;
        let is_promoting = state.promotions.active.is_some();
        let is_pending = match priority {
            Priority::Prefetch => is_promoting || self.waits_for_flight(state, ns, computed),
            Priority::Demand => {
                let gain = self.promised(state, ns, 0).saturating_sub(computed.0);
                // With more computed tokens, computing may serve the request, too: the wait is then weighed against it.
                let needs_hit = state.planned.min > computed.0;
                let is_same = needs_hit == state.planned.needs_hit;
                let waits = state.demanded_ns.is_some() && !state.failed && is_same;
                waits
                    && match is_promoting {
                        true => gain > 0 && !self.is_late(state, gain),
                        false => self.waits_for_flight(state, ns, computed),
                    }
            }
        };
        let shared = state.shared;
        is_pending.then_some(Lookup::Pending { shared })
    }

    /// Where a request's promotion ends if all reads succeed, in tokens; `otherwise` without a promotion.
    pub(super) fn promised(&self, state: &RequestState, ns: NsId, otherwise: u32) -> u32 {
        let promotion = state.promotions.active.as_ref();
        promotion.map_or(otherwise, |promotion| {
            promotion.boundary() * self.residency.hash_block_size(ns)
        })
    }

    /// Whether a demanded lookup would be pending: the request waits for a promotion or a flight.
    pub fn is_promoting(&self, session: SessionId, request: &str) -> bool {
        let ns = self.sessions.get(session).map(|session| session.ns);
        let state = self.sessions.request(session, request);
        ns.zip(state).is_some_and(|(ns, state)| {
            let gain = self.promised(state, ns, 0);
            let is_promoting = state.promotions.active.is_some() && !self.is_late(state, gain);
            !state.failed
                && (is_promoting
                    || self.waits_for_flight(state, ns, Tokens(state.planned.computed)))
        })
    }
}
