//! Reset, which drops everything of a namespace, durably; and sessions that go on by themselves.

use super::coordinator::Engine;
use super::sessions::SessionId;
use crate::forest::NsId;

/// Namespaces that an entry clears at most.
const CLEARED: usize = 4;

impl Engine {
    /// Drops everything of a session's namespace. No lookup finds any of it when this returns; none does
    /// after a restart either once [`Engine::reset_pending`] and [`Engine::reset_failed`] are false.
    ///
    /// A reset usually follows a change of the session's weights, which the description of the namespace
    /// may not show. So the session goes on by itself, see [`Engine::make_private`], and its hits end. Another
    /// session keeps a hit that it was told of before: its weights are those that the description says.
    /// False if there is no such session.
    pub fn reset(&mut self, session: SessionId) -> bool {
        let Some(ns) = self.sessions.get(session).map(|state| state.ns) else {
            return false;
        };
        // The weights may be others from now on: a hit of before must not be loaded.
        for request in self.sessions.requests_of(session) {
            self.release_hit(request);
        }
        let is_unused = |ns| !self.sessions.uses(ns);
        let new = self
            .namespaces
            .begin_new_life(ns, &mut self.residency, is_unused);
        self.sessions.move_all(ns, new);
        if !self.namespaces.is_private(new) {
            self.separate(session, new);
        }
        true
    }

    /// Drops everything of a few of the namespaces whose digests begin with `prefix`, and returns of how many: to be
    /// called until that is 0. Then no lookup finds any of it; after a restart none does once
    /// [`Engine::reset_pending`] and [`Engine::reset_failed`] are false.
    ///
    /// Unlike after [`Engine::reset`], the weights are those of before: sessions go on sharing, and keep the hits that
    /// they were told of.
    pub fn clear(&mut self, prefix: &str) -> usize {
        let forest = self.residency.forest();
        let is_meant = |&ns: &NsId| {
            // One that has ended has nodes until they are removed.
            let is_open = !self.namespaces.is_private(ns) || self.sessions.uses(ns);
            is_open
                && forest.has_nodes(ns)
                && self.namespaces.digest(ns).to_hex().starts_with(prefix)
        };
        let some: Vec<NsId> = forest.namespaces().filter(is_meant).take(CLEARED).collect();
        for &ns in &some {
            let is_unused = |ns| !self.sessions.uses(ns);
            let new = self
                .namespaces
                .begin_new_life(ns, &mut self.residency, is_unused);
            self.sessions.move_all(ns, new);
        }
        some.len()
    }

    /// From now on a session finds what it has saved itself, and nobody else finds that, nor does a
    /// restart: its weights are not those that the description says. Ends its lookups. Idempotent.
    pub fn make_private(&mut self, session: SessionId) {
        let ns = self.sessions.get(session).map(|state| state.ns);
        if let Some(ns) = ns.filter(|&ns| !self.namespaces.is_private(ns)) {
            self.end_lookups(session);
            self.separate(session, ns);
        }
    }

    /// Gives a session of the shared namespace `ns` one of its own.
    fn separate(&mut self, session: SessionId, ns: NsId) {
        let is_unused = |ns| !self.sessions.uses(ns);
        let private = self
            .namespaces
            .add_private(ns, &mut self.residency, is_unused);
        // The payloads fitted when the session was opened; there may be too many namespaces, and then
        // the session stays where it is: the namespace is volatile, and empty.
        let Ok(private) = private else { return };
        let state = self.sessions.get_mut(session);
        state.expect("the caller has found the session").ns = private;
    }

    /// Whether a reset is not durable yet, and may be soon.
    pub fn reset_pending(&self) -> bool {
        self.namespaces.reset_pending()
    }

    /// Whether a reset could not be made durable. It is tried again while the process lives.
    pub fn reset_failed(&self) -> bool {
        self.namespaces.reset_failed()
    }
}
