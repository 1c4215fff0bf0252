//! Numbers of tokens.

use serde::{Deserialize, Serialize};

/// A number of tokens, counted from the start of a prompt.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Tokens(pub u32);

/// How a turn of a conversation ended: turns whose last tokens are the same have the same number, as with a tool call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TurnEnd(pub u32);

impl TurnEnd {
    /// It is not known how the turn ended.
    pub const UNKNOWN: Self = Self(0);

    /// Whether it is known.
    pub fn is_known(self) -> bool {
        self != Self::UNKNOWN
    }
}

/// A request that has finished or was aborted.
#[derive(Clone, Copy, Debug)]
pub struct Finished<'a> {
    /// vLLM's id of the request.
    pub request: &'a str,
    /// How its turn ended.
    pub turn_end: TurnEnd,
}

impl<'a> From<&'a str> for Finished<'a> {
    fn from(request: &'a str) -> Self {
        Self {
            request,
            turn_end: TurnEnd::UNKNOWN,
        }
    }
}

impl<'a> From<&'a String> for Finished<'a> {
    fn from(request: &'a String) -> Self {
        Self::from(request.as_str())
    }
}

impl Tokens {
    /// No limit.
    pub const MAX: Self = Self(u32::MAX);
}
