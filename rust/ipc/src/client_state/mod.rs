//! The state of a client: its requests' lookups, its loads and saves, and the frames to be sent. Plain
//! state without threads or clocks, which `client` adds.

use std::collections::{HashMap, VecDeque};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use undercroft_contract::explain::Rest;
use undercroft_contract::hint::HintAnswer;
use undercroft_contract::key::BlockHash;
use undercroft_contract::namespace::NamespaceSpec;
use undercroft_contract::session::{
    BlockEvents, Extent, Lookup, PromotionWait, SaveEnd, SaveGrant, SessionToken, Tokens,
    TransferId,
};

use crate::protocol::{ClientMessage, LeasedHit, LookupAnswer, ServerMessage};

mod events;
mod hints;
mod lookups;
#[cfg(test)]
mod tests;
mod transfers;

/// Interval between two pings to the server: while a lookup is pending, and otherwise.
const PING_PENDING: Duration = Duration::from_millis(50);
const PING: Duration = Duration::from_secs(1);

/// Most bytes of queued frames. With more, the connection to a server that does not read is closed.
const OUTBOX_MAX: usize = 64 << 20;

/// The address from which the workers of a session get the arena.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionAddress {
    /// The server's socket.
    pub socket: PathBuf,
    /// Id of the arena. Each start of an engine has another id.
    pub arena_id: u64,
    /// The token with which workers attach.
    pub session: SessionToken,
}

/// The answer to a lookup, as far as the client has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Polled {
    /// The answer.
    Answer(Lookup),
    /// The server's answer is due. One short wait for it is worthwhile.
    Soon {
        /// See [`Lookup::Pending`].
        shared: Tokens,
    },
}

impl Polled {
    /// The client has no answer about the prompt.
    pub(crate) const NOTHING: Self = Self::Answer(Lookup::NOTHING);
}

/// Stage of a request's last lookup.
#[derive(Debug)]
enum Stage {
    /// There is no lookup.
    Idle,
    /// The server has not replied yet.
    Sent,
    /// The server has replied that the lookup is pending.
    Pending,
    /// The answer is a hit, which the server leases for this client, or a miss.
    Answered(Option<LeasedHit>, Instant),
}

/// One request.
#[derive(Debug)]
struct ClientRequest {
    id: u64,
    /// Number of the request's lookups.
    version: u32,
    /// Hashes that the server has, and the last of these.
    known: u32,
    last: Option<BlockHash>,
    /// The arguments of the last lookup.
    computed: Tokens,
    max: Tokens,
    min: Tokens,
    wait: Option<PromotionWait>,
    /// Whether the server knows that the scheduler waits.
    demanded: bool,
    stage: Stage,
    /// Whether the scheduler has waited for the reply once.
    waited: bool,
    /// Whether the lookup repeats a lookup that was a miss, so that no wait is worthwhile.
    is_retry: bool,
    /// The last answer's shared tokens, and the reason why it has no more tokens.
    shared: Tokens,
    rest: Option<Rest>,
}

/// Stage of a load or a save.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TransferStage {
    Load,
    /// A save whose grant has not arrived.
    PendingSave,
    GrantedSave,
}

#[derive(Debug)]
pub(crate) struct ClientState {
    pub(crate) spec: NamespaceSpec,
    deadline: Duration,
    /// The session, while there is a connection.
    pub(crate) open: Option<SessionAddress>,
    /// The last session that was open.
    pub(crate) last: Option<SessionAddress>,
    /// Why the server refused the session.
    pub(crate) refused: Option<String>,
    /// Why there is no connection.
    pub(crate) down: String,
    pub(crate) namespace: String,
    pub(crate) info: String,
    pub(crate) stats: String,
    /// Frames to send.
    pub(crate) outbox: Vec<u8>,
    requests: HashMap<Box<str>, ClientRequest>,
    /// Names of the requests, by id.
    names: HashMap<u64, Box<str>>,
    /// The last number of a request, transfer or reset.
    last_number: u64,
    /// Times of sending of the messages whose direct replies are due, in order.
    replies_due: VecDeque<Instant>,
    pinged: Option<Instant>,
    transfers: HashMap<TransferId, TransferStage>,
    /// Events of the server's tiers.
    events: events::EventState,
    /// Grants that the caller has not taken yet.
    grants: Vec<SaveGrant>,
    /// Hints that were sent, with the answers that have come.
    hints: HashMap<u64, Option<HintAnswer>>,
    /// Resets, with the results of the resets that have ended.
    resets: HashMap<u64, Option<bool>>,
    /// Whether the weights may differ from the namespace's, on any server: the caller has requested a reset, or has told
    /// that they change.
    pub(crate) private: bool,
    /// Whether the caller has requested a reset since.
    was_reset: bool,
}

impl ClientState {
    pub(crate) fn new(spec: NamespaceSpec, deadline: Duration) -> Self {
        Self {
            namespace: spec.digest().to_hex(),
            spec,
            deadline,
            open: None,
            last: None,
            refused: None,
            down: "it has not answered yet".to_owned(),
            info: String::new(),
            stats: String::new(),
            outbox: Vec::new(),
            requests: HashMap::new(),
            names: HashMap::new(),
            last_number: 1,
            replies_due: VecDeque::new(),
            pinged: None,
            transfers: HashMap::new(),
            events: events::EventState::default(),
            grants: Vec::new(),
            hints: HashMap::new(),
            resets: HashMap::new(),
            private: false,
            was_reset: false,
        }
    }

    /// The session is open. `asked`: the description of the namespace that the client asked for, and whether it asked for
    /// a private one.
    pub(crate) fn registered(
        &mut self,
        address: SessionAddress,
        (description, private): (&str, bool),
        info: String,
    ) {
        self.info = info;
        self.refused = None;
        self.open = Some(address.clone());
        self.last = Some(address);
        self.events.opened();
        // The caller may have requested a reset, or told of other weights, while the session was being opened.
        if self.private && !private && self.was_reset {
            let reset = self.next_number();
            self.send(&ClientMessage::Reset { reset });
        } else if self.private != private || self.spec.description != description {
            self.send_weights();
        }
    }

    /// The connection and the session are lost. Lookups get no answers. The server ends the loads and saves when the
    /// workers have ended.
    pub(crate) fn lost(&mut self, why: String) {
        self.down = why;
        let Some(SessionAddress { session, .. }) = self.open.take() else {
            return;
        };
        self.events.lost();
        self.outbox.clear();
        self.replies_due.clear();
        self.pinged = None;
        // The next server counts from zero.
        self.stats.clear();
        self.requests.clear();
        self.names.clear();
        self.hints.clear();
        for (id, stage) in self.transfers.drain() {
            if stage == TransferStage::PendingSave {
                self.grants.push(SaveGrant {
                    id,
                    session,
                    extents: Vec::new(),
                    end: SaveEnd::default(),
                });
            }
        }
        for ended in self.resets.values_mut() {
            ended.get_or_insert(false);
        }
    }

    /// Takes a message of the server. Returns false if the client did not expect the message.
    pub(crate) fn take(&mut self, message: ServerMessage, now: Instant) -> bool {
        let direct = match &message {
            ServerMessage::Answer { direct, .. } => *direct,
            ServerMessage::Granted { .. }
            | ServerMessage::Events { .. }
            | ServerMessage::Pong { .. } => true,
            _ => false,
        };
        // The server answers such messages in their order, each once.
        if direct && self.replies_due.pop_front().is_none() {
            return false;
        }
        match message {
            ServerMessage::Answer {
                request,
                version,
                answer,
                rest,
                ..
            } => self.take_answer((request, version), answer, rest, now),
            ServerMessage::Granted {
                transfer,
                end,
                extents,
            } => return self.take_grant(TransferId(transfer), end, extents),
            ServerMessage::Events {
                cleared,
                more,
                events,
            } => {
                let told = BlockEvents {
                    cleared,
                    events,
                    more,
                };
                return self.events.take(told);
            }
            ServerMessage::Hinted { number, answer } => self.take_hinted(number, answer),
            ServerMessage::Reset { reset, ok } => {
                if let Some(ended) = self.resets.get_mut(&reset) {
                    *ended = Some(ok);
                }
            }
            ServerMessage::Pong { stats } => self.stats = stats,
            ServerMessage::Registered { .. }
            | ServerMessage::Refused { .. }
            | ServerMessage::Status { .. }
            | ServerMessage::Operated { .. } => return false,
        }
        true
    }

    fn take_answer(
        &mut self,
        (request, version): (u64, u32),
        answer: LookupAnswer,
        rest: Option<Rest>,
        now: Instant,
    ) {
        let state = self
            .names
            .get(&request)
            .and_then(|name| self.requests.get_mut(name));
        let expected = |state: &&mut ClientRequest| {
            state.version == version && matches!(state.stage, Stage::Sent | Stage::Pending)
        };
        let Some(state) = state.filter(expected) else {
            return;
        };
        state.rest = rest;
        (state.stage, state.shared) = match answer {
            LookupAnswer::Pending { shared } => (Stage::Pending, shared),
            LookupAnswer::Miss { shared } => (Stage::Answered(None, now), shared),
            LookupAnswer::Hit(hit) => {
                let shared = hit.shared;
                (Stage::Answered(Some(hit), now), shared)
            }
        };
    }

    fn take_grant(&mut self, id: TransferId, end: SaveEnd, extents: Vec<Extent>) -> bool {
        let Some(&SessionAddress { session, .. }) = self.open.as_ref() else {
            return false;
        };
        match self.transfers.get_mut(&id) {
            Some(stage @ TransferStage::PendingSave) => *stage = TransferStage::GrantedSave,
            Some(_) => return false,
            None if extents.is_empty() => return true,
            None => {
                // The caller has ended the save before its grant arrived.
                self.send_end_of(id, false);
                return true;
            }
        }
        if extents.is_empty() {
            self.transfers.remove(&id);
        }
        self.grants.push(SaveGrant {
            id,
            session,
            extents,
            end,
        });
        true
    }

    /// Pings the server at intervals. Returns the time until the next call.
    pub(crate) fn tick(&mut self, now: Instant) -> Duration {
        if self.open.is_none() {
            return PING;
        }
        let pending = |request: &ClientRequest| matches!(request.stage, Stage::Pending);
        let interval = if self.requests.values().any(pending) {
            PING_PENDING
        } else {
            PING
        };
        let due = |at: Instant| now.duration_since(at) >= interval;
        if self.replies_due.is_empty() && self.pinged.is_none_or(due) {
            self.pinged = Some(now);
            if self.send(&ClientMessage::Ping) {
                self.replies_due.push_back(now);
            }
        }
        interval
    }

    /// Whether too many bytes are queued for a server that does not read them.
    pub(crate) fn is_overfull(&self) -> bool {
        self.outbox.len() > OUTBOX_MAX
    }

    /// Whether the queue of frames is so long that the client sends no further lookups and saves. Messages that end
    /// earlier lookups and saves must still fit.
    fn is_filling(&self) -> bool {
        self.outbox.len() > OUTBOX_MAX / 2
    }

    /// Whether a direct reply is due for longer than the server's deadline. The client sends no lookup or save until
    /// this reply arrives.
    pub(crate) fn is_late(&self, now: Instant) -> bool {
        self.is_later(now, self.deadline)
    }

    fn is_later(&self, now: Instant, deadline: Duration) -> bool {
        let deadline = deadline.max(self.deadline);
        self.replies_due
            .front()
            .is_some_and(|&at| now.saturating_duration_since(at) > deadline)
    }

    fn next_number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    fn send(&mut self, message: &ClientMessage<'_>) -> bool {
        self.open.is_some() && message.append_to(&mut self.outbox)
    }
}
