//! What a lookup found, and why: counted, and kept for `explain`.

use undercroft_contract::explain::{ExplainQuery, Explained, Reason, Rest};
use undercroft_contract::key::BlockHash;
use undercroft_contract::session::{Lookup, LookupRequest, Tokens};
use undercroft_contract::tier::Tier;

use crate::forest::NsId;
use crate::work;

use super::super::explain::{LookupRecord, Noted, Question};
use super::super::ids::{RequestId, SessionId};
use super::engine::Engine;

/// Most lookups that one entry looks at, and most lookups that it returns.
const LOOKED_AT: u64 = 1024;
const TOLD: usize = 128;

/// Most other namespaces that an entry searches for a block that the prompt's own namespace lacks.
const OTHERS: usize = 8;

impl Engine {
    /// Notes the answer to a lookup: counts a request's first answer, and records each answer that differs from the
    /// previous answer.
    ///
    /// Every lookup calls this, so nothing is allocated or formatted: the record is overwritten in place.
    pub(super) fn note_answer(
        &mut self,
        id: RequestId,
        ns: NsId,
        request: &LookupRequest<'_>,
        answer: Lookup,
    ) {
        // A lease that this lookup ended may have freed blocks.
        self.tell_listeners();
        let (state, share) = (&self.sessions.requests[id], &self.shares[id]);
        let noted = Noted {
            reason: state.answered.reason,
            hit: answer.tokens().unwrap_or(Tokens(0)),
            found: state.shared,
            computed: request.computed,
            freed: self.residency.freed(Tier::Host) + self.residency.freed(Tier::Disk),
            nodes: self.residency.forest().len(),
        };
        let before = state.answered.noted;
        if before.is_some_and(|(before, _)| before == noted) {
            return;
        }
        let size = self.residency.hash_block_size(ns);
        let question = Question::new(ns, size, request, noted.found);
        let (mut rest, mut other) = self.rest_of(&question, &noted, state.answered.is_incomplete);
        let is_gone = !matches!(rest.reason, Reason::Complete | Reason::Incomplete);
        if noted.reason == Reason::Complete
            && is_gone
            && share.is_left
            && question.missing.is_some()
        {
            (rest, other) = (Reason::RemotePlanned.into(), NsId::MAX);
        }
        let (position, record) = self.lookups.place(before.map(|(_, position)| position));
        let waited_ns = state.planned.waited_ns;
        record.write(&question, request, (waited_ns, share), (&noted, rest));
        (record.other, record.at_ns) = (other, self.now_ns);
        let state = &mut self.sessions.requests[id];
        state.answered.noted = Some((noted, position));
        state.answered.rest = rest;
        if before.is_none() {
            let session = state.session;
            self.count_answer(session, question.asked, &noted, rest.reason);
        }
    }

    /// Counts the first answer to a request, which asked for so many tokens.
    fn count_answer(&mut self, session: SessionId, asked: u32, noted: &Noted, reason: Reason) {
        let is_hit = noted.hit.0 > 0;
        if let Some(session) = self.sessions.get_mut(session) {
            session.totals.answered += 1;
            session.totals.hits += u64::from(is_hit);
        }
        let on_device = noted.computed.0.min(asked);
        let counters = &mut self.counters;
        counters.answered_lookups += 1;
        counters.answered_tokens += u64::from(asked);
        counters.answered_device_tokens += u64::from(on_device);
        counters.answered_hit_tokens += u64::from(noted.hit.0.saturating_sub(on_device));
        if !is_hit {
            counters.count_miss(reason);
        }
    }

    /// Why the blocks after a hit were not loaded. If the reason is [`Reason::OtherIdentity`], also the namespace that
    /// has the first of these blocks; else [`NsId::MAX`].
    fn rest_of(&self, question: &Question, noted: &Noted, is_incomplete: bool) -> (Rest, NsId) {
        if noted.reason != Reason::Complete {
            return (noted.reason.into(), NsId::MAX);
        }
        let found = noted.found.0.min(question.asked);
        // A hit may end before the last block found, where a window or a draft model's last tokens are missing.
        if noted
            .hit
            .max(noted.computed)
            .0
            .saturating_add(question.size)
            <= found
        {
            return (Reason::NoBoundary.into(), NsId::MAX);
        }
        let Some(missing) = &question.missing else {
            return (Rest::default(), NsId::MAX);
        };
        if let Some(rest) = self.lookups.departures.find(question.ns, missing) {
            return (rest, NsId::MAX);
        }
        if is_incomplete {
            return (Reason::Incomplete.into(), NsId::MAX);
        }
        match self.other_of(question.ns, missing) {
            Some(other) => (Reason::OtherIdentity.into(), other),
            None => (Reason::NeverSeen.into(), NsId::MAX),
        }
    }

    /// Another namespace than `ns` that has the block `missing`. Searches at most [`OTHERS`] namespaces.
    fn other_of(&self, ns: NsId, missing: &BlockHash) -> Option<NsId> {
        let forest = self.residency.forest();
        // Blocks of a namespace that was reset or cleared may wait for their removal.
        let is_other = |&other: &NsId| other != ns && !self.residency.is_ending(other);
        let others = forest.namespaces().filter(is_other);
        let mut others = others.filter(|&other| forest.has_nodes(other)).take(OTHERS);
        others.find(|&other| forest.find(other, missing).is_some())
    }

    /// A load of a request's hit has begun.
    pub(super) fn note_load(&mut self, id: RequestId) {
        let noted = self.sessions.requests[id].answered.noted;
        if let Some((_, position)) = noted.filter(|&(_, at)| self.lookups.at(at).is_some()) {
            self.lookups.place(Some(position)).1.loaded = true;
        }
    }

    /// Why a request's last answer has no more tokens. `None` before it was answered.
    pub fn rest(&self, session: SessionId, request: &str) -> Option<Rest> {
        let state = self.sessions.request(session, request)?;
        state.answered.noted.map(|_| state.answered.rest)
    }

    /// Some of the last lookups, the latest first. The position is `Some` if the ring has more lookups before it.
    pub fn explain(&self, query: &ExplainQuery) -> (Vec<Explained>, Option<u64>) {
        let lookups = &self.lookups;
        let end = query.before.unwrap_or(u64::MAX).min(lookups.next);
        let first = lookups.next - lookups.ring.len() as u64;
        let mut found = Vec::new();
        let mut position = end;
        while position > first {
            if found.len() == TOLD || end - position == LOOKED_AT {
                return (found, Some(position));
            }
            position -= 1;
            work::queued();
            let Some(record) = lookups.at(position) else {
                break;
            };
            let is_asked = record
                .shown()
                .as_bytes()
                .starts_with(query.request.as_bytes())
                && !(query.misses && record.rest.reason == Reason::Complete);
            if is_asked {
                found.push(self.told(position, record));
            }
        }
        (found, None)
    }

    pub(super) fn told(&self, position: u64, record: &LookupRecord) -> Explained {
        let age_s = |since_ns: u64| self.now_ns.saturating_sub(since_ns) / 1_000_000_000;
        let missing = match record.missing {
            0 => String::new(),
            missing => missing
                .to_le_bytes()
                .iter()
                .map(|byte| format!("{byte:02x}"))
                .collect(),
        };
        Explained {
            position,
            request: record.shown().into_owned(),
            namespace: self.namespaces.digest(record.ns).to_hex(),
            age_s: age_s(record.at_ns),
            asked_tokens: record.asked,
            device_tokens: record.computed,
            found_tokens: record.found,
            hit_tokens: record.hit,
            disk_tokens: record.from_disk,
            remote_tokens: record.from_remote,
            waited_ms: record.waited_ns / 1_000_000,
            loaded: record.loaded,
            missing_block: missing,
            other_namespace: match record.other {
                NsId::MAX => String::new(),
                other => self.namespaces.digest(other).to_hex(),
            },
            rest: record.rest,
        }
    }

    /// The description of the namespace with this digest; `None` if the engine knows none.
    pub fn description(&self, digest: &str) -> Option<&str> {
        let found = self.namespaces.named(digest, |_| true);
        let ns = found.first()?;
        Some(&self.residency.spec(*ns).description)
    }
}
