//! The last lookups, with the reasons for their misses.

use undercroft_contract::explain::{Reason, Rest};
use undercroft_contract::key::BlockHash;
use undercroft_contract::session::{LookupRequest, Sources, Tokens};

use crate::forest::NsId;

use super::departures::Departures;
use super::fetch::Share;

/// Bytes of a request's id that are kept.
const NAME_BYTES: usize = 72;

/// A lookup that was answered.
#[derive(Clone, Copy, Debug)]
pub(super) struct LookupRecord {
    name: [u8; NAME_BYTES],
    name_bytes: u8,
    pub(super) loaded: bool,
    pub(super) ns: NsId,
    pub(super) at_ns: u64,
    pub(super) waited_ns: u64,
    pub(super) asked: u32,
    pub(super) computed: u32,
    pub(super) found: u32,
    pub(super) hit: u32,
    pub(super) from_disk: u32,
    pub(super) from_remote: u32,
    pub(super) rest: Rest,
    /// The hash of the first block that was not found; 0 if all were found.
    pub(super) missing: u64,
    /// Another namespace that has this block; [`NsId::MAX`] if none was found.
    pub(super) other: NsId,
}

/// The last lookups that were answered.
#[derive(Debug)]
pub(super) struct LastLookups {
    /// How blocks have left the tiers.
    pub(super) departures: Departures,
    pub(super) ring: Vec<LookupRecord>,
    records: usize,
    /// Number of lookups noted since the start, which is the position of the next lookup.
    pub(super) next: u64,
}

impl LastLookups {
    /// Keeps the last `records` lookups, at least one, and about `departures` blocks that have left the tiers.
    pub(super) fn new(records: usize, departures: usize) -> Self {
        let records = records.max(1);
        Self {
            departures: Departures::new(departures),
            ring: Vec::with_capacity(records),
            records,
            next: 0,
        }
    }

    pub(super) fn at(&self, position: u64) -> Option<&LookupRecord> {
        let is_kept = position < self.next && self.next - position <= self.ring.len() as u64;
        is_kept.then(|| &self.ring[self.index(position)])
    }

    fn index(&self, position: u64) -> usize {
        (position % self.records as u64) as usize
    }

    /// The position and the place of the record to write: the record at `known` if the ring still has it, else the
    /// oldest record.
    pub(super) fn place(&mut self, known: Option<u64>) -> (u64, &mut LookupRecord) {
        let position = known.filter(|&known| self.at(known).is_some());
        let position = position.unwrap_or_else(|| {
            self.next += 1;
            self.next - 1
        });
        let index = self.index(position);
        if index == self.ring.len() {
            self.ring.push(LookupRecord::EMPTY);
        }
        (position, &mut self.ring[index])
    }
}

/// The explanation of a request's last answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Answered {
    /// Why the hit ends where it does, as far as the lookup itself knows.
    pub(super) reason: Reason,
    /// The first missing block is in the index, and no lookup may use it yet.
    pub(super) is_incomplete: bool,
    /// The explanation's inputs, and the position of its record.
    pub(super) noted: Option<(Noted, u64)>,
    pub(super) rest: Rest,
}

/// The inputs of an answer's explanation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Noted {
    pub(super) reason: Reason,
    pub(super) hit: Tokens,
    pub(super) found: Tokens,
    pub(super) computed: Tokens,
    /// Number of slots freed until the answer, and number of nodes then.
    pub(super) freed: u64,
    pub(super) nodes: usize,
}

/// The part of a prompt that an answer may cover.
#[derive(Clone, Copy)]
pub(super) struct Question {
    pub(super) ns: NsId,
    /// Tokens of a hash block.
    pub(super) size: u32,
    /// Tokens of the prompt's whole hash blocks.
    pub(super) asked: u32,
    /// The first block that is not in the index, or not visible.
    pub(super) missing: Option<BlockHash>,
}

impl Question {
    pub(super) fn new(ns: NsId, size: u32, request: &LookupRequest<'_>, found: Tokens) -> Self {
        let asked = asked(request, size);
        let is_asked = found.0 < asked && request.computed.0 < asked;
        let missing = is_asked.then(|| request.hashes.get((found.0 / size) as usize));
        Self {
            ns,
            size,
            asked,
            missing: missing.flatten(),
        }
    }
}

impl LookupRecord {
    const EMPTY: Self = Self {
        name: [0; NAME_BYTES],
        name_bytes: 0,
        loaded: false,
        ns: NsId::MAX,
        at_ns: 0,
        waited_ns: 0,
        asked: 0,
        computed: 0,
        found: 0,
        hit: 0,
        from_disk: 0,
        from_remote: 0,
        rest: Rest {
            reason: Reason::Complete,
            ago_s: None,
        },
        missing: 0,
        other: NsId::MAX,
    };

    /// Overwrites all fields except the time and the other namespace.
    pub(super) fn write(
        &mut self,
        question: &Question,
        request: &LookupRequest<'_>,
        (waited_ns, share): (u64, &Share),
        (noted, rest): (&Noted, Rest),
    ) {
        let shown = if request.label.is_empty() {
            request.request
        } else {
            request.label
        };
        let name_bytes = shown.len().min(NAME_BYTES);
        self.name[..name_bytes].copy_from_slice(&shown.as_bytes()[..name_bytes]);
        self.name_bytes = name_bytes as u8;
        self.loaded = false;
        self.ns = question.ns;
        self.waited_ns = waited_ns;
        self.asked = question.asked;
        self.computed = noted.computed.0;
        self.found = noted.found.0;
        self.hit = noted.hit.0;
        let gain = Tokens(noted.hit.0.saturating_sub(noted.computed.0));
        let sources = Sources::of(noted.computed, gain, share.brought(question.size));
        self.from_disk = sources.disk.0;
        self.from_remote = sources.remote.0;
        self.rest = rest;
        self.missing = question.missing.map_or(0, |hash| hash.fingerprint());
    }

    pub(super) fn shown(&self) -> std::borrow::Cow<'_, str> {
        // A long name may be cut within a character.
        String::from_utf8_lossy(&self.name[..usize::from(self.name_bytes)])
    }
}

/// Tokens of whole hash blocks that a question is about.
fn asked(request: &LookupRequest<'_>, size: u32) -> u32 {
    let blocks = u32::try_from(request.hashes.len()).unwrap_or(u32::MAX);
    (request.max.0 / size).min(blocks).saturating_mul(size)
}
