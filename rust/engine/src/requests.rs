//! Requests: the engine's state of each lookup, beside its share in the fetches.

use slotmap::SlotMap;
use undercroft_contract::session::{LookupRequest, Priority, PromotionWait, Tokens};

use super::explain::Answered;
use super::fetch::Planned;
use super::ids::{RequestId, SessionId};
use super::lookup_cursor::FoundChain;
use super::save_cursor::BlockOffers;

/// The lookups of all sessions.
pub(super) type Requests = SlotMap<RequestId, RequestState>;

/// One request's lookup.
#[derive(Debug)]
pub(super) struct RequestState {
    pub(super) session: SessionId,
    /// Tick of its arrival, then that of its hit.
    pub(super) tick: u64,
    pub(super) planned: Planned,
    /// Hash blocks of its first hit, which was counted; 0 before.
    pub(super) hit: u32,
    /// See [`SessionSpec::dropped_tokens`](undercroft_contract::session::SessionSpec::dropped_tokens).
    pub(super) dropped_tokens: u32,
    /// See [`NamespaceSpec::alignment_tokens`](undercroft_contract::namespace::NamespaceSpec::alignment_tokens): hits end at multiples.
    pub(super) alignment_tokens: u32,
    /// Tokens of the chain that the last lookup found, whether a hit may end there or not.
    pub(super) shared: Tokens,
    pub(super) offers: BlockOffers,
    /// Its conversation has come back: noted once. A hint's own lookup is no return.
    pub(super) has_come: bool,
    /// Why the last answer has no more tokens.
    pub(super) answered: Answered,
}

impl RequestState {
    /// Notes what a lookup says of its request. Returns how long the request waits, if it may wait for `wait`.
    pub(super) fn note_request(
        &mut self,
        request: &LookupRequest<'_>,
        wait: PromotionWait,
    ) -> PromotionWait {
        self.planned.min = request.min.0;
        self.planned.needs_hit = needs_hit(request);
        if request.priority == Priority::Prefetch {
            self.planned.queued = request.queued.0;
        }
        // A request that only a hit can serve has no computing to weigh the hit against.
        match wait == PromotionWait::Planned && self.planned.needs_hit {
            true => PromotionWait::Complete,
            false => wait,
        }
    }

    /// Notes what a lookup asks for, and which tokens of it the tiers have.
    pub(super) fn note_chain(
        &mut self,
        request: &LookupRequest<'_>,
        (chain, hash_block_size): (FoundChain, u32),
        awaits_remote: bool,
    ) {
        let end = tokens_of(request.hashes.len(), hash_block_size).min(request.max.0);
        // During a wait for the remote store, the prompt's end is its end at the begin of the wait.
        let end = match awaits_remote {
            true => self.planned.end,
            false => end,
        };
        self.planned.note(request.computed.0, end);
        self.answered.is_incomplete = chain.is_incomplete;
        self.shared = Tokens(chain.depth * hash_block_size);
    }
}

/// Whether a request is served only if more tokens are cached than the device has.
pub(super) fn needs_hit(request: &LookupRequest<'_>) -> bool {
    request.min > request.computed
}

/// Tokens of this many hash blocks. Saturates.
pub(super) fn tokens_of(hash_blocks: usize, hash_block_size: u32) -> u32 {
    let tokens = (hash_blocks as u64).saturating_mul(u64::from(hash_block_size));
    tokens.min(u64::from(u32::MAX)) as u32
}
