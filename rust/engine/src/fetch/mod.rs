//! The waits of requests for payloads that are not in the arena, and the payloads that requests keep there.
//!
//! A request may wait for a promotion from disk and for a flight from the remote store at once, and it has one answer. The
//! parts that bring payloads, `promotions` and `remote`, may change the shares, and know nothing else of a request.

mod plans;
mod shares;

pub(super) use plans::{Pace, Planned, Reads};
pub(super) use shares::{LastAnswer, Promotion, Share, Shares, Verified, Waits};
