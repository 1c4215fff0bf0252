//! The address of a server, and for how long it may be silent.

use std::time::Duration;

/// Host and port.
pub(super) type Address = (String, u16);

/// Longest wait for a connection or for the next bytes.
pub(super) const STALL: Duration = Duration::from_secs(1);
