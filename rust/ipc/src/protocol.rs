//! The messages of clients and server: the bodies of request and reply frames, in postcard's encoding.
//! Replies come in the order of the messages that expect one. The answer to a pending lookup comes when
//! its promotion has ended.
//!
//! Numbers that name a request, transfer or reset are valid on the client's own connection only: no client can read or
//! end the lookups, loads and saves of another client.

use serde::{Deserialize, Serialize, Serializer};
use undercroft_contract::explain::Rest;
use undercroft_contract::hint::{Hint, HintAnswer};
use undercroft_contract::key::{BlockHash, HASH_BYTES_MAX, HashSource};
use undercroft_contract::namespace::NamespaceSpec;
use undercroft_contract::session::{
    BlockEvent, Brought, Extent, GiveUp, Offer, Priority, PromotionWait, SaveEnd, SessionToken,
    Step, Tokens, TurnEnd,
};

use crate::frame::{BODY_BYTES_MAX, FrameError, FrameKind, HEADER_BYTES, Header};
use crate::operation::OperatorRequest;

/// Most block hashes that a server keeps of one request. The longest frame holds this number.
pub const HASHES_MAX: usize = 1 << 19;

/// Most offers of a save.
pub const OFFERS_MAX: usize = 4096;

/// Most bytes of a request's id that a client sends.
pub const LABEL_BYTES_MAX: usize = 80;

/// The part of a request's id that is sent to a server, and that the server keeps.
pub(crate) fn label_of(name: &str) -> &str {
    let end = name.len().min(LABEL_BYTES_MAX);
    let end = (0..=end).rev().find(|&end| name.is_char_boundary(end));
    &name[..end.unwrap_or(0)]
}

/// Most steps of a report.
pub const STEPS_MAX: usize = 256;

/// A run of a request's block hashes, after the first `known` hashes, which the server has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HashRun<'a> {
    /// Hashes that the server has already.
    pub known: u32,
    /// Length of each hash in bytes, 1 to 32.
    pub hash_bytes: u8,
    /// The hashes, one after the other.
    #[serde(serialize_with = "in_one")]
    pub bytes: &'a [u8],
}

/// Serde would write a slice byte by byte.
fn in_one<S: Serializer>(bytes: &&[u8], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_bytes(bytes)
}

impl HashRun<'_> {
    /// Number of the hashes; `None` if the bytes are no whole hashes of a possible length.
    pub fn count(&self) -> Option<usize> {
        let len = usize::from(self.hash_bytes);
        let is_whole = len > 0 && len <= HASH_BYTES_MAX && self.bytes.len().is_multiple_of(len);
        is_whole.then(|| self.bytes.len() / len)
    }

    /// Appends the hashes to the known hashes. Returns false, and appends nothing, if the hashes do not follow on the
    /// known hashes.
    pub fn append_to(&self, known: &mut Vec<BlockHash>) -> bool {
        let Some(count) = self.count() else {
            return false;
        };
        if self.known as usize != known.len() || known.len() + count > HASHES_MAX {
            return false;
        }
        let len = usize::from(self.hash_bytes);
        known.reserve(count);
        known.extend(self.bytes.chunks_exact(len).filter_map(BlockHash::new));
        true
    }
}

/// Requests that a session may have at a time.
pub const REQUESTS_MAX: usize = 1 << 16;

/// A message of a client.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ClientMessage<'a> {
    /// Opens the session of this connection. The first message, sent once. The server replies with
    /// `Registered` or `Refused`.
    Register {
        /// The namespace.
        namespace: NamespaceSpec,
        /// See [`SessionSpec::dropped_tokens`](undercroft_contract::session::SessionSpec::dropped_tokens).
        dropped_tokens: Tokens,
        /// Whether the client's weights may have changed before: it has requested a reset, perhaps of another server, or
        /// has told so. Then the session shares with no other session.
        private: bool,
        /// See [`SessionSpec::tenant_share`](undercroft_contract::session::SessionSpec::tenant_share).
        tenant_share: u16,
    },
    /// Starts a lookup, or a further lookup of the same request. The server replies with `Answer`.
    #[serde(borrow)]
    Lookup(LookupMessage<'a>),
    /// The scheduler waits for a prefetch from now on: its priority is
    /// [`Demand`](undercroft_contract::session::Priority::Demand).
    Demand {
        /// The request.
        request: u64,
        /// The present value of [`LookupMessage::queued`].
        queued: Tokens,
    },
    /// The lookup is not needed any more. The server keeps the hashes for saves.
    EndLookup {
        /// The request.
        request: u64,
    },
    /// The request has finished.
    FinishRequest {
        /// The request.
        request: u64,
        /// How its turn ended.
        turn_end: TurnEnd,
    },
    /// Workers copy from the extents of the last answer.
    BeginLoad {
        /// The request.
        request: u64,
        /// Names the load.
        transfer: u64,
        /// Tokens that the device holds.
        computed: Tokens,
        /// Tokens that are loaded after these.
        external: Tokens,
    },
    /// Asks for slots. The server replies with `Granted`.
    #[serde(borrow)]
    BeginSave(SaveMessage<'a>),
    /// All ranks have ended the copies of a load or a save.
    EndTransfer {
        /// The load or the save.
        transfer: u64,
        /// Whether the copies succeeded.
        ok: bool,
    },
    /// Drops everything of the namespace. The server replies with `Reset` when the reset is durable, or
    /// has failed to be.
    Reset {
        /// Names the reset.
        reset: u64,
    },
    /// Steps that the vLLM has run, at most [`STEPS_MAX`].
    ReportSteps {
        /// The steps since the last report.
        #[serde(deserialize_with = "few_steps")]
        steps: Vec<Step>,
    },
    /// Asks whether the server answers. The server replies with `Pong`.
    Ping,
    /// The server replies with `Status`. Allowed before `Register`.
    Status,
    /// Asks for the changes in the tiers. The server replies with `Events`.
    TakeEvents {
        /// Whether the client has forgotten all earlier events. Then the server begins with all present blocks.
        restart: bool,
    },
    /// A hint about a prompt's future use. The server replies with `Hinted`.
    #[serde(borrow)]
    Hint(HintMessage<'a>),
    /// An operator asks. The server replies with `Operated`. Allowed before `Register` only.
    Operate(OperatorRequest),
    /// Like `EndTransfer`, for a load or a save that the client does not want any more.
    GiveUp {
        /// The load or the save.
        transfer: u64,
        /// Why.
        reason: GiveUp,
    },
    /// See [`Session::change_weights`](undercroft_contract::session::Session::change_weights).
    ChangeWeights {
        /// The description of the namespace that the session uses from now on; `None`: it shares with no session.
        description: Option<String>,
    },
}

/// See [`HintRequest`](undercroft_contract::hint::HintRequest).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HintMessage<'a> {
    /// The request.
    pub request: u64,
    /// Names the hint.
    pub number: u64,
    /// The hint concerns this number of first tokens.
    pub max: Tokens,
    /// The treatment of the blocks.
    pub hint: Hint,
    /// The hashes that the server lacks. The last field: a client appends them to the encoded frame.
    #[serde(borrow)]
    pub hashes: HashRun<'a>,
}

/// See [`LookupRequest`](undercroft_contract::session::LookupRequest).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LookupMessage<'a> {
    /// The request.
    pub request: u64,
    /// Counts the lookups of a request: answers to older lookups are void.
    pub version: u32,
    /// vLLM's id of the request, for people; empty if it was sent before.
    pub label: &'a str,
    /// Tokens that the device holds.
    pub computed: Tokens,
    /// The deepest boundary that the request can use.
    pub max: Tokens,
    /// The least boundary that the request can use.
    pub min: Tokens,
    /// Whether the scheduler waits for the lookup.
    pub priority: Priority,
    /// Limit on the wait for a promotion; `None`: the server's limit.
    pub wait: Option<PromotionWait>,
    /// Tokens of earlier requests that are not computed yet.
    pub queued: Tokens,
    /// The hashes that the server lacks. The last field: a client appends them to the encoded frame.
    #[serde(borrow)]
    pub hashes: HashRun<'a>,
}

/// See [`SaveRequest`](undercroft_contract::session::SaveRequest).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SaveMessage<'a> {
    /// The request.
    pub request: u64,
    /// Names the save.
    pub transfer: u64,
    /// Tokens that the device has computed.
    pub tokens: Tokens,
    /// See [`SaveRequest::offers`](undercroft_contract::session::SaveRequest::offers), at most [`OFFERS_MAX`] ranges.
    #[serde(deserialize_with = "few_offers")]
    pub offers: Vec<Offer>,
    /// Whether the device holds no other blocks.
    pub only_offers: bool,
    /// Whether somebody wants the blocks by name.
    pub is_wanted: bool,
    /// The hashes that the server lacks. The last field: a client appends them to the encoded frame.
    #[serde(borrow)]
    pub hashes: HashRun<'a>,
}

/// Reads offers. A frame with more than `OFFERS_MAX` fails before memory is allocated for them.
fn few_offers<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Vec<Offer>, D::Error> {
    few(deserializer, OFFERS_MAX)
}

/// Reads steps. A frame with more than `STEPS_MAX` fails before memory is allocated for them.
fn few_steps<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Vec<Step>, D::Error> {
    few(deserializer, STEPS_MAX)
}

fn few<'de, T: Deserialize<'de>, D: serde::Deserializer<'de>>(
    deserializer: D,
    most: usize,
) -> Result<Vec<T>, D::Error> {
    struct Few<T>(usize, std::marker::PhantomData<T>);
    impl<'de, T: Deserialize<'de>> serde::de::Visitor<'de> for Few<T> {
        type Value = Vec<T>;
        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            write!(f, "at most {} elements", self.0)
        }
        fn visit_seq<A: serde::de::SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<T>, A::Error> {
            let mut all = Vec::new();
            while let Some(one) = seq.next_element()? {
                if all.len() == self.0 {
                    return Err(serde::de::Error::custom("too many elements"));
                }
                all.push(one);
            }
            Ok(all)
        }
    }
    deserializer.deserialize_seq(Few(most, std::marker::PhantomData))
}

/// A message of the server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ServerMessage {
    /// The session is open.
    Registered {
        /// The token of the session, with which workers attach.
        session: SessionToken,
        /// Id of the arena. Each start of an engine has another id.
        arena_id: u64,
        /// `Engine.info()` as JSON.
        info: String,
    },
    /// The namespace cannot be served.
    Refused {
        /// The reason.
        reason: String,
    },
    /// The answer to a lookup.
    Answer {
        /// The request.
        request: u64,
        /// The lookup that this answers.
        version: u32,
        /// Whether this is the reply to a `Lookup`. False for an answer that follows a pending one.
        direct: bool,
        /// The answer.
        answer: LookupAnswer,
        /// The reason why the answer has no more tokens.
        rest: Option<Rest>,
    },
    /// Slots for a save.
    Granted {
        /// The save.
        transfer: u64,
        /// Where the save ends.
        end: SaveEnd,
        /// The slots to fill. Empty if there is nothing to copy.
        #[serde(with = "extents")]
        extents: Vec<Extent>,
    },
    /// A reset has ended.
    Reset {
        /// Names the reset.
        reset: u64,
        /// Whether the reset is durable.
        ok: bool,
    },
    /// The reply to `Ping`.
    Pong {
        /// `Engine.stats()` as JSON.
        stats: String,
    },
    /// The reply to `Status`.
    Status {
        /// See the documentation of `undercroft status --json`.
        json: String,
    },
    /// The reply to `Operate`.
    Operated {
        /// See [`OperatorRequest`].
        json: String,
    },
    /// The answer to a hint.
    Hinted {
        /// Names the hint.
        number: u64,
        /// The answer.
        answer: HintAnswer,
    },
    /// The changes in the tiers, see [`BlockEvents`](undercroft_contract::session::BlockEvents).
    Events {
        /// Whether all earlier events are void.
        cleared: bool,
        /// Whether the server has more events now.
        more: bool,
        /// The changes.
        #[serde(with = "crate::events")]
        events: Vec<BlockEvent>,
    },
}

/// [`Lookup`](undercroft_contract::session::Lookup), and the places of a hit's payloads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LookupAnswer {
    /// Payloads are being read from disk. Another answer follows.
    Pending {
        /// See [`Hit::shared`](undercroft_contract::session::Hit::shared).
        shared: Tokens,
    },
    /// A load may follow.
    Hit(LeasedHit),
    /// There is nothing to load.
    Miss {
        /// See [`Hit::shared`](undercroft_contract::session::Hit::shared).
        shared: Tokens,
    },
}

impl LookupAnswer {
    /// The server has no answer about the prompt.
    pub const NOTHING: Self = Self::Miss { shared: Tokens(0) };

    /// Whether another answer follows.
    pub fn is_pending(&self) -> bool {
        matches!(self, Self::Pending { .. })
    }
}

/// A hit, and the places of its payloads. The server leases the payloads until the request's next lookup, its load, or
/// its end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeasedHit {
    /// See [`Hit::tokens`](undercroft_contract::session::Hit::tokens).
    pub tokens: Tokens,
    /// See [`Hit::shared`](undercroft_contract::session::Hit::shared).
    pub shared: Tokens,
    /// The part of the prompt that was brought for this request.
    pub brought: Brought,
    /// The places of the payloads after the question's computed tokens.
    #[serde(with = "extents")]
    pub extents: Vec<Extent>,
}

impl<'a> ClientMessage<'a> {
    /// Decodes the body of a frame.
    ///
    /// # Errors
    /// If the body is no message, or bytes are left over.
    pub fn decode(body: &'a [u8]) -> Result<Self, FrameError> {
        decode(body)
    }

    /// Appends the frame. False, and nothing is appended, if the frame is too long.
    pub fn append_to(&self, out: &mut Vec<u8>) -> bool {
        append(FrameKind::Request, self, out)
    }
}

impl ServerMessage {
    /// Decodes the body of a frame.
    ///
    /// # Errors
    /// If the body is no message, or bytes are left over.
    pub fn decode(body: &[u8]) -> Result<Self, FrameError> {
        decode(body)
    }

    /// Appends the frame. False, and nothing is appended, if the frame is too long.
    pub fn append_to(&self, out: &mut Vec<u8>) -> bool {
        append(FrameKind::Reply, self, out)
    }
}

fn decode<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, FrameError> {
    match postcard::take_from_bytes(body) {
        Ok((message, [])) => Ok(message),
        _ => Err(FrameError::Malformed),
    }
}

fn append<T: Serialize>(kind: FrameKind, message: &T, out: &mut Vec<u8>) -> bool {
    let start = out.len();
    out.extend_from_slice(&[0; HEADER_BYTES]);
    let encoded = postcard::serialize_with_flavor(message, Appended(out)).is_ok();
    let body_bytes = body_bytes(out.len() - start - HEADER_BYTES).filter(|_| encoded);
    let Some(body_bytes) = body_bytes else {
        out.truncate(start);
        return false;
    };
    let header = Header { kind, body_bytes }.encode();
    out[start..start + HEADER_BYTES].copy_from_slice(&header);
    true
}

/// Appends the frame of a message with the hashes after the first `known`. The hashes are read directly into the
/// buffer, since copies cost time on the scheduler's thread. `message` makes the message from the hashes, which must
/// be its last field. Returns the number of appended hashes. If the frame is too long, it appends nothing and returns
/// `None`.
pub(crate) fn append_with_hashes<'a>(
    out: &mut Vec<u8>,
    hashes: &dyn HashSource,
    known: u32,
    message: impl FnOnce(HashRun<'a>) -> ClientMessage<'a>,
) -> Option<u32> {
    let start = out.len();
    let from = known as usize;
    let first = (from < hashes.len()).then(|| hashes.get(from)).flatten();
    // Without a hash the length has no effect, but the server refuses a length of 0.
    let hash_bytes = first.map_or(1, |hash| hash.as_bytes().len());
    let frame = message(HashRun {
        known,
        hash_bytes: u8::try_from(hash_bytes).expect("a hash has at most 32 bytes"),
        bytes: &[],
    });
    if !frame.append_to(out) {
        return None;
    }
    let length = out.pop();
    assert_eq!(
        length,
        Some(0),
        "the frame ends with the length of no bytes"
    );
    let at = out.len();
    out.extend_from_slice(&[0; LENGTH_BYTES]);
    let (count, _) = hashes.append_from(from, out);
    let bytes = out.len() - at - LENGTH_BYTES;
    let Some(body_bytes) = body_bytes(out.len() - start - HEADER_BYTES) else {
        out.truncate(start);
        return None;
    };
    // The length has a fixed number of bytes, enough for the longest body: seven bits in each byte, and a mark in all
    // bytes but the last.
    for (index, byte) in out[at..at + LENGTH_BYTES].iter_mut().enumerate() {
        let mark = u8::from(index + 1 < LENGTH_BYTES) << 7;
        *byte = (bytes >> (7 * index)) as u8 & 0x7f | mark;
    }
    let kind = FrameKind::Request;
    let header = Header { kind, body_bytes }.encode();
    out[start..start + HEADER_BYTES].copy_from_slice(&header);
    Some(u32::try_from(count).expect("a frame holds fewer than 2^24 hashes"))
}

/// The length of a body for a header; `None` if the body is too long for a frame.
fn body_bytes(len: usize) -> Option<u32> {
    let len = u32::try_from(len).ok()?;
    (len <= BODY_BYTES_MAX).then_some(len)
}

/// Bytes of a length up to [`BODY_BYTES_MAX`] in postcard's encoding.
const LENGTH_BYTES: usize = 4;

/// Extents whose offsets are encoded as bytes, which is much faster than number by number.
mod extents {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};
    use undercroft_contract::session::{ArenaOffset, Extent};

    struct OffsetBytes<'a>(&'a [ArenaOffset]);

    fn one(extent: &Extent) -> (u8, u32, OffsetBytes<'_>) {
        let offsets = OffsetBytes(&extent.offsets);
        (extent.group, extent.first_block, offsets)
    }

    impl Serialize for OffsetBytes<'_> {
        fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            let mut bytes = Vec::with_capacity(8 * self.0.len());
            for offset in self.0 {
                bytes.extend_from_slice(&offset.to_le_bytes());
            }
            serializer.serialize_bytes(&bytes)
        }
    }

    pub(super) fn serialize<S: Serializer>(
        extents: &[Extent],
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(extents.iter().map(one))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Vec<Extent>, D::Error> {
        let found: Vec<(u8, u32, &'de [u8])> = Vec::deserialize(deserializer)?;
        let one = |(group, first_block, bytes): (u8, u32, &[u8])| {
            let (offsets, rest) = bytes.as_chunks::<8>();
            let offsets = offsets.iter().map(|of| ArenaOffset::from_le_bytes(*of));
            rest.is_empty().then(|| Extent {
                group,
                first_block,
                offsets: offsets.collect(),
            })
        };
        let extents: Option<Vec<Extent>> = found.into_iter().map(one).collect();
        extents.ok_or_else(|| D::Error::custom("the offsets are no whole number of 8 bytes"))
    }
}

/// Postcard's output, into a buffer that holds other frames already.
struct Appended<'a>(&'a mut Vec<u8>);

impl postcard::ser_flavors::Flavor for Appended<'_> {
    type Output = ();
    fn try_push(&mut self, byte: u8) -> postcard::Result<()> {
        self.0.push(byte);
        Ok(())
    }
    fn try_extend(&mut self, bytes: &[u8]) -> postcard::Result<()> {
        self.0.extend_from_slice(bytes);
        Ok(())
    }
    fn finalize(self) -> postcard::Result<()> {
        Ok(())
    }
}
