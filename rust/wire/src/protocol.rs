//! What clients and server say to each other: the bodies of request and reply frames, in postcard's
//! encoding. Replies come in the order of the requests that expect one; an answer that the disk owed comes
//! when it is there.
//!
//! Numbers that name something (request, load, save) are the client's own and mean nothing to other
//! connections: nobody can read or end what belongs to another.

use serde::{Deserialize, Serialize, Serializer};
use undercroft_core::key::{BlockHash, HASH_BYTES_MAX, HashSource};
use undercroft_core::namespace::NamespaceSpec;

use crate::frame::{BODY_BYTES_MAX, FrameError, HEADER_BYTES, Header, Kind};

/// Most block hashes that a server keeps of one request.
pub const HASHES_MAX: usize = 4 << 20;

/// A run of a request's block hashes: those after the first `known`, which the server has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hashes<'a> {
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

impl Hashes<'_> {
    /// Adds the hashes to those that are known. False if they do not follow on.
    pub fn append_to(&self, known: &mut Vec<BlockHash>) -> bool {
        let len = usize::from(self.hash_bytes);
        let count = self.bytes.len() / len.max(1);
        if len == 0
            || len > HASH_BYTES_MAX
            || !self.bytes.len().is_multiple_of(len)
            || self.known as usize != known.len()
            || known.len() + count > HASHES_MAX
        {
            return false;
        }
        known.reserve(count);
        known.extend(self.bytes.chunks_exact(len).filter_map(BlockHash::new));
        true
    }
}

/// Requests that a session may have at a time.
pub const REQUESTS_MAX: usize = 1 << 16;

/// What a client says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request<'a> {
    /// First of all, and once: the namespace of this connection. Answered by `Registered` or `Refused`.
    Register {
        /// The namespace.
        spec: NamespaceSpec,
        /// How far before the end of what is cached every hit must end.
        dropped_tokens: u32,
        /// The client has asked for a reset before, perhaps of another server: it shares with nobody.
        private: bool,
    },
    /// Starts a lookup, or another one for the same request. Answered by `Answer`.
    Submit {
        /// The request.
        request: u64,
        /// Counts the lookups of a request: answers to older ones are void.
        version: u32,
        /// What the device holds.
        local_tokens: u32,
        /// The deepest boundary of use.
        max_tokens: u32,
        /// The scheduler waits for it.
        asked: bool,
        /// Limit on the wait for the disk: base and part for every 1,000 tokens.
        wait_ns: Option<(u64, u64)>,
        /// The hashes that the server lacks. Last, see [`append_with_hashes`].
        #[serde(borrow)]
        hashes: Hashes<'a>,
    },
    /// The scheduler waits for a lookup that was submitted early.
    Ask {
        /// The request.
        request: u64,
    },
    /// The lookup is not needed any more; the hashes are kept for saves.
    Release {
        /// The request.
        request: u64,
    },
    /// The request has ended.
    Forget {
        /// The request.
        request: u64,
    },
    /// Workers copy what the last answer named.
    BeginLoad {
        /// The request.
        request: u64,
        /// Names the load.
        load: u64,
        /// What the device holds.
        local_tokens: u32,
        /// What is loaded after it.
        external_tokens: u32,
    },
    /// All ranks have ended a load.
    EndLoad {
        /// The load.
        load: u64,
        /// Whether it succeeded.
        ok: bool,
    },
    /// Asks for slots. Answered by `Granted`.
    BeginSave {
        /// The request.
        request: u64,
        /// Names the save.
        save: u64,
        /// Tokens that the device has computed.
        tokens: u32,
        /// What the device holds of windows and states: group, first block, block after the last.
        offers: Vec<(u8, u32, u32)>,
        /// The hashes that the server lacks. Last, see [`append_with_hashes`].
        #[serde(borrow)]
        hashes: Hashes<'a>,
    },
    /// All ranks have ended a save.
    EndSave {
        /// The save.
        save: u64,
        /// Whether it succeeded.
        ok: bool,
    },
    /// Drops everything of the namespace. Answered by `Reset` when it is durable.
    Reset {
        /// Names the reset.
        ticket: u64,
    },
    /// Are you there? Answered by `Pong`.
    Ping,
    /// Answered by `Status`. Allowed before `Register`.
    Status,
}

/// Blocks of one group: group, index of the first block, one arena offset for each (-1: none).
pub type WireExtent = (u8, u32, Vec<i64>);

/// What the server says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// The session is open.
    Registered {
        /// Names the session: workers attach with it.
        session: u128,
        /// Digest of the namespace, hexadecimal.
        namespace: String,
        /// Which arena it is.
        generation: u64,
        /// `Engine.info()` as JSON.
        info: String,
    },
    /// The namespace cannot be served.
    Refused {
        /// Why.
        reason: String,
    },
    /// What a lookup knows.
    Answer {
        /// The request.
        request: u64,
        /// Of which lookup.
        version: u32,
        /// The direct reply to a `Submit`, not what came later.
        direct: bool,
        /// Nothing if the disk still owes it.
        ready: Option<Ready>,
    },
    /// Slots for a save.
    Granted {
        /// The save.
        save: u64,
        /// Blocks were left out for want of memory.
        refused: bool,
        /// Where to copy to; empty if there is nothing to copy.
        #[serde(with = "offsets")]
        extents: Vec<WireExtent>,
    },
    /// A reset has ended.
    Reset {
        /// Names the reset.
        ticket: u64,
        /// Whether it is durable.
        ok: bool,
    },
    /// I am; `Engine.stats()` as JSON.
    Pong {
        /// The statistics.
        stats: String,
    },
    /// What goes on, as JSON.
    Status {
        /// See the documentation of `undercroft status --json`.
        json: String,
    },
}

/// The answer to a lookup.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ready {
    /// Deepest usable boundary from the start of the prompt.
    pub tokens: u32,
    /// Tokens of the chain found, usable or not.
    pub shared_tokens: u32,
    /// Tokens (exclusive, inclusive) that were brought from disk for it.
    pub from_disk: Option<(u32, u32)>,
    /// Where the payloads lie.
    #[serde(with = "offsets")]
    pub extents: Vec<WireExtent>,
}

impl<'a> Request<'a> {
    /// From the body of a frame.
    ///
    /// # Errors
    /// If it is none, or bytes are left over.
    pub fn decode(body: &'a [u8]) -> Result<Self, FrameError> {
        decode(body)
    }

    /// Appends the frame. False, and nothing appended, if it is too long.
    pub fn append_to(&self, out: &mut Vec<u8>) -> bool {
        append(Kind::Request, self, out)
    }
}

impl Reply {
    /// From the body of a frame.
    ///
    /// # Errors
    /// If it is none, or bytes are left over.
    pub fn decode(body: &[u8]) -> Result<Self, FrameError> {
        decode(body)
    }

    /// Appends the frame. False, and nothing appended, if it is too long.
    pub fn append_to(&self, out: &mut Vec<u8>) -> bool {
        append(Kind::Reply, self, out)
    }
}

fn decode<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, FrameError> {
    match postcard::take_from_bytes(body) {
        Ok((message, [])) => Ok(message),
        _ => Err(FrameError::Malformed),
    }
}

fn append<T: Serialize>(kind: Kind, message: &T, out: &mut Vec<u8>) -> bool {
    let start = out.len();
    out.extend_from_slice(&[0; HEADER_BYTES]);
    let encoded = postcard::serialize_with_flavor(message, Appended(out)).is_ok();
    let body_bytes = u32::try_from(out.len() - start - HEADER_BYTES).unwrap_or(u32::MAX);
    if !encoded || body_bytes > BODY_BYTES_MAX {
        out.truncate(start);
        return false;
    }
    let header = Header { kind, body_bytes }.encode();
    out[start..start + HEADER_BYTES].copy_from_slice(&header);
    true
}

/// Appends a request's frame with the hashes after the first `known`, read straight into the buffer: on the
/// scheduler's thread each copy counts. `request` makes it of the hashes, which must be its last field. How many
/// hashes went along; `None`, and nothing appended, if the frame is too long.
pub(crate) fn append_with_hashes<'a, H: HashSource + ?Sized>(
    out: &mut Vec<u8>,
    hashes: &H,
    known: u32,
    request: impl FnOnce(Hashes<'a>) -> Request<'a>,
) -> Option<u32> {
    let start = out.len();
    let from = known as usize;
    let first = (from < hashes.len()).then(|| hashes.get(from)).flatten();
    // Without a hash its length does not matter, but it must be one.
    let hash_bytes = first.map_or(1, |hash| hash.as_bytes().len());
    let frame = request(Hashes {
        known,
        hash_bytes: u8::try_from(hash_bytes).unwrap_or(1),
        bytes: &[],
    });
    // It ends with the length of no bytes, a zero.
    if !frame.append_to(out) || out.pop() != Some(0) {
        out.truncate(start);
        return None;
    }
    let at = out.len();
    out.extend_from_slice(&[0; LENGTH_BYTES]);
    let (count, _) = hashes.append_from(from, out);
    let bytes = out.len() - at - LENGTH_BYTES;
    let body = out.len() - start - HEADER_BYTES;
    let body_bytes = u32::try_from(body).unwrap_or(u32::MAX);
    if body_bytes > BODY_BYTES_MAX {
        out.truncate(start);
        return None;
    }
    // As many bytes as a length may take, whatever it is: seven bits each, the last one without a mark.
    for (index, byte) in out[at..at + LENGTH_BYTES].iter_mut().enumerate() {
        let mark = u8::from(index + 1 < LENGTH_BYTES) << 7;
        *byte = (bytes >> (7 * index)) as u8 & 0x7f | mark;
    }
    let kind = Kind::Request;
    let header = Header { kind, body_bytes }.encode();
    out[start..start + HEADER_BYTES].copy_from_slice(&header);
    u32::try_from(count).ok()
}

/// Bytes of a length up to [`BODY_BYTES_MAX`] in postcard's encoding.
const LENGTH_BYTES: usize = 4;

/// Extents with their offsets as bytes: thousands at once, in no time.
mod offsets {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use super::WireExtent;

    struct Bytes(Vec<u8>);

    impl Serialize for Bytes {
        fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            serializer.serialize_bytes(&self.0)
        }
    }

    pub(super) fn serialize<S: Serializer>(
        extents: &[WireExtent],
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        let bytes = |slots: &[i64]| slots.iter().flat_map(|slot| slot.to_le_bytes()).collect();
        let one = |(group, first, slots): &WireExtent| (*group, *first, Bytes(bytes(slots)));
        serializer.collect_seq(extents.iter().map(one))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Vec<WireExtent>, D::Error> {
        let found: Vec<(u8, u32, &'de [u8])> = Vec::deserialize(deserializer)?;
        let one = |(group, first, bytes): (u8, u32, &[u8])| {
            let (slots, rest) = bytes.as_chunks::<8>();
            let slots = slots.iter().map(|slot| i64::from_le_bytes(*slot)).collect();
            rest.is_empty().then_some((group, first, slots))
        };
        let extents: Option<Vec<WireExtent>> = found.into_iter().map(one).collect();
        extents.ok_or_else(|| D::Error::custom("offsets of no whole number"))
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
