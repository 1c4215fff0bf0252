//! Keys: block hashes as vLLM computes them, and the digest of a namespace.

use std::fmt;

use sha2::{Digest, Sha256};

/// Longest block hash that vLLM produces (SHA-256), in bytes.
pub const HASH_BYTES_MAX: usize = 32;

/// A block hash, in full. Shorter hashes (xxh3-128) are zero-padded and keep their length, so that
/// hashes of different algorithms never compare equal.
///
/// ```
/// use undercroft_contract::key::BlockHash;
///
/// let sha256 = BlockHash::new(&[0; 32]).unwrap();
/// let xxh3 = BlockHash::new(&[0; 16]).unwrap();
/// assert_eq!(sha256.padded(), xxh3.padded());
/// assert_ne!(sha256, xxh3);
/// assert_eq!(BlockHash::new(&[0; 33]), None);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockHash {
    bytes: [u8; HASH_BYTES_MAX],
    len: u8,
}

impl BlockHash {
    /// Takes a hash of 1 to 32 bytes; `None` for any other length.
    pub fn new(hash: &[u8]) -> Option<Self> {
        // Nearly all hashes have the full length. A copy of a known length takes two instructions.
        if let Ok(bytes) = hash.try_into() {
            return Some(Self {
                bytes,
                len: HASH_BYTES_MAX as u8,
            });
        }
        if hash.is_empty() || hash.len() > HASH_BYTES_MAX {
            return None;
        }
        let mut bytes = [0; HASH_BYTES_MAX];
        bytes[..hash.len()].copy_from_slice(hash);
        Some(Self {
            bytes,
            len: u8::try_from(hash.len()).ok()?,
        })
    }

    /// The hash, without padding.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }

    /// The hash's first eight bytes: a well-mixed digest, since block hashes are uniform.
    #[inline]
    pub fn fingerprint(&self) -> u64 {
        let mut head = [0; 8];
        head.copy_from_slice(&self.padded()[..8]);
        u64::from_le_bytes(head)
    }

    /// The hash with its zero padding, as in a record on disk.
    pub fn padded(&self) -> &[u8; HASH_BYTES_MAX] {
        &self.bytes
    }
}

impl fmt::Debug for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for byte in self.as_bytes().iter().take(6) {
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

/// SHA-256 over the canonical description of everything that must be equal for the bytes of two
/// engines to be interchangeable (docs/internals/keys.md).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NamespaceDigest(pub [u8; 32]);

impl NamespaceDigest {
    /// Digest of a canonical description.
    pub fn of(description: &str) -> Self {
        Self(Sha256::digest(description.as_bytes()).into())
    }

    /// Lower-case hexadecimal, 64 characters.
    pub fn to_hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

impl fmt::Debug for NamespaceDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.to_hex()[..12])
    }
}

/// A request's block hashes, read one by one: a lookup probes O(log n) of them, so the list of the
/// caller is never copied.
pub trait HashSource {
    /// Number of hashes.
    fn len(&self) -> usize;
    /// The hash at `index`, which is below `len()`. `None` if it is not a usable hash.
    fn get(&self, index: usize) -> Option<BlockHash>;
    /// Whether there is no hash at all.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Appends the hashes from `from` on, as long as they are usable and have the same length. Returns their number
    /// and their length (0 if there is none).
    fn append_from(&self, from: usize, out: &mut Vec<u8>) -> (usize, usize) {
        let mut len = 0;
        for index in from..self.len() {
            let hash = self.get(index);
            let usable = |hash: &BlockHash| len == 0 || hash.as_bytes().len() == len;
            let Some(hash) = hash.filter(usable) else {
                return (index - from, len);
            };
            len = hash.as_bytes().len();
            out.extend_from_slice(hash.as_bytes());
        }
        (self.len().saturating_sub(from), len)
    }
}

impl fmt::Debug for dyn HashSource + '_ {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} hashes", self.len())
    }
}

impl<H: HashSource + ?Sized> HashSource for &H {
    fn len(&self) -> usize {
        (**self).len()
    }
    fn get(&self, index: usize) -> Option<BlockHash> {
        (**self).get(index)
    }
    fn append_from(&self, from: usize, out: &mut Vec<u8>) -> (usize, usize) {
        (**self).append_from(from, out)
    }
}

impl HashSource for [BlockHash] {
    fn len(&self) -> usize {
        <[BlockHash]>::len(self)
    }
    fn get(&self, index: usize) -> Option<BlockHash> {
        <[BlockHash]>::get(self, index).copied()
    }
}

impl HashSource for Vec<BlockHash> {
    fn len(&self) -> usize {
        <[BlockHash]>::len(self)
    }
    fn get(&self, index: usize) -> Option<BlockHash> {
        <[BlockHash]>::get(self, index).copied()
    }
}
