//! The contents of payloads, at the granularity of a sector: one word stands for 512 bytes.

use undercroft_core::key::BlockHash;

use crate::random::mix;

/// Bytes that one word stands for: a device writes a sector as a whole.
pub(crate) const SECTOR: u64 = 512;

/// Contents of one sector.
pub(crate) type Token = u64;

/// Identity of a prefix: stands for its tokens.
pub(crate) type PrefixKey = u64;

/// The prefix that `branch` makes of `parent` (0: of nothing).
pub(crate) fn extend(parent: PrefixKey, branch: u64) -> PrefixKey {
    mix(parent, branch + 1)
}

/// The block hash of a prefix, of `len` bytes.
pub(crate) fn hash_of(key: PrefixKey, len: usize) -> Option<BlockHash> {
    let mut bytes = [0; 32];
    for (word, out) in (0u64..).zip(bytes.chunks_exact_mut(8)) {
        out.copy_from_slice(&mix(key, word).to_le_bytes());
    }
    BlockHash::new(&bytes[..len])
}

/// The bytes of one payload: of a namespace, of the weights in use, of a prefix, of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SavedPayload {
    pub(crate) namespace: usize,
    pub(crate) epoch: u64,
    pub(crate) key: PrefixKey,
    pub(crate) group: u8,
}

impl SavedPayload {
    pub(crate) fn sector(&self, index: usize) -> Token {
        let place = mix(self.namespace as u64, u64::from(self.group));
        mix(mix(mix(self.key, self.epoch), place), index as u64)
    }
}

/// Sectors that `bytes` cover.
pub(crate) fn sectors(bytes: u64) -> usize {
    bytes.div_ceil(SECTOR) as usize
}

/// The checksum of the payload in these sectors.
pub(crate) fn checksum(tokens: &[Token]) -> u64 {
    tokens.iter().fold(0, |sum, &token| mix(sum, token))
}
