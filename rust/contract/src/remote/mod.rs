//! The contract with a remote store: objects that many hosts share.
//!
//! The engine produces [`RemoteRequest`]s and consumes [`RemoteCompletion`]s; a [`RemoteStore`] carries them out on
//! threads of its own. An object is a segment: the payloads of a run of hash blocks, named by the block hash at its end
//! ([`key`]), self-describing and checksummed ([`segment`]).

pub mod key;
pub mod segment;

use serde::{Deserialize, Serialize};

pub use key::{ENCRYPTED_VERSION, ObjectKey, REMOTE_VERSION};
pub use segment::{Expected, SegmentError, SegmentHeader, SegmentPayload};

/// A payload of an object, and its place in the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemotePart {
    /// The payload's index in the object.
    pub payload: u32,
    /// Where the payload begins, in bytes from the start of the arena; a multiple of 4,096.
    pub arena_offset: u64,
    /// Bytes of the payload.
    pub len: u32,
}

/// One operation. The completion has the same `token`, which has no meaning to the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RemoteRequest {
    /// Asks which objects exist. Completes with [`RemoteDone::Present`]. The answer is a hint: an object may be deleted
    /// at any time.
    Probe {
        /// Returned in the completion.
        token: u64,
        /// The objects, at most 64.
        keys: Vec<ObjectKey>,
    },
    /// Object -> arena. Completes with [`RemoteDone::Got`] only if the header has the expected fields, and the checksum
    /// of each part matches; else with [`RemoteError::Corrupt`].
    Get {
        /// Returned in the completion.
        token: u64,
        /// The object.
        key: ObjectKey,
        /// The fields that the object's header must have.
        expect: Box<Expected>,
        /// The payloads to bring, in the object's order: often all payloads. Other payloads are not read, or dropped.
        parts: Vec<RemotePart>,
    },
    /// Arena -> object: the header, then each payload, filled with zeros to a multiple of 4,096 bytes. The object is
    /// never visible in part. Completes with [`RemoteDone::Stored`] or [`RemoteDone::AlreadyThere`].
    Put {
        /// Returned in the completion.
        token: u64,
        /// The object.
        key: ObjectKey,
        /// The encoded header.
        header: Box<[u8]>,
        /// All payloads, in the object's order.
        parts: Vec<RemotePart>,
        /// Whether to keep an object that exists, if the store can find out. Otherwise the object is replaced.
        if_absent: bool,
    },
}

impl RemoteRequest {
    /// The token of any operation.
    pub fn token(&self) -> u64 {
        match self {
            Self::Probe { token, .. } | Self::Get { token, .. } | Self::Put { token, .. } => *token,
        }
    }
}

/// The result of an operation that succeeded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RemoteDone {
    /// A probe: one bit for each key, the first in bit 0.
    Present(u64),
    /// A get: the checksum of each part, which the store has compared with the header.
    Got(Vec<u64>),
    /// A put: the whole object is in the store.
    Stored,
    /// A put with `if_absent`: the store already had an object of this name.
    AlreadyThere,
}

/// Why an operation failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RemoteError {
    /// There is no such object.
    NotFound,
    /// The object is not the expected object, or a part does not match its checksum. The store deletes the object if it
    /// may. In a put with encryption: a part in the arena does not match its checksum, and the object is not written.
    Corrupt,
    /// The object is whole, but no key decrypts it as the requested object. The store keeps the object.
    Cipher,
    /// The store does not know the credentials, or they do not allow the operation.
    Denied,
    /// The store asks for fewer requests.
    Throttled,
    /// The operation took too long: no connection within a second, or no byte for a second.
    Late,
    /// The store cannot be reached, or answered with an error that no other variant names.
    Unreachable,
    /// The store has no room for the object.
    Full,
    /// The store was shut down before the operation was started.
    Stopped,
}

impl RemoteError {
    /// Whether the error concerns only the object: this host finds none of the name, or none that it can use. The store
    /// works.
    pub fn is_of_object(self) -> bool {
        matches!(self, Self::NotFound | Self::Corrupt | Self::Cipher)
    }

    /// The word in metrics and logs.
    pub fn name(self) -> &'static str {
        match self {
            Self::NotFound => "not_found",
            Self::Corrupt => "corrupt",
            Self::Cipher => "cipher",
            Self::Denied => "denied",
            Self::Throttled => "throttled",
            Self::Late => "late",
            Self::Unreachable => "unreachable",
            Self::Full => "full",
            Self::Stopped => "stopped",
        }
    }
}

impl std::fmt::Display for RemoteError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::NotFound => "there is no such object",
            Self::Corrupt => "the object does not match its name",
            Self::Cipher => "no key of key_file decrypts the object",
            Self::Denied => "the store denies access",
            Self::Throttled => "the store asks for fewer requests",
            Self::Late => "the store takes too long",
            Self::Unreachable => "the store cannot be reached",
            Self::Full => "the store is full",
            Self::Stopped => "the connection to the store was shut down",
        })
    }
}

/// The end of one operation: exactly one for each request submitted. From then on the store neither reads nor writes
/// the arena for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteCompletion {
    /// The request's token.
    pub token: u64,
    /// The result.
    pub result: Result<RemoteDone, RemoteError>,
}

/// Carries out operations on a store, on threads of its own. Owned by the IO thread: no call blocks.
///
/// The maker gives the store the arena and the `Waker` of the engine's IO thread
/// (`Driver::waker`), which the store wakes after a completion has become ready. The
/// store limits how long an operation takes ([`RemoteError::Late`]); the engine waits no longer than its own limits,
/// but the memory of an operation belongs to the store until the completion. The store may retry inside, if the limits
/// hold. Dropping the store ends its operations, waits for those that may still touch the arena, for at most ten
/// seconds, and after that leaks the memory that they use.
pub trait RemoteStore: Send + std::fmt::Debug {
    /// `"file"`, `"s3"`, ...; shown to the operator.
    fn name(&self) -> &'static str;
    /// Operations that may be submitted now: the engine sends no more. A store with a queue of its own returns the
    /// number that is still worth having in flight.
    fn room(&self) -> usize;
    /// Starts an operation.
    fn submit(&mut self, request: RemoteRequest);
    /// Pushes the completions that are ready to `out`.
    fn drain(&mut self, out: &mut Vec<RemoteCompletion>);
}

/// Which segments are written to the remote store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RemoteWrite {
    /// Every complete segment.
    #[default]
    All,
    /// Segments that a second request has used.
    SecondTouch,
    /// No segments: the engine only reads.
    None,
}

/// Sizes and limits of the remote tier. Times are in nanoseconds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteConfig {
    /// A segment has at least this many bytes of payloads (`remote_object`).
    pub object_bytes: u64,
    /// Which segments are written (`remote_write`).
    pub write: RemoteWrite,
    /// Bytes a second that may be written (`remote_write_rate`); 0 is unlimited.
    pub write_rate: u64,
    /// Bytes that gets may have in flight.
    pub window_bytes: u64,
    /// A probe that takes longer counts as failed.
    pub probe_ns: u64,
    /// The store is late if gets are in flight, and none of them ends for this long.
    pub stall_ns: u64,
    /// How long the absence of a prompt's first segment is remembered.
    pub absent_ns: u64,
}

impl Default for RemoteConfig {
    fn default() -> Self {
        Self {
            object_bytes: 16 << 20,
            write: RemoteWrite::All,
            write_rate: 500_000_000,
            window_bytes: 256 << 20,
            probe_ns: 250_000_000,
            stall_ns: 1_000_000_000,
            absent_ns: 5_000_000_000,
        }
    }
}
