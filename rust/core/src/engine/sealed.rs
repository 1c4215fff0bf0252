//! Payloads of directories whose store is encrypted. The engine does no cryptography. Its request for a transfer
//! carries the identity and the place of the payload, and the IO engine encrypts or decrypts the bytes with that
//! binding only.

use crate::disk::binding::StoredPayload;
use crate::forest::NodeId;
use crate::io::{IoRequest, SealedTransfer};
use crate::slots::slot_offset;

use super::parts::EngineParts;

/// The transfer of a payload between its slots in the arena and on disk, if its directory's store is encrypted.
pub(super) fn sealed_transfer(
    token: u64,
    reads: bool,
    (id, group): (NodeId, u8),
    parts: &EngineParts<'_>,
) -> Option<IoRequest> {
    let residency = &*parts.residency;
    let node = residency.node(id);
    let store_id = residency.disks()[node.device.index()].encrypted_store()?;
    let payload = node.payload(group);
    let stored = StoredPayload {
        store_id,
        file_offset: slot_offset(payload.disk_slot),
        namespace: parts.namespaces.digest(node.ns),
        instance: parts.namespaces.instance(node.ns),
        hash: &node.hash,
        group,
        payload_bytes: residency.payload_bytes(id, group),
    };
    let slot_bytes = residency.disk_slot_bytes(id, group);
    Some(IoRequest::Sealed(Box::new(SealedTransfer {
        token,
        reads,
        device: node.device.number(),
        file_offset: stored.file_offset,
        len: u32::try_from(slot_bytes).expect("a slot is no larger than a page"),
        arena_offset: slot_offset(payload.host_slot),
        payload_len: stored.payload_bytes,
        binding: stored.binding(),
    })))
}
