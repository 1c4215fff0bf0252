//! The last lookups, with the reasons for their misses.

use crate::explain::{ExplainQuery, Explained, Reason, Rest};
use crate::forest::{NsId, Tier};
use crate::session::{Lookup, LookupRequest, Tokens};
use crate::work;

use super::coordinator::Engine;
use super::requests::RequestId;
use super::sessions::SessionId;

/// Bytes of a request's id that are kept.
const NAME_BYTES: usize = 72;

/// Lookups that one entry looks at, and that it tells at most.
const LOOKED_AT: u64 = 1024;
const TOLD: usize = 128;

/// Namespaces whose indexes are asked for a block that a prompt's own lacks.
const OTHERS: usize = 8;

/// A lookup that was answered.
#[derive(Clone, Copy, Debug)]
struct Record {
    name: [u8; NAME_BYTES],
    name_bytes: u8,
    loaded: bool,
    ns: NsId,
    at_ns: u64,
    waited_ns: u64,
    asked: u32,
    computed: u32,
    found: u32,
    hit: u32,
    from_disk: u32,
    from_remote: u32,
    rest: Rest,
    /// The hash of the first block that was not found; 0 without one.
    missing: u64,
    /// A namespace that has that block; [`NsId::MAX`] is none.
    other: NsId,
}

/// The last lookups that were answered.
#[derive(Debug)]
pub(super) struct LastLookups {
    ring: Vec<Record>,
    records: usize,
    /// Lookups that were noted since the start: the position of the next one.
    next: u64,
}

impl LastLookups {
    /// Makes room for so many lookups, at least one.
    pub(super) fn new(records: usize) -> Self {
        let records = records.max(1);
        Self {
            ring: Vec::with_capacity(records),
            records,
            next: 0,
        }
    }

    fn at(&self, position: u64) -> Option<&Record> {
        let is_kept = position < self.next && self.next - position <= self.ring.len() as u64;
        is_kept.then(|| &self.ring[self.index(position)])
    }

    fn at_mut(&mut self, position: u64) -> Option<&mut Record> {
        self.at(position)?;
        let index = self.index(position);
        Some(&mut self.ring[index])
    }

    fn index(&self, position: u64) -> usize {
        (position % self.records as u64) as usize
    }

    fn push(&mut self, record: Record) -> u64 {
        let position = self.next;
        self.next += 1;
        let index = self.index(position);
        match self.ring.get_mut(index) {
            Some(oldest) => *oldest = record,
            None => self.ring.push(record),
        }
        position
    }
}

/// The explanation of a request's last answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Answered {
    /// Why its hit ends where it does, as far as the lookup itself knows.
    pub(super) reason: Reason,
    /// The explanation's inputs, and the position of its record.
    noted: Option<(Noted, u64)>,
    rest: Rest,
}

/// The inputs of an answer's explanation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Noted {
    reason: Reason,
    hit: Tokens,
    found: Tokens,
    computed: Tokens,
    /// Slots that had been freed, and nodes.
    freed: u64,
    nodes: usize,
}

impl Engine {
    /// A lookup was answered: its first answer is counted, and each that differs from the one before is noted.
    pub(super) fn note_answer(
        &mut self,
        id: RequestId,
        ns: NsId,
        request: &LookupRequest<'_>,
        answer: Lookup,
    ) {
        let state = &self.sessions.requests[id];
        let noted = Noted {
            reason: state.answered.reason,
            hit: answer.tokens().unwrap_or(Tokens(0)),
            found: state.shared,
            computed: request.computed,
            freed: Tier::ALL
                .map(|tier| self.residency.freed(tier))
                .iter()
                .sum(),
            nodes: self.residency.forest().len(),
        };
        let before = state.answered.noted;
        if before.is_some_and(|(before, _)| before == noted) {
            return;
        }
        let (mut rest, missing) = self.rest_of(ns, request, &noted);
        let is_gone = !matches!(rest.reason, Reason::Complete | Reason::Incomplete);
        if noted.reason == Reason::Complete && is_gone && missing != 0 && state.remote.is_left {
            rest = Reason::RemotePlanned.into();
        }
        let other = match rest.reason {
            Reason::OtherIdentity => self.other_of(ns, request, noted.found),
            _ => None,
        };
        let is_miss = noted.hit.0 == 0 && rest.reason != Reason::Complete;
        let session = self.sessions.requests[id].session;
        if let Some(session) = self.sessions.get_mut(session).filter(|_| before.is_none()) {
            session.totals.answered += 1;
            session.totals.hits += u64::from(noted.hit.0 > 0);
        }
        if before.is_none() && is_miss {
            self.counters.count_miss(rest.reason);
        }
        let mut record = self.record_of(id, ns, request, (noted.hit, rest, missing));
        record.other = other.unwrap_or(NsId::MAX);
        let known =
            before.and_then(|(_, position)| Some((position, self.lookups.at_mut(position)?)));
        let position = match known {
            Some((position, known)) => {
                *known = record;
                position
            }
            None => self.lookups.push(record),
        };
        let answered = &mut self.sessions.requests[id].answered;
        answered.noted = Some((noted, position));
        answered.rest = rest;
    }

    fn record_of(
        &self,
        id: RequestId,
        ns: NsId,
        request: &LookupRequest<'_>,
        (tokens, rest, missing): (Tokens, Rest, u64),
    ) -> Record {
        let state = &self.sessions.requests[id];
        let size = self.residency.hash_block_size(ns);
        let shown = if request.label.is_empty() {
            request.request
        } else {
            request.label
        };
        let mut name = [0; NAME_BYTES];
        let name_bytes = shown.len().min(NAME_BYTES);
        name[..name_bytes].copy_from_slice(&shown.as_bytes()[..name_bytes]);
        let of_hit = |brought: Option<(u32, u32)>| {
            brought.map_or(0, |(after, to)| {
                let to = (to * size).min(tokens.0);
                to.saturating_sub((after * size).max(request.computed.0))
            })
        };
        Record {
            name,
            name_bytes: name_bytes as u8,
            loaded: false,
            ns,
            at_ns: self.now_ns,
            waited_ns: state.planned.waited_ns,
            asked: asked(request, size),
            computed: request.computed.0,
            found: state.shared.0,
            hit: tokens.0,
            from_disk: of_hit(state.promotions.from_disk),
            from_remote: of_hit(state.remote.brought),
            rest,
            missing,
            other: NsId::MAX,
        }
    }

    /// The reason why the blocks after a hit were not loaded, and the beginning of the first missing block's hash.
    fn rest_of(&self, ns: NsId, request: &LookupRequest<'_>, noted: &Noted) -> (Rest, u64) {
        let size = self.residency.hash_block_size(ns);
        let (found, asked) = (noted.found.0, asked(request, size));
        let is_asked = found < asked && request.computed.0 < asked;
        let missing = is_asked.then(|| request.hashes.get((found / size) as usize));
        let missing = missing.flatten();
        let fingerprint = missing.map_or(0, |hash| hash.fingerprint());
        if noted.reason != Reason::Complete {
            return (noted.reason.into(), fingerprint);
        }
        // A hit may end before the last block found, where a window or a draft model's last tokens are missing.
        if noted.hit.max(noted.computed).0 + size <= found.min(asked) {
            return (Reason::NoBoundary.into(), fingerprint);
        }
        let Some(missing) = missing else {
            return (Rest::default(), 0);
        };
        if let Some(rest) = self.residency.departures.find(ns, &missing) {
            return (rest, fingerprint);
        }
        if self.residency.forest().find(ns, &missing).is_some() {
            return (Reason::Incomplete.into(), fingerprint);
        }
        let reason = match self.other_of(ns, request, noted.found) {
            Some(_) => Reason::OtherIdentity,
            None => Reason::NeverSeen,
        };
        (reason.into(), fingerprint)
    }

    /// A namespace that has the first block of a prompt that its own namespace lacks. Few are looked at.
    fn other_of(&self, ns: NsId, request: &LookupRequest<'_>, found: Tokens) -> Option<NsId> {
        let size = self.residency.hash_block_size(ns);
        let missing = request.hashes.get((found.0 / size) as usize)?;
        let forest = self.residency.forest();
        // Of a namespace that was reset or cleared, blocks may wait for their removal.
        let is_other = |&other: &NsId| other != ns && !self.residency.is_ending(other);
        let others = forest.namespaces().filter(is_other);
        let mut others = others.filter(|&other| forest.has_nodes(other)).take(OTHERS);
        others.find(|&other| forest.find(other, &missing).is_some())
    }

    /// A load of a request's hit has begun.
    pub(super) fn note_load(&mut self, id: RequestId) {
        let noted = self.sessions.requests[id].answered.noted;
        if let Some(record) = noted.and_then(|(_, at)| self.lookups.at_mut(at)) {
            record.loaded = true;
        }
    }

    /// Why a request's last answer has no more tokens. `None` before it was answered.
    pub fn rest(&self, session: SessionId, request: &str) -> Option<Rest> {
        let state = self.sessions.request(session, request)?;
        state.answered.noted.map(|_| state.answered.rest)
    }

    /// The lookup of a request that was answered last.
    pub fn explained(&self, session: SessionId, request: &str) -> Option<Explained> {
        let state = self.sessions.request(session, request)?;
        let (_, position) = state.answered.noted?;
        Some(self.told(position, self.lookups.at(position)?))
    }

    /// Some of the last lookups, the latest first, and before which place there are more to be told.
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

    fn told(&self, position: u64, record: &Record) -> Explained {
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

    /// Bytes of the memory for explanations, once it is full: of the last lookups, and of blocks that have left.
    pub fn explain_bytes(&self) -> u64 {
        let ring = self.lookups.records * size_of::<Record>();
        ring as u64 + self.residency.departures.bytes()
    }
}

impl Record {
    fn shown(&self) -> std::borrow::Cow<'_, str> {
        // A long name may be cut within a character.
        String::from_utf8_lossy(&self.name[..usize::from(self.name_bytes)])
    }
}

/// Tokens of whole hash blocks that a question is about.
fn asked(request: &LookupRequest<'_>, size: u32) -> u32 {
    let blocks = u32::try_from(request.hashes.len()).unwrap_or(u32::MAX);
    (request.max.0 / size).min(blocks).saturating_mul(size)
}
