//! The server's sessions: what clients ask for, done with the engine.
//!
//! A session outlives a lost connection as long as a worker of its vLLM has the arena mapped: what it was
//! told may still be copied, also of a load that we have not heard of. The client opens another session.

use std::collections::HashMap;
use std::sync::Arc;

use serde_json::{Value, json};
use undercroft_core::engine::{Answer, Engine, Extent, Offer, SessionId, Transfer, TransferId};
use undercroft_core::key::BlockHash;
use undercroft_core::namespace::NamespaceSpec;
use undercroft_core::shell::Shell;

use crate::protocol::{Hashes, REQUESTS_MAX, Ready, Reply, Request, WireExtent};
use crate::stats::StatsSource;

/// With so many bytes of answers queued, a client gets no more of them until it has read these.
const ANSWERS_MAX: usize = 1 << 20;

/// A frame that does not belong where it came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Violation;

/// One request of a session.
#[derive(Debug, Default)]
struct Lookup {
    /// The engine's name for it.
    name: String,
    hashes: Vec<BlockHash>,
    version: u32,
    local_tokens: u32,
    max_tokens: u32,
    asked: bool,
}

#[derive(Debug)]
struct Session {
    id: SessionId,
    namespace: String,
    connected: bool,
    workers: usize,
    requests: HashMap<u64, Lookup>,
    /// Requests whose answer the disk owes.
    pending: Vec<u64>,
    loads: HashMap<u64, TransferId>,
    saves: HashMap<u64, TransferId>,
    resets: Vec<u64>,
}

/// All sessions, by token.
#[derive(Debug)]
pub(crate) struct Sessions {
    shell: Arc<Shell>,
    generation: u64,
    stats: StatsSource,
    sessions: HashMap<u128, Session>,
    lookups: u64,
}

fn extents(extents: Vec<Extent>) -> Vec<WireExtent> {
    let one = |extent: Extent| (extent.group, extent.first_block, extent.slots);
    extents.into_iter().map(one).collect()
}

fn token() -> u128 {
    use std::hash::{BuildHasher, RandomState};
    // The keys come from the operating system and are others each time; they are never told.
    let half = || u128::from(RandomState::new().hash_one(std::process::id()));
    (half() << 64 | half()).max(1)
}

impl Sessions {
    pub(crate) fn new(shell: Arc<Shell>, generation: u64, stats: StatsSource) -> Self {
        Self {
            shell,
            generation,
            stats,
            sessions: HashMap::new(),
            lookups: 0,
        }
    }

    /// Opens a session. The token, and the reply.
    pub(crate) fn register(
        &mut self,
        spec: NamespaceSpec,
        dropped_tokens: u32,
        private: bool,
        info: &Value,
    ) -> (Option<u128>, Reply) {
        let digest = spec.digest().to_hex();
        let opened = self.shell.enter(|engine| {
            let session = engine.open_session(spec)?;
            engine.set_dropped_tokens(session, dropped_tokens);
            if private {
                engine.make_private(session);
            }
            Ok::<_, undercroft_core::error::RegisterError>(session)
        });
        let refused = |reason: String| (None, Reply::Refused { reason });
        let id = match opened {
            Some(Ok(id)) => id,
            Some(Err(error)) => return refused(error.to_string()),
            None => return refused("the engine has failed; see the server's log".to_owned()),
        };
        let token = token();
        let reply = Reply::Registered {
            session: token,
            namespace: digest.clone(),
            generation: self.generation,
            info: info.to_string(),
        };
        let session = Session {
            id,
            namespace: digest,
            connected: true,
            workers: 0,
            requests: HashMap::new(),
            pending: Vec::new(),
            loads: HashMap::new(),
            saves: HashMap::new(),
            resets: Vec::new(),
        };
        self.sessions.insert(token, session);
        (Some(token), reply)
    }

    /// A worker has mapped the arena for a session. False if there is no such session.
    pub(crate) fn worker_came(&mut self, token: u128) -> bool {
        let session = self.sessions.get_mut(&token);
        session.map(|session| session.workers += 1).is_some()
    }

    /// A worker's process no longer copies.
    pub(crate) fn worker_went(&mut self, token: u128) {
        if let Some(session) = self.sessions.get_mut(&token) {
            session.workers -= 1;
            self.close_if_gone(token);
        }
    }

    /// The client's connection has ended.
    pub(crate) fn client_went(&mut self, token: u128) {
        if let Some(session) = self.sessions.get_mut(&token) {
            session.connected = false;
            session.requests.clear();
            session.pending.clear();
            session.resets.clear();
            self.shell.enter(|engine| engine.end_unanswered(session.id));
            self.close_if_gone(token);
        }
    }

    fn close_if_gone(&mut self, token: u128) {
        let gone = |session: &Session| !session.connected && session.workers == 0;
        if let Some(session) = self.sessions.get(&token).filter(|session| gone(session)) {
            self.shell.enter(|engine| engine.close_session(session.id));
            self.sessions.remove(&token);
        }
    }

    /// Does what a session's client asks, and appends the replies.
    pub(crate) fn handle(
        &mut self,
        token: u128,
        request: Request<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(), Violation> {
        let session = self.sessions.get_mut(&token).ok_or(Violation)?;
        let id = session.id;
        match request {
            Request::Submit {
                request,
                version,
                hashes,
                local_tokens,
                max_tokens,
                asked,
                wait_ns,
            } => {
                self.lookups += 1;
                let lookup = session.lookup(request, hashes)?;
                lookup.version = version;
                (lookup.local_tokens, lookup.max_tokens) = (local_tokens, max_tokens);
                lookup.asked |= asked;
                let reply = self.shell.enter(|engine| {
                    if let Some((base, part)) = wait_ns {
                        engine.limit_wait(id, &lookup.name, base, part);
                    }
                    lookup.answer(engine, id)
                });
                let ready = reply.unwrap_or(Some(Ready::default()));
                session.pending.retain(|&pending| pending != request);
                if ready.is_none() {
                    session.pending.push(request);
                }
                answer(request, version, true, ready, out);
            }
            Request::Ask { request } => {
                if let Some(lookup) = session.requests.get_mut(&request) {
                    lookup.asked = true;
                }
            }
            Request::Release { request } => {
                session.pending.retain(|&pending| pending != request);
                if let Some(lookup) = session.requests.get_mut(&request) {
                    lookup.asked = false;
                    self.shell.enter(|engine| engine.discard(id, &lookup.name));
                }
            }
            Request::Forget { request } => {
                session.pending.retain(|&pending| pending != request);
                if let Some(lookup) = session.requests.remove(&request) {
                    self.shell.enter(|engine| engine.discard(id, &lookup.name));
                }
            }
            Request::BeginLoad {
                request,
                load,
                local_tokens,
                external_tokens,
            } => {
                // Under a number in use, the load of before could not be ended any more.
                if session.loads.contains_key(&load) {
                    return Err(Violation);
                }
                let lookup = session.requests.get(&request).ok_or(Violation)?;
                let begun = self.shell.enter(|engine| {
                    engine.begin_promised_load(id, &lookup.name, local_tokens, external_tokens)
                });
                if let Some(Transfer { id, .. }) = begun.flatten() {
                    session.loads.insert(load, id);
                }
            }
            Request::EndLoad { load, ok } => {
                if let Some(transfer) = session.loads.remove(&load) {
                    self.shell.enter(|engine| engine.end_transfer(transfer, ok));
                }
            }
            Request::BeginSave {
                request,
                save,
                hashes,
                tokens,
                offers,
            } => {
                if session.saves.contains_key(&save) {
                    return Err(Violation);
                }
                let lookup = session.lookup(request, hashes)?;
                let offers = offers.iter().map(|&(group, first_block, end_block)| Offer {
                    group,
                    first_block,
                    end_block,
                });
                let offers: Vec<Offer> = offers.collect();
                let begun = self.shell.enter(|engine| {
                    let transfer =
                        engine.begin_save(id, &lookup.name, &lookup.hashes, tokens, &offers);
                    (transfer, engine.save_refused(id))
                });
                let (transfer, refused) = begun.unwrap_or((None, false));
                let slots = transfer.map_or(Vec::new(), |transfer| {
                    session.saves.insert(save, transfer.id);
                    transfer.extents
                });
                let extents = extents(slots);
                Reply::Granted {
                    save,
                    refused,
                    extents,
                }
                .append_to(out);
            }
            Request::EndSave { save, ok } => {
                if let Some(transfer) = session.saves.remove(&save) {
                    self.shell.enter(|engine| engine.end_transfer(transfer, ok));
                }
            }
            Request::Reset { ticket } => {
                self.shell.enter(|engine| engine.reset(id));
                session.resets.push(ticket);
                self.settle_resets(token, out);
            }
            Request::Ping => {
                let stats = self.stats.take().to_string();
                Reply::Pong { stats }.append_to(out);
            }
            Request::Register { .. } | Request::Status => return Err(Violation),
        }
        Ok(())
    }

    /// How many answers are owed: for them the engine is to be asked again soon.
    pub(crate) fn pending(&self) -> usize {
        let owed = |session: &Session| session.pending.len() + session.resets.len();
        self.sessions.values().map(owed).sum()
    }

    /// Tokens of the sessions that are owed answers.
    pub(crate) fn owed(&self) -> Vec<u128> {
        let owed = |session: &Session| !session.pending.is_empty() || !session.resets.is_empty();
        let sessions = self.sessions.iter();
        sessions
            .filter(|(_, session)| owed(session))
            .map(|(&token, _)| token)
            .collect()
    }

    /// Appends the answers that have come.
    pub(crate) fn settle(&mut self, token: u128, out: &mut Vec<u8>) {
        let Some(session) = self.sessions.get_mut(&token) else {
            return;
        };
        let (id, requests) = (session.id, &session.requests);
        let mut found = Vec::new();
        let shell = &self.shell;
        let waits = |engine: &Engine| {
            let waits = |request: &u64| {
                let lookup = requests.get(request);
                lookup.is_some_and(|lookup| lookup.waits(engine, id))
            };
            session.pending.iter().all(waits)
        };
        // A look: entering the engine would have it try again what waits for memory.
        if shell.look(waits) == Some(true) {
            self.settle_resets(token, out);
            return;
        }
        let mut bytes = out.len();
        shell.enter(|engine| {
            session.pending.retain(|request| {
                let Some(lookup) = requests.get(request) else {
                    return false;
                };
                if bytes > ANSWERS_MAX {
                    // When the client has read these.
                    return true;
                }
                let ready = lookup.answer(engine, id);
                let pending = ready.is_none();
                if let Some(ready) = ready {
                    bytes += ready.extents.iter().map(|of| of.2.len() * 8).sum::<usize>();
                    found.push((*request, lookup.version, ready));
                }
                pending
            });
        });
        for (request, version, ready) in found {
            answer(request, version, false, Some(ready), out);
        }
        self.settle_resets(token, out);
    }

    fn settle_resets(&mut self, token: u128, out: &mut Vec<u8>) {
        let Some(session) = self.sessions.get_mut(&token) else {
            return;
        };
        if session.resets.is_empty() {
            return;
        }
        let state = self
            .shell
            .enter(|engine| (engine.reset_pending(), !engine.reset_failed()));
        let (pending, ok) = state.unwrap_or((false, false));
        if !pending {
            for ticket in session.resets.drain(..) {
                Reply::Reset { ticket, ok }.append_to(out);
            }
        }
    }

    /// Lookups since the start.
    pub(crate) fn lookups(&self) -> u64 {
        self.lookups
    }

    /// Every session, for `undercroft status`.
    pub(crate) fn describe(&self) -> Value {
        let one = |session: &Session| {
            let jobs = self.shell.enter(|engine| engine.session_jobs(session.id));
            let [jobs, pending, loads, saves] = jobs.unwrap_or_default();
            json!({
                "namespace": session.namespace, "connected": session.connected,
                "workers": session.workers, "jobs": jobs, "pending": pending, "loads": loads,
                "saves": saves,
            })
        };
        self.sessions.values().map(one).collect()
    }
}

impl Session {
    /// The request, with the hashes that came added.
    fn lookup(&mut self, request: u64, hashes: Hashes<'_>) -> Result<&mut Lookup, Violation> {
        if self.requests.len() >= REQUESTS_MAX && !self.requests.contains_key(&request) {
            return Err(Violation);
        }
        let lookup = self.requests.entry(request).or_insert_with(|| Lookup {
            name: request.to_string(),
            ..Lookup::default()
        });
        if hashes.append_to(&mut lookup.hashes) {
            Ok(lookup)
        } else {
            Err(Violation)
        }
    }
}

impl Lookup {
    /// Whether the engine would say again that the disk owes the answer.
    fn waits(&self, engine: &Engine, id: SessionId) -> bool {
        if self.asked {
            engine.waits(id, &self.name, self.local_tokens)
        } else {
            engine.is_pending(id, &self.name)
        }
    }

    /// The engine's answer; `None` while the disk owes it.
    fn answer(&self, engine: &mut Engine, id: SessionId) -> Option<Ready> {
        let (name, hashes) = (self.name.as_str(), &self.hashes);
        let answer = if self.asked {
            engine.poll(id, name, hashes, self.local_tokens, self.max_tokens)
        } else {
            engine.peek(id, name, hashes, self.local_tokens, self.max_tokens)
        };
        let Answer::Ready(tokens) = answer else {
            return None;
        };
        let gain = tokens > self.local_tokens;
        Some(Ready {
            tokens,
            shared_tokens: engine.shared_tokens(id, name),
            from_disk: engine.from_disk(id, name),
            extents: if gain {
                extents(engine.leased_extents(id, name, self.local_tokens))
            } else {
                Vec::new()
            },
        })
    }
}

fn answer(request: u64, version: u32, direct: bool, ready: Option<Ready>, out: &mut Vec<u8>) {
    let mut reply = Reply::Answer {
        request,
        version,
        direct,
        ready,
    };
    if !reply.append_to(out) {
        // Too many extents for one frame: not worth a hit.
        if let Reply::Answer { ready, .. } = &mut reply {
            *ready = Some(Ready::default());
        }
        reply.append_to(out);
    }
}
