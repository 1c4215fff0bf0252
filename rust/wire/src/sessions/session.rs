//! One session of a server: its requests, its pending lookups, its loads and saves.

use std::collections::HashMap;

use undercroft_core::driver::{Driver, EngineAccess};
use undercroft_core::engine::{Engine, Granted, SessionId};
use undercroft_core::key::BlockHash;
use undercroft_core::session::{
    Lookup, LookupRequest, Priority, PromotionWait, SaveRequest, Tokens, TransferId,
};

use super::Violation;
use crate::protocol::{
    HashRun, LeasedHit, LookupAnswer, LookupMessage, REQUESTS_MAX, SaveMessage, ServerMessage,
};

/// With more bytes of answers queued than this, a client gets no further ones until it has read these.
const ANSWERS_MAX: usize = 1 << 20;

/// One request of a session.
#[derive(Debug)]
struct ServedRequest {
    /// The engine's name for the request.
    name: String,
    hashes: Vec<BlockHash>,
    /// Of the last lookup.
    version: u32,
    computed: Tokens,
    max: Tokens,
    /// Instead of the engine's `promotion_wait`.
    wait: Option<PromotionWait>,
    priority: Priority,
}

#[derive(Debug)]
pub(super) struct ServedSession {
    pub(super) id: SessionId,
    /// Digest of the namespace, hexadecimal.
    pub(super) namespace: String,
    pub(super) connected: bool,
    /// Workers that have the arena mapped.
    pub(super) workers: usize,
    requests: HashMap<u64, ServedRequest>,
    /// Requests whose lookup is pending.
    pending: Vec<u64>,
    /// Loads and saves under way, by the client's numbers.
    transfers: HashMap<u64, TransferId>,
    /// Resets that have not been answered.
    resets: Vec<u64>,
}

impl ServedSession {
    pub(super) fn new(id: SessionId, namespace: String) -> Self {
        Self {
            id,
            namespace,
            connected: true,
            workers: 0,
            requests: HashMap::new(),
            pending: Vec::new(),
            transfers: HashMap::new(),
            resets: Vec::new(),
        }
    }

    /// The client's connection has ended. Loads, saves and the leases of hits stay: workers may copy.
    pub(super) fn client_went(&mut self, driver: &Driver) {
        self.connected = false;
        self.requests.clear();
        self.pending.clear();
        self.resets.clear();
        driver.enter(|engine| engine.end_unanswered(self.id));
    }

    /// Number of lookups and resets that are pending.
    pub(super) fn pending(&self) -> usize {
        self.pending.len() + self.resets.len()
    }

    /// The request, with the hashes of a message added.
    fn request(
        &mut self,
        request: u64,
        hashes: HashRun<'_>,
    ) -> Result<&mut ServedRequest, Violation> {
        if self.requests.len() >= REQUESTS_MAX && !self.requests.contains_key(&request) {
            return Err(Violation);
        }
        let state = self
            .requests
            .entry(request)
            .or_insert_with(|| ServedRequest {
                name: request.to_string(),
                hashes: Vec::new(),
                version: 0,
                computed: Tokens(0),
                max: Tokens(0),
                wait: None,
                priority: Priority::Prefetch,
            });
        if hashes.append_to(&mut state.hashes) {
            Ok(state)
        } else {
            Err(Violation)
        }
    }

    pub(super) fn lookup(
        &mut self,
        driver: &Driver,
        message: LookupMessage<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(), Violation> {
        let LookupMessage {
            request, version, ..
        } = message;
        let id = self.id;
        let state = self.request(request, message.hashes)?;
        state.version = version;
        (state.computed, state.max) = (message.computed, message.max);
        state.wait = message.wait;
        if message.priority == Priority::Demand {
            state.priority = Priority::Demand;
        }
        let answer = driver.enter(|engine| state.lookup(engine, id));
        let answer = answer.unwrap_or(LookupAnswer::NOTHING);
        self.pending.retain(|&pending| pending != request);
        if answer.is_pending() {
            self.pending.push(request);
        }
        append_answer(request, version, true, answer, out);
        Ok(())
    }

    pub(super) fn demand(&mut self, request: u64) {
        if let Some(state) = self.requests.get_mut(&request) {
            state.priority = Priority::Demand;
        }
    }

    pub(super) fn end_lookup(&mut self, driver: &Driver, request: u64) {
        self.pending.retain(|&pending| pending != request);
        if let Some(state) = self.requests.get_mut(&request) {
            state.priority = Priority::Prefetch;
            driver.enter(|engine| engine.end_lookup(self.id, &state.name));
        }
    }

    pub(super) fn finish_request(&mut self, driver: &Driver, request: u64) {
        self.pending.retain(|&pending| pending != request);
        if let Some(state) = self.requests.remove(&request) {
            driver.enter(|engine| engine.finish_request(self.id, &state.name));
        }
    }

    pub(super) fn begin_load(
        &mut self,
        driver: &Driver,
        request: u64,
        transfer: u64,
        (computed, external): (Tokens, Tokens),
    ) -> Result<(), Violation> {
        // With its number given away, the transfer that has it could not be ended any more.
        if self.transfers.contains_key(&transfer) {
            return Err(Violation);
        }
        let state = self.requests.get(&request).ok_or(Violation)?;
        let load =
            driver.enter(|engine| engine.begin_load(self.id, &state.name, computed, external));
        if let Some(load) = load.flatten() {
            self.transfers.insert(transfer, load.id);
        }
        Ok(())
    }

    pub(super) fn begin_save(
        &mut self,
        driver: &Driver,
        message: SaveMessage<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(), Violation> {
        let id = self.id;
        let transfer = message.transfer;
        if self.transfers.contains_key(&transfer) {
            return Err(Violation);
        }
        let state = self.request(message.request, message.hashes)?;
        let granted = driver.enter(|engine| {
            let save = SaveRequest::new(&state.name, &state.hashes, message.tokens);
            engine.begin_save(id, &save.offers(&message.offers))
        });
        let Granted {
            transfer: save,
            refused,
        } = granted.unwrap_or_default();
        let extents = save.map_or_else(Vec::new, |save| {
            self.transfers.insert(transfer, save.id);
            save.extents
        });
        let reply = ServerMessage::Granted {
            transfer,
            refused,
            extents,
        };
        if !reply.append_to(out) {
            // Too many extents for one frame.
            self.end_transfer(driver, transfer, false);
            let reply = ServerMessage::Granted {
                transfer,
                refused: true,
                extents: Vec::new(),
            };
            reply.append_to(out);
        }
        Ok(())
    }

    pub(super) fn end_transfer(&mut self, driver: &Driver, transfer: u64, ok: bool) {
        if let Some(id) = self.transfers.remove(&transfer) {
            driver.enter(|engine| engine.end_transfer(id, ok));
        }
    }

    pub(super) fn reset(&mut self, driver: &Driver, reset: u64) {
        driver.enter(|engine| engine.reset(self.id));
        self.resets.push(reset);
    }

    /// Appends the answers of pending lookups that have come.
    pub(super) fn answer_lookups(&mut self, driver: &Driver, out: &mut Vec<u8>) {
        let (id, requests) = (self.id, &self.requests);
        let all_pending = |engine: &Engine| {
            let pending = |request: &u64| {
                let state = requests.get(request);
                state.is_some_and(|state| state.still_pending(engine, id))
            };
            self.pending.iter().all(pending)
        };
        // Reading is enough here. An entry would have the IO thread try again the promotions and writes
        // that wait for memory.
        if driver.read(all_pending) == Some(true) {
            return;
        }
        let mut answers = Vec::new();
        let mut bytes = out.len();
        driver.enter(|engine| {
            self.pending.retain(|request| {
                let Some(state) = requests.get(request) else {
                    return false;
                };
                if bytes > ANSWERS_MAX {
                    // Answered when the client has read the answers that are queued.
                    return true;
                }
                let answer = state.lookup(engine, id);
                if answer.is_pending() {
                    return true;
                }
                if let LookupAnswer::Hit(hit) = &answer {
                    bytes += 8 * hit.extents.iter().map(|of| of.offsets.len()).sum::<usize>();
                }
                answers.push((*request, state.version, answer));
                false
            });
        });
        for (request, version, answer) in answers {
            append_answer(request, version, false, answer, out);
        }
    }

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

impl ServedRequest {
    /// Whether the engine would answer again that the lookup is pending.
    fn still_pending(&self, engine: &Engine, id: SessionId) -> bool {
        engine
            .still_pending(id, &self.name, self.computed, self.priority)
            .is_some()
    }

    /// The engine's answer, with the extents of a hit.
    fn lookup(&self, engine: &mut Engine, id: SessionId) -> LookupAnswer {
        let question = LookupRequest::new(&self.name, &self.hashes)
            .computed(self.computed)
            .max(self.max)
            .wait(self.wait)
            .priority(self.priority);
        match engine.lookup(id, &question) {
            Lookup::Pending { shared } => LookupAnswer::Pending { shared },
            Lookup::Miss { shared } => LookupAnswer::Miss { shared },
            Lookup::Hit(hit) => LookupAnswer::Hit(LeasedHit {
                tokens: hit.tokens,
                shared: hit.shared,
                from_disk: engine.from_disk(id, &self.name),
                extents: engine.hit_extents(id, &self.name, self.computed),
            }),
        }
    }
}

fn append_answer(
    request: u64,
    version: u32,
    direct: bool,
    answer: LookupAnswer,
    out: &mut Vec<u8>,
) {
    let shared = match &answer {
        LookupAnswer::Pending { shared } | LookupAnswer::Miss { shared } => *shared,
        LookupAnswer::Hit(hit) => hit.shared,
    };
    let message = |answer| ServerMessage::Answer {
        request,
        version,
        direct,
        answer,
    };
    if !message(answer).append_to(out) {
        // A hit with too many extents for one frame is not worth a load.
        message(LookupAnswer::Miss { shared }).append_to(out);
    }
}
