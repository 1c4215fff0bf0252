//! Resets, which drop everything of a namespace durably, and the private sessions that follow them.

use super::coordinator::Engine;
use super::sessions::SessionId;
use crate::forest::NsId;

impl Engine {
    /// Drops all blocks of a session's namespace. From now on no lookup finds any of them. No restart finds them once
    /// [`Engine::reset_pending`] and [`Engine::reset_failed`] are false.
    ///
    /// A reset usually follows a change of the session's weights, which the description of the namespace may not show.
    /// So the session gets a private namespace, see [`Engine::make_private`], and its hits end. Another session keeps a
    /// hit of an earlier answer: the description still matches its weights. False if there is no such session.
    pub fn reset(&mut self, session: SessionId) -> bool {
        let Some(ns) = self.sessions.get(session).map(|state| state.ns) else {
            return false;
        };
        // The weights may change from now on: an earlier hit must not be loaded.
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
        self.end_outlived_flights();
        true
    }

    /// Moves a session to a private namespace: from now on the session finds only the blocks that it saves itself, and
    /// no other session and no restart finds these. Its weights may not match the description. Ends its lookups.
    /// Idempotent.
    pub fn make_private(&mut self, session: SessionId) {
        let ns = self.sessions.get(session).map(|state| state.ns);
        if let Some(ns) = ns.filter(|&ns| !self.namespaces.is_private(ns)) {
            self.end_lookups(session);
            self.separate(session, ns);
        }
    }

    /// Gives a session of the shared namespace `ns` a private namespace.
    fn separate(&mut self, session: SessionId, ns: NsId) {
        let is_unused = |ns| !self.sessions.uses(ns);
        let private = self
            .namespaces
            .add_private(ns, &mut self.residency, is_unused);
        // The payloads fitted when the session was opened, but there may be too many namespaces. The session then keeps
        // its namespace, which is volatile and empty.
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

    /// Whether a reset is not durable yet, and the writes that make it durable have not failed.
    pub fn reset_pending(&self) -> bool {
        self.namespaces.reset_pending()
    }

    /// Whether a reset could not be made durable. It is tried again while the process lives.
    pub fn reset_failed(&self) -> bool {
        self.namespaces.reset_failed()
    }
}
