//! Requests: the engine's state of each lookup, beside its share in the fetches.

use slotmap::SlotMap;

use crate::session::Tokens;

use super::explain::Answered;
use super::fetch::Planned;
use super::ids::{RequestId, SessionId};
use super::save_cursor::BlockOffers;

/// The lookups of all sessions.
pub(super) type Requests = SlotMap<RequestId, RequestState>;

/// One request's lookup.
#[derive(Debug)]
pub(super) struct RequestState {
    pub(super) session: SessionId,
    /// Tick of its arrival.
    pub(super) tick: u64,
    pub(super) planned: Planned,
    /// The request's hit was counted.
    pub(super) touched: bool,
    /// See [`SessionSpec::dropped_tokens`](crate::session::SessionSpec::dropped_tokens).
    pub(super) dropped_tokens: u32,
    /// Tokens of the chain that the last lookup found, whether a hit may end there or not.
    pub(super) shared: Tokens,
    pub(super) offers: BlockOffers,
    /// Why the last answer has no more tokens.
    pub(super) answered: Answered,
}
