//! Hints: prefetches, pins and demotions. Conversations that are read before they come back.

use std::collections::BTreeSet;

use undercroft_contract::hint::{Hint, HintAnswer, HintRefusal, HintRequest};
use undercroft_contract::key::HashSource;
use undercroft_contract::session::{Lookup, LookupRequest, PromotionWait, Tokens};

use crate::forest::{NONE, NodeId, NsId};
use crate::metrics::Counters;
use crate::work;

use super::super::fetch::Share;
use super::super::hints::HintCursor;
use super::super::ids::{RequestId, SessionId};
use super::super::pins::PinSpec;
use super::super::returns::{ChainEnd, NodeAt, ReturnRead};
use super::engine::Engine;

/// Prefetches that hints have under way at most.
const PREFETCHES_MAX: usize = 64;
/// Chains that are being demoted at once at most.
const DEMOTIONS_MAX: usize = 64;
/// Nodes that an entry demotes at most.
pub(super) const DEMOTED_MAX: usize = 128;

/// The name of the lookup that reads for a conversation's return.
const RETURN: &str = "\0return";
/// Times nearer than this are looked at several times a second.
pub(super) const RETURN_NEAR_NS: u64 = 1_250_000_000;
/// A piece of a conversation that is read at once: demanded reads may have to wait for it.
const PIECE_BYTES: u64 = 8 << 20;
const PIECE_BLOCKS: u32 = 64;
/// Pause between two looks at the blocks that would make way for a piece.
const LOOK_NS: u64 = 100_000_000;

/// The hash blocks of a prompt that a hint is about.
#[derive(Clone, Copy, Debug)]
struct HintReach {
    ns: NsId,
    /// Number of these hash blocks that are in the index.
    depth: u32,
    hash_block_size: u32,
    /// Tokens of the prompt up to the last boundary.
    wanted: Tokens,
}

impl Engine {
    /// Carries out a hint, for a caller that has the engine to itself.
    pub fn hint(&mut self, session: SessionId, request: &HintRequest<'_>) -> HintAnswer {
        let mut cursor = HintCursor::default();
        loop {
            if let Some(answer) = self.step_hint(session, request, &mut cursor) {
                return answer;
            }
        }
    }

    /// Carries out a part of a hint. The first call gets a new cursor. `None`: the caller calls again.
    pub fn step_hint(
        &mut self,
        session: SessionId,
        request: &HintRequest<'_>,
        cursor: &mut HintCursor,
    ) -> Option<HintAnswer> {
        let Some(ns) = self.sessions.get(session).map(|state| state.ns) else {
            return Some(HintAnswer::Rejected(HintRefusal::Unavailable));
        };
        let reach = self.reach_of(ns, request);
        let answer = match request.hint {
            Hint::Prefetch => self.step_prefetch(session, request, reach, cursor)?,
            Hint::Pin { ttl_ns, name } => {
                let spec = PinSpec {
                    ns,
                    ttl_ns: *ttl_ns,
                    name,
                };
                self.pin_chain(request.hashes, reach, spec)
            }
            Hint::Demote => self.start_demotion(request.hashes, reach),
            Hint::Release { name } => {
                let ended =
                    self.pins
                        .release((ns, name), request.hashes, reach.depth, &mut self.residency);
                match ended {
                    0 => HintAnswer::Rejected(HintRefusal::NotPinned),
                    depth => HintAnswer::Accepted(Tokens(depth * reach.hash_block_size)),
                }
            }
        };
        count(request.hint, answer, &mut self.counters);
        Some(answer)
    }

    /// A session of the only namespace in use whose digest begins with `namespace`; an empty `namespace` matches all.
    /// The error lists the namespaces in use.
    pub fn session_in(&self, namespace: &str) -> Result<SessionId, String> {
        let mut found: Vec<(NsId, SessionId)> = Vec::new();
        for (ns, session) in self.sessions.by_namespace() {
            let is_meant = self.digest_of(ns).starts_with(namespace);
            if is_meant && found.iter().all(|&(other, _)| other != ns) {
                found.push((ns, session));
            }
        }
        if let &[(_, session)] = found.as_slice() {
            return Ok(session);
        }
        let used: BTreeSet<String> = self
            .sessions
            .by_namespace()
            .map(|(ns, _)| self.digest_of(ns))
            .collect();
        let used = Vec::from_iter(used).join(", ");
        Err(format!(
            "namespace = {namespace:?}: allowed is the beginning of one digest of those in use: {used}"
        ))
    }

    fn digest_of(&self, ns: NsId) -> String {
        self.namespaces.digest(ns).to_hex()
    }

    fn reach_of(&self, ns: NsId, request: &HintRequest<'_>) -> HintReach {
        let spec = self.residency.spec(ns);
        let most = request.max.0 / spec.hash_block_size;
        let most = most.min(u32::try_from(request.hashes.len()).unwrap_or(u32::MAX));
        let end = (1..=most).rev().find(|&depth| spec.may_end(depth));
        let found = self.residency.deepest(ns, request.hashes, |_| true);
        HintReach {
            ns,
            depth: found.map_or(0, |(_, depth)| depth.min(most)),
            hash_block_size: spec.hash_block_size,
            wanted: Tokens(end.unwrap_or(0) * spec.hash_block_size),
        }
    }

    fn pin_chain(
        &mut self,
        hashes: &dyn HashSource,
        reach: HintReach,
        spec: PinSpec<'_>,
    ) -> HintAnswer {
        if self.pins.budget() == 0 {
            return HintAnswer::Rejected(HintRefusal::Off);
        }
        if reach.depth == 0 {
            return HintAnswer::Rejected(HintRefusal::NotCached);
        }
        let parts = (&mut self.residency, &mut self.counters);
        match self.pins.add(spec, hashes, reach.depth, self.now_ns, parts) {
            0 => HintAnswer::Rejected(HintRefusal::OverBudget),
            depth => HintAnswer::of(Tokens(depth * reach.hash_block_size), reach.wanted),
        }
    }

    fn start_demotion(&mut self, hashes: &dyn HashSource, reach: HintReach) -> HintAnswer {
        let last = reach
            .depth
            .checked_sub(1)
            .and_then(|at| hashes.get(at as usize));
        let node = last.and_then(|hash| self.residency.forest().find(reach.ns, &hash));
        let Some(node) = node else {
            return HintAnswer::Rejected(HintRefusal::NotCached);
        };
        if self.hints.demoted.len() + self.hints.unsettled.len() >= DEMOTIONS_MAX {
            return HintAnswer::Rejected(HintRefusal::Busy);
        }
        let epoch = self.residency.node(node).epoch;
        self.hints.demoted.push_back((node, epoch));
        self.demote_some(DEMOTED_MAX);
        HintAnswer::of(Tokens(reach.depth * reach.hash_block_size), reach.wanted)
    }

    /// Starts to read the payloads of a prompt that are only on disk.
    fn step_prefetch(
        &mut self,
        session: SessionId,
        request: &HintRequest<'_>,
        reach: HintReach,
        cursor: &mut HintCursor,
    ) -> Option<HintAnswer> {
        if cursor.name.is_empty() {
            if self.hints.prefetches.len() >= PREFETCHES_MAX {
                return Some(HintAnswer::Rejected(HintRefusal::Busy));
            }
            self.hints.count += 1;
            // No request of vLLM has such a name.
            cursor.name = format!("\0hint {}", self.hints.count);
        }
        let question = LookupRequest::new(&cursor.name, request.hashes)
            .max(request.max)
            // The hint asks only for reads: they are not weighed against computing.
            .min(Tokens(1))
            .wait(Some(PromotionWait::Complete))
            .prefetch();
        let looked = self.step_lookup(session, &question, &mut cursor.lookup)?;
        let id = self.sessions.request_id(session, &cursor.name);
        Some(match (looked, id) {
            (Lookup::Pending { .. }, Some(id)) => {
                let promotion = self.shares[id].waits.disk.as_ref();
                let end = promotion.map_or(0, |promotion| promotion.boundary());
                self.hints.prefetches.push((session, id));
                HintAnswer::of(Tokens(end * reach.hash_block_size), reach.wanted)
            }
            (Lookup::Hit(hit), Some(id)) => {
                self.end_prefetch(session, id);
                HintAnswer::of(hit.tokens, reach.wanted)
            }
            _ => {
                self.end_lookup(session, &cursor.name);
                HintAnswer::Rejected(HintRefusal::NotCached)
            }
        })
    }

    /// Ends a prefetch whose payloads have arrived or will not arrive, and its lease. Its payloads become the most
    /// recently used.
    fn end_prefetch(&mut self, session: SessionId, id: RequestId) {
        let lease = self.shares[id].lease;
        if lease != NONE {
            self.residency.renew(lease);
        }
        self.drop_request(id);
        self.sessions.forget_removed(session);
    }

    /// Renews the pins that end within the first `tokens` of a prompt, which were hit or saved.
    pub(super) fn note_pins_used(&mut self, ns: NsId, hashes: &dyn HashSource, tokens: Tokens) {
        let depth = tokens.0 / self.residency.hash_block_size(ns);
        self.pins
            .used(ns, hashes, depth, self.now_ns, &self.residency);
    }

    /// Whether [`Engine::step_hints`] has something to do now.
    pub(super) fn has_hints(&self) -> bool {
        !self.hints.demoted.is_empty() || self.pins.is_due(self.now_ns)
    }

    /// Continues the work for hints; demotes at most `demoted` nodes.
    pub(super) fn step_hints(&mut self, demoted: usize) {
        self.pins
            .step(self.now_ns, &mut self.residency, &mut self.counters);
        let is_stuck = self.promotions.take_lack()
            && self.residency.queued_bytes() == 0
            && !self.residency.has_page_moves();
        if is_stuck {
            self.pins.give_way(&mut self.residency, &mut self.counters);
        }
        let mut at = 0;
        while let Some(&(session, id)) = self.hints.prefetches.get(at) {
            let share = self.shares.get(id);
            let ns = self.sessions.get(session).map(|state| state.ns);
            let waits = |share: &Share| {
                let of_remote = || {
                    let state = &self.sessions.requests[id];
                    let computed = Tokens(state.planned.computed);
                    ns.is_some_and(|ns| self.waits_for_flight((state, share), ns, computed))
                };
                share.waits.disk.is_some() || of_remote()
            };
            match share.map(waits) {
                Some(true) => at += 1,
                Some(false) => {
                    self.end_prefetch(session, id);
                    self.hints.prefetches.swap_remove(at);
                }
                None => {
                    self.hints.prefetches.swap_remove(at);
                }
            }
        }
        self.demote_some(demoted);
    }

    fn demote_some(&mut self, most: usize) {
        let residency = &self.residency;
        let is_settled = |&mut (node, epoch): &mut (NodeId, u32)| {
            !residency.forest().is_live(node, epoch) || !residency.is_unsettled(node)
        };
        let settled = self.hints.unsettled.extract_if(.., is_settled);
        self.hints.demoted.extend(settled);
        for _ in 0..most {
            let Some((node, epoch)) = self.hints.demoted.pop_front() else {
                return;
            };
            let is_there = self.residency.forest().is_live(node, epoch)
                && !self.residency.node(node).is_detached();
            if !is_there {
                continue;
            }
            if self.residency.is_unsettled(node) {
                self.hints.unsettled.push((node, epoch));
                continue;
            }
            let above = self.residency.demote(node, &mut self.counters);
            if let Some(above) = above {
                let epoch = self.residency.node(above).epoch;
                self.hints.demoted.push_back((above, epoch));
            }
        }
    }
}

impl Engine {
    /// A save has extended the chain that ended at `before`, and whose first block is `first`, to `end`.
    pub(super) fn note_saved(
        &mut self,
        session: SessionId,
        before: NodeId,
        (first, end): (u64, NodeAt),
    ) {
        let residency = &self.residency;
        let is_there = residency.forest().is_live(end.0, end.1);
        if !self.returns.learns() || residency.disks().is_empty() || !is_there {
            return;
        }
        let before = (before != NONE).then(|| (before, residency.node(before).epoch));
        let node = residency.node(end.0);
        let chain = ChainEnd {
            end,
            session,
            instance: self.namespaces.instance(node.ns),
            first,
            depth: node.depth,
        };
        self.returns
            .saved(before, chain, self.now_ns, &mut self.counters);
    }

    /// Reads the blocks of conversations that are expected; looks at about `nodes` nodes. A piece is read only while the
    /// disks read nothing else.
    pub(super) fn step_returns(&mut self, nodes: usize) {
        if self.returns.is_empty() {
            return;
        }
        self.returns.pass_time(self.now_ns, &mut self.counters);
        let under_way = self.returns.reading.take();
        let Some(reading) = under_way.or_else(|| self.begin_return()) else {
            return;
        };
        let end = reading.end;
        self.returns.reading = self.go_on_reading(reading, nodes);
        if self.returns.reading.is_none() {
            self.returns.done(end);
        }
    }

    fn begin_return(&self) -> Option<ReturnRead> {
        let (end, session) = self.returns.next()?;
        let (mut at, mut piece, mut ends) = (Some(end), 1, Vec::new());
        let mut renews = true;
        if self.is_there(end) {
            let node = self.residency.node(end.0);
            let bytes = self.residency.chain_bytes(node.ns, 0, PIECE_BLOCKS);
            piece = PIECE_BYTES * u64::from(PIECE_BLOCKS) / bytes.max(1);
            piece = piece.clamp(1, u64::from(PIECE_BLOCKS));
            if !self.residency.spec(node.ns).has_full_only() {
                // Windows and states are needed at the end alone, so it is one piece.
                let is_short = node.depth <= PIECE_BLOCKS;
                let is_read = is_short && !self.residency.is_hit_in_host(end.0, 0);
                (at, ends) = (None, Vec::from_iter(is_read.then_some(end)));
                renews = is_short;
            }
        }
        Some(ReturnRead {
            end,
            session,
            at,
            piece: piece as u32,
            ends,
            from: 0,
            request: None,
            look_ns: 0,
            renews,
        })
    }

    /// Whether a node is still in the index, as far as that is known at once.
    fn is_there(&self, (node, epoch): NodeAt) -> bool {
        let residency = &self.residency;
        residency.forest().is_live(node, epoch)
            && !residency.node(node).is_detached()
            && residency.node(node).is_visible()
            && !residency.awaits_removals()
    }

    /// Continues to read a conversation. `None`: all is read, or is not to be read.
    fn go_on_reading(&mut self, mut reading: ReturnRead, nodes: usize) -> Option<ReturnRead> {
        if let Some(id) = reading.request {
            let share = self.shares.get(id)?;
            if share.waits.disk.is_some() {
                return Some(reading);
            }
            let bytes = share.bytes;
            self.end_prefetch(reading.session, id);
            reading.request = None;
            self.returns.note_read(reading.end, bytes);
            // A device that does not answer, or memory that lacks, ends the read.
            (bytes > 0).then_some(())?;
        }
        let is_wanted = self.returns.is_expected(reading.end) && !self.draining;
        if is_wanted && reading.at.is_none() && self.residency.awaits_removals() {
            // Perhaps of other conversations.
            return Some(reading);
        }
        if !is_wanted || !self.is_there(reading.end) {
            return None;
        }
        for _ in 0..nodes {
            let Some(at) = reading.at else { break };
            work::node();
            let is_there = self.residency.forest().is_live(at.0, at.1);
            let node = self.residency.node(at.0);
            if !is_there || self.residency.is_in_host(at.0) {
                reading.from = if is_there { node.depth } else { 0 };
                reading.at = None;
                break;
            }
            let below = self.residency.node(reading.end.0).depth - node.depth;
            if below.is_multiple_of(reading.piece) {
                reading.ends.push(at);
            }
            let above = node.parent();
            reading.at = (above != NONE).then(|| (above, self.residency.node(above).epoch));
        }
        if reading.at.is_some() {
            return Some(reading);
        }
        let Some(&end) = reading.ends.last() else {
            if reading.renews {
                // All is in the arena, and is to stay there.
                self.residency.expect_hit(reading.end.0);
                self.returns.stays(reading.end, self.now_ns);
            }
            return None;
        };
        if !self.is_there(end) {
            return None;
        }
        if !self.may_read_piece(end, &mut reading) {
            return Some(reading);
        }
        reading.ends.pop();
        reading.request = Some(self.read_piece(end, &reading)?);
        reading.from = self.residency.node(end.0).depth;
        Some(reading)
    }

    /// Whether nothing is lost by a read of a piece: the disks read nothing else, and the arena has room, or evicts blocks
    /// that are on disk and do not come back sooner.
    fn may_read_piece(&mut self, end: NodeAt, reading: &mut ReturnRead) -> bool {
        let rates = &self.planner.rates;
        let is_idle = |device| rates.in_flight(device) == 0;
        if self.now_ns < reading.look_ns
            || self.promotions.has_reads()
            || !self.residency.devices().all(is_idle)
        {
            return false;
        }
        let node = self.residency.node(end.0);
        let bytes = self
            .residency
            .chain_bytes(node.ns, reading.from, node.depth);
        let held = self.returns.awaited_bytes();
        if held > 0 && held + bytes > self.promotions.prefetch_bytes() {
            return false;
        }
        let group = node.groups().find(|&group| node.requires(group));
        let victim = self
            .residency
            .gives_way_to(end.0, group.unwrap_or(0), reading.piece);
        let may_read = victim.is_some_and(|victim| {
            let epoch = |node| self.residency.node(node).epoch;
            let of_victim = (victim != NONE).then(|| (victim, epoch(victim)));
            let sooner = of_victim.and_then(|of| self.returns.expected_ns(of));
            let own = self.returns.expected_ns(reading.end);
            sooner.is_none_or(|sooner| own < Some(sooner))
        });
        if !may_read {
            reading.look_ns = self.now_ns + LOOK_NS;
        }
        may_read
    }

    /// Starts to read the payloads down to `end`. `None` if nothing is read.
    fn read_piece(&mut self, end: NodeAt, reading: &ReturnRead) -> Option<RequestId> {
        let tick = self.residency.tick();
        let id = self
            .sessions
            .request_or_add(reading.session, RETURN, || tick)?;
        self.shares.entry(id)?.or_insert_with(Share::new);
        if self.start_promotion(id, end.0, (reading.from, 1), reading.from + 1) {
            return Some(id);
        }
        self.end_prefetch(reading.session, id);
        None
    }
}

/// Counts a hint by its answer.
fn count(hint: &Hint, answer: HintAnswer, counters: &mut Counters) {
    let [accepted, clipped, rejected] = match hint {
        Hint::Prefetch => [
            &mut counters.hints_prefetch_accepted,
            &mut counters.hints_prefetch_clipped,
            &mut counters.hints_prefetch_rejected,
        ],
        Hint::Pin { .. } => [
            &mut counters.hints_pin_accepted,
            &mut counters.hints_pin_clipped,
            &mut counters.hints_pin_rejected,
        ],
        Hint::Demote => [
            &mut counters.hints_demote_accepted,
            &mut counters.hints_demote_clipped,
            &mut counters.hints_demote_rejected,
        ],
        Hint::Release { .. } => {
            let is_rejected = matches!(answer, HintAnswer::Rejected(_));
            counters.hints_release_rejected += u64::from(is_rejected);
            counters.hints_release_accepted += u64::from(!is_rejected);
            return;
        }
    };
    match answer {
        HintAnswer::Accepted(_) => *accepted += 1,
        HintAnswer::Clipped(_) => *clipped += 1,
        HintAnswer::Rejected(_) => *rejected += 1,
        HintAnswer::Pending => {}
    }
}
