//! Hints: a client's knowledge of a prompt's future use. The engine may carry a hint out or not, and reports which.

use serde::{Deserialize, Serialize};

use crate::key::HashSource;
use crate::tokens::Tokens;

/// Bytes of the longest name of a pin.
pub const PIN_NAME_MAX: usize = 64;
/// The longest time to live of a pin: a day.
pub const TTL_MAX_NS: u64 = 86_400_000_000_000;

/// The treatment that a hint asks for a prompt's blocks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Hint {
    /// The prompt is used soon: its payloads are read from disk into host memory. No request waits for them, and
    /// nothing is computed.
    Prefetch,
    /// The prompt's payloads stay in the tiers for this time after the last use, as far as the budget of pins allows.
    Pin {
        /// Nanoseconds without a use after which the pin ends.
        ttl_ns: u64,
        /// A pin ends when another pin with its namespace and name begins. Empty: the pin has no name.
        name: String,
    },
    /// The prompt is not used soon: its payloads are evicted from host memory before others. Payloads that are on disk
    /// and that no other prompt shares are evicted at once.
    Demote,
    /// Ends the pin of a name, or the pins without a name that end in the prompt.
    Release {
        /// See [`Hint::Pin::name`].
        name: String,
    },
}

/// A hint about a prompt.
#[derive(Clone, Copy, Debug)]
pub struct HintRequest<'a> {
    /// vLLM's id of the request that has the prompt.
    pub request: &'a str,
    /// Block hashes of the prompt.
    pub hashes: &'a dyn HashSource,
    /// The hint is about these first tokens.
    pub max: Tokens,
    /// The treatment of their blocks.
    pub hint: &'a Hint,
}

/// The engine's answer to a hint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum HintAnswer {
    /// The hint holds for all whole blocks of these tokens.
    Accepted(Tokens),
    /// The hint holds only for these tokens: the other tokens are not cached, or exceed a budget.
    Clipped(Tokens),
    /// The hint holds for no tokens.
    Rejected(HintRefusal),
    /// The server has not answered yet. It carries the hint out nevertheless.
    Pending,
}

/// Why a hint holds for no tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum HintRefusal {
    /// No whole block of the prompt is cached.
    NotCached,
    /// Not even one block fits the budget, or the part of it that running requests leave.
    OverBudget,
    /// The budget of pins is zero.
    Off,
    /// Too many prefetches are under way.
    Busy,
    /// There is no such pin.
    NotPinned,
    /// There is no engine.
    Unavailable,
}

impl HintRefusal {
    /// The name in responses.
    pub fn name(self) -> &'static str {
        match self {
            Self::NotCached => "not_cached",
            Self::OverBudget => "over_budget",
            Self::Off => "off",
            Self::Busy => "busy",
            Self::NotPinned => "not_pinned",
            Self::Unavailable => "unavailable",
        }
    }
}

impl HintAnswer {
    /// The answer to a hint that holds for `tokens` of the `wanted` tokens.
    pub fn of(tokens: Tokens, wanted: Tokens) -> Self {
        if tokens < wanted {
            Self::Clipped(tokens)
        } else {
            Self::Accepted(tokens)
        }
    }
}
