//! Frames: a header of fixed size, then a body. All numbers of the header are little-endian.
//!
//! | bytes | header field |
//! | --- | --- |
//! | 0..4 | magic `UCFT` |
//! | 4..6 | protocol version |
//! | 6 | kind ([`FrameKind`]) |
//! | 7 | 0, reserved |
//! | 8..12 | length of the body in bytes |
//!
//! The length is checked against the limit of its kind before anything is allocated for it.

use undercroft_contract::session::SessionToken;

/// First bytes of every frame.
pub const MAGIC: [u8; 4] = *b"UCFT";

/// Version of the protocol. A server also supports the versions in `dialect.rs`.
pub const VERSION: u16 = 18;

/// Length of a header in bytes.
pub const HEADER_BYTES: usize = 12;

/// Length of the body of [`FrameKind::Attach`] in bytes.
pub const ATTACH_BODY_BYTES: usize = 16;

/// Length of the body of [`FrameKind::Arena`] in bytes.
pub const ARENA_BODY_BYTES: usize = 16;

/// Longest body of a request or a reply in bytes: the hashes of half a million blocks.
pub const BODY_BYTES_MAX: u32 = 16 << 20;

/// Kinds of frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum FrameKind {
    /// Worker to server: the token (u128) of its engine's session; asks for the arena.
    Attach = 1,
    /// Server to worker: size (u64) and id (u64) of the arena, with its descriptor.
    Arena = 2,
    /// Client to server: a [`crate::protocol::ClientMessage`].
    Request = 3,
    /// Server to client: a [`crate::protocol::ServerMessage`].
    Reply = 4,
    /// Worker to server: this process copies no more. Without this frame, its slots are kept until the process ends.
    LetGo = 5,
}

/// A header that has been checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The kind of the frame.
    pub kind: FrameKind,
    /// Length of the body in bytes.
    pub body_bytes: u32,
}

/// Why bytes are not a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// The bytes belong to another protocol.
    #[error("frame starts with {0:02x?}, expected {MAGIC:02x?}: not an undercroft socket")]
    Magic([u8; 4]),
    /// The peer has another version of undercroft.
    #[error(
        "the other process speaks protocol version {0}, this one version {VERSION}: {older}; run the same \
         undercroft in all processes, and upgrade the server first",
        older = which_is_older(*.0)
    )]
    Version(u16),
    /// The kind is unknown, or is not allowed here.
    #[error("unexpected frame of kind {0}")]
    Kind(u8),
    /// The kind does not have bodies of this length.
    #[error("frame body of {0} bytes does not fit its kind")]
    Body(u32),
    /// The body is no message.
    #[error("the body of a frame cannot be decoded")]
    Malformed,
}

fn which_is_older(version: u16) -> &'static str {
    if version < VERSION {
        "the other process runs the older undercroft"
    } else {
        "this process runs the older undercroft"
    }
}

impl Header {
    /// The header as bytes.
    pub fn encode(self) -> [u8; HEADER_BYTES] {
        self.encode_as(VERSION)
    }

    /// The header in another version: the fields of a header never change.
    pub(crate) fn encode_as(self, version: u16) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..6].copy_from_slice(&version.to_le_bytes());
        bytes[6] = self.kind as u8;
        bytes[8..].copy_from_slice(&self.body_bytes.to_le_bytes());
        bytes
    }

    /// Checks magic, version, kind, and whether the body's length is possible for the kind.
    ///
    /// # Errors
    /// Names the field that is wrong.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, FrameError> {
        Self::decode_as(VERSION, bytes)
    }

    /// Decodes the header of a frame of another version.
    pub(crate) fn decode_as(expected: u16, bytes: &[u8; HEADER_BYTES]) -> Result<Self, FrameError> {
        let [m0, m1, m2, m3, v0, v1, kind, _, b0, b1, b2, b3] = *bytes;
        let magic = [m0, m1, m2, m3];
        if magic != MAGIC {
            return Err(FrameError::Magic(magic));
        }
        let version = u16::from_le_bytes([v0, v1]);
        if version != expected {
            return Err(FrameError::Version(version));
        }
        let message = 1..=BODY_BYTES_MAX;
        let exactly = |bytes: usize| bytes as u32..=bytes as u32;
        let (kind, allowed) = match kind {
            1 => (FrameKind::Attach, exactly(ATTACH_BODY_BYTES)),
            2 => (FrameKind::Arena, exactly(ARENA_BODY_BYTES)),
            3 => (FrameKind::Request, message),
            4 => (FrameKind::Reply, message),
            5 => (FrameKind::LetGo, 0..=0),
            other => return Err(FrameError::Kind(other)),
        };
        let body_bytes = u32::from_le_bytes([b0, b1, b2, b3]);
        if !allowed.contains(&body_bytes) {
            return Err(FrameError::Body(body_bytes));
        }
        Ok(Self { kind, body_bytes })
    }
}

/// A whole frame: header, body, and the length of both together.
pub type Frame<'a> = (Header, &'a [u8], usize);

/// The first frame in `bytes`; `None` while it is incomplete.
///
/// # Errors
/// The errors of [`Header::decode`], as soon as the header is complete, even if the body is not.
pub fn first(bytes: &[u8]) -> Result<Option<Frame<'_>>, FrameError> {
    first_as(VERSION, bytes)
}

/// Like [`first`], for a frame of another version.
pub(crate) fn first_as(version: u16, bytes: &[u8]) -> Result<Option<Frame<'_>>, FrameError> {
    let Some(head) = bytes.first_chunk::<HEADER_BYTES>() else {
        return Ok(None);
    };
    let header = Header::decode_as(version, head)?;
    let end = HEADER_BYTES + header.body_bytes as usize;
    Ok(bytes.get(HEADER_BYTES..end).map(|body| (header, body, end)))
}

/// A worker's request for the arena.
pub fn attach_request(session: SessionToken) -> [u8; HEADER_BYTES + ATTACH_BODY_BYTES] {
    let mut bytes = [0; HEADER_BYTES + ATTACH_BODY_BYTES];
    let header = Header {
        kind: FrameKind::Attach,
        body_bytes: ATTACH_BODY_BYTES as u32,
    };
    bytes[..HEADER_BYTES].copy_from_slice(&header.encode());
    bytes[HEADER_BYTES..].copy_from_slice(&session.0.to_le_bytes());
    bytes
}

/// The frame by which a worker releases the arena.
pub fn let_go() -> [u8; HEADER_BYTES] {
    let header = Header {
        kind: FrameKind::LetGo,
        body_bytes: 0,
    };
    header.encode()
}

/// The answer that announces the arena.
pub fn arena_answer(size: u64, arena_id: u64) -> [u8; HEADER_BYTES + ARENA_BODY_BYTES] {
    let mut bytes = [0; HEADER_BYTES + ARENA_BODY_BYTES];
    let header = Header {
        kind: FrameKind::Arena,
        body_bytes: ARENA_BODY_BYTES as u32,
    };
    bytes[..HEADER_BYTES].copy_from_slice(&header.encode());
    bytes[HEADER_BYTES..HEADER_BYTES + 8].copy_from_slice(&size.to_le_bytes());
    bytes[HEADER_BYTES + 8..].copy_from_slice(&arena_id.to_le_bytes());
    bytes
}

/// Size and id of the arena, from the body of a [`FrameKind::Arena`] frame.
pub fn decode_arena_body(body: &[u8; ARENA_BODY_BYTES]) -> (u64, u64) {
    let both = u128::from_le_bytes(*body);
    (both as u64, (both >> 64) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_survive_the_way() {
        for (kind, body_bytes) in [
            (FrameKind::Attach, 16),
            (FrameKind::Arena, 16),
            (FrameKind::Request, 1),
            (FrameKind::Reply, BODY_BYTES_MAX),
            (FrameKind::LetGo, 0),
        ] {
            let header = Header { kind, body_bytes };
            assert_eq!(Header::decode(&header.encode()), Ok(header));
        }
        let answer = arena_answer(1 << 40, 7);
        let body = answer[HEADER_BYTES..].try_into().unwrap();
        assert_eq!(decode_arena_body(body), (1 << 40, 7));
    }

    #[test]
    fn the_bytes_are_fixed() {
        let bytes = attach_request(SessionToken(1));
        assert_eq!(
            bytes[..16],
            *b"UCFT\x12\x00\x01\x00\x10\x00\x00\x00\x01\x00\x00\x00"
        );
    }

    #[test]
    fn every_wrong_field_is_named() {
        let change = |at: usize, value: u8| {
            let mut bytes = attach_request(SessionToken(0));
            bytes[at] = value;
            first(&bytes).map(drop)
        };
        assert!(matches!(change(0, b'X'), Err(FrameError::Magic(_))));
        assert_eq!(change(4, 77), Err(FrameError::Version(77)));
        assert_eq!(change(6, 77), Err(FrameError::Kind(77)));
        assert_eq!(change(11, 1), Err(FrameError::Body((1 << 24) + 16)));
    }

    #[test]
    fn a_length_over_the_limit_is_refused_before_the_body_comes() {
        let header = Header {
            kind: FrameKind::Request,
            body_bytes: BODY_BYTES_MAX + 1,
        };
        let refused = first(&header.encode()).map(drop);
        assert_eq!(refused, Err(FrameError::Body(BODY_BYTES_MAX + 1)));
    }

    #[test]
    fn a_frame_is_taken_when_it_is_whole() {
        let bytes = attach_request(SessionToken(5));
        for len in 0..bytes.len() {
            assert_eq!(first(&bytes[..len]), Ok(None));
        }
        let (header, body, len) = first(&bytes).unwrap().unwrap();
        assert_eq!((header.kind, body.len(), len), (FrameKind::Attach, 16, 28));
    }
}
