//! The contents of payloads, with one word for each sector of 512 bytes.

use undercroft_contract::cipher::Binding;
use undercroft_contract::io::IoFault;
use undercroft_contract::key::BlockHash;

use crate::random::mix;

/// Bytes of a sector, which one word represents. A device writes a sector as a whole.
pub(crate) const SECTOR: u64 = 512;

/// Contents of one sector.
pub(crate) type Token = u64;

/// Id of a prefix, in place of its tokens.
pub(crate) type PrefixKey = u64;

/// The prefix that follows `parent` in `branch`. With 0 as `parent` it is the first.
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

/// Identifies the bytes of one payload: its namespace, weights, prefix and group.
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

/// A word that differs with every part of a binding, and with the key.
fn mask(key: u64, binding: &Binding) -> u64 {
    let bytes = binding.namespace.iter().chain(&*binding.associated);
    bytes.fold(key, |sum, &byte| mix(sum, u64::from(byte)))
}

/// The sectors of an encrypted payload in a slot of `sectors`; its seal is in the last one.
pub(crate) fn seal(plain: &[Token], sectors: usize, key: u64, binding: &Binding) -> Vec<Token> {
    assert!(plain.len() < sectors, "the seal has a sector of its own");
    let mask = mask(key, binding);
    let mut stored = vec![0; sectors];
    for (at, (to, &from)) in (0u64..).zip(stored.iter_mut().zip(plain)) {
        *to = from ^ mix(mask, at);
    }
    stored[sectors - 1] = mix(mask, checksum(plain));
    stored
}

/// Decrypts the payload of `sectors` in an encrypted slot.
pub(crate) fn unseal(
    stored: &[Token],
    sectors: usize,
    key: u64,
    binding: &Binding,
) -> Result<Vec<Token>, IoFault> {
    let mask = mask(key, binding);
    let encrypted = (0u64..).zip(&stored[..sectors]);
    let plain: Vec<Token> = encrypted.map(|(at, &of)| of ^ mix(mask, at)).collect();
    let is_right = stored.last() == Some(&mix(mask, checksum(&plain)));
    is_right.then_some(plain).ok_or(IoFault::Cipher)
}
