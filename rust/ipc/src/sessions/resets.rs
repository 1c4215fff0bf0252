//! Resets of a session's client.

use serde_json::json;
use undercroft_driver::{Driver, EngineAccess};
use undercroft_engine::metrics::Order;

use super::Violation;
use super::state::ServedSession;
use crate::orders::tell;
use crate::protocol::ServerMessage;

/// Most resets of a session that are pending. A vLLM waits at most a second for each.
const RESETS_MAX: usize = 1024;

impl ServedSession {
    pub(super) fn reset(&mut self, driver: &Driver, reset: u64) -> Result<(), Violation> {
        if self.resets.len() >= RESETS_MAX {
            return Err(Violation);
        }
        let begun = driver.enter(|engine| engine.reset(self.id));
        let of = json!({"namespace": self.namespace.get(..12)});
        tell(self.caller, Order::Reset, &of, &json!({"begun": begun}));
        // Its namespace is private from now on.
        self.leave_scope();
        self.resets.push(reset);
        Ok(())
    }

    /// The weights of the client's vLLM change.
    pub(super) fn change_weights(&mut self, driver: &Driver, description: Option<&str>) {
        let named = driver.enter(|engine| {
            engine.change_weights(self.id, description);
            engine.namespace_of(self.id)
        });
        if let Some(digest) = named.flatten() {
            self.namespace = digest.into();
        }
    }

    /// Appends the answers of all resets, if none is pending any more.
    pub(super) fn answer_resets(&mut self, driver: &Driver, out: &mut Vec<u8>) {
        if self.resets.is_empty() {
            return;
        }
        let state = driver.read(|engine| (engine.reset_pending(), !engine.reset_failed()));
        let (pending, ok) = state.unwrap_or((false, false));
        if !pending {
            for reset in self.resets.drain(..) {
                ServerMessage::Reset { reset, ok }.append_to(out);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use undercroft_contract::log;
    use undercroft_contract::log::Level;
    use undercroft_contract::namespace::{GroupKind, NamespaceSpec};
    use undercroft_contract::session::SessionSpec;
    use undercroft_engine::{ChainBytes, Engine, EngineConfig};
    use undercroft_io::arena::Arena;
    use undercroft_io::{IoEngineChoice, open_io_engine};

    use super::*;
    use crate::orders::Caller;

    fn session() -> (Driver, ServedSession) {
        let arena = Arc::new(Arena::create(1 << 20).unwrap());
        let (io, _) = open_io_engine(IoEngineChoice::ThreadPool, 4, arena, Vec::new()).unwrap();
        let driver = Driver::start(Engine::new(EngineConfig::new(1 << 20)), io).unwrap();
        let namespace = NamespaceSpec::uniform("", 16, &[(GroupKind::Full, 4096)]);
        let id = driver.enter(|engine| engine.open_session(SessionSpec::from(namespace)));
        let chain_bytes = ChainBytes::of(16, Vec::new());
        let namespace = "0123456789abcdef";
        let session = ServedSession::new(id.unwrap().unwrap(), namespace, false, chain_bytes);
        (driver, session)
    }

    #[test]
    fn a_reset_is_an_order_of_the_clients_process() {
        let (driver, session) = session();
        let (ours, _theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let mut session = session.of(Caller::at(&ours));
        session.reset(&driver, 1).unwrap();
        let lines = log::take();
        let line = format!(
            "undercroft: order reset {{\"namespace\":\"0123456789ab\"}} by uid {}, pid {}: {{\"begun\":true}}",
            rustix::process::geteuid().as_raw(),
            std::process::id()
        );
        assert!(lines.contains(&(Level::Info, line)), "{lines:?}");
        assert_eq!(
            driver.read(|engine| engine.counters().orders_reset),
            Some(1)
        );
    }

    #[test]
    fn resets_that_are_pending_are_bounded() {
        let (driver, mut session) = session();
        for reset in 0..RESETS_MAX as u64 {
            assert_eq!(session.reset(&driver, reset), Ok(()));
        }
        assert_eq!(session.reset(&driver, 0), Err(Violation));
        let mut out = Vec::new();
        session.answer_resets(&driver, &mut out);
        assert!(!out.is_empty());
        assert_eq!(session.reset(&driver, 0), Ok(()));
    }
}
