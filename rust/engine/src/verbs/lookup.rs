//! Lookup: a hit in the arena and a miss are answered at once; a hit on disk is pending until its
//! payloads are in the arena.

use std::cell::Cell;

use undercroft_contract::explain::Reason;
use undercroft_contract::key::HashSource;
use undercroft_contract::session::{Finished, Hit, Lookup, LookupRequest, Priority, Tokens};

use crate::forest::{NONE, NodeId, NsId};

use super::super::fetch::{LastAnswer, Reads, Share};
use super::super::ids::{RequestId, SessionId};
use super::super::lookup_cursor::{Ending, FoundChain, LookupCursor, SearchSpan};
use super::super::planner::FetchSource;
use super::super::promotions::PromotionEnd;
use super::super::requests::{RequestState, needs_hit, tokens_of};
use super::engine::Engine;

/// Promotions that one lookup may start before it is answered: payloads may be evicted or lost again and again.
const PROMOTIONS_MAX: u32 = 3;

impl Engine {
    /// Looks a prompt up, see [`Session::lookup`](undercroft_contract::session::Session::lookup), for a caller that has
    /// the engine to itself: the work is proportional to the prompt's length.
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
        let Some(of_session) = self.sessions.get(session) else {
            return Some(Lookup::NOTHING);
        };
        let (ns, is_barred) = (of_session.ns, of_session.is_barred);
        let leases = of_session.leases_prefetches;
        // A prefetch is usually the first lookup of its request, a demanded lookup is not: one search suffices.
        let known = match request.priority {
            Priority::Demand => of_session.requests.get(request.request).copied(),
            Priority::Prefetch => None,
        };
        let Some(id) = known.or_else(|| self.add_request(session, request)) else {
            return Some(Lookup::NOTHING);
        };
        let (state, share) = (&mut self.sessions.requests[id], &mut self.shares[id]);
        let wait = request.wait.unwrap_or(self.config.promotion_wait);
        share.waits.limit = Some(state.note_request(request, wait));
        if is_barred {
            return Some(Lookup::NOTHING);
        }
        let had_hit = state.hit > 0;
        let has_failed = share.answer == LastAnswer::Failed;
        let answer = if has_failed {
            state.answered.reason = Reason::LoadFailed;
            Lookup::NOTHING
        } else {
            self.begin_and_search(id, ns, request, cursor)?
        };
        if self.sessions.requests[id].hit > 0 && !had_hit {
            self.note_pins_used(ns, request.hashes, answer.shared());
        }
        // A hint's own lookup belongs to no request.
        let is_final = request.priority == Priority::Demand || leases;
        self.end_step(id, request, answer, is_final);
        let is_explained = (is_final || has_failed) && !request.request.starts_with('\0');
        if is_explained && !answer.is_pending() {
            self.note_answer(id, ns, request, answer);
        }
        Some(answer)
    }

    /// Begins the waits of a lookup in its first entry, and continues its search. `None`: there are more nodes to look at.
    fn begin_and_search(
        &mut self,
        id: RequestId,
        ns: NsId,
        request: &LookupRequest<'_>,
        cursor: &mut LookupCursor,
    ) -> Option<Lookup> {
        let mut found = None;
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
            if self.remote.is_some() {
                let chain = self.find_chain(ns, request.hashes);
                let epoch = chain.epoch(&self.residency);
                cursor.awaits_remote = self.awaits_remote(id, ns, request, chain.end());
                // A flight that ends may take nodes with it.
                found = Some(chain).filter(|chain| chain.is_there(epoch, &self.residency));
            }
        }
        let chain = found.unwrap_or_else(|| self.find_chain(ns, request.hashes));
        let answer = self.search(id, ns, request, (chain, cursor))?;
        Some(match cursor.awaits_remote {
            true => self.pending(id),
            false => answer,
        })
    }

    /// Notes the answer of a step in the request's share. `is_final`: the request looks up no more if it is answered.
    fn end_step(
        &mut self,
        id: RequestId,
        request: &LookupRequest<'_>,
        answer: Lookup,
        is_final: bool,
    ) {
        let (state, share) = (&mut self.sessions.requests[id], &mut self.shares[id]);
        match request.priority {
            Priority::Prefetch => {
                if let LastAnswer::Hit { is_reserved, .. } = &mut share.answer {
                    *is_reserved = is_final && matches!(answer, Lookup::Hit(_));
                }
            }
            Priority::Demand if !answer.is_pending() => {
                let since_ns = share.waits.since_ns.take().unwrap_or(self.now_ns);
                share.waits.promotions = 0;
                state.planned.waited_ns = self.now_ns - since_ns;
            }
            Priority::Demand => {}
        }
        if is_final && !answer.is_pending() && share.waits.remote.is_some() {
            self.leave_flight(id);
        }
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
        let (state, share) = (&mut self.sessions.requests[id], &mut self.shares[id]);
        self.promotions
            .promote_to_demand(id, share, &mut self.planner.rates);
        // The limit of the wait counts from the first demand: a prefetch before it held nobody up.
        if share.waits.since_ns.is_none() {
            share.waits.since_ns = Some(self.now_ns);
            state.planned.queued = request.queued.0;
        }
        let (state, share) = (&self.sessions.requests[id], &self.shares[id]);
        let hash_block_size = self.residency.hash_block_size(ns);
        let most = request
            .max
            .0
            .min(tokens_of(request.hashes.len(), hash_block_size));
        // The computed tokens may reach beyond the hit.
        let gain = self
            .promised(share, ns, most)
            .saturating_sub(request.computed.0);
        let late = self.is_late((state, share), gain);
        let Some(promotion) = &share.waits.disk else {
            return Some(match late {
                true => Reason::TimedOut,
                false => Reason::Complete,
            });
        };
        if gain > 0 && !late {
            return None;
        }
        // Both look at the promotion, which is gone after its end.
        let is_stalled = late && self.is_stalled(promotion);
        let stop = match late {
            true => self.promotion_stop(state, share),
            false => None,
        };
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

    /// A request has finished or was aborted. Idempotent.
    pub fn finish_request<'a>(&mut self, session: SessionId, finished: impl Into<Finished<'a>>) {
        let Finished { request, turn_end } = finished.into();
        self.end_lookup(session, request);
        let state = self.sessions.get_mut(session);
        let saved = state.and_then(|state| state.saved.remove(request));
        if let Some(end) = saved.and_then(|saved| saved.end) {
            self.returns.finished(end, turn_end, self.now_ns);
        }
    }

    /// The request of a lookup, which is added if the session has no such request.
    fn add_request(
        &mut self,
        session: SessionId,
        request: &LookupRequest<'_>,
    ) -> Option<RequestId> {
        let tick = || self.residency.next_tick();
        let id = self
            .sessions
            .request_or_add(session, request.request, tick)?;
        self.shares.entry(id)?.or_insert_with(Share::new);
        Some(id)
    }

    /// The nodes of a prompt that lookups may use.
    fn find_chain(&self, ns: NsId, hashes: &dyn HashSource) -> FoundChain {
        // The shallowest node that is in the index and not visible.
        let unseen = Cell::new(u32::MAX);
        let found = self.residency.deepest(ns, hashes, |node| {
            if !node.is_visible() {
                unseen.set(unseen.get().min(node.depth));
            }
            node.is_visible()
        });
        let (deepest, depth) = found.unwrap_or((NONE, 0));
        FoundChain {
            deepest,
            depth,
            is_incomplete: unseen.get() == depth + 1,
        }
    }

    /// Searches the present index for the end of a hit. Starts a promotion only if the cursor permits that. `None`: there
    /// are more nodes to look at.
    fn search(
        &mut self,
        id: RequestId,
        ns: NsId,
        request: &LookupRequest<'_>,
        (chain, cursor): (FoundChain, &mut LookupCursor),
    ) -> Option<Lookup> {
        let hash_block_size = self.residency.hash_block_size(ns);
        let span = self.span(&self.sessions.requests[id], request, hash_block_size);
        let state = &mut self.sessions.requests[id];
        state.note_chain(request, (chain, hash_block_size), cursor.awaits_remote);
        let comes = !std::mem::replace(&mut state.has_come, true);
        if comes && chain.deepest != NONE {
            let end = (chain.deepest, chain.epoch(&self.residency));
            let in_host = || self.residency.is_in_host(end.0);
            self.returns
                .came(end, self.now_ns, in_host, &mut self.counters);
        }
        let state = &self.sessions.requests[id];
        // A draft model cannot use the cached last tokens.
        let dropped = state.dropped_tokens;
        let limit = chain
            .depth
            .saturating_sub(dropped.div_ceil(hash_block_size))
            .min(request.max.0 / hash_block_size);
        if limit <= span.local {
            return Some(self.miss(id, Reason::Complete));
        }
        let from = (chain.deepest, limit);
        let mut top = cursor.top(ns, request.hashes, from, &self.residency);
        loop {
            match self.search_end(id, top, &span, cursor) {
                Ending::Further => return None,
                Ending::None { reason, reach } => {
                    self.cap_shared(id, reach, span.min);
                    return Some(self.miss(id, reason));
                }
                Ending::InHost(end, reason) => {
                    return Some(self.answer_with(id, end, &span, reason));
                }
                Ending::OnDisk(end) => {
                    if cursor.may_promote {
                        match self.try_promotion(id, end, &span, request.priority) {
                            None => return Some(self.pending(id)),
                            Some(unread) => cursor.unread = unread,
                        }
                    }
                    // Nothing is read from the disk, so the hit consists of blocks in the arena, and ends here or above.
                    cursor.host_only = true;
                    cursor.set(end, &self.residency);
                    top = end;
                }
            }
        }
    }

    fn span(
        &self,
        state: &RequestState,
        request: &LookupRequest<'_>,
        hash_block_size: u32,
    ) -> SearchSpan {
        SearchSpan {
            computed: request.computed.0,
            local: request.computed.0 / hash_block_size,
            align: state.alignment_tokens / hash_block_size,
            hash_block_size,
            min: request.min.0,
            least: match needs_hit(request) {
                true => self.config.min_load_tokens.unwrap_or(1).max(1),
                false => self.least(state),
            },
            is_planned: self.config.min_load_tokens.is_none() && !needs_hit(request),
        }
    }

    /// Searches for the end of a hit at or above `top`: anywhere in the tiers, or in the arena if the cursor says so.
    /// Changes only the cursor.
    fn search_end(
        &self,
        id: RequestId,
        top: NodeId,
        span: &SearchSpan,
        cursor: &mut LookupCursor,
    ) -> Ending {
        let end = match self.next_end(top, span, cursor) {
            Some(Some(end)) => end,
            Some(None) => return Ending::Further,
            None if cursor.host_only => {
                return Ending::None {
                    reason: cursor.unread,
                    reach: u32::MAX,
                };
            }
            None => {
                return Ending::None {
                    reason: self.why_no_end(top, span),
                    reach: span.computed,
                };
            }
        };
        if cursor.host_only {
            return Ending::InHost(end, cursor.unread);
        }
        let reach = self.residency.node(end).depth * span.hash_block_size;
        if reach < span.min {
            let reason = Reason::Threshold;
            return Ending::None { reason, reach };
        }
        let is_ready = self.residency.is_hit_in_host(end, span.local)
            && self.verified_end(id, end, span.local) == Some(end);
        match is_ready {
            true => Ending::InHost(end, Reason::Complete),
            false => Ending::OnDisk(end),
        }
    }

    /// Answers with the payloads in the arena, up to `end`.
    fn answer_with(
        &mut self,
        id: RequestId,
        end: NodeId,
        span: &SearchSpan,
        reason: Reason,
    ) -> Lookup {
        if span.is_planned {
            let to = self.residency.node(end).depth * span.hash_block_size;
            if !self.is_copy_worth(id, to) {
                return self.miss(id, Reason::Planned);
            }
        }
        let Some(end) = self.verified_end(id, end, span.local) else {
            return self.miss(id, reason);
        };
        let depth = self.residency.node(end).depth;
        match span.is_worth(depth) {
            true => self.hit(id, (end, depth), span, reason),
            false => self.miss(id, reason),
        }
    }

    /// Starts to promote the payloads of a hit at `top`. If no promotion starts, returns the reason.
    fn try_promotion(
        &mut self,
        id: RequestId,
        top: NodeId,
        span: &SearchSpan,
        priority: Priority,
    ) -> Option<Reason> {
        if !self.plans_reads(id, top, span, priority) {
            return Some(Reason::Planned);
        }
        let is_tried = self.shares[id].waits.promotions >= PROMOTIONS_MAX;
        let least = span.min.div_ceil(span.hash_block_size);
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
    #[inline]
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

    /// Starts to promote the payloads that a hit at `target` needs ([`SearchSpan::bounds`]). False if the budget has no room
    /// for a hit of `min` hash blocks, or after [`PROMOTIONS_MAX`] promotions.
    pub(super) fn start_promotion(
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

    /// Answers with a hit that ends at `node`, in `depth`, for `reason`: leases the node, and counts the request's hit
    /// once.
    fn hit(
        &mut self,
        id: RequestId,
        (node, depth): (NodeId, u32),
        span: &SearchSpan,
        reason: Reason,
    ) -> Lookup {
        let state = &mut self.sessions.requests[id];
        state.answered.reason = reason;
        let share = &mut self.shares[id];
        share.move_lease(node, &mut self.residency);
        share.answer = LastAnswer::Hit {
            after: span.local,
            is_reserved: false,
        };
        let hit = Lookup::Hit(Hit {
            tokens: Tokens(depth * span.hash_block_size),
            shared: state.shared,
        });
        if state.hit > 0 {
            return hit;
        }
        state.hit = depth;
        // Later requests have their own ticks. Without a new tick, a node that two requests touch
        // would count once.
        if state.tick != self.residency.tick() {
            state.tick = self.residency.next_tick();
        }
        self.residency.note_host_chain(node);
        self.residency.touch_hit(node);
        self.writeback
            .offer_hit(node, &mut self.residency, self.now_ns, &mut self.counters);
        self.offer_remote_hit(node);
        hit
    }
}
