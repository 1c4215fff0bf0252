//! Promotions: payloads move from disk into the arena, front to back, for requests in the order of
//! arrival. A payload is read once, however many requests wait for it.

mod budget;
#[cfg(feature = "check")]
mod check;
mod probes;
mod read_queues;
mod reads;

use std::collections::{HashMap, VecDeque};

use undercroft_contract::session::Priority;
use undercroft_contract::tier::Tier;

use crate::forest::{DeviceIndex, NONE, NodeId};
use crate::metrics::Counters;
use crate::work;

use super::fetch::{Promotion, Share, Shares, Verified};
use super::ids::RequestId;
use super::parts::EngineParts;
use super::planner::Rates;
use super::residency::{PromotionPlan, Residency};
use budget::PromotionBudget;
use probes::Probe;
use read_queues::ReadQueues;

pub(super) use read_queues::QueuePlace;
pub(super) use reads::{REQUESTS_LOOKED_AT, slot_len};

/// Payloads of a promotion that one step looks at.
const FRONT_STEP: usize = 64;

/// A waiter for a read: a request, and one of its promotions.
type Waiter = (RequestId, u32);

/// How a promotion ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PromotionEnd {
    /// All of its reads have ended.
    Finished,
    /// No request needs it any more.
    Cancelled,
    /// The device did not answer, or the request may wait no longer.
    GivenUp,
}

impl PromotionEnd {
    /// The end of a promotion without reads to wait for; `silent`: a device did not answer.
    fn of_issued(silent: bool) -> Self {
        if silent {
            Self::GivenUp
        } else {
            Self::Finished
        }
    }
}

/// The promotions of all requests.
///
/// Invariants:
/// - the budget counts the bytes that requests hold;
/// - a promotion that is not issued in full has one place in the read queues, of its priority and of the
///   device that it waits for;
/// - a payload with waiters is being read, and a promotion's `waiting` counts its entries among them;
/// - a promotion under way leases the deepest payload that it has reached.
#[derive(Debug)]
pub(super) struct Promotions {
    budget: PromotionBudget,
    read_queues: ReadQueues,
    /// The waiters for each payload being read.
    waiters: HashMap<(NodeId, u8), Vec<Waiter>>,
    /// Prefetches whose promotions have ended, latest last.
    prefetched: VecDeque<RequestId>,
    /// Payloads to be read only for measurement.
    probes: Vec<Probe>,
    /// A promotion has ended since the last call of [`Promotions::take_ended`].
    ended: bool,
    /// A demanded request has found no memory since the last call of [`Promotions::take_lack`].
    lacks_memory: bool,
    /// A read found no memory in the last pass.
    is_short: bool,
}

impl Promotions {
    pub(super) fn new(budget_bytes: u64) -> Self {
        Self {
            budget: PromotionBudget::new(budget_bytes),
            read_queues: ReadQueues::default(),
            waiters: HashMap::new(),
            prefetched: VecDeque::new(),
            probes: Vec::new(),
            ended: false,
            lacks_memory: false,
            is_short: false,
        }
    }

    /// Whether a demanded request has found no memory since the last call.
    pub(super) fn take_lack(&mut self) -> bool {
        std::mem::take(&mut self.lacks_memory)
    }

    /// Whether a read waits for memory.
    pub(super) fn is_short(&self) -> bool {
        self.is_short
    }

    /// Sets the bytes that promotions may hold. Started promotions go on.
    pub(super) fn set_budget(&mut self, most: u64) {
        self.budget.set(most);
    }

    /// Bytes that one more promotion of a request may bring.
    pub(super) fn budget_of(&self, share: &Share) -> u64 {
        self.budget.of(share)
    }

    /// Bytes that prefetches may hold together.
    pub(super) fn prefetch_bytes(&self) -> u64 {
        self.budget.prefetch_bytes()
    }

    /// Bytes held in the arena until they are loaded.
    pub(super) fn promoted_bytes(&self) -> u64 {
        self.budget.promoted_bytes()
    }

    /// Whether there are reads to start, for a request or for measurement.
    pub(super) fn has_reads(&self) -> bool {
        !self.read_queues.is_empty()
    }

    /// Whether there are reads to start for measurement.
    pub(super) fn has_probes(&self) -> bool {
        !self.probes.is_empty()
    }

    /// Whether any request waits to read from a device, or for checksums.
    pub(super) fn waits_for(&self, device: Option<DeviceIndex>) -> bool {
        self.read_queues.waits_for(device)
    }

    /// Whether a promotion has ended since the last call.
    pub(super) fn take_ended(&mut self) -> bool {
        std::mem::take(&mut self.ended)
    }

    /// Starts a promotion; the request leases the plan's target.
    pub(super) fn start(
        &mut self,
        id: RequestId,
        share: &mut Share,
        plan: PromotionPlan,
        rates: &mut Rates,
        now_ns: u64,
    ) {
        assert!(
            share.waits.disk.is_none(),
            "a request has two promotions at once"
        );
        let priority = share.priority();
        let shares = rates.enqueue(&plan.unread_by_device, priority);
        let place = self.read_queues.new_place(priority, plan.device);
        self.read_queues.insert(place, id);
        share.waits.disk = Some(Promotion {
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
            place: Some(place),
            shares,
            front: 0,
            predicted_ns: share.plans.disk.predicted_ns,
            reserved: None,
            continues: share.bytes > 0,
            silent: false,
            started_ns: now_ns,
            short_ns: None,
        });
    }

    /// Makes a prefetch a demand: its reads start before the reads of prefetches.
    #[inline]
    pub(super) fn promote_to_demand(
        &mut self,
        id: RequestId,
        share: &mut Share,
        rates: &mut Rates,
    ) {
        if share.demanded {
            return;
        }
        self.budget.demanded(share);
        share.demanded = true;
        if let Some(promotion) = &mut share.waits.disk {
            rates.promote_to_demand(&mut promotion.shares);
        }
        let place = share.waits.disk.as_mut().and_then(|of| of.place.as_mut());
        if let Some(place) = place {
            self.read_queues.remove(*place);
            *place = self.read_queues.new_place(Priority::Demand, place.device());
            self.read_queues.insert(*place, id);
        }
    }

    /// Frees a request's share of the budget.
    pub(super) fn release(&mut self, share: &mut Share) {
        self.budget.release(share);
    }

    /// Ends a request's promotion. Reads in flight go on and serve the next request for their payloads; reads that were
    /// not issued are not made.
    pub(super) fn end(&mut self, id: RequestId, how: PromotionEnd, parts: &mut EngineParts<'_>) {
        let share = &mut parts.shares[id];
        let Some(promotion) = share.waits.disk.take() else {
            return;
        };
        self.ended = true;
        let priority = share.priority();
        parts.rates.ended(&promotion.shares, priority);
        if let Some(place) = promotion.place {
            self.read_queues.remove(place);
        }
        self.budget.ended(id, &promotion, share);
        if promotion.reached != NONE {
            parts.residency.unpin(promotion.reached);
        }
        match how {
            PromotionEnd::Finished => {
                let is_complete = promotion.is_complete();
                parts.shares[id].verified = is_complete.then_some(promotion.goal);
                let took_ns = parts.now_ns - promotion.started_ns;
                if let Some(predicted_ns) = promotion.predicted_ns {
                    parts.counters.plan_predicted_disk_ns += predicted_ns;
                    parts.counters.plan_actual_disk_ns += took_ns;
                    parts.counters.plan_error_disk_ns += predicted_ns.abs_diff(took_ns);
                }
                parts.counters.promotions += 1;
                parts.counters.promotion_ns += parts.now_ns - promotion.started_ns;
            }
            PromotionEnd::Cancelled => {
                parts.counters.promotions_cancelled += 1;
                return;
            }
            PromotionEnd::GivenUp => parts.counters.promotions_given_up += 1,
        }
        if !parts.shares[id].demanded {
            // Requests that have ended leave their ids behind: they are dropped when they are most of the queue.
            if self.prefetched.len() > 2 * parts.shares.len() {
                let shares = &parts.shares;
                self.prefetched.retain(|&id| shares.contains_key(id));
            }
            self.prefetched.push_back(id);
        }
    }

    /// Gives up the promotions that wait for reads that do not end. If these reads end later, they serve the next
    /// request for their payloads.
    pub(super) fn give_up_reads(&mut self, reads: &[(NodeId, u8)], parts: &mut EngineParts<'_>) {
        for read in reads {
            for (id, started) in self.waiters.remove(read).unwrap_or_default() {
                work::queued();
                let share = parts.shares.get(id);
                if share.is_some_and(|share| share.started == started) {
                    self.end(id, PromotionEnd::GivenUp, parts);
                }
            }
        }
    }

    /// Takes the end of a payload's read, or of its checksum, for all waiters.
    pub(super) fn read_ended(
        &mut self,
        node: NodeId,
        group: u8,
        ok: bool,
        parts: &mut EngineParts<'_>,
    ) {
        for (id, started) in self.waiters.remove(&(node, group)).unwrap_or_default() {
            work::queued();
            let Some(share) = parts.shares.get_mut(id) else {
                continue;
            };
            if share.started != started {
                continue;
            }
            let Some(promotion) = &mut share.waits.disk else {
                continue;
            };
            let left = promotion.waiting.checked_sub(1);
            promotion.waiting = left.expect("a promotion counts the reads that it waits for");
            promotion.front = front(promotion, parts.residency);
            if !ok {
                promotion.cut();
            }
            if promotion.waiting == 0 && promotion.is_issued() {
                let silent = promotion.silent;
                self.end(id, PromotionEnd::of_issued(silent), parts);
            }
        }
    }

    /// Bytes that requests wait for and that are not being read yet. Bytes that other requests have read meanwhile
    /// count until the request's own turn reaches them.
    pub(super) fn queue_bytes(shares: &Shares) -> u64 {
        let waits = shares.values().map(|share| &share.waits);
        waits
            .filter_map(|waits| waits.disk.as_ref())
            .filter(|promotion| !promotion.is_issued())
            .map(|promotion| promotion.unread)
            .sum()
    }
}

/// How many payloads of a promotion, front to back, are in the arena. Looks at some payloads only: the next call goes
/// on behind them.
pub(super) fn front(promotion: &Promotion, residency: &Residency) -> usize {
    let rest = promotion
        .payloads
        .get(promotion.front..)
        .unwrap_or_default();
    let here = rest.iter().take(FRONT_STEP).take_while(|&&(node, group)| {
        work::node();
        residency.node(node).payload(group).is_readable(Tier::Host)
    });
    promotion.front + here.count()
}

/// Counts a payload that was read from disk.
pub(super) fn count_read(payload_bytes: u32, started_ns: u64, parts: &mut EngineParts<'_>) {
    let counters: &mut Counters = parts.counters;
    counters.disk_reads += 1;
    counters.disk_read_bytes += u64::from(payload_bytes);
    counters.disk_read_ns += parts.now_ns - started_ns;
}
