//! The server's sessions: carries out the messages of clients with the engine.
//!
//! A session outlives a lost connection as long as a worker of its vLLM has the arena mapped: the worker
//! may still copy from extents that the client was told of, also for a load that the server has not heard
//! of. The client opens another session.

use std::collections::HashMap;
use std::sync::Arc;

use serde_json::{Value, json};
use undercroft_core::driver::{Driver, EngineAccess};
use undercroft_core::session::{SessionSpec, SessionToken};

use crate::protocol::{ClientMessage, ServerMessage};
use crate::stats::StatsSource;
use session::ServedSession;

mod session;

/// A message that its client may not send now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Violation;

/// All sessions, by token.
#[derive(Debug)]
pub(crate) struct ServedSessions {
    driver: Arc<Driver>,
    arena_id: u64,
    stats: StatsSource,
    sessions: HashMap<SessionToken, ServedSession>,
    lookups: u64,
}

/// A token that nobody can guess, and no other session has.
pub fn new_token() -> SessionToken {
    use std::hash::{BuildHasher, RandomState};
    // The keys of a RandomState are secret and random: no token can be guessed.
    let half = || u128::from(RandomState::new().hash_one(std::process::id()));
    SessionToken((half() << 64 | half()).max(1))
}

impl ServedSessions {
    pub(crate) fn new(driver: Arc<Driver>, arena_id: u64, stats: StatsSource) -> Self {
        Self {
            driver,
            arena_id,
            stats,
            sessions: HashMap::new(),
            lookups: 0,
        }
    }

    /// Opens a session. Returns its token, if it is open, and the reply.
    pub(crate) fn register(
        &mut self,
        spec: SessionSpec,
        info: &Value,
    ) -> (Option<SessionToken>, ServerMessage) {
        let namespace = spec.namespace.digest().to_hex();
        let opened = self.driver.enter(|engine| engine.open_session(spec));
        let refused = |reason: String| (None, ServerMessage::Refused { reason });
        let id = match opened {
            Some(Ok(id)) => id,
            Some(Err(error)) => return refused(error.to_string()),
            None => return refused("the engine has failed; see the server's log".to_owned()),
        };
        let token = new_token();
        self.sessions
            .insert(token, ServedSession::new(id, namespace));
        let reply = ServerMessage::Registered {
            session: token,
            arena_id: self.arena_id,
            info: info.to_string(),
        };
        (Some(token), reply)
    }

    /// A worker has mapped the arena for a session. False if there is no such session.
    pub(crate) fn worker_came(&mut self, token: SessionToken) -> bool {
        let session = self.sessions.get_mut(&token);
        session.map(|session| session.workers += 1).is_some()
    }

    /// A worker has let go of the arena, or its process is gone: it copies no more.
    pub(crate) fn worker_went(&mut self, token: SessionToken) {
        if let Some(session) = self.sessions.get_mut(&token) {
            session.workers -= 1;
            self.close_if_gone(token);
        }
    }

    /// The client's connection has ended.
    pub(crate) fn client_went(&mut self, token: SessionToken) {
        if let Some(session) = self.sessions.get_mut(&token) {
            session.client_went(&self.driver);
            self.close_if_gone(token);
        }
    }

    fn close_if_gone(&mut self, token: SessionToken) {
        let gone = |session: &ServedSession| !session.connected && session.workers == 0;
        if let Some(session) = self.sessions.get(&token).filter(|session| gone(session)) {
            self.driver.enter(|engine| engine.close_session(session.id));
            self.sessions.remove(&token);
        }
    }

    /// Carries out a message of a session's client, and appends the replies.
    pub(crate) fn handle(
        &mut self,
        token: SessionToken,
        message: ClientMessage<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(), Violation> {
        let session = self.sessions.get_mut(&token).ok_or(Violation)?;
        let driver = &*self.driver;
        match message {
            ClientMessage::Lookup(lookup) => {
                self.lookups += 1;
                session.lookup(driver, lookup, out)?;
            }
            ClientMessage::Demand { request } => session.demand(request),
            ClientMessage::EndLookup { request } => session.end_lookup(driver, request),
            ClientMessage::FinishRequest { request } => session.finish_request(driver, request),
            ClientMessage::BeginLoad {
                request,
                transfer,
                computed,
                external,
            } => session.begin_load(driver, request, transfer, (computed, external))?,
            ClientMessage::BeginSave(save) => session.begin_save(driver, save, out)?,
            ClientMessage::EndTransfer { transfer, ok } => {
                session.end_transfer(driver, transfer, ok);
            }
            ClientMessage::Reset { reset } => {
                session.reset(driver, reset);
                session.answer_resets(driver, out);
            }
            ClientMessage::Ping => {
                let stats = self.stats.take().to_string();
                ServerMessage::Pong { stats }.append_to(out);
            }
            ClientMessage::Register { .. } | ClientMessage::Status => return Err(Violation),
        }
        Ok(())
    }

    /// Number of lookups and resets that are pending: the engine is to be asked about them again soon.
    pub(crate) fn pending(&self) -> usize {
        self.sessions.values().map(ServedSession::pending).sum()
    }

    /// Tokens of the sessions with lookups or resets that are pending.
    pub(crate) fn with_pending(&self) -> Vec<SessionToken> {
        let sessions = self.sessions.iter();
        let sessions = sessions.filter(|(_, session)| session.pending() > 0);
        sessions.map(|(&token, _)| token).collect()
    }

    /// Appends the answers of a session's pending lookups and resets that have come.
    pub(crate) fn answer_pending(&mut self, token: SessionToken, out: &mut Vec<u8>) {
        if let Some(session) = self.sessions.get_mut(&token) {
            session.answer_lookups(&self.driver, out);
            session.answer_resets(&self.driver, out);
        }
    }

    /// Lookups since the start.
    pub(crate) fn lookups(&self) -> u64 {
        self.lookups
    }

    /// Every session, for `undercroft status`.
    pub(crate) fn describe(&self) -> Value {
        let one = |session: &ServedSession| {
            let counts = self
                .driver
                .enter(|engine| engine.session_counts(session.id));
            let [lookups, pending, loads, saves] = counts.unwrap_or_default();
            json!({
                "namespace": session.namespace, "connected": session.connected,
                "workers": session.workers, "lookups": lookups, "pending": pending,
                "loads": loads, "saves": saves,
            })
        };
        self.sessions.values().map(one).collect()
    }
}
