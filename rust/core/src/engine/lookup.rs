//! Lookup: submit, poll, discard. A hit in the arena and a miss are answered at once; only what the
//! disk still owes is pending.

use crate::forest::{DiskState, HostState, NONE, NodeId, NsId};
use crate::key::HashSource;
use crate::resolve::resolve;

use super::promote::Promotion;
use super::{Engine, RequestId, SessionId};

/// Promotions that one lookup may start: what is evicted or lost again and again is left alone.
const PROMOTIONS_MAX: u32 = 3;

/// A device that nobody looked at for this many times the limit is held to be stalled.
const NO_LOOK_STALLS: u64 = 5;

/// What a lookup knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The disk still owes a part.
    Pending,
    /// The deepest usable boundary, in tokens from the start of the prompt. A load may follow.
    Ready(u32),
}

/// One request's lookup.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) ns: NsId,
    /// Leased node at the boundary of the last answer, or `NONE`.
    pub(super) lease: NodeId,
    /// A promotion under way.
    pub(super) promotion: Option<Promotion>,
    pub(super) promotions_started: u32,
    /// Arena bytes that its promotion holds until they are loaded.
    pub(super) promoted_bytes: u64,
    /// Depths (exclusive, inclusive) that its promotions brought from disk, for metrics.
    pub(super) from_disk: Option<(u32, u32)>,
    /// The scheduler has asked: no longer a prefetch, its turn is before those.
    pub(super) hastened: bool,
    /// Its client has an answer that relies on the lease, although the scheduler has not asked.
    pub(super) held: bool,
    /// Instead of [`EngineConfig::promotion_wait_ns`](super::EngineConfig::promotion_wait_ns).
    wait_ns: Option<(u64, u64)>,
    /// Since when it waits for an answer.
    asked_ns: Option<u64>,
    /// A load failed: there is nothing for this request any more.
    pub(super) failed: bool,
    touched: bool,
    /// See [`Engine::set_dropped_tokens`].
    dropped_tokens: u32,
    /// Tokens of the chain that the last look found, whether a hit may end there or not.
    shared_tokens: u32,
    /// Tick of its arrival.
    tick: u64,
    /// Granules, from the first, that were offered to the policies to be saved.
    pub(super) offered: u32,
    /// Depth of the block that a policy did not admit, or 0: what stands on it is not saved.
    pub(super) not_admitted: u32,
}

impl Engine {
    /// Starts a request's lookup, and the promotion of what lies on disk only. Idempotent.
    /// `local_tokens`: what the device already holds; `max_tokens`: the deepest boundary of use.
    pub fn submit<H: HashSource + ?Sized>(
        &mut self,
        session: SessionId,
        request: &str,
        hashes: &H,
        local_tokens: u32,
        max_tokens: u32,
    ) {
        if let Some(id) = self.request_of(session, request)
            && self.requests[id].promotion.is_none()
        {
            self.look(id, hashes, local_tokens, max_tokens);
        }
    }

    /// Asks for a request's answer. See [`Engine::submit`]; a request not submitted is submitted.
    pub fn poll<H: HashSource + ?Sized>(
        &mut self,
        session: SessionId,
        request: &str,
        hashes: &H,
        local_tokens: u32,
        max_tokens: u32,
    ) -> Answer {
        let Some(id) = self.request_of(session, request) else {
            return Answer::Ready(0);
        };
        let state = &self.requests[id];
        if state.failed {
            return Answer::Ready(0);
        }
        self.hasten(id);
        self.requests[id].asked_ns.get_or_insert(self.now_ns);
        let state = &self.requests[id];
        let granule = self.namespaces[usize::from(state.ns)]
            .spec
            .hash_block_tokens;
        let hashed = u32::try_from(hashes.len()).unwrap_or(u32::MAX);
        let most = max_tokens.min(hashed.saturating_mul(granule));
        let gain = self.promised(state, most).saturating_sub(local_tokens);
        let late = self.is_late(state, gain);
        if state.promotion.is_some() && gain > 0 && !late {
            return Answer::Pending;
        }
        self.end_promotion(id, late);
        if late {
            self.requests[id].promotions_started = PROMOTIONS_MAX;
        }
        let answer = self.look(id, hashes, local_tokens, max_tokens);
        if answer != Answer::Pending {
            self.requests[id].asked_ns = None;
        }
        answer
    }

    /// Whether [`Engine::poll`] was asked before and would say "pending" again. A look at the engine:
    /// so that a crowd that waits costs little.
    pub fn waits(&self, session: SessionId, request: &str, local_tokens: u32) -> bool {
        self.request(session, request).is_some_and(|state| {
            let gain = self.promised(state, 0).saturating_sub(local_tokens);
            let asked = state.asked_ns.is_some() && !state.failed;
            asked && state.promotion.is_some() && gain > 0 && !self.is_late(state, gain)
        })
    }

    /// Where a request's promotion ends if all goes well; `otherwise` without one. In tokens.
    fn promised(&self, state: &Request, otherwise: u32) -> u32 {
        let spec = &self.namespaces[usize::from(state.ns)].spec;
        state.promotion.as_ref().map_or(otherwise, |promotion| {
            promotion.boundary.saturating_mul(spec.hash_block_tokens)
        })
    }

    /// Whether a request that may gain `gain` tokens has waited for long enough, or in vain.
    fn is_late(&self, state: &Request, gain: u32) -> bool {
        let asked_ns = state.asked_ns.unwrap_or(self.now_ns);
        let wait_ns = state.wait_ns.or(self.config.promotion_wait_ns);
        let waited = wait_ns.is_some_and(|(base, per_thousand)| {
            let part = u128::from(per_thousand) * u128::from(gain) / 1000;
            let since = self.now_ns.saturating_sub(asked_ns);
            u128::from(since) >= u128::from(base) + part
        });
        let stalled = state.promotion.as_ref().is_some_and(|promotion| {
            // A process that was held up itself has reads that ended meanwhile. But whoever looks may be
            // held up for good, by the device.
            let after = |stalls: u64| {
                let stall_ns = self.config.stall_ns.saturating_mul(stalls);
                promotion.progress_ns.saturating_add(stall_ns)
            };
            self.looked_ns >= after(1) || self.now_ns >= after(NO_LOOK_STALLS)
        });
        waited || stalled
    }

    /// Asks on behalf of a client whose scheduler has not asked yet: the request stays a prefetch. What is
    /// answered Ready stays in the arena until the next answer or the end of the request.
    pub fn peek<H: HashSource + ?Sized>(
        &mut self,
        session: SessionId,
        request: &str,
        hashes: &H,
        local_tokens: u32,
        max_tokens: u32,
    ) -> Answer {
        let Some(id) = self.request_of(session, request) else {
            return Answer::Ready(0);
        };
        if self.requests[id].failed {
            return Answer::Ready(0);
        }
        if self.requests[id].promotion.is_some() {
            return Answer::Pending;
        }
        self.requests[id].held = false;
        let answer = self.look(id, hashes, local_tokens, max_tokens);
        self.requests[id].held = matches!(answer, Answer::Ready(tokens) if tokens > 0);
        answer
    }

    /// Gives a request its own limit on the wait for its promotion: a base and a part for every 1,000
    /// tokens that it would gain, in nanoseconds.
    pub fn limit_wait(&mut self, session: SessionId, request: &str, base_ns: u64, per_1k_ns: u64) {
        if let Some(id) = self.request_of(session, request) {
            self.requests[id].wait_ns = Some((base_ns, per_1k_ns));
        }
    }

    /// Whether the disk still owes a request's answer.
    pub fn is_pending(&self, session: SessionId, request: &str) -> bool {
        self.request(session, request)
            .is_some_and(|state| state.promotion.is_some())
    }

    /// The request has finished or was aborted. Idempotent.
    pub fn discard(&mut self, session: SessionId, request: &str) {
        let Some(state) = self.sessions.get_mut(session) else {
            return;
        };
        state.saved.remove(request);
        if let Some(id) = state.requests.remove(request) {
            self.drop_request(id);
        }
    }

    /// Of the tokens in `(local, local + external]`, how many came from (host, disk).
    pub fn sources(
        &self,
        session: SessionId,
        request: &str,
        local_tokens: u32,
        external_tokens: u32,
    ) -> (u32, u32) {
        let Some((after, to)) = self.from_disk(session, request) else {
            return (external_tokens, 0);
        };
        let end = local_tokens.saturating_add(external_tokens);
        let (from, to) = (after.clamp(local_tokens, end), to.clamp(local_tokens, end));
        (external_tokens - (to - from), to - from)
    }

    /// The tokens (exclusive, inclusive) between which a request's promotions brought payloads from disk.
    pub fn from_disk(&self, session: SessionId, request: &str) -> Option<(u32, u32)> {
        let id = self.sessions.get(session)?.requests.get(request)?;
        let state = self.requests.get(*id)?;
        let granule = self.namespaces[usize::from(state.ns)]
            .spec
            .hash_block_tokens;
        let (after, to) = state.from_disk?;
        Some((after.saturating_mul(granule), to.saturating_mul(granule)))
    }

    /// How many tokens of a request's prompt its last lookup found a chain for. Above the answer, where
    /// a window or a state was missing: others share that prefix, and a hit could end there.
    pub fn shared_tokens(&self, session: SessionId, request: &str) -> u32 {
        self.request(session, request)
            .map_or(0, |state| state.shared_tokens)
    }

    fn request(&self, session: SessionId, request: &str) -> Option<&Request> {
        let &id = self.sessions.get(session)?.requests.get(request)?;
        self.requests.get(id)
    }

    fn request_of(&mut self, session: SessionId, request: &str) -> Option<RequestId> {
        let state = self.sessions.get_mut(session)?;
        if let Some(&id) = state.requests.get(request) {
            return Some(id);
        }
        self.tick += 1;
        let id = self.requests.insert(Request {
            tick: self.tick,
            offered: 0,
            not_admitted: 0,
            ns: state.ns,
            lease: NONE,
            promotion: None,
            promotions_started: 0,
            promoted_bytes: 0,
            from_disk: None,
            hastened: false,
            held: false,
            wait_ns: None,
            asked_ns: None,
            failed: false,
            touched: false,
            dropped_tokens: state.dropped_tokens,
            shared_tokens: 0,
        });
        state.requests.insert(request.into(), id);
        Some(id)
    }

    /// Looks the request up as the index is now.
    fn look<H: HashSource + ?Sized>(
        &mut self,
        id: RequestId,
        hashes: &H,
        local_tokens: u32,
        max_tokens: u32,
    ) -> Answer {
        let ns = self.requests[id].ns;
        let spec = &self.namespaces[usize::from(ns)].spec;
        let granule = spec.hash_block_tokens;
        let local = local_tokens / granule;
        let found = self.forest.deepest(ns, hashes, |node| node.visible);
        self.requests[id].shared_tokens = found.map_or(0, |(_, depth)| depth * granule);
        let Some((deepest, depth)) = found.filter(|&(_, depth)| depth > local) else {
            return self.nothing(id);
        };
        let dropped = self.requests[id].dropped_tokens.div_ceil(granule);
        let limit = depth.saturating_sub(dropped).min(max_tokens / granule);
        if limit <= local {
            return self.nothing(id);
        }
        let anywhere = self.boundary(deepest, limit, local, false);
        let least = self.config.min_load_tokens.max(1);
        let worth = |boundary: u32| boundary > local && boundary * granule - local_tokens >= least;
        if !worth(anywhere) {
            return self.nothing(id);
        }
        let at = self.forest.ancestor(deepest, anywhere);
        let in_host = self.boundary(at, anywhere, local, true);
        if in_host < anywhere && self.requests[id].promotions_started < PROMOTIONS_MAX {
            self.requests[id].promotions_started += 1;
            self.lease(id, at);
            if self.start_promotion(id, at, local) {
                return Answer::Pending;
            }
        }
        if !worth(in_host) {
            return self.nothing(id);
        }
        let at = self.forest.ancestor(at, in_host);
        self.lease(id, at);
        self.touch_hit(id, at);
        Answer::Ready(in_host * granule)
    }

    /// The answer that there is no hit. What was promoted for it is nobody's by right any more.
    fn nothing(&mut self, id: RequestId) -> Answer {
        self.lease(id, NONE);
        self.release_promoted(id);
        Answer::Ready(0)
    }

    /// The deepest boundary at or below `limit` on the chain of `deepest`, counting what is in the
    /// arena only, or in any tier.
    pub(super) fn boundary(&self, deepest: NodeId, limit: u32, local: u32, host_only: bool) -> u32 {
        let top = self.forest.ancestor(deepest, limit);
        let spec = &self.namespaces[usize::from(self.forest.node(top).ns)].spec;
        let reach = if host_only {
            self.host_reach(top, local)
        } else {
            limit
        };
        let mut chain = Chain {
            engine: self,
            top: self.forest.node(top).depth,
            nodes: vec![top],
            host_only,
        };
        resolve(spec, reach, local, |depth, group| chain.has(depth, group))
    }

    /// How far, from `local` towards `top`, every required payload is in the arena.
    fn host_reach(&self, top: NodeId, local: u32) -> u32 {
        let mut reach = self.forest.node(top).depth;
        let mut at = top;
        while at != NONE {
            let node = self.forest.node(at);
            if node.depth <= local || node.host_chain {
                break;
            }
            if !self.is_in_host(at) {
                reach = node.depth - 1;
            }
            at = node.parent;
        }
        reach
    }

    /// Moves the request's lease to `node` (`NONE`: to nothing).
    pub(super) fn lease(&mut self, id: RequestId, node: NodeId) {
        let old = std::mem::replace(&mut self.requests[id].lease, node);
        if old == node {
            return;
        }
        if node != NONE {
            self.pin_hit(node);
        }
        if old != NONE {
            self.unpin_hit(old);
        }
    }

    /// Counts a request's hit once.
    fn touch_hit(&mut self, id: RequestId, node: NodeId) {
        if std::mem::replace(&mut self.requests[id].touched, true) {
            return;
        }
        // Requests that came since have their own ticks, and what two requests touch in one tick would
        // count once.
        if self.requests[id].tick != self.tick {
            self.tick += 1;
        }
        if self.host_policy.touches_every_block() {
            let mut at = node;
            while at != NONE {
                self.touch(at);
                at = self.forest.node(at).parent;
            }
        } else {
            self.touch(node);
            for above in self.window_above(node) {
                self.renew(above);
            }
        }
        self.offer_hit_to_disk(node);
    }

    pub(super) fn drop_request(&mut self, id: RequestId) {
        if !self.requests.contains_key(id) {
            return;
        }
        self.end_promotion(id, false);
        self.lease(id, NONE);
        self.release_promoted(id);
        self.requests.remove(id);
        let tick = self.tick;
        self.host_policy.end_of_request(tick);
        for disk in &mut self.disks {
            disk.policy.end_of_request(tick);
        }
    }
}

/// Reads a chain from its deepest node upwards, and remembers what it has passed.
struct Chain<'a> {
    engine: &'a Engine,
    top: u32,
    nodes: Vec<NodeId>,
    host_only: bool,
}

impl Chain<'_> {
    fn has(&mut self, depth: u32, group: usize) -> bool {
        let forest = &self.engine.forest;
        let index = (self.top - depth) as usize;
        while let Some(&last) = self.nodes.last().filter(|_| self.nodes.len() <= index) {
            self.nodes.push(forest.node(last).parent);
        }
        let place = forest.node(self.nodes[index]).places()[group];
        place.host == HostState::Present || !self.host_only && place.disk == DiskState::Present
    }
}
