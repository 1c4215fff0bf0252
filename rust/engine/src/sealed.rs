//! Payloads of directories whose store is encrypted. The engine does no cryptography. Its request for a transfer
//! carries the identity and the place of the payload, and the IO engine encrypts or decrypts the bytes with that
//! binding only.

use undercroft_contract::binding::StoredPayload;
use undercroft_contract::io::{IoRequest, SealedTransfer};

use crate::forest::NodeId;
use crate::slots::slot_offset;

use super::config::EngineConfig;
use super::parts::EngineParts;

/// The number of a write that starts at `started_ns`: nanoseconds since 1970. A slot has one write at a time, so the
/// numbers of its writes differ.
pub(super) fn write_id(started_ns: u64, config: &EngineConfig) -> u64 {
    let zero_ns = config.unix_at_zero_s.wrapping_mul(1_000_000_000);
    zero_ns.wrapping_add(started_ns)
}

/// The transfer of a payload between its slots in the arena and on disk, if its directory's store is encrypted.
/// `write_id` is the number of the write that this transfer is, or whose bytes this transfer reads.
pub(super) fn sealed_transfer(
    token: u64,
    (reads, write_id): (bool, u64),
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
        write_id,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_at_the_same_moment_of_two_lives_have_different_numbers() {
        let life = |unix_at_zero_s| EngineConfig {
            unix_at_zero_s,
            ..EngineConfig::new(1 << 20)
        };
        let numbers = [1_790_000_000, 1_790_000_001].map(|at_s| write_id(77, &life(at_s)));
        assert_eq!(numbers[0] + 1_000_000_000, numbers[1]);
    }
}
