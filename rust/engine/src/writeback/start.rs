//! The write of one queued payload.

use undercroft_contract::io::{IoFault, IoRequest};

use crate::forest::{DeviceIndex, DiskState, NONE, NodeId};
use crate::metrics::Counters;
use crate::slots::slot_offset;

use super::super::checksums::drop_changed;
use super::super::operations::Purpose;
use super::super::parts::EngineParts;
use super::super::promotions::slot_len;
use super::super::residency::DiskRefusal;
use super::super::sealed::{sealed_transfer, write_id};
use super::queue::{QueuedWrite, WriteBack};
use super::refusals::WriteRefusal;

impl WriteBack {
    /// Starts the write of a queued payload, unless the write has become useless or impossible.
    pub(super) fn start_write(
        &mut self,
        write: QueuedWrite,
        parts: &mut EngineParts<'_>,
    ) -> Option<IoRequest> {
        let QueuedWrite {
            node: id, group, ..
        } = write;
        let residency = &mut *parts.residency;
        if !residency.forest().is_live(id, write.epoch) {
            return None;
        }
        let node = residency.node(id);
        if node.is_detached() || node.payload(group).disk != DiskState::Queued {
            return None;
        }
        let ancestor = residency.required_ancestor(id);
        if ancestor != NONE && residency.node(ancestor).is_detached() {
            // The ancestor is being removed, and `id` with it.
            self.refuse(id, group, WriteRefusal::Ancestor, parts);
            return None;
        }
        let is_optional = !residency.node(id).requires(group);
        if ancestor != NONE && residency.is_queued(ancestor)
            || is_optional && residency.is_queued(id)
        {
            // A restart finds `id` only with its ancestor, so the ancestor is written first. An optional payload
            // is of use only with the required payloads.
            self.postpone(write);
            return None;
        }
        if is_optional && !residency.is_on_disk(id) {
            // An optional payload alone is of no use after a restart.
            self.refuse(id, group, WriteRefusal::Ancestor, parts);
            return None;
        }
        if ancestor != NONE
            && let Some(missing) = residency.writable_group(ancestor)
        {
            self.write_ancestor_first(write, (ancestor, missing), parts);
            return None;
        }
        let operations = &*parts.operations;
        let has_room = |device| operations.may_write(device);
        let (now_ns, counters) = (parts.now_ns, &mut *parts.counters);
        let reserved =
            residency.reserve_disk(id, group, write.admitted, now_ns, has_room, counters);
        match reserved {
            Ok(place) => Some(write_request(write, place, parts)),
            Err(DiskRefusal::Later) => {
                self.wait_for_room(write);
                None
            }
            Err(why) => {
                if write.admitted && why == DiskRefusal::Full {
                    self.orphaned.found_no_room(residency);
                }
                self.refuse(id, group, WriteRefusal::Disk(why), parts);
                None
            }
        }
    }

    /// Queues the required ancestor of a queued payload, which is not on disk, before the payload. Does not if the
    /// ancestor was refused.
    fn write_ancestor_first(
        &mut self,
        write: QueuedWrite,
        (ancestor, missing): (NodeId, u8),
        parts: &mut EngineParts<'_>,
    ) {
        let residency = &mut *parts.residency;
        let refused_lately = self.refusals.of(ancestor, residency, parts.now_ns);
        if let Some(why) = refused_lately {
            self.refuse(write.node, write.group, why, parts);
        } else if write.ancestor_group == Some(missing) {
            self.refuse(write.node, write.group, WriteRefusal::Ancestor, parts);
        } else {
            self.enqueue_ancestor_first((ancestor, missing), write, residency);
        }
    }

    /// Refuses to write a queued payload, which stays in the arena only.
    fn refuse(&mut self, id: NodeId, group: u8, why: WriteRefusal, parts: &mut EngineParts<'_>) {
        let residency = &mut *parts.residency;
        if residency.node(id).requires(group) {
            self.refusals.note(id, why, residency);
        }
        count_refusal(why, parts.counters);
        residency.unqueue_write(id, group);
        residency.note_refused_write(id, parts.now_ns);
        residency.refresh(id);
        self.orphaned.note(id, residency);
    }

    /// A payload write has ended.
    pub(crate) fn write_ended(
        &mut self,
        (id, group): (NodeId, u8),
        started_ns: u64,
        result: Result<u64, IoFault>,
        parts: &mut EngineParts<'_>,
    ) {
        let residency = &mut *parts.residency;
        let device = residency.node(id).device;
        let now_ns = parts.now_ns;
        match result {
            // The directory was given up meanwhile: nothing is read from it.
            Ok(_) if residency.disk_mut(device).health.is_given_up(now_ns) => {
                residency.write_failed(id, group);
            }
            // The bytes in the arena differ from the saved bytes. Nothing refers to the bytes on disk.
            Ok(checksum) if !residency.is_unchanged(id, group, checksum) => {
                drop_changed(id, residency, parts.counters);
                residency.write_failed(id, group);
            }
            Ok(checksum) => {
                let counters = &mut *parts.counters;
                counters.disk_writes += 1;
                counters.disk_write_bytes += u64::from(residency.payload_bytes(id, group));
                counters.disk_write_ns += now_ns - started_ns;
                let disk = residency.disk_mut(device);
                disk.health.write_succeeded(now_ns);
                // The record of an encrypted payload says nothing about the plain bytes.
                let number = write_id(started_ns, parts.config);
                let kept = disk.encrypted_store().map_or(checksum, |_| number);
                residency.write_succeeded(id, group, kept);
            }
            Err(fault) => {
                if fault != IoFault::Stopped {
                    parts.counters.write_failures += 1;
                    let health = &mut residency.disk_mut(device).health;
                    health.write_failed(fault, now_ns);
                }
                residency.write_failed(id, group);
                self.orphaned.note(id, residency);
                if residency.host_checksum(id, group).is_none() {
                    parts.checksums.add_saved(id, group, residency);
                }
            }
        }
        residency.reconcile(id);
    }
}

fn count_refusal(why: WriteRefusal, counters: &mut Counters) {
    match why {
        WriteRefusal::Disk(DiskRefusal::Admission) => counters.refused_admission += 1,
        WriteRefusal::Disk(DiskRefusal::Full) => counters.refused_disk_full += 1,
        WriteRefusal::Disk(DiskRefusal::Degraded) => counters.refused_disk_degraded += 1,
        WriteRefusal::Disk(DiskRefusal::Later) | WriteRefusal::Ancestor => {}
    }
}

fn write_request(
    write: QueuedWrite,
    (device, offset): (DeviceIndex, u64),
    parts: &mut EngineParts<'_>,
) -> IoRequest {
    let QueuedWrite {
        node: id,
        group,
        unsummed,
        ..
    } = write;
    let purpose = Purpose::Write {
        node: id,
        group,
        started_ns: parts.now_ns,
    };
    let token = parts.operations.start(purpose, device, parts.now_ns);
    let residency = &mut *parts.residency;
    residency.write_started(id, group, device, offset);
    residency.add_placeholders(id, device);
    let number = write_id(parts.now_ns, parts.config);
    if let Some(request) = sealed_transfer(token, (false, number), (id, group), parts) {
        return request;
    }
    let residency = &*parts.residency;
    let payload = residency.node(id).payload(group);
    // The record gets the checksum of the saved bytes: if the bytes change before they are written, a read finds that
    // they do not match their record.
    let checksum = residency.host_checksum(id, group).filter(|_| unsummed);
    IoRequest::WritePayload {
        token,
        device: device.number(),
        file_offset: offset,
        arena_offset: slot_offset(payload.host_slot),
        len: slot_len(residency, id, group),
        payload_len: residency.payload_bytes(id, group),
        checksum,
    }
}
