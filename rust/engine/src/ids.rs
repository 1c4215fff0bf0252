//! The keys of the engine's tables.

use slotmap::Key;
use undercroft_contract::session::TransferId;

slotmap::new_key_type! {
    /// One client's use of one namespace.
    pub struct SessionId;
    /// A load or a save under way.
    pub(super) struct TransferKey;
    /// One request's lookup.
    pub(super) struct RequestId;
    /// A fetch of objects from the remote store.
    pub(super) struct FlightId;
}

/// A transfer's name outside of the engine.
pub(super) fn id_of(key: TransferKey) -> TransferId {
    TransferId(key.data().as_ffi())
}
