//! Objects whose payloads are encrypted. Such an object has the usual form, but each payload is followed by a seal. It
//! has a version and a name of its own, so that a host without a key does not find it.

use std::sync::Arc;

use undercroft_contract::checksum::checksum;
use undercroft_contract::cipher::{Binding, PayloadCipher, SEAL_BYTES, close_seal, is_intact};
use undercroft_contract::remote::{
    ENCRYPTED_VERSION, Expected, RemoteError, RemotePart, SegmentHeader, SegmentPayload,
};
use undercroft_io::arena::Arena;
use undercroft_io::secret::{SecretBytes, clear};

use crate::store_error::{ObjectStoreError, Result, out_of_arena};

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
) -> Result<SecretBytes> {
    let corrupt = |why| ObjectStoreError::new(RemoteError::Corrupt, why);
    let decoded = SegmentHeader::decode(header);
    let SegmentHeader {
        described: plain,
        checksums: sums,
    } = decoded.map_err(|_| corrupt("the header of a put is damaged"))?;
    let described = sealed(&plain);
    let mut sealed = SecretBytes::zeros(described.object_bytes() as usize).map_err(no_memory)?;
    let object = sealed.bytes_mut();
    let mut checksums = Vec::with_capacity(parts.len());
    let payloads = parts.iter().zip(&plain.payloads).zip(described.offsets());
    for (((part, payload), start), &sum) in payloads.zip(&sums) {
        let len = part.len as usize;
        let bytes = &mut object[start as usize..][..len + SEAL_BYTES];
        arena
            .copy_to(part.arena_offset, &mut bytes[..len])
            .expect("parts of a put lie in the arena");
        // The checksum of the copy is compared, since the arena may change meanwhile.
        if checksum(&bytes[..len]) != sum {
            return Err(corrupt("a payload in host memory has changed"));
        }
        if !cipher.encrypt(&binding(&plain, path, payload), bytes) {
            return Err(RemoteError::Cipher.into());
        }
        close_seal(bytes);
        checksums.push(checksum(bytes));
    }
    let header = SegmentHeader {
        described,
        checksums,
    };
    let head = header.encode_as(ENCRYPTED_VERSION);
    object[..head.len()].copy_from_slice(&head);
    Ok(sealed)
}

fn no_memory(error: std::io::Error) -> ObjectStoreError {
    ObjectStoreError::new(RemoteError::Unreachable, error)
}

/// Decrypts the payloads of an object that is read, one after the other.
#[derive(Debug)]
pub(crate) struct Unsealing<'a> {
    cipher: &'a Arc<dyn PayloadCipher>,
    /// The engine's description of the object.
    plain: &'a Expected,
    path: &'a str,
    /// Room for the largest payload, once one arrives.
    room: Option<SecretBytes>,
    /// Bytes of the encrypted payload that have arrived.
    filled: usize,
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
            room: None,
            filled: 0,
        }
    }

    /// Takes the next bytes. Returns the copy.
    pub(crate) fn take(&mut self, bytes: &[u8]) -> Result<&[u8]> {
        self.room(bytes.len())?.copy_from_slice(bytes);
        Ok(self.fill(bytes.len()))
    }

    /// Room for the next `len` bytes of a payload.
    pub(crate) fn room(&mut self, len: usize) -> Result<&mut [u8]> {
        let room = match self.room.take() {
            Some(room) => room,
            None => {
                let largest = self.plain.payloads.iter().map(|payload| payload.len).max();
                let bytes = largest.unwrap_or(0) as usize + SEAL_BYTES;
                SecretBytes::zeros(bytes).map_err(no_memory)?
            }
        };
        Ok(&mut self.room.insert(room).bytes_mut()[self.filled..][..len])
    }

    /// The first `count` bytes of the room have arrived.
    pub(crate) fn fill(&mut self, count: usize) -> &[u8] {
        let start = self.filled;
        self.filled += count;
        &self.bytes()[start..]
    }

    fn bytes(&self) -> &[u8] {
        let room = self.room.as_ref().map_or(&[][..], SecretBytes::bytes);
        &room[..self.filled]
    }

    /// The whole payload has arrived: writes it into the arena. Returns the checksum of the plain bytes.
    pub(crate) fn end(&mut self, part: RemotePart, arena: &Arena) -> Result<u64> {
        let payload = &self.plain.payloads[part.payload as usize];
        if !is_intact(self.bytes()) {
            let why = "a payload does not match its seal";
            return Err(ObjectStoreError::new(RemoteError::Corrupt, why));
        }
        let binding = binding(self.plain, self.path, payload);
        let (cipher, filled) = (self.cipher, std::mem::take(&mut self.filled));
        let room = self
            .room
            .as_mut()
            .map_or(&mut [][..], SecretBytes::bytes_mut);
        let bytes = &mut room[..filled];
        if !cipher.decrypt(&binding, bytes) {
            return Err(RemoteError::Cipher.into());
        }
        let plain = &mut bytes[..payload.len as usize];
        let written = arena.write(part.arena_offset, plain);
        let sum = checksum(plain);
        clear(plain);
        written.map(|()| sum).map_err(out_of_arena)
    }
}
