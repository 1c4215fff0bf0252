//! Encryption of payloads at rest: AES-256-GCM with the keys of a key file. `docs/security.md` has the argument.

mod aes;
mod key_file;

pub use aes::AesGcm;
pub use key_file::{KEYS_MAX, KeyFileError, Keys};
