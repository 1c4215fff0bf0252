//! Encryption of payloads where others can read them: the contract of a cipher, and the seal behind each encrypted
//! payload. The caller provides the cipher, since this crate has no cryptography.
//!
//! A seal directly follows its payload: 48 bytes of the cipher, `UCSEALED`, and the checksum of the encrypted payload
//! and of the seal's earlier bytes. So damage is found without a key.

use std::fmt::Debug;

use crate::checksum::checksum;
use crate::little_endian::u64_at;

/// Bytes of a seal.
pub const SEAL_BYTES: usize = 64;
/// Bytes at the start of a seal that are the cipher's own.
pub const CIPHER_BYTES: usize = 48;

const MAGIC: [u8; 8] = *b"UCSEALED";
/// Where the checksum is, in bytes from the start of a seal.
const CHECKSUM: usize = 56;

/// Identity and place of a payload. Bytes that were encrypted with one binding cannot be decrypted with another.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Binding {
    /// Digest of the namespace, which has keys of its own.
    pub namespace: [u8; 32],
    /// The block, its group, its size and its place.
    pub associated: Box<[u8]>,
}

/// Encrypts and decrypts payloads, on threads that wait for files.
pub trait PayloadCipher: Send + Sync + Debug {
    /// Encrypts a payload in place and fills the first [`CIPHER_BYTES`] of the seal behind it. False if the payload
    /// could not be encrypted: the bytes are then neither plain nor encrypted.
    fn encrypt(&self, binding: &Binding, sealed: &mut [u8]) -> bool;

    /// Decrypts a payload, which its seal follows, in place. False if the bytes are not the result of an encryption
    /// with this binding: the bytes are then undefined.
    fn decrypt(&self, binding: &Binding, sealed: &mut [u8]) -> bool;
}

/// Completes the seal of an encrypted payload.
///
/// # Panics
/// If `sealed` is shorter than a seal.
pub fn close_seal(sealed: &mut [u8]) {
    let seal = sealed.len() - SEAL_BYTES;
    sealed[seal + CIPHER_BYTES..seal + CHECKSUM].copy_from_slice(&MAGIC);
    let sum = checksum_of(sealed);
    sealed[seal + CHECKSUM..].copy_from_slice(&sum.to_le_bytes());
}

/// Whether an encrypted payload and its seal are intact. No key is needed.
pub fn is_intact(sealed: &[u8]) -> bool {
    let Some(seal) = sealed.len().checked_sub(SEAL_BYTES) else {
        return false;
    };
    sealed[seal + CIPHER_BYTES..seal + CHECKSUM] == MAGIC
        && checksum_of(sealed) == u64_at(sealed, seal + CHECKSUM)
}

fn checksum_of(sealed: &[u8]) -> u64 {
    checksum(&sealed[..sealed.len() - SEAL_BYTES + CHECKSUM])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bit_flipped_anywhere_breaks_the_seal() {
        let mut sealed = vec![7; 100 + SEAL_BYTES];
        assert!(!is_intact(&sealed));
        close_seal(&mut sealed);
        assert!(is_intact(&sealed));
        for bit in 0..sealed.len() * 8 {
            sealed[bit / 8] ^= 1 << (bit % 8);
            assert!(!is_intact(&sealed), "bit {bit}");
            sealed[bit / 8] ^= 1 << (bit % 8);
        }
        assert!(!is_intact(&sealed[1..]) && !is_intact(&sealed[..SEAL_BYTES - 1]));
    }
}
