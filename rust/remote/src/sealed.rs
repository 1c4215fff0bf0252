//! Objects whose payloads are encrypted. Such an object has the usual form, but each payload is followed by a seal. It
//! has a version and a name of its own, so that a host without a key does not find it.

use std::sync::Arc;

use undercroft_core::arena::Arena;
use undercroft_core::checksum::checksum;
use undercroft_core::cipher::{Binding, PayloadCipher, SEAL_BYTES, close_seal, is_intact};
use undercroft_core::remote::segment::SEGMENT_ALIGN;
use undercroft_core::remote::{
    ENCRYPTED_VERSION, Expected, RemoteError, RemotePart, SegmentHeader, SegmentPayload,
};

use crate::objects::{Result, StoreError};
use crate::receiver::out_of_arena;

/// Begins the associated data of payloads in a remote store, so that it differs from that of every slot on disk.
const PLACE: &[u8] = b"remote";

/// The object in the store: each payload with its seal.
pub(crate) fn sealed(of: &Expected) -> Expected {
    let with_seal = |payload: &SegmentPayload| SegmentPayload {
        len: payload.len + SEAL_BYTES as u32,
        ..*payload
    };
    Expected {
        payloads: of.payloads.iter().map(with_seal).collect(),
        ..of.clone()
    }
}

/// Binds a payload to its object, and to its place in the object.
pub(crate) fn binding(of: &Expected, path: &str, payload: &SegmentPayload) -> Binding {
    let hash = &of.hashes[payload.hash_block as usize];
    let mut associated = Vec::with_capacity(PLACE.len() + path.len() + 9 + hash.padded().len());
    associated.extend_from_slice(PLACE);
    associated.extend_from_slice(&payload.len.to_le_bytes());
    associated.extend_from_slice(&payload.hash_block.to_le_bytes());
    associated.push(payload.group);
    associated.extend_from_slice(hash.padded());
    // The path comes last, since its length varies.
    associated.extend_from_slice(path.as_bytes());
    Binding {
        namespace: of.namespace.0,
        associated: associated.into(),
    }
}

/// The bytes of the encrypted object, from the header and payloads of a plain object.
///
/// # Errors
/// [`RemoteError::Corrupt`] if the header is invalid, or if a payload in the arena has changed since its checksum was
/// computed: the seal would authenticate wrong bytes. [`RemoteError::Cipher`] if a payload cannot be encrypted.
pub(crate) fn seal_object(
    (path, header): (&str, &[u8]),
    parts: &[RemotePart],
    arena: &Arena,
    cipher: &Arc<dyn PayloadCipher>,
) -> Result<Vec<u8>> {
    let corrupt = |why| StoreError::new(RemoteError::Corrupt, why);
    let decoded = SegmentHeader::decode(header);
    let SegmentHeader {
        described: plain,
        checksums: sums,
    } = decoded.map_err(|_| corrupt("the header of a put is damaged"))?;
    let described = sealed(&plain);
    let mut object = Vec::with_capacity(described.object_bytes() as usize);
    object.resize(described.header_bytes() as usize, 0);
    let mut checksums = Vec::with_capacity(parts.len());
    for ((part, payload), &sum) in parts.iter().zip(&plain.payloads).zip(&sums) {
        let start = object.len();
        arena
            .append_to(&mut object, part.arena_offset, u64::from(part.len))
            .expect("parts of a put lie in the arena");
        // The checksum of the copy is compared, since the arena may change meanwhile.
        if checksum(&object[start..]) != sum {
            return Err(corrupt("a payload in host memory has changed"));
        }
        object.resize(object.len() + SEAL_BYTES, 0);
        let bytes = &mut object[start..];
        if !cipher.encrypt(&binding(&plain, path, payload), bytes) {
            return Err(RemoteError::Cipher.into());
        }
        close_seal(bytes);
        checksums.push(checksum(bytes));
        object.resize(object.len().next_multiple_of(SEGMENT_ALIGN as usize), 0);
    }
    let sealed = SegmentHeader {
        described,
        checksums,
    };
    let head = sealed.encode_as(ENCRYPTED_VERSION);
    object[..head.len()].copy_from_slice(&head);
    Ok(object)
}

/// Decrypts the payloads of an object that is read, one after the other.
#[derive(Debug)]
pub(crate) struct Unsealing<'a> {
    cipher: &'a Arc<dyn PayloadCipher>,
    /// The engine's description of the object.
    plain: &'a Expected,
    path: &'a str,
    /// The encrypted payload that is arriving.
    bytes: Vec<u8>,
}

impl<'a> Unsealing<'a> {
    pub(crate) fn new(
        cipher: &'a Arc<dyn PayloadCipher>,
        plain: &'a Expected,
        path: &'a str,
    ) -> Self {
        Self {
            cipher,
            plain,
            path,
            bytes: Vec::new(),
        }
    }

    /// Takes the next bytes. Returns the copy.
    pub(crate) fn take(&mut self, bytes: &[u8]) -> &[u8] {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(bytes);
        &self.bytes[start..]
    }

    /// Room for the next bytes. The caller must fill all of it.
    pub(crate) fn room(&mut self, len: usize) -> &mut [u8] {
        let start = self.bytes.len();
        self.bytes.resize(start + len, 0);
        &mut self.bytes[start..]
    }

    /// Frees the part of the room after the first `filled` bytes.
    pub(crate) fn cut(&mut self, room: usize, filled: usize) {
        self.bytes.truncate(self.bytes.len() - room + filled);
    }

    /// The whole payload has arrived: writes it into the arena. Returns the checksum of the plain bytes.
    pub(crate) fn end(&mut self, part: RemotePart, arena: &Arena) -> Result<u64> {
        let payload = &self.plain.payloads[part.payload as usize];
        if !is_intact(&self.bytes) {
            let why = "a payload does not match its seal";
            return Err(StoreError::new(RemoteError::Corrupt, why));
        }
        let binding = binding(self.plain, self.path, payload);
        if !self.cipher.decrypt(&binding, &mut self.bytes) {
            return Err(RemoteError::Cipher.into());
        }
        let plain = &self.bytes[..payload.len as usize];
        arena
            .write(part.arena_offset, plain)
            .map_err(out_of_arena)?;
        let sum = checksum(plain);
        self.bytes.clear();
        Ok(sum)
    }
}
