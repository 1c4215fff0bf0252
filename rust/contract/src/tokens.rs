//! Numbers of tokens.

use serde::{Deserialize, Serialize};

/// A number of tokens, counted from the start of a prompt.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Tokens(pub u32);

impl Tokens {
    /// No limit.
    pub const MAX: Self = Self(u32::MAX);
}
