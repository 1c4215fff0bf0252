//! The state of a client without a server, used as vLLM uses it: hundreds of lookups of one request, other
//! numbers of tokens, names that are used again, aborts, and answers that come too late.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use undercroft_contract::key::BlockHash;
use undercroft_contract::namespace::{GroupKind, NamespaceSpec};
use undercroft_contract::session::{
    ArenaOffset, Brought, Extent, Hit, Lookup, LookupRequest, Priority, Save, SaveEnd, SaveRequest,
    SessionToken, Sources, Tokens, TransferId,
};

use super::{ClientState, Polled, SessionAddress};
use crate::frame;
use crate::protocol::{ClientMessage, LeasedHit, LookupAnswer, REQUESTS_MAX, ServerMessage};

mod events;
mod lookups;
mod transfers;

const DEADLINE: Duration = Duration::from_millis(5);
const MS: Duration = Duration::from_millis(1);

fn address(arena_id: u64) -> SessionAddress {
    SessionAddress {
        socket: PathBuf::from("/s"),
        arena_id,
        session: SessionToken(9),
    }
}

/// [`Polled`] in short: where a hit ends, 0 for a miss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seen {
    Ready(u32),
    Pending,
    Soon,
}

/// A state with a clock.
struct StateRig {
    state: ClientState,
    now: Instant,
}

impl StateRig {
    fn new() -> Self {
        let spec = NamespaceSpec::uniform("", 16, &[(GroupKind::Full, 1)]);
        let mut state = ClientState::new(spec, DEADLINE);
        state.registered(address(1), ("", false), String::new());
        Self {
            state,
            now: Instant::now(),
        }
    }

    fn poll(&mut self, name: &str, computed: u32, max: u32) -> Seen {
        self.poll_for(name, &hashes(8), (computed, max))
    }

    fn poll_for(&mut self, name: &str, hashes: &[BlockHash], (computed, max): (u32, u32)) -> Seen {
        let question = LookupRequest::new(name, &hashes)
            .computed(Tokens(computed))
            .max(Tokens(max));
        match self.state.lookup(&question, self.now) {
            Polled::Soon { .. } => Seen::Soon,
            Polled::Answer(answer) => answer
                .tokens()
                .map_or(Seen::Pending, |tokens| Seen::Ready(tokens.0)),
        }
    }

    fn prefetch(&mut self, name: &str, hashes: &[BlockHash], max: u32) {
        let question = LookupRequest::new(name, &hashes).max(Tokens(max));
        self.state.lookup(&question.prefetch(), self.now);
    }

    fn begin_load(&mut self, name: &str, computed: u32, external: u32) -> Option<Vec<Extent>> {
        let load = self
            .state
            .begin_load(name, Tokens(computed), Tokens(external));
        load.map(|load| load.extents)
    }

    fn begin_save(&mut self, name: &str, hashes: &[BlockHash]) -> Option<TransferId> {
        let tokens = Tokens(u32::try_from(hashes.len()).unwrap() * 16);
        let save = SaveRequest::new(name, &hashes, tokens);
        match self.state.begin_save(&save, self.now) {
            Save::Pending(id) => Some(id),
            Save::Unavailable => None,
            Save::Granted(grant) => panic!("{grant:?}"),
        }
    }

    fn grant(&mut self, save: TransferId) -> bool {
        let granted = ServerMessage::Granted {
            transfer: save.0,
            end: SaveEnd::default(),
            extents: vec![extent(0, 0..1)],
        };
        self.state.take(granted, self.now)
    }

    /// The messages since the last call, in short.
    fn sent(&mut self) -> Vec<String> {
        let bytes = std::mem::take(&mut self.state.outbox);
        let (mut at, mut all) = (0, Vec::new());
        while let Some((_, body, len)) = frame::first(&bytes[at..]).unwrap() {
            let request = ClientMessage::decode(body).unwrap();
            all.push(match request {
                ClientMessage::Lookup(lookup) => {
                    let hashes = lookup.hashes;
                    let kind = match lookup.priority {
                        Priority::Demand => "lookup",
                        Priority::Prefetch => "prefetch",
                    };
                    format!(
                        "{kind} {}.{} {}+{} computed {}",
                        lookup.request,
                        lookup.version,
                        hashes.known,
                        hashes.bytes.len() / usize::from(hashes.hash_bytes),
                        lookup.computed.0
                    )
                }
                ClientMessage::BeginSave(save) => {
                    let (id, request) = (save.transfer, save.request);
                    format!("save {id} of {request} {}+", save.hashes.known)
                }
                other => format!("{other:?}"),
            });
            at += len;
        }
        all
    }

    fn answer(&mut self, request: u64, version: u32, direct: bool, tokens: Option<u32>) -> bool {
        let answer = match tokens {
            None => LookupAnswer::Pending { shared: Tokens(0) },
            Some(0) => LookupAnswer::NOTHING,
            Some(tokens) => LookupAnswer::Hit(LeasedHit {
                tokens: Tokens(tokens),
                shared: Tokens(tokens),
                brought: Brought::default(),
                extents: vec![extent(0, 0..tokens / 16)],
            }),
        };
        self.take_answer(request, version, direct, answer)
    }

    fn take_answer(
        &mut self,
        request: u64,
        version: u32,
        direct: bool,
        answer: LookupAnswer,
    ) -> bool {
        let message = ServerMessage::Answer {
            request,
            version,
            direct,
            answer,
            rest: None,
        };
        self.state.take(message, self.now)
    }
}

/// Blocks of group 0 with their indices as offsets.
fn extent(first_block: u32, offsets: std::ops::Range<u32>) -> Extent {
    Extent {
        group: 0,
        first_block,
        offsets: offsets.map(|at| ArenaOffset::new(u64::from(at))).collect(),
    }
}

fn hashes(blocks: u8) -> Vec<BlockHash> {
    let hash = |block| BlockHash::new(&[block; 32]).unwrap();
    (1..=blocks).map(hash).collect()
}
