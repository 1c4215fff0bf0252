//! Frames: a header of fixed size, then a body. All numbers are little-endian.
//!
//! | bytes | header field |
//! | --- | --- |
//! | 0..4 | magic `UCFT` |
//! | 4..6 | protocol version |
//! | 6 | kind ([`Kind`]) |
//! | 7 | 0, reserved |
//! | 8..12 | length of the body in bytes |

/// First bytes of every frame.
pub const MAGIC: [u8; 4] = *b"UCFT";

/// Version of the protocol; both ends must have the same.
pub const VERSION: u16 = 1;

/// Length of a header in bytes.
pub const HEADER_BYTES: usize = 12;

/// Length of the body of [`Kind::Arena`] in bytes.
pub const ARENA_BODY_BYTES: usize = 16;

/// What a frame says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Client to server, no body: asks for the arena.
    AttachArena = 1,
    /// Server to client: size (u64) and generation (u64) of the arena, its descriptor attached.
    Arena = 2,
}

/// A header that has been checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What the frame says.
    pub kind: Kind,
    /// Length of the body in bytes.
    pub body_bytes: u32,
}

/// Why bytes are no header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// Not this protocol at all.
    #[error("frame starts with {0:02x?}, expected {MAGIC:02x?}: not an undercroft socket")]
    Magic([u8; 4]),
    /// Another version of undercroft.
    #[error(
        "protocol version {0}, expected {VERSION}: run the same undercroft version in all processes"
    )]
    Version(u16),
    /// An unknown kind, or one that does not belong here.
    #[error("unexpected frame of kind {0}")]
    Kind(u8),
    /// A body length that its kind does not have.
    #[error("frame body of {0} bytes does not fit its kind")]
    Body(u32),
}

impl Header {
    /// The header as bytes.
    pub fn encode(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..6].copy_from_slice(&VERSION.to_le_bytes());
        bytes[6] = self.kind as u8;
        bytes[8..].copy_from_slice(&self.body_bytes.to_le_bytes());
        bytes
    }

    /// Checks magic, version, kind, and that the body has the length of its kind.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, FrameError> {
        let [m0, m1, m2, m3, v0, v1, kind, _, b0, b1, b2, b3] = *bytes;
        let magic = [m0, m1, m2, m3];
        if magic != MAGIC {
            return Err(FrameError::Magic(magic));
        }
        let version = u16::from_le_bytes([v0, v1]);
        if version != VERSION {
            return Err(FrameError::Version(version));
        }
        let (kind, expected) = match kind {
            1 => (Kind::AttachArena, 0),
            2 => (Kind::Arena, ARENA_BODY_BYTES as u32),
            other => return Err(FrameError::Kind(other)),
        };
        let body_bytes = u32::from_le_bytes([b0, b1, b2, b3]);
        if body_bytes != expected {
            return Err(FrameError::Body(body_bytes));
        }
        Ok(Self { kind, body_bytes })
    }
}

/// The request for the arena.
pub fn attach_request() -> [u8; HEADER_BYTES] {
    Header {
        kind: Kind::AttachArena,
        body_bytes: 0,
    }
    .encode()
}

/// The answer that announces the arena.
pub fn arena_answer(size: u64, generation: u64) -> [u8; HEADER_BYTES + ARENA_BODY_BYTES] {
    let mut bytes = [0; HEADER_BYTES + ARENA_BODY_BYTES];
    let header = Header {
        kind: Kind::Arena,
        body_bytes: ARENA_BODY_BYTES as u32,
    };
    bytes[..HEADER_BYTES].copy_from_slice(&header.encode());
    bytes[HEADER_BYTES..HEADER_BYTES + 8].copy_from_slice(&size.to_le_bytes());
    bytes[HEADER_BYTES + 8..].copy_from_slice(&generation.to_le_bytes());
    bytes
}

/// Size and generation from the body of a [`Kind::Arena`] frame.
pub fn decode_arena_body(body: &[u8; ARENA_BODY_BYTES]) -> (u64, u64) {
    let [
        s0,
        s1,
        s2,
        s3,
        s4,
        s5,
        s6,
        s7,
        g0,
        g1,
        g2,
        g3,
        g4,
        g5,
        g6,
        g7,
    ] = *body;
    (
        u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]),
        u64::from_le_bytes([g0, g1, g2, g3, g4, g5, g6, g7]),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_survive_the_way() {
        for header in [
            Header {
                kind: Kind::AttachArena,
                body_bytes: 0,
            },
            Header {
                kind: Kind::Arena,
                body_bytes: 16,
            },
        ] {
            assert_eq!(Header::decode(&header.encode()), Ok(header));
        }
        let answer = arena_answer(1 << 40, 7);
        let body = answer[HEADER_BYTES..].try_into().unwrap();
        assert_eq!(decode_arena_body(body), (1 << 40, 7));
    }

    #[test]
    fn the_bytes_are_fixed() {
        assert_eq!(attach_request(), *b"UCFT\x01\x00\x01\x00\x00\x00\x00\x00");
    }

    #[test]
    fn every_wrong_field_is_named() {
        let change = |at: usize, value: u8| {
            let mut bytes = attach_request();
            bytes[at] = value;
            Header::decode(&bytes)
        };
        assert!(matches!(change(0, b'X'), Err(FrameError::Magic(_))));
        assert_eq!(change(4, 9), Err(FrameError::Version(9)));
        assert_eq!(change(6, 77), Err(FrameError::Kind(77)));
        assert_eq!(change(11, 1), Err(FrameError::Body(1 << 24)));
    }
}
