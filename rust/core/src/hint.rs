//! Hints: a client's knowledge of a prompt's future use. The engine may act on a hint or not, and says which.

use serde::{Deserialize, Serialize};

use crate::key::HashSource;
use crate::session::Tokens;

/// Bytes of the longest name of a pin.
pub const PIN_NAME_MAX: usize = 64;
/// The longest time to live of a pin: a day.
pub const TTL_MAX_NS: u64 = 86_400_000_000_000;

/// The treatment that a hint asks for a prompt's blocks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Hint {
    /// It is used soon: its payloads come from disk to host memory. No request waits for them, and nothing is computed.
    Prefetch,
    /// Its payloads stay in the tiers for this time after the last use, as far as the budget of pins allows.
    Pin {
        /// Nanoseconds without a use after which the pin ends.
        ttl_ns: u64,
        /// A pin of the same namespace and name ends when another one begins. Empty: the pin has no name.
        name: String,
    },
    /// It is not used soon: its payloads are evicted from host memory first. Payloads that are on disk and that no
    /// other prompt shares are evicted at once.
    Demote,
    /// Ends the pin of a name, or the pins without a name that end in the prompt.
    Release {
        /// As [`Hint::Pin::name`].
        name: String,
    },
}

/// A hint about a prompt.
#[derive(Clone, Copy, Debug)]
pub struct HintRequest<'a> {
    /// vLLM's id of the request whose prompt it is.
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
    /// It holds for all whole blocks of these tokens.
    Accepted(Tokens),
    /// It holds for these tokens, fewer than the hint was about: the others are not cached, or exceed a budget.
    Clipped(Tokens),
    /// It holds for nothing.
    Rejected(HintRefusal),
    /// A server has not answered. It carries the hint out nevertheless.
    Pending,
}

/// Why a hint holds for nothing.
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
    /// The answer for `tokens` of those that the hint was about.
    pub(crate) fn of(tokens: Tokens, wanted: Tokens) -> Self {
        if tokens < wanted {
            Self::Clipped(tokens)
        } else {
            Self::Accepted(tokens)
        }
    }
}
