//! AES-256-GCM. Each payload has a key of its own, derived from a key of the file by HKDF-SHA-256.
//!
//! The cipher's part of a seal:
//!
//! | offset | bytes | meaning |
//! | --- | --- | --- |
//! | 0 | 16 | tag of AES-256-GCM |
//! | 16 | 12 | nonce, random |
//! | 28 | 4 | id of the key in the file: the start of HKDF-SHA-256 of that key for this purpose |
//! | 32 | 16 | salt, random |

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, MAX_TAG_LEN, NONCE_LEN, Nonce, UnboundKey};
use aws_lc_rs::hkdf::{HKDF_SHA256, Prk, Salt};
use aws_lc_rs::rand;
use undercroft_contract::cipher::{Binding, CIPHER_BYTES, PayloadCipher, SEAL_BYTES};

use crate::key_file::Keys;

const NONCE: usize = MAX_TAG_LEN;
const KEY_ID: usize = NONCE + NONCE_LEN;
const SALT: usize = KEY_ID + 4;
const _: () = assert!(SALT + 16 == CIPHER_BYTES);

/// Separates the uses of a key and the versions of the scheme.
const PAYLOAD: &[u8] = b"undercroft 1 payload";
const ID: &[u8] = b"undercroft 1 key id";

/// Encrypts with the first key, and decrypts with any of them.
pub struct AesGcm {
    keys: Keys,
    /// The id of each key.
    ids: Vec<[u8; 4]>,
}

impl std::fmt::Debug for AesGcm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "AES-256-GCM with {} keys", self.ids.len())
    }
}

impl AesGcm {
    /// A cipher with these keys.
    pub fn new(keys: Keys) -> Self {
        let ids = keys.iter().map(id_of).collect();
        Self { keys, ids }
    }
}

/// The key of the payload with this salt.
fn derive(key: &[u8], salt: &[u8], namespace: &[u8; 32]) -> Option<LessSafeKey> {
    let prk = Salt::new(HKDF_SHA256, salt).extract(key);
    let info = [PAYLOAD, namespace];
    let key = prk.expand(&info, &AES_256_GCM).ok()?;
    Some(LessSafeKey::new(UnboundKey::from(key)))
}

/// Identifies a key without revealing anything of it.
fn id_of(key: &[u8]) -> [u8; 4] {
    let mut id = [0; 4];
    let named = Prk::new_less_safe(HKDF_SHA256, key);
    let filled = named.expand(&[ID], HKDF_SHA256).and_then(|okm| {
        let mut all = [0; 32];
        okm.fill(&mut all)?;
        id.copy_from_slice(&all[..4]);
        Ok(())
    });
    filled.expect("HKDF fills as many bytes as its hash has");
    id
}

impl PayloadCipher for AesGcm {
    fn encrypt(&self, binding: &Binding, sealed: &mut [u8]) -> bool {
        let (payload, seal) = split(sealed);
        let (Some(key), Some(id)) = (self.keys.iter().next(), self.ids.first()) else {
            return false;
        };
        if rand::fill(&mut seal[NONCE..KEY_ID]).is_err() || rand::fill(&mut seal[SALT..]).is_err() {
            return false;
        }
        seal[KEY_ID..SALT].copy_from_slice(id);
        let Some(derived) = derive(key, &seal[SALT..], &binding.namespace) else {
            return false;
        };
        let aad = Aad::from(&binding.associated);
        let tag = derived.seal_in_place_separate_tag(nonce(seal), aad, payload);
        tag.is_ok_and(|tag| {
            seal[..NONCE].copy_from_slice(tag.as_ref());
            true
        })
    }

    fn decrypt(&self, binding: &Binding, sealed: &mut [u8]) -> bool {
        let (payload, seal) = split(sealed);
        let mut keys = self.keys.iter().zip(&self.ids);
        let of_id = keys.find(|(_, id)| **id == seal[KEY_ID..SALT]);
        let derived = of_id.and_then(|(key, _)| derive(key, &seal[SALT..], &binding.namespace));
        derived.is_some_and(|derived| {
            let (aad, tag) = (Aad::from(&binding.associated), &seal[..NONCE]);
            let opened = derived.open_in_place_separate_tag(nonce(seal), aad, tag, payload);
            opened.is_ok()
        })
    }
}

/// The payload, and the cipher's part of its seal.
fn split(sealed: &mut [u8]) -> (&mut [u8], &mut [u8]) {
    let (payload, seal) = sealed.split_at_mut(sealed.len() - SEAL_BYTES);
    (payload, &mut seal[..CIPHER_BYTES])
}

fn nonce(seal: &[u8]) -> Nonce {
    let mut bytes = [0; NONCE_LEN];
    bytes.copy_from_slice(&seal[NONCE..KEY_ID]);
    Nonce::assume_unique_for_key(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cipher(keys: &[u8]) -> AesGcm {
        AesGcm::new(Keys::of(keys))
    }

    fn binding() -> Binding {
        Binding {
            namespace: [4; 32],
            associated: b"place".as_slice().into(),
        }
    }

    const PLAIN: &[u8] = b"a plain payload";

    fn encrypted(keys: &[u8]) -> Vec<u8> {
        let mut sealed = [PLAIN, &[0; SEAL_BYTES]].concat();
        assert!(cipher(keys).encrypt(&binding(), &mut sealed));
        sealed
    }

    fn decrypted(keys: &[u8], binding: &Binding, mut sealed: Vec<u8>) -> Option<Vec<u8>> {
        let is_right = cipher(keys).decrypt(binding, &mut sealed);
        is_right.then(|| sealed[..PLAIN.len()].to_vec())
    }

    /// Another implementation of HKDF and AES-GCM computed these values from the format in `docs/disk-format.md`.
    #[test]
    fn the_format_is_the_documented_one() {
        let bytes = |hex: &str| -> Vec<u8> {
            let digits = (0..hex.len()).step_by(2);
            let byte = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
            digits.map(byte).collect()
        };
        let sealed = [
            bytes("f954a3cb40cd2cc1abddaee94879eb"),
            bytes("176bc3b5de60642aca46b8a41ed5245c"),
            vec![3; 12],
            bytes("1bebbad1"),
            vec![2; 16],
            vec![0; 16],
        ];
        let found = decrypted(&[1], &binding(), sealed.concat());
        assert_eq!(found.as_deref(), Some(PLAIN));
    }

    #[test]
    fn only_a_key_of_the_file_and_the_same_binding_decrypt() {
        let sealed = encrypted(&[1]);
        assert_ne!(&sealed[..PLAIN.len()], PLAIN);
        let open =
            |keys: &[u8], binding: &Binding| decrypted(keys, binding, sealed.clone()).is_some();
        assert!(open(&[1], &binding()) && open(&[2, 1], &binding()));
        assert!(!open(&[2], &binding()) && !open(&[], &binding()));
        let mut other = binding();
        other.namespace[0] ^= 1;
        assert!(!open(&[1], &other));
        let mut other = binding();
        other.associated = b"elsewhere".as_slice().into();
        assert!(!open(&[1], &other));
    }

    #[test]
    fn no_changed_bit_is_accepted() {
        let sealed = encrypted(&[1]);
        for bit in 0..(PLAIN.len() + CIPHER_BYTES) * 8 {
            let mut changed = sealed.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(decrypted(&[1], &binding(), changed), None, "bit {bit}");
        }
    }

    #[test]
    fn salts_and_nonces_are_never_used_twice() {
        let mut seen = std::collections::HashSet::new();
        for _ in 0..1000 {
            let sealed = encrypted(&[1]);
            let seal = &sealed[PLAIN.len()..];
            assert!(seen.insert(seal[NONCE..KEY_ID].to_vec()), "a nonce");
            assert!(seen.insert(seal[SALT..CIPHER_BYTES].to_vec()), "a salt");
        }
    }

    #[test]
    fn the_first_key_encrypts_and_nothing_shows_a_key() {
        assert!(decrypted(&[1], &binding(), encrypted(&[1, 2])).is_some());
        assert_eq!(decrypted(&[2], &binding(), encrypted(&[1, 2])), None);
        let mut sealed = [0; SEAL_BYTES];
        assert!(!cipher(&[]).encrypt(&binding(), &mut sealed));
        assert_eq!(format!("{:?}", cipher(&[1, 2])), "AES-256-GCM with 2 keys");
    }
}
