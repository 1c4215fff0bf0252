//! Which reads start, and for whom: front to back, for requests in the order of arrival.

use undercroft_contract::io::IoRequest;
use undercroft_contract::session::Priority;

use crate::forest::{DeviceIndex, DiskState, HostState, NONE, NodeId};
use crate::slots::slot_offset;
use crate::work;

use super::super::ids::RequestId;
use super::super::operations::Purpose;
use super::super::parts::EngineParts;
use super::super::residency::Residency;
use super::super::sealed::sealed_transfer;
use super::read_queues::QueuePlace;
use super::{PromotionEnd, Promotions};

/// Requests of each priority that a turn looks at for reads.
pub(crate) const REQUESTS_LOOKED_AT: usize = 64;

/// Which reads of a request are left to start.
#[derive(Debug)]
enum Issued {
    /// No read is left to start.
    All,
    /// The next read waits for a device, or for checksums.
    Waits(Option<DeviceIndex>),
}

/// Index of the queue of a device, or of the requests that wait for checksums.
fn queue_index(device: Option<DeviceIndex>, parts: &EngineParts<'_>) -> usize {
    device.map_or(parts.residency.disks().len(), DeviceIndex::index)
}

impl Promotions {
    /// Appends reads to start now, for at most `looked_at` requests of each priority.
    pub(crate) fn next_reads(
        &mut self,
        parts: &mut EngineParts<'_>,
        looked_at: usize,
        out: &mut Vec<IoRequest>,
    ) {
        self.is_short = false;
        if self.read_queues.is_empty() {
            return;
        }
        let mut admits = true;
        for priority in [Priority::Demand, Priority::Prefetch] {
            // By device; the last entry is for the requests that wait for checksums.
            let mut seen = vec![0; parts.residency.disks().len() + 1];
            for _ in 0..looked_at {
                let next = self.next_of(priority, &seen, parts);
                let Some((order, device, id)) = next else {
                    break;
                };
                seen[queue_index(device, parts)] = order;
                let place = self.leave_queue(id, parts);
                if let Issued::Waits(device) = self.issue(id, &mut admits, parts, out) {
                    let place = place.at(device);
                    self.read_queues.insert(place, id);
                    let promotion = parts.shares[id].waits.disk.as_mut();
                    promotion.expect("it goes on").place = Some(place);
                }
            }
        }
    }

    /// The first request of a priority, behind those `seen`, whose device takes a read, or does not
    /// answer reads.
    fn next_of(
        &self,
        priority: Priority,
        seen: &[u64],
        parts: &EngineParts<'_>,
    ) -> Option<(u64, Option<DeviceIndex>, RequestId)> {
        let disks = parts.residency.disks();
        let devices = parts.residency.devices().filter(|&device| {
            parts.operations.may_read(device) || !disks[device.index()].health.answers_reads()
        });
        let may_sum = parts.checksums.has_room().then_some(None);
        let queues = devices.map(Some).chain(may_sum);
        let firsts = queues.filter_map(|device| {
            let after = seen[queue_index(device, parts)];
            let (order, id) = self.read_queues.first(priority, device, after)?;
            Some((order, device, id))
        });
        firsts.min_by_key(|&(order, ..)| order)
    }

    fn leave_queue(&mut self, id: RequestId, parts: &mut EngineParts<'_>) -> QueuePlace {
        let promotion = parts.shares[id].waits.disk.as_mut();
        let place = promotion.and_then(|promotion| promotion.place.take());
        let place = place.expect("a request in a queue has a promotion that knows its place");
        self.read_queues.remove(place);
        place
    }

    /// Issues a request's reads, and comparisons of checksums, as far as depth, memory and budget allow.
    fn issue(
        &mut self,
        id: RequestId,
        admits: &mut bool,
        parts: &mut EngineParts<'_>,
        out: &mut Vec<IoRequest>,
    ) -> Issued {
        loop {
            work::queued();
            let Some(promotion) = parts.shares[id].waits.disk.as_mut() else {
                return Issued::All;
            };
            let Some(&(node, group)) = promotion.payloads.get(promotion.next) else {
                if promotion.waiting == 0 {
                    let silent = promotion.silent;
                    self.end(id, PromotionEnd::of_issued(silent), parts);
                }
                return Issued::All;
            };
            let state = parts.residency.node(node);
            let (payload, device) = (state.payload(group), state.device);
            let is_lost = state.is_detached()
                || payload.host == HostState::Empty && parts.residency.is_being_given_up(device)
                || payload.host == HostState::Filling
                || payload.host == HostState::Empty && payload.disk != DiskState::Present;
            let is_silent = !is_lost
                && payload.host != HostState::Present
                && !parts.residency.disks()[device.index()]
                    .health
                    .answers_reads();
            if is_lost || is_silent {
                // The payload was evicted or lost, a save is filling it, or its device hangs: the
                // hit ends before it.
                promotion.silent |= is_silent;
                promotion.cut();
                continue;
            }
            if payload.host == HostState::Empty {
                let may_start = parts.operations.may_read(device)
                    && self.admit(id, (node, group), admits, parts);
                let starts = may_start
                    && parts.residency.reserve_host(
                        node,
                        group,
                        HostState::Reading,
                        parts.counters,
                    );
                if !starts {
                    return self.wait(id, device, may_start, parts);
                }
                self.charge(id, node, group, parts);
                out.push(read_request(node, group, parts));
            } else if parts.config.verify_host && payload.host == HostState::Present {
                if !parts.checksums.has_room() {
                    return Issued::Waits(None);
                }
                let (residency, operations) = (&mut *parts.residency, &mut *parts.operations);
                parts.checksums.start(node, group, residency, operations);
            }
            self.pass(id, node, group, parts);
        }
    }

    /// A request's next read waits, `for_memory` if it lacks nothing else. A prefetch that has waited for memory for
    /// too long is given up here, since no lookup of the scheduler gives it up: its memory and its part of the budget
    /// are freed.
    fn wait(
        &mut self,
        id: RequestId,
        device: DeviceIndex,
        for_memory: bool,
        parts: &mut EngineParts<'_>,
    ) -> Issued {
        let now_ns = parts.now_ns;
        let share = &mut parts.shares[id];
        self.is_short |= for_memory;
        self.lacks_memory |= for_memory && share.demanded;
        let promotion = share.waits.disk.as_mut().expect("its reads are issued");
        let since_ns = promotion.short_ns.unwrap_or(now_ns);
        promotion.short_ns = for_memory.then_some(since_ns);
        let since_ns = since_ns.max(parts.operations.read_progress_ns(device));
        if !for_memory || share.demanded || now_ns < since_ns.saturating_add(parts.config.stall_ns)
        {
            return Issued::Waits(Some(device));
        }
        self.end(id, PromotionEnd::GivenUp, parts);
        let share = &mut parts.shares[id];
        share.move_lease(NONE, parts.residency);
        self.release(share);
        Issued::All
    }

    /// Moves a request's promotion past a payload that is in the arena or being read.
    fn pass(&mut self, id: RequestId, node: NodeId, group: u8, parts: &mut EngineParts<'_>) {
        let share = &mut parts.shares[id];
        let started = share.started;
        let promotion = share.waits.disk.as_mut().expect("its reads are issued");
        let before = std::mem::replace(&mut promotion.reached, node);
        promotion.next += 1;
        promotion.short_ns = None;
        let is_read = parts.residency.node(node).payload(group).host == HostState::Reading;
        let is_compared = parts.config.verify_host && parts.checksums.is_in_flight(node, group);
        if is_read || is_compared {
            promotion.waiting += 1;
            let waiters = self.waiters.entry((node, group)).or_default();
            waiters.push((id, started));
        }
        if before != node {
            parts.residency.pin(node);
            if before != NONE {
                parts.residency.unpin(before);
            }
        }
    }

    /// Whether the budget lets a promotion start, or go on with a payload. In one pass, no promotion starts after an
    /// earlier one had to wait.
    fn admit(
        &mut self,
        id: RequestId,
        (node, group): (NodeId, u8),
        admits: &mut bool,
        parts: &mut EngineParts<'_>,
    ) -> bool {
        let share = &parts.shares[id];
        let promotion = share.waits.disk.as_ref().expect("its reads are issued");
        let (rest, continues) = (promotion.unread, promotion.continues);
        if promotion.reserved.is_some() {
            return true;
        }
        // A promotion that has started goes on: others may wait for the bytes that it holds.
        if !*admits && !continues && !self.budget.is_partial(id) {
            return false;
        }
        if share.demanded && !continues {
            self.evict_prefetches(id, rest, parts);
        }
        let slot = parts.residency.slot_bytes(node, group);
        let share = &mut parts.shares[id];
        let is_admitted = self.budget.admit(id, share, slot);
        *admits &= is_admitted;
        is_admitted
    }

    /// Frees budget for a demand of `bytes`: the payloads of ended prefetches stay in the arena, but may be
    /// evicted.
    fn evict_prefetches(&mut self, id: RequestId, bytes: u64, parts: &mut EngineParts<'_>) {
        while self.budget.lacks(&parts.shares[id], bytes)
            && let Some(other) = self.prefetched.pop_back()
        {
            let Some(share) = parts.shares.get_mut(other) else {
                continue;
            };
            if !share.demanded && !share.is_reserved() && share.waits.disk.is_none() {
                share.move_lease(NONE, parts.residency);
                self.release(share);
            }
        }
    }

    /// Counts the bytes of a payload that is read for a request.
    fn charge(&mut self, id: RequestId, node: NodeId, group: u8, parts: &mut EngineParts<'_>) {
        let slot = parts.residency.slot_bytes(node, group);
        let (depth, device) = (
            parts.residency.node(node).depth,
            parts.residency.node(node).device,
        );
        let share = &mut parts.shares[id];
        share.from_disk = Some(match share.from_disk {
            None => (depth - 1, depth),
            Some((after, to)) => (after.min(depth - 1), to.max(depth)),
        });
        self.budget.take(share, slot);
        let priority = share.priority();
        if let Some(promotion) = &mut share.waits.disk {
            let shares = &mut promotion.shares;
            parts.rates.read_began(device, slot, shares, priority);
            promotion.unread = promotion.unread.saturating_sub(slot);
        }
    }
}

pub(super) fn read_request(node: NodeId, group: u8, parts: &mut EngineParts<'_>) -> IoRequest {
    let device = parts.residency.node(node).device;
    let read = Purpose::Read {
        node,
        group,
        started_ns: parts.now_ns,
        ahead: parts.rates.in_flight(device),
    };
    let token = parts.operations.start(read, device, parts.now_ns);
    let written = parts.residency.node(node).payload(group).checksum;
    if let Some(request) = sealed_transfer(token, (true, written), (node, group), parts) {
        return request;
    }
    let residency = &*parts.residency;
    let state = residency.node(node);
    let payload = state.payload(group);
    assert_eq!(
        (payload.host, payload.disk),
        (HostState::Reading, DiskState::Present),
        "node {node} group {group} is read from disk into its slot"
    );
    IoRequest::ReadPayload {
        token,
        device: state.device.number(),
        file_offset: slot_offset(payload.disk_slot),
        arena_offset: slot_offset(payload.host_slot),
        len: slot_len(residency, node, group),
        payload_len: residency.payload_bytes(node, group),
        checksum: payload.checksum,
    }
}

/// Bytes of a payload's slot, as an IO request carries them.
pub(crate) fn slot_len(residency: &Residency, node: NodeId, group: u8) -> u32 {
    let bytes = residency.slot_bytes(node, group);
    u32::try_from(bytes).expect("a slot is no larger than a page")
}
