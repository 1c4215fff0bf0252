//! Numbers of connections and of accounts, and the reasons why a connection ends.

use std::time::Duration;

use crate::frame::FrameError;
use crate::sessions::Violation;

/// Interval of the search for silent connections, and pause of the listener after accepting has
/// failed.
pub(super) const PAUSE: Duration = Duration::from_secs(1);

slotmap::new_key_type! {
    pub(super) struct ConnectionId;
    /// A process, to the fair queue.
    pub(super) struct AccountId;
}

/// Why a connection is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Closed,
    /// A worker copies no more, or has not taken the arena.
    LetGo,
    Refused,
    Malformed,
    /// The peer has another version of the protocol.
    Version(u16),
}

impl From<Violation> for End {
    fn from(_: Violation) -> Self {
        Self::Malformed
    }
}

impl From<FrameError> for End {
    fn from(error: FrameError) -> Self {
        match error {
            FrameError::Version(version) => Self::Version(version),
            _ => Self::Malformed,
        }
    }
}
