//! Promotion: moving payloads from disk into the arena, front to back, for requests in the order of
//! arrival. A payload being read is read once, whoever waits for it.

use crate::forest::{DiskState, HostState, NONE, NodeId};
use crate::io::{IoFault, IoRequest};

use super::places::{Loss, bytes};
use super::{Engine, Op, RequestId};

/// Requests looked at for reads in one pass: bounds its work.
const TURNS_MAX: usize = 64;

/// One request's promotion. The request's own lease keeps the target; this one leases the deepest
/// payload reached, which keeps all before it in the arena.
#[derive(Debug)]
pub(super) struct Promotion {
    /// Payloads that the load will need, front to back.
    steps: Vec<(NodeId, u8)>,
    next: usize,
    /// Reads that this request waits for.
    pub(super) waiting: u32,
    /// Leased node, or `NONE`.
    pub(super) reached: NodeId,
    /// The boundary, in granules, if all goes well.
    pub(super) boundary: u32,
    /// Bytes that were on disk only when it started, less what it has begun to read.
    unread: u64,
    started_ns: u64,
    /// When it was started, or a read for it ended last.
    pub(super) progress_ns: u64,
}

impl Promotion {
    /// Whether it has no more reads to start.
    pub(super) fn is_issued(&self) -> bool {
        self.next == self.steps.len()
    }
}

/// Who waits for a read: a request, and which of its promotions.
pub(super) type Waiter = (RequestId, u32);

enum Turn {
    /// Everything is issued.
    Issued,
    /// No memory, budget or depth now.
    Blocked,
}

impl Engine {
    /// Starts to promote what a hit at `target` needs beyond `local`. False if nothing of it can be
    /// held.
    pub(super) fn start_promotion(&mut self, id: RequestId, target: NodeId, local: u32) -> bool {
        let mut boundary = self.forest.node(target).depth;
        let mut steps = self.steps(target, local);
        let held = self.requests[id].promoted_bytes;
        let budget = self.config.promotion_bytes.saturating_sub(held);
        let mut unread = self.missing_bytes(&steps);
        let mut room = budget;
        // Larger than the budget: a part of the prefix is a hit too.
        while unread > budget {
            let reach = self.affordable(&steps, room);
            boundary = match reach.min(boundary - 1) {
                reach if reach > local => self.boundary(target, reach, local, false),
                _ => return false,
            };
            if boundary <= local {
                return false;
            }
            steps = self.steps(self.forest.ancestor(target, boundary), local);
            unread = self.missing_bytes(&steps);
            // A window or a state at the new end may be more than what was left out.
            room -= room / 16;
        }
        let target = self.forest.ancestor(target, boundary);
        self.lease(id, target);
        self.requests[id].promotion = Some(Promotion {
            steps,
            next: 0,
            waiting: 0,
            reached: NONE,
            boundary,
            unread,
            started_ns: self.now_ns,
            progress_ns: self.now_ns,
        });
        let queue = usize::from(!self.requests[id].hastened);
        self.turns[queue].push_back(id);
        true
    }

    /// Payloads that a load of `(local, depth of target]` needs, front to back.
    pub(super) fn steps(&self, target: NodeId, local: u32) -> Vec<(NodeId, u8)> {
        let top = self.forest.node(target);
        let spec = &self.namespaces[usize::from(top.ns)].spec;
        let groups = 0..u8::try_from(spec.groups.len()).unwrap_or(0);
        let after: Vec<u32> = groups
            .clone()
            .map(|group| spec.needed_after(usize::from(group), top.depth).max(local))
            .collect();
        let lowest = after.iter().copied().min().unwrap_or(local);
        let mut steps = Vec::with_capacity((top.depth - lowest.min(top.depth)) as usize);
        let mut at = target;
        while at != NONE && self.forest.node(at).depth > lowest {
            let depth = self.forest.node(at).depth;
            for group in groups.clone() {
                if depth > after[usize::from(group)] && spec.ends_block(usize::from(group), depth) {
                    steps.push((at, group));
                }
            }
            at = self.forest.node(at).parent;
        }
        steps.reverse();
        steps
    }

    fn missing_bytes(&self, steps: &[(NodeId, u8)]) -> u64 {
        steps.iter().map(|&step| self.missing(step)).sum()
    }

    /// Bytes that a payload takes of the arena beyond what it has there.
    fn missing(&self, (node, group): (NodeId, u8)) -> u64 {
        match self.forest.node(node).place(group).host {
            HostState::Present | HostState::Reading => 0,
            _ => self.host.slot_bytes(self.host_class(node, group)),
        }
    }

    /// The depth to which `room` bytes suffice for what is missing, front to back.
    fn affordable(&self, steps: &[(NodeId, u8)], mut room: u64) -> u32 {
        let depth = |node| self.forest.node(node).depth;
        for &step in steps {
            match room.checked_sub(self.missing(step)) {
                Some(left) => room = left,
                None => return depth(step.0) - 1,
            }
        }
        steps.last().map_or(0, |&(node, _)| depth(node))
    }

    /// The scheduler waits for this request: it goes before prefetches.
    pub(super) fn hasten(&mut self, id: RequestId) {
        let request = &mut self.requests[id];
        if std::mem::replace(&mut request.hastened, true) {
            return;
        }
        self.prefetched_bytes -= request.promoted_bytes;
        if let Some(promotion) = &mut request.promotion {
            // As a prefetch it may have waited for long without being in anybody's way.
            promotion.progress_ns = self.now_ns;
            self.turns[0].push_back(id);
        }
    }

    /// Appends reads to start now.
    pub(super) fn next_reads(&mut self, limit: usize, out: &mut Vec<IoRequest>) {
        for queue in 0..2 {
            let mut looked_at = 0;
            while out.len() < limit && looked_at < TURNS_MAX.min(self.turns[queue].len()) {
                let id = self.turns[queue][looked_at];
                let stale = self.requests.get(id).is_none_or(|request| {
                    request.promotion.is_none() || request.hastened != (queue == 0)
                });
                let turn = if stale {
                    Turn::Issued
                } else {
                    self.issue(id, limit, out)
                };
                match turn {
                    Turn::Issued => {
                        self.turns[queue].remove(looked_at);
                    }
                    Turn::Blocked => looked_at += 1,
                }
            }
        }
    }

    /// Issues a request's reads as far as depth, memory and budget go.
    fn issue(&mut self, id: RequestId, limit: usize, out: &mut Vec<IoRequest>) -> Turn {
        loop {
            let request = &self.requests[id];
            let Some(promotion) = &request.promotion else {
                return Turn::Issued;
            };
            let started = request.promotions_started;
            let Some(&(node, group)) = promotion.steps.get(promotion.next) else {
                if promotion.waiting == 0 {
                    self.end_promotion(id, true);
                }
                return Turn::Issued;
            };
            let place = *self.forest.node(node).place(group);
            let lost = self.forest.node(node).detached
                || place.host == HostState::Filling
                || place.host == HostState::Empty && place.disk != DiskState::Present;
            if lost {
                self.cut(id);
                continue;
            }
            if place.host == HostState::Empty {
                if out.len() >= limit || !self.afford(id, node, group) {
                    return Turn::Blocked;
                }
                if !self.take_host(node, group, HostState::Reading) {
                    return Turn::Blocked;
                }
                self.charge(id, node, group);
                let slot = self.host.slot_bytes(self.host_class(node, group));
                if let Some(promotion) = &mut self.requests[id].promotion {
                    promotion.unread = promotion.unread.saturating_sub(slot);
                }
                out.push(self.read_request(node, group));
            }
            self.reach(id, node);
            if self.forest.node(node).place(group).host == HostState::Reading {
                self.waiters
                    .entry((node, group))
                    .or_default()
                    .push((id, started));
            }
            let reading = self.forest.node(node).place(group).host == HostState::Reading;
            if let Some(promotion) = &mut self.requests[id].promotion {
                promotion.next += 1;
                promotion.waiting += u32::from(reading);
            }
        }
    }

    fn read_request(&mut self, node: NodeId, group: u8) -> IoRequest {
        let started_ns = self.now_ns;
        let token = self.start_op(Op::Read {
            node,
            group,
            started_ns,
        });
        let at = self.forest.node(node);
        let place = at.place(group);
        let spec = &self.namespaces[usize::from(at.ns)].spec;
        let len = self.host.slot_bytes(self.host_class(node, group));
        IoRequest::ReadPayload {
            token,
            device: u16::from(at.device),
            file_offset: bytes(place.disk_at),
            arena_offset: bytes(place.host_at),
            len: u32::try_from(len).unwrap_or(u32::MAX),
            payload_len: spec.groups[usize::from(group)].payload_bytes,
            checksum: place.checksum,
        }
    }

    /// Moves a promotion's lease to the payload it has reached.
    fn reach(&mut self, id: RequestId, node: NodeId) {
        let Some(promotion) = &mut self.requests[id].promotion else {
            return;
        };
        let old = std::mem::replace(&mut promotion.reached, node);
        if old != node {
            self.pin(node);
            if old != NONE {
                self.unpin(old);
            }
        }
    }

    /// Gives up what a promotion has not issued yet.
    fn cut(&mut self, id: RequestId) {
        if let Some(promotion) = &mut self.requests[id].promotion {
            promotion.steps.truncate(promotion.next);
        }
    }

    /// Whether the budget allows one more payload. A request that holds all of what is held goes
    /// on: it was cut to the budget when it started.
    fn afford(&mut self, id: RequestId, node: NodeId, group: u8) -> bool {
        let slot = self.host.slot_bytes(self.host_class(node, group));
        let (mine, hastened) = (self.requests[id].promoted_bytes, self.requests[id].hastened);
        let budget = self.config.promotion_bytes;
        if !hastened {
            return self.prefetched_bytes <= mine && self.promoted_bytes <= mine
                || self.prefetched_bytes + slot <= budget / 2
                    && self.promoted_bytes + slot <= budget;
        }
        while self.promoted_bytes > mine && self.promoted_bytes + slot > budget {
            // What was fetched early for others stays in the arena, but no longer by right.
            let Some(other) = self.prefetched.pop_back() else {
                return false;
            };
            let idle = self
                .requests
                .get(other)
                .is_some_and(|other| !other.hastened && !other.held && other.promotion.is_none());
            if idle {
                self.lease(other, NONE);
                self.release_promoted(other);
            }
        }
        true
    }

    fn charge(&mut self, id: RequestId, node: NodeId, group: u8) {
        let slot = self.host.slot_bytes(self.host_class(node, group));
        let depth = self.forest.node(node).depth;
        let request = &mut self.requests[id];
        request.promoted_bytes += slot;
        request.from_disk = Some(match request.from_disk {
            None => (depth - 1, depth),
            Some((after, to)) => (after.min(depth - 1), to.max(depth)),
        });
        self.promoted_bytes += slot;
        if !request.hastened {
            self.prefetched_bytes += slot;
        }
    }

    /// Frees a request's share of the promotion budget.
    pub(super) fn release_promoted(&mut self, id: RequestId) {
        let request = &mut self.requests[id];
        let held = std::mem::take(&mut request.promoted_bytes);
        self.promoted_bytes -= held;
        if !request.hastened {
            self.prefetched_bytes -= held;
        }
    }

    /// Ends a request's promotion. Reads in flight go on and serve whoever comes next; what was not
    /// issued is not read.
    pub(super) fn end_promotion(&mut self, id: RequestId, finished: bool) {
        let Some(promotion) = self.requests[id].promotion.take() else {
            return;
        };
        if promotion.reached != NONE {
            self.unpin(promotion.reached);
        }
        if finished {
            self.counters.promotions += 1;
            self.counters.promotion_ns += self.now_ns - promotion.started_ns;
            if !self.requests[id].hastened {
                if self.prefetched.len() > 2 * self.requests.len() {
                    self.prefetched.retain(|&id| self.requests.contains_key(id));
                }
                self.prefetched.push_back(id);
            }
        } else {
            self.counters.promotions_cancelled += 1;
        }
    }

    /// A payload read has ended.
    pub(super) fn read_ended(
        &mut self,
        node: NodeId,
        group: u8,
        started_ns: u64,
        result: Result<u64, IoFault>,
    ) {
        let waiters = self.waiters.remove(&(node, group)).unwrap_or_default();
        let device = usize::from(self.forest.node(node).device);
        let ns = usize::from(self.forest.node(node).ns);
        let payload = self.namespaces[ns].spec.groups[usize::from(group)].payload_bytes;
        match result {
            Ok(_) => {
                self.counters.disk_reads += 1;
                self.counters.disk_read_bytes += u64::from(payload);
                self.counters.disk_read_ns += self.now_ns - started_ns;
                self.disks[device].read_succeeded();
                self.host_filled(node, group);
            }
            Err(fault) => self.read_failed(node, group, device, fault),
        }
        for (id, started) in waiters {
            let Some(request) = self.requests.get_mut(id) else {
                continue;
            };
            if request.promotions_started != started {
                continue;
            }
            let Some(promotion) = &mut request.promotion else {
                continue;
            };
            promotion.waiting -= 1;
            promotion.progress_ns = self.now_ns;
            if result.is_err() {
                self.cut(id);
            }
            let done = self.requests[id]
                .promotion
                .as_ref()
                .is_some_and(|promotion| {
                    promotion.waiting == 0 && promotion.next == promotion.steps.len()
                });
            if done {
                self.end_promotion(id, true);
            }
        }
    }

    fn read_failed(&mut self, node: NodeId, group: u8, device: usize, fault: IoFault) {
        self.forest.node_mut(node).busy -= 1;
        self.drop_host(node, group, Loss::Dropped);
        match fault {
            IoFault::Stopped => {}
            IoFault::Corrupt => self.counters.checksum_failures += 1,
            IoFault::Truncated | IoFault::Os(_) => self.counters.read_failures += 1,
        }
        if fault != IoFault::Stopped {
            let class = self.disk_class(node, device, group);
            let place = *self.forest.node(node).place(group);
            if place.disk == DiskState::Present {
                self.disks[device].mark_dirty(class, bytes(place.disk_at));
                self.drop_disk(node, group, Loss::Dropped);
            }
        }
        self.settle(node);
        if matches!(fault, IoFault::Os(_)) && self.disks[device].read_failed(fault, self.now_ns) {
            self.give_up_disk(device);
        }
    }

    /// Bytes that requests wait for and that are not being read yet. What others have read meanwhile counts
    /// until a request's turn has passed it.
    pub(super) fn promotion_queue_bytes(&self) -> u64 {
        let promotions = self.requests.values();
        promotions
            .filter_map(|request| request.promotion.as_ref())
            .filter(|promotion| !promotion.is_issued())
            .map(|promotion| promotion.unread)
            .sum()
    }
}
