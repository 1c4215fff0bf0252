//! The bytes of an object in a remote store: a header, then payloads. Little-endian throughout.
//!
//! | at | bytes | |
//! | --- | --- | --- |
//! | 0 | 8 | `UNDRSEGM` |
//! | 8 | 4 | version of the format |
//! | 12 | 4 | bytes of the header, a multiple of 4,096 |
//! | 16 | 32 | digest of the namespace |
//! | 48 | 4 | hash blocks |
//! | 52 | 4 | payloads |
//! | 56 | 1 | bytes of a block hash |
//! | 57 | 1 | bytes of the parent's hash: 0 for the first segment of a chain |
//! | 58 | 2 | zero |
//! | 60 | 4, 4 | the heads of the shards that the payloads have: first and number; both 0 for all |
//! | 68 | 4 | zero |
//! | 72 | 32 | block hash at the end of the parent segment, padded with zeros |
//! | 104 | 8 | CRC-64/NVME of the header without these bytes, without the zeros at its end |
//! | 112 | 32 each | block hashes, padded with zeros |
//! | then | 24 each | payloads: hash block (4), engine group (4), bytes (4), zero (4), CRC-64/NVME (8) |
//!
//! Payloads follow in this order, each at the next multiple of 4,096. So the description alone determines the place of
//! each payload, and a reader may request parts of an object.

use crate::checksum::RunningChecksum;
use crate::key::{BlockHash, HASH_BYTES_MAX, NamespaceDigest};
use crate::little_endian::{u32_at, u64_at};

use super::key::REMOTE_VERSION;

/// Alignment of the payloads in an object, and of the header's length, in bytes.
pub const SEGMENT_ALIGN: u64 = 4096;
/// Hash blocks that a segment may have.
pub const HASH_BLOCKS_MAX: usize = 4096;
/// Payloads that a segment may have.
pub const PAYLOADS_MAX: usize = 16_384;

const MAGIC: [u8; 8] = *b"UNDRSEGM";
const FIXED: usize = 112;
const SUM_AT: usize = 104;
const PAYLOAD: usize = 24;

/// One payload of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentPayload {
    /// The hash block at whose end the payload's block ends, counted from the segment's first hash block.
    pub hash_block: u32,
    /// The payload's engine group.
    pub group: u8,
    /// Bytes of the payload.
    pub len: u32,
}

/// All properties of an object on which two engines must agree: the content of its header without the checksums.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expected {
    /// The namespace.
    pub namespace: NamespaceDigest,
    /// The block hash before the segment's first hash block; `None` at the start of a chain.
    pub parent: Option<BlockHash>,
    /// The block hashes, at most [`HASH_BLOCKS_MAX`], all of one length.
    pub hashes: Vec<BlockHash>,
    /// The payloads, at most [`PAYLOADS_MAX`], by hash block and then by group.
    pub payloads: Vec<SegmentPayload>,
}

/// A header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentHeader {
    /// The description of the object.
    pub described: Expected,
    /// CRC-64/NVME of each payload.
    pub checksums: Vec<u64>,
}

/// Why bytes are not the requested object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SegmentError {
    /// The bytes end too early.
    Truncated,
    /// The bytes do not begin with the magic of an object.
    NotOurs,
    /// The format has another version.
    Version(u32),
    /// The header does not match its checksum.
    Checksum,
    /// A value that no writer produces.
    Value,
    /// The bytes are another whole object.
    Other,
}

impl std::fmt::Display for SegmentError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Truncated => f.write_str("the object ends too early"),
            Self::NotOurs => f.write_str("not an object of undercroft"),
            Self::Version(version) => write!(
                f,
                "an object of format version {version}, which is not the one asked for"
            ),
            Self::Checksum => f.write_str("the header does not match its checksum"),
            Self::Value => f.write_str("the header has a value that no writer produces"),
            Self::Other => f.write_str("an object of another prefix or namespace"),
        }
    }
}

impl Expected {
    /// Bytes of the header.
    pub fn header_bytes(&self) -> u64 {
        header_bytes(self.hashes.len(), self.payloads.len())
    }

    /// Where each payload begins, in bytes from the start of the object.
    pub fn offsets(&self) -> impl Iterator<Item = u64> + '_ {
        let mut next = self.header_bytes();
        self.payloads.iter().map(move |payload| {
            let at = next;
            next += u64::from(payload.len).next_multiple_of(SEGMENT_ALIGN);
            at
        })
    }

    /// Bytes of the object.
    pub fn object_bytes(&self) -> u64 {
        let lens = self.payloads.iter().map(|payload| u64::from(payload.len));
        let padded = lens.map(|len| len.next_multiple_of(SEGMENT_ALIGN));
        self.header_bytes() + padded.sum::<u64>()
    }

    /// Whether the object is within the limits of the format.
    pub fn is_valid(&self) -> bool {
        let count = self.hashes.len();
        let len = self.hashes.first().map(|hash| hash.as_bytes().len());
        let place = |payload: &SegmentPayload| (payload.hash_block, payload.group);
        (1..=HASH_BLOCKS_MAX).contains(&count)
            && (1..=PAYLOADS_MAX).contains(&self.payloads.len())
            && (self.hashes.iter()).all(|hash| Some(hash.as_bytes().len()) == len)
            && (self.payloads.iter())
                .all(|payload| (payload.hash_block as usize) < count && payload.len > 0)
            && self.payloads.is_sorted_by(|a, b| place(a) < place(b))
    }
}

impl SegmentHeader {
    /// The header's bytes, [`Expected::header_bytes`] many.
    ///
    /// # Panics
    /// If the header breaks a limit of [`Expected`], or has not one checksum for each payload.
    pub fn encode(&self) -> Box<[u8]> {
        self.encode_as(REMOTE_VERSION)
    }

    /// Like [`SegmentHeader::encode`], for an object of this version.
    ///
    /// # Panics
    /// Like [`SegmentHeader::encode`].
    pub fn encode_as(&self, version: u32) -> Box<[u8]> {
        let of = &self.described;
        assert!(
            of.is_valid() && of.payloads.len() == self.checksums.len(),
            "a header that the format has no room for"
        );
        let mut bytes = vec![0; of.header_bytes() as usize];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, &MAGIC);
        put(8, &version.to_le_bytes());
        put(12, &(of.header_bytes() as u32).to_le_bytes());
        put(16, &of.namespace.0);
        put(48, &(of.hashes.len() as u32).to_le_bytes());
        put(52, &(of.payloads.len() as u32).to_le_bytes());
        put(56, &[of.hashes[0].as_bytes().len() as u8]);
        if let Some(parent) = &of.parent {
            put(57, &[parent.as_bytes().len() as u8]);
            put(72, parent.padded());
        }
        for (index, hash) in of.hashes.iter().enumerate() {
            put(FIXED + index * HASH_BYTES_MAX, hash.padded());
        }
        let payloads_at = FIXED + of.hashes.len() * HASH_BYTES_MAX;
        for (index, (payload, sum)) in of.payloads.iter().zip(&self.checksums).enumerate() {
            let at = payloads_at + index * PAYLOAD;
            put(at, &payload.hash_block.to_le_bytes());
            put(at + 4, &u32::from(payload.group).to_le_bytes());
            put(at + 8, &payload.len.to_le_bytes());
            put(at + 16, &sum.to_le_bytes());
        }
        let end = payloads_at + of.payloads.len() * PAYLOAD;
        let sum = header_sum(&bytes[..end]);
        bytes[SUM_AT..SUM_AT + 8].copy_from_slice(&sum.to_le_bytes());
        bytes.into()
    }

    /// Reads the header at the start of an object; bytes behind it are not looked at.
    ///
    /// # Errors
    /// Says why there is none.
    pub fn decode(bytes: &[u8]) -> Result<Self, SegmentError> {
        Self::decode_as(bytes, REMOTE_VERSION)
    }

    /// Like [`SegmentHeader::decode`], for an object of this version.
    ///
    /// # Errors
    /// Says why there is none.
    pub fn decode_as(bytes: &[u8], expected: u32) -> Result<Self, SegmentError> {
        if bytes.len() < FIXED {
            return Err(SegmentError::Truncated);
        }
        if bytes[..8] != MAGIC {
            return Err(SegmentError::NotOurs);
        }
        let version = u32_at(bytes, 8);
        if version != expected {
            return Err(SegmentError::Version(version));
        }
        let (hash_blocks, payloads) = (u32_at(bytes, 48) as usize, u32_at(bytes, 52) as usize);
        if hash_blocks > HASH_BLOCKS_MAX || payloads > PAYLOADS_MAX {
            return Err(SegmentError::Value);
        }
        let payloads_at = FIXED + hash_blocks * HASH_BYTES_MAX;
        let end = payloads_at + payloads * PAYLOAD;
        if bytes.len() < end {
            return Err(SegmentError::Truncated);
        }
        if header_sum(&bytes[..end]) != u64_at(bytes, SUM_AT) {
            return Err(SegmentError::Checksum);
        }
        Self::fields(bytes, payloads_at, (hash_blocks, payloads)).ok_or(SegmentError::Value)
    }

    /// The fields of a header whose checksum holds.
    fn fields(
        bytes: &[u8],
        payloads_at: usize,
        (hash_blocks, payloads): (usize, usize),
    ) -> Option<Self> {
        let hash = |at: usize, len: u8| BlockHash::new(bytes.get(at..at + usize::from(len))?);
        let (hash_len, parent_len) = (bytes[56], bytes[57]);
        let parent = match parent_len {
            0 => None,
            len => Some(hash(72, len).filter(|_| usize::from(len) <= HASH_BYTES_MAX)?),
        };
        let hashes = (0..hash_blocks).map(|index| hash(FIXED + index * HASH_BYTES_MAX, hash_len));
        let at = |index: usize| payloads_at + index * PAYLOAD;
        let payload = |index: usize| {
            Some(SegmentPayload {
                hash_block: u32_at(bytes, at(index)),
                group: u8::try_from(u32_at(bytes, at(index) + 4)).ok()?,
                len: u32_at(bytes, at(index) + 8),
            })
        };
        let mut namespace = [0; 32];
        namespace.copy_from_slice(&bytes[16..48]);
        let described = Expected {
            namespace: NamespaceDigest(namespace),
            parent,
            hashes: hashes.collect::<Option<_>>()?,
            payloads: (0..payloads).map(payload).collect::<Option<_>>()?,
        };
        // This version does not read objects with shards of only some heads.
        let is_whole = u32_at(bytes, 60) == 0 && u32_at(bytes, 64) == 0;
        let is_sized = u64::from(u32_at(bytes, 12)) == described.header_bytes();
        (is_whole && is_sized && described.is_valid()).then(|| Self {
            described,
            checksums: (0..payloads)
                .map(|index| u64_at(bytes, at(index) + 16))
                .collect(),
        })
    }
}

/// Reads the header at the start of an object and compares it with the expected one.
///
/// # Errors
/// Says why the bytes are not that object.
pub fn verify(bytes: &[u8], expected: &Expected) -> Result<SegmentHeader, SegmentError> {
    verify_as(bytes, expected, REMOTE_VERSION)
}

/// Like [`verify`], for an object of this version.
///
/// # Errors
/// Says why the bytes are not that object.
pub fn verify_as(
    bytes: &[u8],
    expected: &Expected,
    version: u32,
) -> Result<SegmentHeader, SegmentError> {
    let header = SegmentHeader::decode_as(bytes, version)?;
    if header.described == *expected {
        Ok(header)
    } else {
        Err(SegmentError::Other)
    }
}

fn header_bytes(hash_blocks: usize, payloads: usize) -> u64 {
    let bytes = FIXED + hash_blocks * HASH_BYTES_MAX + payloads * PAYLOAD;
    (bytes as u64).next_multiple_of(SEGMENT_ALIGN)
}

fn header_sum(header: &[u8]) -> u64 {
    let mut sum = RunningChecksum::default();
    sum.update(&header[..SUM_AT]);
    sum.update(&header[SUM_AT + 8..]);
    sum.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> SegmentHeader {
        let hash = |byte: u8| BlockHash::new(&[byte; 32]).expect("32 bytes");
        SegmentHeader {
            described: Expected {
                namespace: NamespaceDigest::of("a model"),
                parent: Some(hash(9)),
                hashes: (0..4).map(hash).collect(),
                payloads: (0..4)
                    .map(|hash_block| SegmentPayload {
                        hash_block,
                        group: 0,
                        len: 5000,
                    })
                    .collect(),
            },
            checksums: vec![11, 12, 13, 14],
        }
    }

    #[test]
    fn a_header_is_read_as_it_was_written() {
        let header = header();
        let bytes = header.encode();
        assert_eq!(bytes.len(), 4096);
        assert_eq!(SegmentHeader::decode(&bytes), Ok(header.clone()));
        assert_eq!(verify(&bytes, &header.described), Ok(header));
    }

    #[test]
    fn payloads_begin_at_multiples_of_4_kib() {
        let described = header().described;
        let offsets: Vec<u64> = described.offsets().collect();
        assert_eq!(offsets, [4096, 12_288, 20_480, 28_672]);
        assert_eq!(described.object_bytes(), 36_864);
    }

    #[test]
    fn every_changed_bit_is_found() {
        let header = header();
        let bytes = header.encode();
        let end = FIXED + 4 * HASH_BYTES_MAX + 4 * PAYLOAD;
        for bit in 0..end * 8 {
            let mut changed = bytes.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert!(verify(&changed, &header.described).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn another_object_is_not_taken_for_the_one_asked_for() {
        let bytes = header().encode();
        let asked = |change: fn(&mut Expected)| {
            let mut described = header().described;
            change(&mut described);
            verify(&bytes, &described)
        };
        let other = Err(SegmentError::Other);
        assert_eq!(
            asked(|of| of.namespace = NamespaceDigest::of("another")),
            other
        );
        assert_eq!(asked(|of| of.parent = None), other);
        assert_eq!(asked(|of| of.hashes.swap(0, 1)), other);
        assert_eq!(asked(|of| of.payloads[3].len = 5001), other);
        assert_eq!(asked(|of| of.payloads[3].group = 1), other);
    }

    #[test]
    fn a_header_that_ends_early_is_no_header() {
        let bytes = header().encode();
        let end = FIXED + 4 * HASH_BYTES_MAX + 4 * PAYLOAD;
        for len in 0..end {
            let found = SegmentHeader::decode(&bytes[..len]);
            assert_eq!(found, Err(SegmentError::Truncated), "{len} bytes");
        }
    }

    #[test]
    fn counts_of_another_format_allocate_nothing() {
        let mut bytes = header().encode();
        bytes[48..52].copy_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(SegmentHeader::decode(&bytes), Err(SegmentError::Value));
    }
}
