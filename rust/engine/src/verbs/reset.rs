//! Resets, which drop everything of a namespace durably, and the private sessions that follow them.

use undercroft_contract::namespace::NamespaceSpec;

use crate::forest::NsId;
use crate::metrics::Order;

use super::super::ids::SessionId;
use super::engine::Engine;

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
        self.count_order(Order::Reset);
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
        self.settle_shares();
        self.end_outlived_flights();
        true
    }

    /// Moves a session to a private namespace: from now on the session finds only the blocks that it saves itself, and
    /// no other session and no restart finds these. Its weights may not match the description. Ends its lookups.
    /// If there are too many namespaces, the session finds and saves nothing any more. Idempotent.
    pub fn make_private(&mut self, session: SessionId) {
        let ns = self.sessions.get(session).map(|state| state.ns);
        if let Some(ns) = ns.filter(|&ns| !self.namespaces.is_private(ns)) {
            self.end_lookups(session);
            self.separate(session, ns);
            self.settle_shares();
        }
    }

    /// The weights of a session change, see [`Session::change_weights`](undercroft_contract::session::Session::change_weights). If
    /// the namespace of `description` cannot be opened, the session gets a private namespace.
    pub fn change_weights(&mut self, session: SessionId, description: Option<&str>) {
        let Some(old) = self.sessions.get(session).map(|state| state.ns) else {
            return;
        };
        let Some(description) = description else {
            self.make_private(session);
            return;
        };
        self.end_lookups(session);
        let spec = NamespaceSpec {
            description: description.to_owned(),
            ..self.residency.spec(old).clone()
        };
        let used_s = self.unix_s();
        let is_unused = |ns| !self.sessions.uses(ns);
        let opened = self
            .namespaces
            .register(spec, &mut self.residency, used_s, is_unused);
        let Ok(new) = opened else {
            self.make_private(session);
            return;
        };
        // Another namespace may have made room.
        self.end_outlived_flights();
        if new != old {
            let state = self.sessions.get_mut(session);
            let state = state.expect("the session was found above");
            (state.ns, state.is_barred) = (new, false);
            self.leave_namespace(old);
            self.settle_shares();
        }
    }

    /// Gives a session of the shared namespace `ns` a private namespace.
    fn separate(&mut self, session: SessionId, ns: NsId) {
        let is_unused = |ns| !self.sessions.uses(ns);
        let private = self
            .namespaces
            .add_private(ns, &mut self.residency, is_unused);
        let state = self.sessions.get_mut(session);
        let state = state.expect("the caller has found the session");
        // The payloads fitted when the session was opened, but there may be too many namespaces.
        match private {
            Ok(private) => state.ns = private,
            Err(_) => state.is_barred = true,
        }
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

#[cfg(test)]
mod tests {
    use undercroft_contract::key::BlockHash;
    use undercroft_contract::namespace::GroupKind;
    use undercroft_contract::session::{Lookup, LookupRequest, SaveRequest, Tokens};

    use super::*;
    use crate::EngineConfig;

    #[test]
    fn a_session_without_a_namespace_finds_and_saves_nothing() {
        let mut engine = Engine::new(EngineConfig::new(1 << 20));
        let spec = NamespaceSpec::uniform("weights", 16, &[(GroupKind::Full, 4096)]);
        let hashes = vec![BlockHash::new(&[7; 32]).expect("32 bytes")];
        let saved = SaveRequest::new("a", &hashes, Tokens(16));
        let session = engine.open_session(spec).expect("a payload fits");
        let granted = engine.begin_save(session, &saved).transfer;
        engine.end_transfer(granted.expect("there is room").id, true);
        let lookup = LookupRequest::new("b", &hashes);
        assert!(matches!(engine.lookup(session, &lookup), Lookup::Hit(_)));
        engine.sessions.get_mut(session).expect("open").is_barred = true;
        assert_eq!(engine.lookup(session, &lookup), Lookup::NOTHING);
        assert_eq!(engine.start_save(session, &saved), None);
        // Weights that have a namespace of their own are cached again.
        engine.change_weights(session, Some("other weights"));
        assert_eq!(engine.lookup(session, &lookup), Lookup::NOTHING);
        assert!(engine.start_save(session, &saved).is_some());
    }
}
