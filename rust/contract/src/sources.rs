//! Where the tokens of a load came from.

use serde::{Deserialize, Serialize};

use crate::tokens::Tokens;

/// The tokens of a load by the tier that they came from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sources {
    /// Host memory.
    pub host: Tokens,
    /// Disk.
    pub disk: Tokens,
    /// The remote store.
    pub remote: Tokens,
}

/// The part of a prompt that was brought into host memory for one request, by source. A part may have blocks
/// that were in host memory already.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Brought {
    /// Tokens (exclusive, inclusive) from disk.
    pub disk: Option<(Tokens, Tokens)>,
    /// Tokens (exclusive, inclusive) from the remote store.
    pub remote: Option<(Tokens, Tokens)>,
}

impl Sources {
    /// The sources of `external` tokens after `computed`. Tokens that came from disk and from the store count
    /// as the store's.
    pub fn of(computed: Tokens, external: Tokens, brought: Brought) -> Self {
        let end = computed.0.saturating_add(external.0);
        // A server's frame may say anything.
        let inside = |part: Option<(Tokens, Tokens)>| {
            part.map_or((end, end), |(after, to)| {
                let to = to.0.clamp(computed.0, end);
                (after.0.clamp(computed.0, to), to)
            })
        };
        let (disk, remote) = (inside(brought.disk), inside(brought.remote));
        let both = (disk.1.min(remote.1)).saturating_sub(disk.0.max(remote.0));
        let (disk, remote) = (disk.1 - disk.0 - both, remote.1 - remote.0);
        Self {
            host: Tokens(external.0 - disk - remote),
            disk: Tokens(disk),
            remote: Tokens(remote),
        }
    }
}
