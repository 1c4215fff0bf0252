//! One request of a session: its hashes, and its lookups.

use std::sync::Arc;

use undercroft_contract::explain::Rest;
use undercroft_contract::key::BlockHash;
use undercroft_contract::session::{Lookup, LookupRequest, Priority, PromotionWait, Tokens};
use undercroft_driver::{Driver, EngineAccess};
use undercroft_engine::{Engine, LookupCursor, SessionId};

use super::held::HeldChain;
use super::job::{FoundHit, HIT_STEP};
use crate::protocol::LookupAnswer;

/// Bytes of a server's memory for a request, without its hashes.
pub(super) const REQUEST_BYTES: u64 = 512;

const HASH_BYTES: u64 = size_of::<BlockHash>() as u64;

/// Least capacity of a vector of hashes that is not empty, as the standard library allocates it.
const CAPACITY_MIN: usize = 4;

/// One request of a session.
#[derive(Debug)]
pub(super) struct ServedRequest {
    /// The engine's name for the request.
    pub(super) name: String,
    /// vLLM's name for the request.
    pub(super) label: String,
    pub(super) hashes: Vec<BlockHash>,
    /// Whether the server had no room for the request. Then it gets neither hits nor slots until it ends, and it does
    /// not count against the session's share: [`REQUESTS_MAX`](crate::protocol::REQUESTS_MAX) bounds such requests.
    pub(super) over: bool,
    /// Whether the request's lookup is pending.
    pub(super) pending: bool,
    /// Version of the last lookup. The fields below also belong to this lookup.
    pub(super) version: u32,
    pub(super) computed: Tokens,
    pub(super) max: Tokens,
    pub(super) min: Tokens,
    /// Limit on the wait for a promotion; `None`: the engine's `promotion_wait`.
    pub(super) wait: Option<PromotionWait>,
    /// Tokens that the vLLM computes before this request.
    pub(super) queued: Tokens,
    pub(super) priority: Priority,
    /// The chain that the answer of the last lookup keeps.
    pub(super) held: Option<Arc<HeldChain>>,
}

/// The state of a lookup.
pub(super) enum Looked {
    Answer(LookupAnswer, Option<Rest>),
    Hit(FoundHit),
}

impl ServedRequest {
    pub(super) fn new(request: u64) -> Self {
        Self {
            name: request.to_string(),
            label: String::new(),
            hashes: Vec::new(),
            over: false,
            pending: false,
            version: 0,
            computed: Tokens(0),
            max: Tokens(0),
            min: Tokens(0),
            wait: None,
            queued: Tokens(0),
            priority: Priority::Prefetch,
            held: None,
        }
    }

    /// The server has no room for the request.
    pub(super) fn give_up(&mut self) {
        self.over = true;
        self.hashes = Vec::new();
        self.label = String::new();
    }

    /// Whether the lookup is still pending in the engine.
    pub(super) fn still_pending(&self, engine: &Engine, id: SessionId) -> bool {
        engine
            .still_pending(id, &self.name, self.computed, self.priority)
            .is_some()
    }

    /// The engine's answer, with the extents at the end of a hit. This enters the engine as often as necessary, so that
    /// other callers can enter in between. `None`: the engine is broken.
    pub(super) fn lookup(&self, driver: &Driver, id: SessionId) -> Option<Looked> {
        let mut cursor = LookupCursor::default();
        driver.drive(|engine| self.step(engine, id, &mut cursor))
    }

    fn step(
        &self,
        engine: &mut Engine,
        id: SessionId,
        cursor: &mut LookupCursor,
    ) -> Option<Looked> {
        if self.over {
            return Some(Looked::Answer(LookupAnswer::NOTHING, None));
        }
        let question = LookupRequest::new(&self.name, &self.hashes)
            .label(&self.label)
            .computed(self.computed)
            .max(self.max)
            .min(self.min)
            .wait(self.wait)
            .queued(self.queued)
            .priority(self.priority);
        let answer = engine.step_lookup(id, &question, cursor)?;
        let rest = engine.rest(id, &self.name);
        let hit = match answer {
            Lookup::Pending { shared } => {
                return Some(Looked::Answer(LookupAnswer::Pending { shared }, rest));
            }
            Lookup::Miss { shared } => {
                return Some(Looked::Answer(LookupAnswer::Miss { shared }, rest));
            }
            Lookup::Hit(hit) => hit,
        };
        let left = engine.start_hit_extents(id, &self.name, self.computed);
        let Some(mut left) = left else {
            let shared = hit.shared;
            return Some(Looked::Answer(LookupAnswer::Miss { shared }, rest));
        };
        let part = engine.step_hit_extents(&mut left, HIT_STEP);
        Some(Looked::Hit(FoundHit {
            tokens: hit.tokens,
            shared: hit.shared,
            rest,
            brought: engine.brought(id, &self.name),
            end_bytes: engine.end_bytes(id, hit.tokens),
            host_capacity: engine.host_capacity(),
            save_bytes: engine.save_bytes(id).1,
            left,
            parts: part.into_iter().collect(),
        }))
    }
}

/// Bytes by which a vector of hashes grows when `count` hashes are added; `None` if they fit.
pub(super) fn growth(hashes: &Vec<BlockHash>, count: usize) -> Option<u64> {
    let (capacity, needed) = (hashes.capacity(), hashes.len() + count);
    let grown = needed.max(2 * capacity).max(CAPACITY_MIN) - capacity;
    (needed > capacity).then_some(grown as u64 * HASH_BYTES)
}

/// Bytes of a request that count against the session's share.
pub(super) fn bytes_of(state: &ServedRequest) -> u64 {
    if state.over {
        0
    } else {
        REQUEST_BYTES + state.hashes.capacity() as u64 * HASH_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::label_of;

    #[test]
    fn a_request_with_the_longest_label_takes_no_more_than_its_share() {
        let label = label_of(&"\u{10348}".repeat(1000)).to_owned();
        // A hash map has up to two places for an entry.
        let entry = 2 * size_of::<(u64, ServedRequest)>();
        let bytes = entry + u64::MAX.to_string().len() + label.capacity();
        assert!(bytes as u64 <= REQUEST_BYTES, "{bytes}");
    }
}
