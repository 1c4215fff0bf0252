//! Bytes on disk: superblock, namespace table, records. Little-endian throughout.
//!
//! `super` file: 4 KiB superblock, then [`NAMESPACES_MAX`] entries of [`NAMESPACE_BYTES`].
//! `table` file: records of [`RECORD_BYTES`], [`RECORDS_PER_BLOCK`] to a 4 KiB block.
//! `data` file: payload slots.
//!
//! Nothing depends on the order in which writes reach the medium: a record is valid only if its
//! own checksum is right, and a payload only if it matches the checksum in its record.

use crate::checksum::checksum;
use crate::key::{BlockHash, HASH_BYTES_MAX};
use crate::little_endian::{u32_at, u64_at};
use crate::namespace::NamespaceSpec;
use crate::pages::SLOT_ALIGN;

/// Version of the format described here.
pub const FORMAT_VERSION: u32 = 1;
/// Version of the format with encrypted payloads, each with a [seal](crate::cipher) behind it. Records have no
/// checksums of encrypted payloads.
pub const ENCRYPTED_VERSION: u32 = 2;
/// Size of a record.
pub const RECORD_BYTES: usize = 128;
/// Records in one block of the table.
pub const RECORDS_PER_BLOCK: usize = 32;
/// Bytes of a block of the table: each write of records covers whole blocks.
pub const BLOCK_BYTES: usize = RECORD_BYTES * RECORDS_PER_BLOCK;
/// Size of one entry of the namespace table.
pub const NAMESPACE_BYTES: usize = 32 << 10;
/// Bytes of a namespace's entry that its description may take; the last block has the last use of the
/// namespace.
pub const ENTRY_BYTES: usize = NAMESPACE_BYTES - BLOCK_BYTES;
/// Entries of the namespace table.
pub const NAMESPACES_MAX: usize = 128;

/// The last tick at which a block can be used. With a few ticks for each request, it is centuries away.
pub const TICK_MAX: u64 = (1 << 44) - 1;

/// A later tick in a file counts as this tick. The engine continues from the latest tick of all records, and as many
/// ticks are left for it.
pub const TICK_READ_MAX: u64 = TICK_MAX / 2;

const _: () = assert!(BLOCK_BYTES as u64 == SLOT_ALIGN);

const SUPER_MAGIC: [u8; 8] = *b"UNDRCRFT";
const NAMESPACE_MAGIC: [u8; 4] = *b"UCNS";
const USE_MAGIC: [u8; 4] = *b"UCUS";
const RECORD_MAGIC: [u8; 4] = *b"UCRD";
const RECORD_BODY: usize = 120;
const NAMESPACE_HEAD: usize = 24;

/// The superblock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// Identifies the store.
    pub store_id: u64,
    /// Page size of the data file, in bytes.
    pub page_bytes: u64,
    /// Whether payloads are encrypted.
    pub encrypted: bool,
}

/// Why a superblock is not valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SuperblockError {
    /// The file is too short, or has another magic.
    NotOurs,
    /// The format has another version.
    Version(u32),
    /// The checksum does not match.
    Checksum,
    /// A value that no writer produces.
    Value,
}

impl Superblock {
    /// The superblock as one block of 4 KiB.
    pub fn encode(&self) -> Box<[u8]> {
        let mut block = vec![0; BLOCK_BYTES];
        block[..8].copy_from_slice(&SUPER_MAGIC);
        let version = Self::version(self.encrypted);
        block[8..12].copy_from_slice(&version.to_le_bytes());
        block[16..24].copy_from_slice(&self.store_id.to_le_bytes());
        block[24..32].copy_from_slice(&self.page_bytes.to_le_bytes());
        let sum = checksum(&block[..32]);
        block[32..40].copy_from_slice(&sum.to_le_bytes());
        block.into()
    }

    /// The format version of an encrypted or a plain store.
    pub fn version(encrypted: bool) -> u32 {
        if encrypted {
            ENCRYPTED_VERSION
        } else {
            FORMAT_VERSION
        }
    }

    /// Reads the first block of a `super` file.
    ///
    /// # Errors
    /// If the block is no valid superblock.
    pub fn decode(block: &[u8]) -> Result<Self, SuperblockError> {
        if block.len() < 40 || block[..8] != SUPER_MAGIC {
            return Err(SuperblockError::NotOurs);
        }
        let version = u32_at(block, 8);
        if version != FORMAT_VERSION && version != ENCRYPTED_VERSION {
            return Err(SuperblockError::Version(version));
        }
        if checksum(&block[..32]) != u64_at(block, 32) {
            return Err(SuperblockError::Checksum);
        }
        let found = Self {
            store_id: u64_at(block, 16),
            page_bytes: u64_at(block, 24),
            encrypted: version == ENCRYPTED_VERSION,
        };
        if !found.page_bytes.is_power_of_two() || found.page_bytes < SLOT_ALIGN {
            return Err(SuperblockError::Value);
        }
        Ok(found)
    }
}

/// An entry of the namespace table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamespaceEntry {
    /// The instance in the records of this life of the namespace.
    pub instance: u64,
    /// Groups and description.
    pub spec: NamespaceSpec,
}

/// Offset of an entry in the `super` file.
pub fn namespace_offset(index: usize) -> u64 {
    SLOT_ALIGN + (index * NAMESPACE_BYTES) as u64
}

impl NamespaceEntry {
    /// The bytes of the entry, a multiple of 4 KiB; `None` if the description is too long for an entry.
    pub fn encode(&self) -> Option<Box<[u8]>> {
        let json = serde_json::to_vec(&self.spec).ok()?;
        let length = NAMESPACE_HEAD + json.len();
        if length > ENTRY_BYTES {
            return None;
        }
        let mut entry = vec![0; length.next_multiple_of(BLOCK_BYTES)];
        entry[..4].copy_from_slice(&NAMESPACE_MAGIC);
        entry[4..8].copy_from_slice(&u32::try_from(json.len()).ok()?.to_le_bytes());
        entry[8..16].copy_from_slice(&self.instance.to_le_bytes());
        entry[NAMESPACE_HEAD..length].copy_from_slice(&json);
        let sum = checksum(&entry[..16]) ^ checksum(&json);
        entry[16..24].copy_from_slice(&sum.to_le_bytes());
        Some(entry.into())
    }

    /// Reads an entry; `None` if it is empty or damaged.
    pub fn decode(entry: &[u8]) -> Option<Self> {
        if entry.len() < NAMESPACE_HEAD || entry[..4] != NAMESPACE_MAGIC {
            return None;
        }
        let json_bytes = usize::try_from(u32_at(entry, 4)).ok()?;
        let json = entry.get(NAMESPACE_HEAD..NAMESPACE_HEAD.checked_add(json_bytes)?)?;
        if checksum(&entry[..16]) ^ checksum(json) != u64_at(entry, 16) {
            return None;
        }
        let spec: NamespaceSpec = serde_json::from_slice(json).ok()?;
        spec.validate().ok()?;
        Some(Self {
            instance: u64_at(entry, 8),
            spec,
        })
    }
}

/// The last use of a namespace. If it is torn or lost, only the time of that use is unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamespaceUse {
    /// The namespace's instance; the use of another instance is ignored.
    pub instance: u64,
    /// Tick of the use.
    pub tick: u64,
    /// Time of the use, in seconds since 1970.
    pub used_s: u32,
}

const USE_BODY: usize = 24;

impl NamespaceUse {
    /// The use as one block of 4 KiB.
    pub fn encode(&self) -> Box<[u8]> {
        let mut block = vec![0; BLOCK_BYTES];
        block[..4].copy_from_slice(&USE_MAGIC);
        block[4..8].copy_from_slice(&self.used_s.to_le_bytes());
        block[8..16].copy_from_slice(&self.instance.to_le_bytes());
        block[16..USE_BODY].copy_from_slice(&self.tick.to_le_bytes());
        let sum = checksum(&block[..USE_BODY]);
        block[USE_BODY..USE_BODY + 8].copy_from_slice(&sum.to_le_bytes());
        block.into()
    }

    /// Reads the use of `instance` from the place of its entry; `None` if there is no use of this instance.
    pub fn decode(place: &[u8], instance: u64) -> Option<Self> {
        let block = place.get(ENTRY_BYTES..ENTRY_BYTES + USE_BODY + 8)?;
        if block[..4] != USE_MAGIC || checksum(&block[..USE_BODY]) != u64_at(block, USE_BODY) {
            return None;
        }
        let found = Self {
            instance: u64_at(block, 8),
            tick: tick_at(block, 16)?,
            used_s: u32_at(block, 4),
        };
        (found.instance == instance).then_some(found)
    }
}

/// Reads a tick; `None` if no node can have it.
fn tick_at(bytes: &[u8], at: usize) -> Option<u64> {
    let tick = u64_at(bytes, at);
    (tick <= TICK_MAX).then_some(tick.min(TICK_READ_MAX))
}

/// Offset of an entry's [`NamespaceUse`] in the `super` file.
pub fn use_offset(index: usize) -> u64 {
    namespace_offset(index) + ENTRY_BYTES as u64
}

/// The group of a placeholder record, which describes a node that has children but no required payload.
pub const PLACEHOLDER: u8 = u8::MAX;
/// There is at most one placeholder record for this many slots of the least size.
pub const PLACEHOLDERS_SHARE: u64 = 16;

/// One payload on disk, or a placeholder: a node between payloads.
///
/// A record proves itself, so that a torn write is a missing record and never a wrong one:
///
/// ```
/// use undercroft_contract::format::{RECORD_BYTES, Record};
/// use undercroft_contract::key::BlockHash;
///
/// let record = Record {
///     group: 0,
///     hit_class: 0,
///     seq: 7,
///     instance: 1,
///     slot: 20,
///     payload_bytes: 65536,
///     checksum: 0x1234,
///     depth: 1,
///     last: 3,
///     written_s: 1_800_000_000,
///     hash: BlockHash::new(&[9; 32]).unwrap(),
///     parent: None,
/// };
/// let mut bytes = [0; RECORD_BYTES];
/// record.encode(&mut bytes);
/// assert_eq!(Record::decode(&bytes), Some(record));
/// bytes[24] ^= 1;
/// assert_eq!(Record::decode(&bytes), None);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// KV cache group, or [`PLACEHOLDER`]; then slot, bytes and checksum of the payload are 0.
    pub group: u8,
    /// Hits since first sight (policy).
    pub hit_class: u8,
    /// Sequence number of the write: of two records that claim the same bytes, the later record is right.
    pub seq: u64,
    /// The namespace's instance.
    pub instance: u64,
    /// Slot, in units of [`SLOT_ALIGN`] bytes from the start of the data file.
    pub slot: u32,
    /// Bytes of the payload.
    pub payload_bytes: u32,
    /// Checksum of the payload; in an encrypted store the number of its write, see
    /// [`StoredPayload::write_id`](super::binding::StoredPayload::write_id).
    pub checksum: u64,
    /// Hash blocks from the root.
    pub depth: u32,
    /// Tick of the last touch.
    pub last: u64,
    /// A second since 1970 by which the last touch was over.
    pub written_s: u32,
    /// Block hash of the node.
    pub hash: BlockHash,
    /// Block hash of the node's parent; `None` for the first node of a chain.
    pub parent: Option<BlockHash>,
}

impl Record {
    /// Writes the record to `out`, which is [`RECORD_BYTES`] long.
    pub fn encode(&self, out: &mut [u8]) {
        assert_eq!(out.len(), RECORD_BYTES, "a record has a fixed length");
        assert!(self.depth > 0, "the first block of a chain has depth 1");
        assert_eq!(
            self.parent.is_none(),
            self.depth == 1,
            "a record names its parent"
        );
        out.fill(0);
        out[..4].copy_from_slice(&RECORD_MAGIC);
        out[4] = u8::try_from(self.hash.as_bytes().len()).expect("a hash has at most 32 bytes");
        out[5] = self.group;
        out[6] = u8::from(self.parent.is_none());
        out[7] = self.hit_class;
        out[8..16].copy_from_slice(&self.seq.to_le_bytes());
        out[16..24].copy_from_slice(&self.instance.to_le_bytes());
        out[24..28].copy_from_slice(&self.slot.to_le_bytes());
        out[28..32].copy_from_slice(&self.payload_bytes.to_le_bytes());
        out[32..40].copy_from_slice(&self.checksum.to_le_bytes());
        out[40..44].copy_from_slice(&self.depth.to_le_bytes());
        out[44..52].copy_from_slice(&self.last.to_le_bytes());
        out[52..56].copy_from_slice(&self.written_s.to_le_bytes());
        out[56..88].copy_from_slice(self.hash.padded());
        if let Some(parent) = &self.parent {
            out[88..120].copy_from_slice(parent.padded());
        }
        let sum = checksum(&out[..RECORD_BODY]);
        out[RECORD_BODY..RECORD_BYTES].copy_from_slice(&sum.to_le_bytes());
    }

    /// Reads a record of [`RECORD_BYTES`]; `None` if it is empty, torn or foreign.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        if bytes.len() < RECORD_BYTES || bytes[..4] != RECORD_MAGIC {
            return None;
        }
        if checksum(&bytes[..RECORD_BODY]) != u64_at(bytes, RECORD_BODY) {
            return None;
        }
        let hash_bytes = usize::from(bytes[4]);
        if hash_bytes == 0 || hash_bytes > HASH_BYTES_MAX {
            return None;
        }
        let parent = match bytes[6] {
            0 => Some(BlockHash::new(&bytes[88..88 + hash_bytes])?),
            _ => None,
        };
        Some(Self {
            group: bytes[5],
            hit_class: bytes[7],
            seq: u64_at(bytes, 8),
            instance: u64_at(bytes, 16),
            slot: u32_at(bytes, 24),
            payload_bytes: u32_at(bytes, 28),
            checksum: u64_at(bytes, 32),
            depth: u32_at(bytes, 40),
            last: tick_at(bytes, 44)?,
            written_s: u32_at(bytes, 52),
            hash: BlockHash::new(&bytes[56..56 + hash_bytes])?,
            parent,
        })
    }

    /// Whether the bytes are an empty record rather than a damaged one.
    pub fn is_blank(bytes: &[u8]) -> bool {
        bytes.iter().all(|&byte| byte == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::namespace::{GroupKind, GroupSpec};

    fn record() -> Record {
        Record {
            group: 3,
            hit_class: 2,
            seq: 99,
            instance: 0xDEAD_BEEF,
            slot: 1234,
            payload_bytes: 65536,
            checksum: 0x0123_4567_89AB_CDEF,
            depth: 17,
            last: 1 << 40,
            written_s: 1_800_000_000,
            hash: BlockHash::new(&[7; 32]).unwrap(),
            parent: Some(BlockHash::new(&[8; 32]).unwrap()),
        }
    }

    #[test]
    fn a_record_survives_the_round_trip() {
        for record in [
            record(),
            Record {
                parent: None,
                depth: 1,
                hash: BlockHash::new(&[1; 16]).unwrap(),
                ..record()
            },
        ] {
            let mut bytes = [0; RECORD_BYTES];
            record.encode(&mut bytes);
            assert_eq!(Record::decode(&bytes), Some(record));
        }
    }

    #[test]
    fn a_bit_flipped_anywhere_in_a_record_is_noticed() {
        let mut bytes = [0; RECORD_BYTES];
        record().encode(&mut bytes);
        for bit in 0..RECORD_BYTES * 8 {
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Record::decode(&bytes), None, "bit {bit}");
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
    }

    #[test]
    fn a_superblock_survives_the_round_trip_and_notices_damage() {
        let superblock = Superblock {
            store_id: 42,
            page_bytes: 1 << 20,
            encrypted: false,
        };
        let encrypted = Superblock {
            encrypted: true,
            ..superblock
        };
        assert_eq!(Superblock::decode(&encrypted.encode()), Ok(encrypted));
        let mut block = superblock.encode();
        assert_eq!(Superblock::decode(&block), Ok(superblock));
        block[20] ^= 1;
        assert_eq!(Superblock::decode(&block), Err(SuperblockError::Checksum));
        block[20] ^= 1;
        block[8] = 9;
        assert_eq!(Superblock::decode(&block), Err(SuperblockError::Version(9)));
        assert_eq!(Superblock::decode(b"hello"), Err(SuperblockError::NotOurs));
    }

    #[test]
    fn a_use_survives_the_round_trip_and_is_of_one_instance() {
        let used = NamespaceUse {
            instance: 5,
            tick: 1 << 40,
            used_s: 1_800_000_000,
        };
        let mut place = vec![0; ENTRY_BYTES];
        assert_eq!(NamespaceUse::decode(&place, 5), None);
        place.extend_from_slice(&used.encode());
        assert_eq!(NamespaceUse::decode(&place, 5), Some(used));
        assert_eq!(NamespaceUse::decode(&place, 6), None);
        place[ENTRY_BYTES + 17] ^= 1;
        assert_eq!(NamespaceUse::decode(&place, 5), None);
    }

    #[test]
    fn a_namespace_entry_survives_the_round_trip_and_notices_damage() {
        let entry = NamespaceEntry {
            instance: 5,
            spec: NamespaceSpec {
                description: "{\"model\":\"x\"}".repeat(300),
                hash_block_size: 16,
                alignment_tokens: 16,
                groups: vec![GroupSpec {
                    kind: GroupKind::SlidingWindow { tokens: 256 },
                    block_tokens: 32,
                    payload_bytes: 4096,
                }],
            },
        };
        let mut bytes = entry.encode().unwrap();
        assert_eq!(NamespaceEntry::decode(&bytes), Some(entry.clone()));
        for at in [5, 9, 17, 30, 2000] {
            bytes[at] ^= 4;
            assert_eq!(NamespaceEntry::decode(&bytes), None, "byte {at}");
            bytes[at] ^= 4;
        }
        let long = "x".repeat(ENTRY_BYTES);
        let spec = NamespaceSpec {
            description: long,
            ..entry.spec
        };
        assert_eq!(NamespaceEntry { spec, ..entry }.encode(), None);
    }
}
