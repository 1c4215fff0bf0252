//! Resets, which drop everything of a namespace durably, and the private sessions that follow them.

use super::coordinator::Engine;
use super::sessions::SessionId;
use crate::forest::NsId;

impl Engine {
    /// Drops everything of a session's namespace. No lookup finds any of it when this returns; none does
    /// after a restart either once [`Engine::reset_pending`] and [`Engine::reset_failed`] are false.
    ///
    /// A reset usually follows a change of the session's weights, which the description of the namespace may not show.
    /// So the session goes on by itself, see [`Engine::make_private`], and its hits end. Another session keeps a hit of
    /// an earlier answer: its weights are those that the description says. False if there is no such session.
    pub fn reset(&mut self, session: SessionId) -> bool {
        let Some(ns) = self.sessions.get(session).map(|state| state.ns) else {
            return false;
        };
        // The weights may be others from now on: an earlier hit must not be loaded.
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

    /// From now on a session finds the blocks that it has saved itself. No other session and no
    /// restart finds these: the session's weights are not those that the description says. Ends its
    /// lookups. Idempotent.
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
        // The payloads fitted when the session was opened; there may be too many namespaces, the session then keeps its
        // namespace, which is volatile and empty.
        let Ok(private) = private else {
            // Other hosts must not get these blocks.
            if let Some(remote) = &mut self.remote {
                remote.bar(self.namespaces.instance(ns));
            }
            return;
        };
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
