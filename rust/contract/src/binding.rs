//! The binding between the bytes of a slot and their payload, in a store whose payloads are encrypted.

use crate::cipher::Binding;
use crate::key::{BlockHash, NamespaceDigest};

/// Begins the associated data of payloads on disk, so that no object elsewhere has the same associated data.
const PLACE: &[u8; 4] = b"disk";
/// Bytes of the associated data.
const BYTES: usize = 74;

/// A payload in the slot of a store.
#[derive(Clone, Copy, Debug)]
pub struct StoredPayload<'a> {
    /// The id of the store.
    pub store_id: u64,
    /// The slot's offset in the data file, in bytes.
    pub file_offset: u64,
    /// The namespace.
    pub namespace: &'a NamespaceDigest,
    /// The namespace's instance.
    pub instance: u64,
    /// The block hash of the payload's node.
    pub hash: &'a BlockHash,
    /// The payload's group.
    pub group: u8,
    /// The payload's bytes.
    pub payload_bytes: u32,
    /// The number of the write, which is also in the record. An earlier write of the payload to this slot may have had
    /// other bytes, which may reappear when the device loses power.
    pub write_id: u64,
}

impl StoredPayload<'_> {
    /// The binding of the payload's bytes.
    pub fn binding(&self) -> Binding {
        let mut associated = Vec::with_capacity(BYTES);
        associated.extend_from_slice(PLACE);
        associated.extend_from_slice(&self.store_id.to_le_bytes());
        associated.extend_from_slice(&self.file_offset.to_le_bytes());
        associated.extend_from_slice(&self.instance.to_le_bytes());
        associated.extend_from_slice(&self.payload_bytes.to_le_bytes());
        associated.extend_from_slice(&self.write_id.to_le_bytes());
        associated.push(self.group);
        // A hash has at most 32 bytes.
        associated.push(self.hash.as_bytes().len() as u8);
        associated.extend_from_slice(self.hash.padded());
        Binding {
            namespace: self.namespace.0,
            associated: associated.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_property_of_a_payload_makes_another_binding() {
        let (namespace, hash) = (NamespaceDigest([1; 32]), BlockHash::new(&[2; 16]).unwrap());
        let stored = StoredPayload {
            store_id: 3,
            file_offset: 4096,
            namespace: &namespace,
            instance: 5,
            hash: &hash,
            group: 6,
            payload_bytes: 7,
            write_id: 8,
        };
        let (other_namespace, longer) = (
            NamespaceDigest([8; 32]),
            BlockHash::new(&[[2; 16], [0; 16]].concat()).unwrap(),
        );
        let others = [
            StoredPayload {
                store_id: 4,
                ..stored
            },
            StoredPayload {
                file_offset: 8192,
                ..stored
            },
            StoredPayload {
                namespace: &other_namespace,
                ..stored
            },
            StoredPayload {
                instance: 6,
                ..stored
            },
            StoredPayload {
                hash: &longer,
                ..stored
            },
            StoredPayload { group: 7, ..stored },
            StoredPayload {
                payload_bytes: 8,
                ..stored
            },
            StoredPayload {
                write_id: 9,
                ..stored
            },
        ];
        assert_eq!(stored.binding().associated.len(), BYTES);
        for other in others {
            assert_ne!(other.binding(), stored.binding(), "{other:?}");
        }
    }
}
