//! Lookup: a hit in the arena and a miss are answered at once; a hit on disk is pending until its
//! payloads are in the arena.

use std::cell::Cell;

use crate::explain::Reason;
use crate::forest::{NONE, NodeId, NsId};
use crate::key::HashSource;
use crate::session::{Hit, Lookup, LookupRequest, Priority, PromotionWait, Tokens};

use super::coordinator::Engine;
use super::fetch::{LastAnswer, Share};
use super::ids::{RequestId, SessionId};
use super::planner::FetchSource;
use super::plans::Reads;
use super::promotions::PromotionEnd;
use super::residency::Residency;

/// Promotions that one lookup may start before it is answered: payloads may be evicted or lost again and again.
const PROMOTIONS_MAX: u32 = 3;

/// A lookup's question in hash blocks.
#[derive(Clone, Copy, Debug)]
struct SearchSpan {
    /// Computed tokens: the device has their hash blocks.
    computed: u32,
    /// Number of whole hash blocks among the computed tokens.
    local: u32,
    /// The session's hits end at multiples of this number.
    align: u32,
    /// Tokens of a hash block.
    hash_block_size: u32,
    /// A hit that gains fewer tokens is not worth a load.
    least: u32,
    /// Whether the planner decides which loads are worth their time.
    is_planned: bool,
}

impl SearchSpan {
    /// Where a hit begins, and the number of which its end is a multiple.
    fn bounds(&self) -> (u32, u32) {
        (self.local, self.align)
    }

    /// Whether a hit at `boundary` is worth a load.
    fn is_worth(&self, boundary: u32) -> bool {
        boundary > self.local && boundary * self.hash_block_size - self.computed >= self.least
    }
}

/// The progress of a lookup that takes several entries.
///
/// With windows or states a hit may end far above the deepest node of the prompt, and each node on the way has to be
/// looked at.
#[derive(Debug, Default)]
pub struct LookupCursor {
    /// The first entry has been made.
    has_begun: bool,
    may_promote: bool,
    /// The deepest node where a hit may end as far as the search has come, and its epoch.
    at: Option<(NodeId, u32)>,
    /// A hit may end at that node only by a read from disk, which this lookup does not start. The search continues
    /// for a hit that is in the arena.
    host_only: bool,
    /// Why this lookup starts no read.
    unread: Reason,
    /// The request waits for the remote store: the answer is pending even if the search finds a hit.
    awaits_remote: bool,
}

impl LookupCursor {
    fn set(&mut self, node: NodeId, residency: &Residency) {
        self.at = Some((node, residency.node(node).epoch));
    }

    /// The node at which the search continues, at or above the depth `limit` on the chain of `deepest`. The search
    /// begins anew if the chain has changed.
    fn top(
        &mut self,
        ns: NsId,
        hashes: &dyn HashSource,
        (deepest, limit): (NodeId, u32),
        residency: &Residency,
    ) -> NodeId {
        let is_there = |&(id, epoch): &(NodeId, u32)| {
            let node = residency.node(id);
            residency.forest().is_live(id, epoch)
                && node.is_visible()
                && node.ns == ns
                && node.depth <= limit
                && hashes.get(node.depth as usize - 1) == Some(node.hash)
                && !residency.has_left_index(id)
        };
        if let Some((id, _)) = self.at.filter(is_there) {
            return id;
        }
        (self.at, self.host_only) = (None, false);
        residency.forest().ancestor(deepest, limit)
    }
}

impl Engine {
    /// Looks a prompt up, see [`Session::lookup`](crate::session::Session::lookup), for a caller that has the engine to
    /// itself: the work is proportional to the prompt's length.
    pub fn lookup(&mut self, session: SessionId, request: &LookupRequest<'_>) -> Lookup {
        let mut cursor = LookupCursor::default();
        loop {
            if let Some(answer) = self.step_lookup(session, request, &mut cursor) {
                return answer;
            }
        }
    }

    /// A step of a lookup. The first step gets a new cursor. `None`: the caller takes another step.
    pub fn step_lookup(
        &mut self,
        session: SessionId,
        request: &LookupRequest<'_>,
        cursor: &mut LookupCursor,
    ) -> Option<Lookup> {
        let Some(id) = self.request_of(session, request) else {
            return Some(Lookup::NOTHING);
        };
        let of_session = self.sessions.get(session);
        let of_session = of_session.expect("a request belongs to a session");
        let ns = of_session.ns;
        if of_session.is_barred {
            return Some(Lookup::NOTHING);
        }
        if self.shares[id].answer == LastAnswer::Failed {
            self.sessions.requests[id].answered.reason = Reason::LoadFailed;
            self.note_answer(id, ns, request, Lookup::NOTHING);
            return Some(Lookup::NOTHING);
        }
        if !std::mem::replace(&mut cursor.has_begun, true) {
            let begun = match request.priority {
                Priority::Demand => self.begin_demanded(id, ns, request),
                Priority::Prefetch => self.begin_prefetch(id),
            };
            let Some(unread) = begun else {
                return Some(self.pending(id));
            };
            cursor.unread = self.unless_draining(unread);
            cursor.may_promote = cursor.unread == Reason::Complete;
            cursor.awaits_remote = self.awaits_remote(id, ns, request);
        }
        let was_touched = self.sessions.requests[id].touched;
        let found = self.look_up_now(id, ns, request, cursor)?;
        let answer = if cursor.awaits_remote {
            self.pending(id)
        } else {
            found
        };
        if self.sessions.requests[id].touched && !was_touched {
            self.note_pins_used(ns, request.hashes, answer.shared());
        }
        let session = self.sessions.get(session);
        let leases = session.is_some_and(|session| session.leases_prefetches);
        let share = &mut self.shares[id];
        match request.priority {
            Priority::Prefetch => {
                if let (LastAnswer::Hit { is_reserved, .. }, Lookup::Hit(_)) =
                    (&mut share.answer, answer)
                {
                    *is_reserved = leases;
                }
            }
            Priority::Demand if !answer.is_pending() => {
                let since_ns = share.waits.since_ns.take().unwrap_or(self.now_ns);
                self.sessions.requests[id].planned.waited_ns = self.now_ns - since_ns;
                share.waits.promotions = 0;
            }
            Priority::Demand => {}
        }
        // A hint's own lookup belongs to no request.
        let is_final = request.priority == Priority::Demand || leases;
        if is_final && !answer.is_pending() {
            self.leave_flight(id);
        }
        if is_final && !answer.is_pending() && !request.request.starts_with('\0') {
            self.note_answer(id, ns, request, answer);
        }
        Some(answer)
    }

    /// Begins a prefetch. Returns why it may not start a promotion, [`Reason::Complete`] if it may, and `None` if one
    /// is under way.
    fn begin_prefetch(&mut self, id: RequestId) -> Option<Reason> {
        let share = &mut self.shares[id];
        if share.waits.disk.is_some() {
            return None;
        }
        // A new lookup voids the last answer.
        if let LastAnswer::Hit { is_reserved, .. } = &mut share.answer {
            *is_reserved = false;
        }
        Some(Reason::Complete)
    }

    /// Begins a demanded lookup, whose wait for a promotion is limited. Returns why no other promotion may start,
    /// [`Reason::Complete`] if one may, and `None` if the lookup waits for the promotion under way.
    fn begin_demanded(
        &mut self,
        id: RequestId,
        ns: NsId,
        request: &LookupRequest<'_>,
    ) -> Option<Reason> {
        let now_ns = self.now_ns;
        let share = &mut self.shares[id];
        self.promotions
            .promote_to_demand(id, share, &mut self.planner.rates);
        if share.waits.since_ns.is_none() {
            share.waits.since_ns = Some(now_ns);
            self.sessions.requests[id].planned.queued = request.queued.0;
        }
        let hash_block_size = self.residency.hash_block_size(ns);
        let most = request
            .max
            .0
            .min(tokens_of(request.hashes.len(), hash_block_size));
        // The computed tokens may reach beyond the hit.
        let gain = self
            .promised(id, ns, most)
            .saturating_sub(request.computed.0);
        let late = self.is_late(id, gain);
        let stop = if late { self.promotion_stop(id) } else { None };
        let promotion = self.shares[id].waits.disk.as_ref();
        let is_stalled = late && promotion.is_some_and(|promotion| self.is_stalled(promotion));
        if promotion.is_some() && gain > 0 && !late {
            return None;
        }
        let (promotions, mut parts) = self.promotions();
        let end = if late {
            PromotionEnd::GivenUp
        } else {
            PromotionEnd::Cancelled
        };
        promotions.end(id, end, &mut parts);
        if let Some((stop, tokens)) = stop {
            stop.count(FetchSource::Disk, tokens, &mut self.counters);
        }
        // A late lookup is answered with the blocks that have arrived.
        Some(match stop {
            _ if !late => Reason::Complete,
            _ if is_stalled => Reason::DiskSilent,
            Some(_) => Reason::Planned,
            None => Reason::TimedOut,
        })
    }

    fn pending(&self, id: RequestId) -> Lookup {
        let shared = self.sessions.requests[id].shared;
        Lookup::Pending { shared }
    }

    /// The request's lookup is not needed any more. Idempotent.
    pub fn end_lookup(&mut self, session: SessionId, request: &str) {
        if let Some(state) = self.sessions.get_mut(session)
            && let Some(id) = state.requests.remove(request)
        {
            self.drop_request(id);
        }
    }

    /// The request has finished or was aborted. Idempotent.
    pub fn finish_request(&mut self, session: SessionId, request: &str) {
        self.end_lookup(session, request);
        if let Some(state) = self.sessions.get_mut(session) {
            state.saved.remove(request);
        }
    }

    /// The tokens (exclusive, inclusive) between which a request's promotions brought payloads from disk.
    pub fn from_disk(&self, session: SessionId, request: &str) -> Option<(Tokens, Tokens)> {
        let ns = self.sessions.get(session)?.ns;
        let id = self.sessions.request_id(session, request)?;
        let (after, to) = self.shares[id].from_disk?;
        let hash_block_size = self.residency.hash_block_size(ns);
        let tokens = |depth: u32| Tokens(depth * hash_block_size);
        Some((tokens(after), tokens(to)))
    }

    fn request_of(&mut self, session: SessionId, request: &LookupRequest<'_>) -> Option<RequestId> {
        // A prefetch is usually the first lookup of its request, a demanded lookup is not: one search suffices.
        let known = match request.priority {
            Priority::Demand => self.sessions.request_id(session, request.request),
            Priority::Prefetch => None,
        };
        let id = known.or_else(|| {
            let tick = || self.residency.next_tick();
            self.sessions.request_or_add(session, request.request, tick)
        })?;
        let state = &mut self.sessions.requests[id];
        let share = self.shares.entry(id)?.or_insert_with(Share::new);
        let wait = request.wait.unwrap_or(self.config.promotion_wait);
        // A request that only a hit can serve has no computing to weigh the hit against.
        state.planned.min = request.min.0;
        state.planned.needs_hit = needs_hit(request);
        let is_weighed = wait != PromotionWait::Planned || !state.planned.needs_hit;
        share.waits.limit = Some(if is_weighed {
            wait
        } else {
            PromotionWait::Complete
        });
        if request.priority == Priority::Prefetch {
            state.planned.queued = request.queued.0;
        }
        Some(id)
    }

    /// Looks the request up in the present index. Starts a promotion only if the cursor permits that. `None`: there are
    /// more nodes to look at.
    fn look_up_now(
        &mut self,
        id: RequestId,
        ns: NsId,
        request: &LookupRequest<'_>,
        cursor: &mut LookupCursor,
    ) -> Option<Lookup> {
        let hash_block_size = self.residency.hash_block_size(ns);
        let span = SearchSpan {
            computed: request.computed.0,
            local: request.computed.0 / hash_block_size,
            align: self.sessions.alignment_of(id) / hash_block_size,
            hash_block_size,
            least: match needs_hit(request) {
                true => self.config.min_load_tokens.unwrap_or(1).max(1),
                false => self.least(id),
            },
            is_planned: self.config.min_load_tokens.is_none() && !needs_hit(request),
        };
        let end = request
            .max
            .0
            .min(tokens_of(request.hashes.len(), hash_block_size));
        let state = &mut self.sessions.requests[id];
        // During a wait for the remote store, the prompt's end is its end at the begin of the wait.
        let end = match cursor.awaits_remote {
            true => state.planned.end,
            false => end,
        };
        state.planned.note(request.computed.0, end);
        let residency = &self.residency;
        // The shallowest node that is in the index and not visible.
        let unseen = Cell::new(u32::MAX);
        let found = residency.deepest(ns, request.hashes, |node| {
            if !node.is_visible() {
                unseen.set(unseen.get().min(node.depth));
            }
            node.is_visible()
        });
        let (deepest, depth) = found.unwrap_or((NONE, 0));
        state.answered.is_incomplete = unseen.get() == depth + 1;
        state.shared = Tokens(depth * hash_block_size);
        // A draft model cannot use the cached last tokens.
        let dropped = state.dropped_tokens.div_ceil(hash_block_size);
        let limit = depth
            .saturating_sub(dropped)
            .min(request.max.0 / hash_block_size);
        if limit <= span.local {
            return Some(self.miss(id, Reason::Complete));
        }
        let mut top = cursor.top(ns, request.hashes, (deepest, limit), &self.residency);
        if !cursor.host_only {
            let min = request.min.0;
            let Some(anywhere) = self.next_end(top, &span, cursor) else {
                self.cap_shared(id, span.computed, min);
                let why = self.why_no_end(top, &span);
                return Some(self.miss(id, why));
            };
            top = anywhere?;
            let reach = self.residency.node(top).depth * hash_block_size;
            if reach < min {
                self.cap_shared(id, reach, min);
                return Some(self.miss(id, Reason::Threshold));
            }
            let is_ready = self.residency.is_hit_in_host(top, span.local)
                && self.verified_end(id, top, span.local) == Some(top);
            if is_ready {
                let is_worth =
                    !span.is_planned || self.is_copy_worth(id, self.residency.node(top).depth);
                return Some(if is_worth {
                    self.hit(id, top, span.local, Reason::Complete)
                } else {
                    self.miss(id, Reason::Planned)
                });
            }
            if cursor.may_promote {
                let least = min.div_ceil(hash_block_size);
                match self.try_promotion(id, top, &span, (request.priority, least)) {
                    None => return Some(self.pending(id)),
                    Some(unread) => cursor.unread = unread,
                }
            }
            cursor.host_only = true;
            cursor.set(top, &self.residency);
        }
        let unread = cursor.unread;
        let Some(in_host) = self.next_end(top, &span, cursor) else {
            return Some(self.miss(id, unread));
        };
        let in_host = in_host?;
        if span.is_planned && !self.is_copy_worth(id, self.residency.node(in_host).depth) {
            return Some(self.miss(id, Reason::Planned));
        }
        Some(match self.verified_end(id, in_host, span.local) {
            Some(end) if span.is_worth(self.residency.node(end).depth) => {
                self.hit(id, end, span.local, unread)
            }
            _ => self.miss(id, unread),
        })
    }

    /// Starts to promote the payloads of a hit at `top`, of at least `least` hash blocks. If no promotion starts,
    /// returns the reason.
    fn try_promotion(
        &mut self,
        id: RequestId,
        top: NodeId,
        span: &SearchSpan,
        (priority, least): (Priority, u32),
    ) -> Option<Reason> {
        if !self.plans_reads(id, top, span, priority) {
            return Some(Reason::Planned);
        }
        let is_tried = self.shares[id].waits.promotions >= PROMOTIONS_MAX;
        match self.start_promotion(id, top, span.bounds(), least) {
            true => None,
            false if is_tried => Some(Reason::Repeated),
            false => Some(Reason::Budget),
        }
    }

    /// Whether to read the payloads of a hit at `top` from disk. If the search does not reach the end of the part that
    /// is in the arena, this part counts as read, too.
    fn plans_reads(
        &mut self,
        id: RequestId,
        top: NodeId,
        span: &SearchSpan,
        priority: Priority,
    ) -> bool {
        let (residency, nodes_max) = (&self.residency, self.config.visits);
        let in_host = residency.boundary_within(top, span.bounds(), true, nodes_max);
        let ends = (in_host.unwrap_or(span.local), residency.node(top).depth);
        match self.plans_promotion(id, ends, priority == Priority::Prefetch) {
            Reads::All => true,
            Reads::Some => {
                self.promotions.probe(top, span.local, &self.residency);
                false
            }
            Reads::None => false,
        }
    }

    /// Why no hit ends at or above `top`, even with reads from disk.
    fn why_no_end(&self, top: NodeId, span: &SearchSpan) -> Reason {
        if !span.is_worth(self.residency.node(top).depth) {
            return Reason::TooFew;
        }
        let mut disks = self.residency.disks().iter();
        if disks.any(|disk| !disk.health.answers_reads()) {
            Reason::DiskSilent
        } else {
            Reason::NoBoundary
        }
    }

    /// Notes that a request reaches `tokens` at best, if that is less than the `min` tokens that it needs.
    fn cap_shared(&mut self, id: RequestId, tokens: u32, min: u32) {
        let shared = &mut self.sessions.requests[id].shared;
        if tokens < min {
            *shared = Tokens(shared.0.min(tokens));
        }
    }

    /// The deepest node where a hit may end, at or above `top`. `None` if no hit is worth a load; `Some(None)` if there
    /// are more nodes to look at.
    fn next_end(
        &self,
        top: NodeId,
        span: &SearchSpan,
        cursor: &mut LookupCursor,
    ) -> Option<Option<NodeId>> {
        let (residency, nodes_max) = (&self.residency, self.config.visits);
        match residency.boundary_within(top, span.bounds(), cursor.host_only, nodes_max) {
            Ok(boundary) if span.is_worth(boundary) => {
                Some(Some(residency.forest().ancestor(top, boundary)))
            }
            Ok(_) => None,
            Err(node) if span.is_worth(residency.node(node).depth) => {
                cursor.set(node, residency);
                Some(None)
            }
            Err(_) => None,
        }
    }

    /// Where a hit may end, at or above `end`, whose payloads are in the arena; `None` if their checksums have
    /// yet to be compared.
    fn verified_end(&self, id: RequestId, end: NodeId, local: u32) -> Option<NodeId> {
        if !self.config.verify_host {
            return Some(end);
        }
        let verified = self.shares[id].verified?;
        let (forest, depth) = (
            self.residency.forest(),
            self.residency.node(verified.node).depth,
        );
        let is_above =
            depth <= self.residency.node(end).depth && forest.ancestor(end, depth) == verified.node;
        (is_above && verified.local <= local).then_some(verified.node)
    }

    /// Starts to promote the payloads that a hit at `target` needs ([`Span::bounds`]). False if the budget has no room
    /// for a hit of `min` hash blocks, or after [`PROMOTIONS_MAX`] promotions.
    fn start_promotion(
        &mut self,
        id: RequestId,
        target: NodeId,
        bounds: (u32, u32),
        min: u32,
    ) -> bool {
        let share = &mut self.shares[id];
        if share.waits.promotions >= PROMOTIONS_MAX {
            return false;
        }
        share.waits.promotions += 1;
        share.started += 1;
        let budget = self.promotions.budget_of(share);
        let plan = self.residency.plan_promotion(target, bounds, budget);
        let Some(plan) = plan.filter(|plan| self.residency.node(plan.target).depth >= min) else {
            return false;
        };
        share.move_lease(plan.target, &mut self.residency);
        self.promotions
            .start(id, share, plan, &mut self.planner.rates, self.now_ns);
        true
    }

    /// Answers with a miss: the payloads that were promoted for the request may be evicted.
    fn miss(&mut self, id: RequestId, reason: Reason) -> Lookup {
        let state = &mut self.sessions.requests[id];
        state.answered.reason = reason;
        let share = &mut self.shares[id];
        share.move_lease(NONE, &mut self.residency);
        self.promotions.release(share);
        Lookup::Miss {
            shared: state.shared,
        }
    }

    /// Answers with a hit that ends at `node`, for `reason`: leases the node, and counts the request's hit once.
    fn hit(&mut self, id: RequestId, node: NodeId, local: u32, reason: Reason) -> Lookup {
        let state = &mut self.sessions.requests[id];
        state.answered.reason = reason;
        let share = &mut self.shares[id];
        share.move_lease(node, &mut self.residency);
        share.answer = LastAnswer::Hit {
            after: local,
            is_reserved: false,
        };
        let hash_block_size = self.residency.spec_of(node).hash_block_size;
        let hit = Lookup::Hit(Hit {
            tokens: Tokens(self.residency.node(node).depth * hash_block_size),
            shared: state.shared,
        });
        if std::mem::replace(&mut state.touched, true) {
            return hit;
        }
        // Later requests have their own ticks. Without a new tick, a node that two requests touch
        // would count once.
        if state.tick != self.residency.tick() {
            self.residency.next_tick();
        }
        self.residency.note_host_chain(node);
        self.residency.touch_hit(node);
        self.writeback
            .offer_hit(node, &mut self.residency, self.now_ns, &mut self.counters);
        self.offer_remote_hit(node);
        hit
    }
}

/// Whether a request is served only if more tokens are cached than the device has.
fn needs_hit(request: &LookupRequest<'_>) -> bool {
    request.min > request.computed
}

/// Tokens of this many hash blocks. Saturates.
fn tokens_of(hash_blocks: usize, hash_block_size: u32) -> u32 {
    let tokens = (hash_blocks as u64).saturating_mul(u64::from(hash_block_size));
    tokens.min(u64::from(u32::MAX)) as u32
}
