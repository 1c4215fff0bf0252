//! The server's sessions: carries out the messages of clients with the engine.
//!
//! A session outlives a lost connection while a worker of its vLLM has the arena mapped. The worker may still copy from
//! extents that the client has received, even for a load that the server does not know of. The client opens another
//! session.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use serde_json::{Value, json};
use undercroft_contract::session::{SessionSpec, SessionToken, TransferEnd};
use undercroft_contract::tier::TENANT_SHARE_WHOLE;
use undercroft_driver::{Driver, EngineAccess};
use undercroft_engine::{SessionId, SessionUsage};

use crate::budget::Budget;
use crate::frame::HEADER_BYTES;
use crate::orders::Caller;
use crate::protocol::{ClientMessage, ServerMessage};
use crate::stats::{Report, StatsSource};
use held::HeldChains;
pub(crate) use session::ANSWERS_MAX;
use state::{Budgets, ServedSession};

mod held;
mod hints;
mod holds;
mod job;
mod request;
mod resets;
mod session;
mod state;
mod transfers;

/// Most bytes of all clients' hashes, and of each client's hashes.
const HASHES_LIMIT: u64 = 96 << 20;
const HASHES_FLOOR: u64 = 1 << 20;

/// Most bytes of the extents that are being collected for all sessions, and for each session.
const ANSWERS_LIMIT: u64 = 32 << 20;
const ANSWERS_FLOOR: u64 = 256 << 10;

/// A message that the client may not send now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Violation;

/// All sessions, by token.
#[derive(Debug)]
pub(crate) struct ServedSessions {
    driver: Arc<Driver>,
    arena_id: u64,
    stats: StatsSource,
    /// The statistics, for clients.
    report: Report,
    sessions: HashMap<SessionToken, ServedSession>,
    budgets: Budgets,
    /// Sessions whose lookups are being ended, because their clients' connections have ended.
    ending: VecDeque<SessionToken>,
    lookups: u64,
}

/// A token that cannot be guessed, and that no other session has.
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
            report: Report::default(),
            sessions: HashMap::new(),
            budgets: Budgets {
                hashes: Budget::new(HASHES_LIMIT, HASHES_FLOOR),
                answers: Budget::new(ANSWERS_LIMIT, ANSWERS_FLOOR),
                held: HeldChains::default(),
            },
            ending: VecDeque::new(),
            lookups: 0,
        }
    }

    /// Opens a session. Returns its token, if it is open, and the reply.
    pub(crate) fn register(
        &mut self,
        spec: SessionSpec,
        caller: Caller,
        info: &Value,
    ) -> (Option<SessionToken>, ServerMessage) {
        let (namespace, private) = (spec.namespace.digest().to_hex(), spec.private);
        let opened = self.driver.enter(|engine| {
            let opened = engine.open_session(spec);
            opened.map(|id| (id, engine.chain_bytes(id)))
        });
        let refused = |reason: String| (None, ServerMessage::Refused { reason });
        let failed = || refused("the engine has failed; see the server's log".to_owned());
        let (id, chain_bytes) = match opened {
            Some(Ok((id, Some(chain_bytes)))) => (id, chain_bytes),
            Some(Err(error)) => return refused(error.to_string()),
            Some(Ok((_, None))) | None => return failed(),
        };
        let token = new_token();
        let session = ServedSession::new(id, &namespace, private, chain_bytes).of(caller);
        self.sessions.insert(token, session);
        let reply = ServerMessage::Registered {
            session: token,
            arena_id: self.arena_id,
            info: info.to_string(),
        };
        (Some(token), reply)
    }

    /// A worker has mapped the arena for a session. Returns false if there is no such session.
    pub(crate) fn worker_came(&mut self, token: SessionToken) -> bool {
        // A session without a client and without workers is being ended.
        let is_open = |session: &&mut ServedSession| session.connected || session.workers > 0;
        let session = self.sessions.get_mut(&token).filter(is_open);
        session.map(|session| session.workers += 1).is_some()
    }

    /// A worker has released the arena, or its process has ended: the worker copies no more.
    pub(crate) fn worker_went(&mut self, token: SessionToken) {
        if let Some(session) = self.sessions.get_mut(&token) {
            session.workers -= 1;
            self.close_if_gone(token);
        }
    }

    /// The client's connection has ended.
    pub(crate) fn client_went(&mut self, token: SessionToken) {
        if let Some(session) = self.sessions.get_mut(&token) {
            session.client_went(&mut self.budgets);
            self.ending.push_back(token);
        }
    }

    /// A session without a client has lost a worker.
    fn close_if_gone(&mut self, token: SessionToken) {
        let gone = |session: &ServedSession| !session.connected && session.workers == 0;
        if self.sessions.get(&token).is_some_and(gone) && !self.ending.contains(&token) {
            self.ending.push_back(token);
        }
    }

    /// Whether sessions are being ended.
    pub(crate) fn is_ending(&self) -> bool {
        !self.ending.is_empty()
    }

    /// Continues to end a session whose client's connection has ended: its lookups at once, the rest and the session
    /// itself when no worker copies any more.
    pub(crate) fn step_end(&mut self) {
        let Some(token) = self.ending.pop_front() else {
            return;
        };
        let Some(session) = self.sessions.get_mut(&token) else {
            return;
        };
        let all = session.workers == 0;
        if !session.step_end_of_client(&self.driver, &mut self.budgets, all) {
            self.ending.push_back(token);
        } else if all {
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
        let (driver, budgets) = (&*self.driver, &mut self.budgets);
        match message {
            ClientMessage::Lookup(lookup) => {
                self.lookups += 1;
                session.lookup(driver, &lookup, budgets, out)?;
            }
            ClientMessage::Demand { request, queued } => session.demand(request, queued),
            ClientMessage::ReportSteps { steps } => {
                driver.enter(|engine| engine.report_steps(session.id, &steps));
            }
            ClientMessage::EndLookup { request } => session.end_lookup(driver, request, budgets),
            ClientMessage::FinishRequest { request, turn_end } => {
                session.finish_request(driver, (request, turn_end), budgets);
            }
            ClientMessage::BeginLoad {
                request,
                transfer,
                computed,
                external,
            } => session.begin_load(driver, request, transfer, (computed, external))?,
            ClientMessage::BeginSave(save) => session.begin_save(driver, save, budgets, out)?,
            ClientMessage::EndTransfer { transfer, ok } => {
                session.end_transfer(driver, transfer, ok.into(), budgets);
            }
            ClientMessage::GiveUp { transfer, reason } => {
                session.end_transfer(driver, transfer, TransferEnd::GivenUp(reason), budgets);
            }
            ClientMessage::ChangeWeights { description } => {
                session.change_weights(driver, description.as_deref());
            }
            ClientMessage::Reset { reset } => {
                session.reset(driver, reset)?;
                session.answer_resets(driver, out);
            }
            ClientMessage::Hint(hint) => session.take_hint(driver, hint, budgets, out)?,
            ClientMessage::TakeEvents { restart } => session.take_events(driver, restart, out),
            ClientMessage::Ping => {
                let stats = self.report.take(|| self.stats.take());
                ServerMessage::Pong { stats }.append_to(out);
            }
            // A connection registers once, and has a session or asks for an operator.
            ClientMessage::Register { .. } | ClientMessage::Status | ClientMessage::Operate(_) => {
                return Err(Violation);
            }
        }
        Ok(())
    }

    /// Like [`ServedSessions::handle`], for a long frame, whose hashes are copied in steps.
    pub(crate) fn handle_long(
        &mut self,
        token: SessionToken,
        frame: Vec<u8>,
        out: &mut Vec<u8>,
    ) -> Result<(), Violation> {
        let frame = Arc::new(frame);
        let of_message = Arc::clone(&frame);
        let body = &of_message[HEADER_BYTES..];
        let message = ClientMessage::decode(body).map_err(|_| Violation)?;
        let session = self.sessions.get_mut(&token).ok_or(Violation)?;
        // The hashes are the last field.
        let hashes = |bytes: &[u8]| frame.len() - bytes.len()..frame.len();
        match message {
            ClientMessage::Lookup(lookup) => {
                self.lookups += 1;
                let left = hashes(lookup.hashes.bytes);
                session.lookup_later(&lookup, (frame, left), &mut self.budgets)
            }
            ClientMessage::BeginSave(save) => {
                let left = hashes(save.hashes.bytes);
                session.begin_save_later(save, (frame, left), &mut self.budgets)
            }
            ClientMessage::Hint(hint) => {
                let left = hashes(hint.hashes.bytes);
                session.take_hint_later(hint, (frame, left), &mut self.budgets)
            }
            message => self.handle(token, message, out),
        }
    }

    /// Whether a session's last message is still being carried out.
    pub(crate) fn is_busy(&self, token: SessionToken) -> bool {
        self.sessions
            .get(&token)
            .is_some_and(ServedSession::is_busy)
    }

    /// Continues the message of a session that is being carried out.
    pub(crate) fn step(&mut self, token: SessionToken, out: &mut Vec<u8>) -> Result<(), Violation> {
        let session = self.sessions.get_mut(&token).ok_or(Violation)?;
        session.step(&self.driver, &mut self.budgets, out)
    }

    /// Number of pending lookups and resets. The engine must be asked about them again soon.
    pub(crate) fn pending(&self) -> usize {
        self.sessions.values().map(ServedSession::pending).sum()
    }

    /// Tokens of the sessions with pending lookups or resets.
    pub(crate) fn with_pending(&self) -> Vec<SessionToken> {
        let sessions = self.sessions.iter();
        let sessions = sessions.filter(|(_, session)| session.pending() > 0);
        sessions.map(|(&token, _)| token).collect()
    }

    /// Appends the answers that are ready, for some of a session's pending lookups and resets.
    pub(crate) fn answer_pending(&mut self, token: SessionToken, out: &mut Vec<u8>) {
        if let Some(session) = self.sessions.get_mut(&token) {
            session.answer_lookups(&self.driver, &mut self.budgets, out);
            session.answer_resets(&self.driver, out);
        }
    }

    /// Lookups since the start.
    pub(crate) fn lookups(&self) -> u64 {
        self.lookups
    }

    /// Every session, of clients and of this process, for `undercroft status`. `attached`: workers of all sessions.
    pub(crate) fn describe(&self, attached: u64) -> Value {
        let served = self.sessions.values().map(|session| {
            let report = SessionReport {
                namespace: session.namespace.to_string(),
                connected: session.connected,
                workers: session.workers as u64,
                request_bytes: session.bytes(),
                held_bytes: session.held_bytes(),
            };
            (session.id, report)
        });
        let mut all: Vec<(SessionId, SessionReport)> = served.collect();
        let of_served: u64 = all.iter().map(|(_, report)| report.workers).sum();
        let known: Vec<SessionId> = all.iter().map(|&(id, _)| id).collect();
        let own = self.driver.read(|engine| {
            let ids = engine.session_ids().filter(|id| !known.contains(id));
            let own = ids.map(|id| {
                let report = SessionReport {
                    namespace: engine.namespace_of(id).unwrap_or_default(),
                    connected: true,
                    workers: attached.saturating_sub(of_served),
                    request_bytes: 0,
                    held_bytes: 0,
                };
                (id, report)
            });
            own.collect::<Vec<_>>()
        });
        all.extend(own.unwrap_or_default());
        let describe = |(id, report): &(SessionId, SessionReport)| {
            let usage = self.driver.read(|engine| engine.session_usage(*id));
            report.describe(&usage.unwrap_or_default())
        };
        all.iter().map(describe).collect()
    }
}

/// The fields of a session in the status, without its usage.
struct SessionReport {
    namespace: String,
    connected: bool,
    workers: u64,
    /// Bytes of the session's requests in the server.
    request_bytes: u64,
    /// Bytes of host memory that its hits and loads keep from eviction, if the session has a share.
    held_bytes: u64,
}

impl SessionReport {
    fn describe(&self, usage: &SessionUsage) -> Value {
        json!({
            "namespace": self.namespace, "connected": self.connected,
            "workers": self.workers, "lookups": usage.lookups, "pending": usage.pending,
            "loads": usage.loads, "saves": usage.saves, "load_bytes": usage.load_bytes,
            "save_bytes": usage.save_bytes, "request_bytes": self.request_bytes,
            "held_bytes": self.held_bytes,
            "answered": usage.answered, "hits": usage.hits,
            "loaded_bytes": usage.loaded_bytes, "saved_bytes": usage.saved_bytes,
            "tenant_share": f64::from(usage.namespace.tenant_share) / f64::from(TENANT_SHARE_WHOLE),
            "host_bytes": usage.namespace.host_bytes, "disk_bytes": usage.namespace.disk_bytes,
        })
    }
}
