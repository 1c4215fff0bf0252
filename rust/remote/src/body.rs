//! The bytes of an object that is written: a header, then payloads in the arena, each with zeros up to its alignment.

use undercroft_contract::remote::RemotePart;
use undercroft_contract::remote::segment::SEGMENT_ALIGN;
use undercroft_io::arena::Arena;

/// The zeros after a payload.
const ZEROS: [u8; SEGMENT_ALIGN as usize] = [0; SEGMENT_ALIGN as usize];

/// The bytes of an object.
#[derive(Clone, Copy, Debug)]
pub struct ObjectBody<'a> {
    header: &'a [u8],
    payloads: Option<(&'a Arena, &'a [RemotePart])>,
}

/// A run of the bytes.
pub(crate) enum Chunk<'a> {
    /// Bytes of this process.
    Bytes(&'a [u8]),
    /// Bytes of the arena: offset and length.
    Arena(&'a Arena, u64, u64),
}

impl<'a> ObjectBody<'a> {
    /// A header, then payloads.
    pub fn segment(header: &'a [u8], arena: &'a Arena, parts: &'a [RemotePart]) -> Self {
        Self {
            header,
            payloads: Some((arena, parts)),
        }
    }

    /// These bytes.
    pub fn bytes(bytes: &'a [u8]) -> Self {
        Self {
            header: bytes,
            payloads: None,
        }
    }

    /// Number of the bytes.
    pub fn len(&self) -> u64 {
        let parts = self.payloads.map_or(&[][..], |(_, parts)| parts);
        let padded = parts
            .iter()
            .map(|part| u64::from(part.len).next_multiple_of(SEGMENT_ALIGN));
        self.header.len() as u64 + padded.sum::<u64>()
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(crate) fn chunks(&self) -> impl Iterator<Item = Chunk<'a>> {
        let header = std::iter::once(Chunk::Bytes(self.header));
        let payloads = self.payloads.into_iter().flat_map(|(arena, parts)| {
            parts.iter().flat_map(move |part| {
                let len = u64::from(part.len);
                let padding = (len.next_multiple_of(SEGMENT_ALIGN) - len) as usize;
                let payload = Chunk::Arena(arena, part.arena_offset, len);
                let zeros = (padding > 0).then_some(Chunk::Bytes(&ZEROS[..padding]));
                std::iter::once(payload).chain(zeros)
            })
        });
        header.chain(payloads)
    }

    /// A copy of all bytes.
    #[cfg(any(feature = "s3", feature = "redis"))]
    pub(crate) fn to_vec(self) -> Vec<u8> {
        let mut all = Vec::with_capacity(self.len() as usize);
        for chunk in self.chunks() {
            match chunk {
                Chunk::Bytes(bytes) => all.extend_from_slice(bytes),
                Chunk::Arena(arena, offset, len) => arena
                    .append_to(&mut all, offset, len)
                    .expect("parts of a put lie in the arena"),
            }
        }
        all
    }
}
