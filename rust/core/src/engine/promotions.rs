//! Promotions: payloads move from disk into the arena, front to back, for requests in the order of
//! arrival. A payload is read once, however many requests wait for it.

use std::collections::{HashMap, VecDeque};

use crate::forest::{DiskState, HostState, NONE, NodeId};
use crate::io::IoRequest;
use crate::metrics::Counters;
use crate::session::Priority;
use crate::slots::slot_offset;
use crate::work;

#[cfg(feature = "check")]
use super::ensure::ensure;
use super::operations::Purpose;
use super::parts::EngineParts;
use super::requests::{Promotion, RequestId, RequestPromotions, Requests, Verified};
use super::residency::{PromotionPlan, Residency};

/// Requests looked at for reads in one pass: bounds its work.
const SCAN_MAX: usize = 64;

/// Who waits for a read: a request, and which of its promotions.
type Waiter = (RequestId, u32);

/// The rest of a request's reads.
#[derive(Debug)]
enum Issued {
    /// No read is left to start.
    All,
    /// There is no memory, budget or depth now.
    Part,
}

/// The promotions of all requests.
///
/// Invariants:
/// - `promoted_bytes` sums the requests' `bytes`, `prefetched_bytes` those of the requests that the
///   scheduler has not asked for;
/// - a promotion that is not issued in full is in the read queue of its priority;
/// - a payload with waiters is being read, and a promotion's `waiting` counts its entries among them;
/// - a promotion under way leases the deepest payload that it has reached.
#[derive(Debug)]
pub(super) struct Promotions {
    /// Bytes that may be held in the arena until they are loaded.
    budget_bytes: u64,
    /// Requests with reads to start, by [`Priority`].
    read_queues: [VecDeque<RequestId>; 2],
    /// Who waits for a payload being read.
    waiters: HashMap<(NodeId, u8), Vec<Waiter>>,
    promoted_bytes: u64,
    prefetched_bytes: u64,
    /// Prefetches that are done, latest last.
    prefetched: VecDeque<RequestId>,
}

impl Promotions {
    pub(super) fn new(budget_bytes: u64) -> Self {
        Self {
            budget_bytes,
            read_queues: [VecDeque::new(), VecDeque::new()],
            waiters: HashMap::new(),
            promoted_bytes: 0,
            prefetched_bytes: 0,
            prefetched: VecDeque::new(),
        }
    }

    /// Bytes that one more promotion of a request may bring.
    pub(super) fn budget_of(&self, request: &RequestPromotions) -> u64 {
        // A demand may hold more than the budget for a moment.
        self.budget_bytes.saturating_sub(request.bytes)
    }

    /// Bytes held in the arena until they are loaded.
    pub(super) fn promoted_bytes(&self) -> u64 {
        self.promoted_bytes
    }

    /// Whether any request has reads to start.
    pub(super) fn has_reads(&self) -> bool {
        self.read_queues.iter().any(|queue| !queue.is_empty())
    }

    /// Starts a promotion; the request leases the plan's target.
    pub(super) fn start(
        &mut self,
        id: RequestId,
        request: &mut RequestPromotions,
        plan: PromotionPlan,
        now_ns: u64,
    ) {
        assert!(
            request.active.is_none(),
            "a request has two promotions at once"
        );
        request.active = Some(Promotion {
            payloads: plan.payloads,
            next: 0,
            waiting: 0,
            reached: NONE,
            boundary: plan.boundary,
            goal: Verified {
                node: plan.target,
                local: plan.local,
            },
            is_cut: false,
            unread: plan.unread,
            started_ns: now_ns,
            progress_ns: now_ns,
        });
        self.read_queues[request.priority() as usize].push_back(id);
    }

    /// The scheduler waits for this request: its reads go before those of prefetches.
    pub(super) fn promote_to_demand(
        &mut self,
        id: RequestId,
        request: &mut RequestPromotions,
        now_ns: u64,
    ) {
        if std::mem::replace(&mut request.demanded, true) {
            return;
        }
        let left = self.prefetched_bytes.checked_sub(request.bytes);
        self.prefetched_bytes = left.expect("prefetched_bytes counts every prefetch");
        if let Some(promotion) = &mut request.active {
            // As a prefetch it may have waited for long without being in anybody's way.
            promotion.progress_ns = now_ns;
            self.read_queues[Priority::Demand as usize].push_back(id);
        }
    }

    /// Appends reads to start now.
    pub(super) fn next_reads(
        &mut self,
        limit: usize,
        parts: &mut EngineParts<'_>,
        out: &mut Vec<IoRequest>,
    ) {
        for priority in [Priority::Demand, Priority::Prefetch] {
            let queue = priority as usize;
            let mut looked_at = 0;
            while out.len() < limit && looked_at < SCAN_MAX.min(self.read_queues[queue].len()) {
                let id = self.read_queues[queue][looked_at];
                let is_stale = parts.requests.get(id).is_none_or(|request| {
                    let promotions = &request.promotions;
                    promotions.active.is_none() || promotions.priority() != priority
                });
                let issued = if is_stale {
                    Issued::All
                } else {
                    self.issue(id, limit, parts, out)
                };
                match issued {
                    Issued::All => {
                        self.read_queues[queue].remove(looked_at);
                    }
                    Issued::Part => looked_at += 1,
                }
            }
        }
    }

    /// Issues a request's reads as far as depth, memory and budget go.
    fn issue(
        &mut self,
        id: RequestId,
        limit: usize,
        parts: &mut EngineParts<'_>,
        out: &mut Vec<IoRequest>,
    ) -> Issued {
        loop {
            work::queued();
            let request = &mut parts.requests[id].promotions;
            let Some(promotion) = &mut request.active else {
                return Issued::All;
            };
            let Some(&(node, group)) = promotion.payloads.get(promotion.next) else {
                if promotion.waiting == 0 {
                    self.end(id, true, parts);
                }
                return Issued::All;
            };
            let state = parts.residency.node(node);
            let payload = state.payload(group);
            let is_lost = state.is_detached()
                || payload.host == HostState::Empty
                    && parts.residency.is_being_given_up(state.device)
                || payload.host == HostState::Filling
                || payload.host == HostState::Empty && payload.disk != DiskState::Present;
            if is_lost {
                // Others were faster, or it was evicted: the hit ends before it.
                promotion.cut();
                continue;
            }
            if payload.host == HostState::Empty {
                if out.len() >= limit || !self.afford(id, node, group, parts) {
                    return Issued::Part;
                }
                let reading = HostState::Reading;
                if !parts
                    .residency
                    .reserve_host(node, group, reading, parts.counters)
                {
                    return Issued::Part;
                }
                self.charge(id, node, group, parts);
                out.push(read_request(node, group, parts));
            } else if parts.config.verify_host && payload.host == HostState::Present {
                if !parts.checksums.has_room() {
                    return Issued::Part;
                }
                let (residency, operations) = (&mut *parts.residency, &mut *parts.operations);
                parts.checksums.start(node, group, residency, operations);
            }
            self.pass(id, node, group, parts);
        }
    }

    /// A request's promotion has a payload in the arena, or being read, and goes on to the next.
    fn pass(&mut self, id: RequestId, node: NodeId, group: u8, parts: &mut EngineParts<'_>) {
        let request = &mut parts.requests[id].promotions;
        let started = request.started;
        let promotion = request.active.as_mut().expect("its reads are issued");
        let before = std::mem::replace(&mut promotion.reached, node);
        promotion.next += 1;
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

    /// Whether the budget allows one more payload. A request that holds all bytes that are held goes on:
    /// its plan was made for the budget.
    fn afford(
        &mut self,
        id: RequestId,
        node: NodeId,
        group: u8,
        parts: &mut EngineParts<'_>,
    ) -> bool {
        let slot = parts.residency.slot_bytes(node, group);
        let request = &parts.requests[id].promotions;
        let (mine, budget) = (request.bytes, self.budget_bytes);
        if !request.demanded {
            return self.prefetched_bytes <= mine && self.promoted_bytes <= mine
                || self.prefetched_bytes + slot <= budget / 2
                    && self.promoted_bytes + slot <= budget;
        }
        while self.promoted_bytes > mine && self.promoted_bytes + slot > budget {
            // The payloads of a prefetch that is done stay in the arena, but may be evicted.
            let Some(other) = self.prefetched.pop_back() else {
                return false;
            };
            let Some(state) = parts.requests.get_mut(other) else {
                continue;
            };
            let of = &state.promotions;
            if !of.demanded && !of.reserved && of.active.is_none() {
                state.move_lease(NONE, parts.residency);
                self.release(&mut state.promotions);
            }
        }
        true
    }

    /// Counts the bytes of a payload that is read for a request.
    fn charge(&mut self, id: RequestId, node: NodeId, group: u8, parts: &mut EngineParts<'_>) {
        let slot = parts.residency.slot_bytes(node, group);
        let depth = parts.residency.node(node).depth;
        let request = &mut parts.requests[id].promotions;
        request.bytes += slot;
        request.from_disk = Some(match request.from_disk {
            None => (depth - 1, depth),
            Some((after, to)) => (after.min(depth - 1), to.max(depth)),
        });
        self.promoted_bytes += slot;
        if !request.demanded {
            self.prefetched_bytes += slot;
        }
        if let Some(promotion) = &mut request.active {
            // A payload that was in the arena at the start may have been evicted: it was not counted.
            promotion.unread = promotion.unread.saturating_sub(slot);
        }
    }

    /// Frees a request's share of the budget.
    pub(super) fn release(&mut self, request: &mut RequestPromotions) {
        let held = std::mem::take(&mut request.bytes);
        let left = self.promoted_bytes.checked_sub(held);
        self.promoted_bytes = left.expect("promoted_bytes counts every request");
        if !request.demanded {
            let left = self.prefetched_bytes.checked_sub(held);
            self.prefetched_bytes = left.expect("prefetched_bytes counts every prefetch");
        }
    }

    /// Ends a request's promotion. Reads in flight go on and serve whoever comes next; reads that were not
    /// issued are not made.
    pub(super) fn end(&mut self, id: RequestId, finished: bool, parts: &mut EngineParts<'_>) {
        let request = &mut parts.requests[id].promotions;
        let demanded = request.demanded;
        let Some(promotion) = request.active.take() else {
            return;
        };
        if promotion.reached != NONE {
            parts.residency.unpin(promotion.reached);
        }
        if !finished {
            parts.counters.promotions_cancelled += 1;
            return;
        }
        request.verified = promotion.is_complete().then_some(promotion.goal);
        parts.counters.promotions += 1;
        parts.counters.promotion_ns += parts.now_ns - promotion.started_ns;
        if !demanded {
            if self.prefetched.len() > 2 * parts.requests.len() {
                let requests = &parts.requests;
                self.prefetched.retain(|&id| requests.contains_key(id));
            }
            self.prefetched.push_back(id);
        }
    }

    /// A payload's read, or its checksum, has ended: tells those who wait for it.
    pub(super) fn read_ended(
        &mut self,
        node: NodeId,
        group: u8,
        ok: bool,
        parts: &mut EngineParts<'_>,
    ) {
        for (id, started) in self.waiters.remove(&(node, group)).unwrap_or_default() {
            work::queued();
            let Some(request) = parts.requests.get_mut(id) else {
                continue;
            };
            if request.promotions.started != started {
                continue;
            }
            let Some(promotion) = &mut request.promotions.active else {
                continue;
            };
            let left = promotion.waiting.checked_sub(1);
            promotion.waiting = left.expect("a promotion counts the reads that it waits for");
            promotion.progress_ns = parts.now_ns;
            if !ok {
                promotion.cut();
            }
            if promotion.waiting == 0 && promotion.is_issued() {
                self.end(id, true, parts);
            }
        }
    }

    /// Bytes that requests wait for and that are not being read yet. Bytes that others have read meanwhile
    /// count until a request's own turn has passed them.
    pub(super) fn queue_bytes(requests: &Requests) -> u64 {
        let promotions = requests.values();
        promotions
            .filter_map(|request| request.promotions.active.as_ref())
            .filter(|promotion| !promotion.is_issued())
            .map(|promotion| promotion.unread)
            .sum()
    }

    /// Whether every invariant holds, while the payloads in `reading` are being read.
    #[cfg(feature = "check")]
    pub(super) fn check(
        &self,
        requests: &Requests,
        reading: &std::collections::HashSet<(NodeId, u8)>,
    ) -> Result<(), String> {
        for (node, group) in self.waiters.keys() {
            ensure!(
                reading.contains(&(*node, *group)),
                "node {node} group {group}: awaited and not read"
            );
        }
        let mut waiting: HashMap<RequestId, u32> = HashMap::new();
        for &(id, started) in self.waiters.values().flatten() {
            let promotions = requests.get(id).map(|request| &request.promotions);
            if promotions.is_some_and(|of| of.started == started && of.active.is_some()) {
                *waiting.entry(id).or_default() += 1;
            }
        }
        let (mut promoted, mut prefetched) = (0, 0);
        for (id, request) in requests {
            let promotions = &request.promotions;
            promoted += promotions.bytes;
            if !promotions.demanded {
                prefetched += promotions.bytes;
            }
            let Some(promotion) = &promotions.active else {
                continue;
            };
            let (has, expected) = (promotion.waiting, waiting.get(&id).copied().unwrap_or(0));
            ensure!(
                has == expected,
                "{id:?} waits for {has} reads, {expected} know of it"
            );
            let queue = &self.read_queues[promotions.priority() as usize];
            ensure!(
                queue.contains(&id) || promotion.is_issued() && has > 0,
                "{id:?}: nobody goes on with its promotion"
            );
        }
        let counted = (self.promoted_bytes, self.prefetched_bytes);
        ensure!(
            counted == (promoted, prefetched),
            "promoted and prefetched bytes {counted:?}, held {promoted} and {prefetched}"
        );
        Ok(())
    }
}

fn read_request(node: NodeId, group: u8, parts: &mut EngineParts<'_>) -> IoRequest {
    let token = parts.operations.start(Purpose::Read {
        node,
        group,
        started_ns: parts.now_ns,
    });
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
pub(super) fn slot_len(residency: &Residency, node: NodeId, group: u8) -> u32 {
    let bytes = residency.slot_bytes(node, group);
    u32::try_from(bytes).expect("a slot is no larger than a page")
}

/// A payload was read from disk.
pub(super) fn count_read(payload_bytes: u32, started_ns: u64, parts: &mut EngineParts<'_>) {
    let counters: &mut Counters = parts.counters;
    counters.disk_reads += 1;
    counters.disk_read_bytes += u64::from(payload_bytes);
    counters.disk_read_ns += parts.now_ns - started_ns;
}
