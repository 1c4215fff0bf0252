//! When conversations come back: their pauses, and which of them are to be in the arena soon.
//!
//! A conversation is known by the last node of its chain. It ends with a save, and comes back when a request's chain
//! ends at that node. Its next pause is predicted from its own last pauses if these agree and the last one was as
//! predicted. If they do not, the pauses decide that followed turns with the same end, as after a tool call, and those
//! after the same first block before others; if it has had fewer than two, also those of conversations of the same
//! depth: if nearly all of a kind are alike. Where pauses are random, nothing is predicted: the order of eviction keeps
//! the blocks used last.
//!
//! Everything is bounded: a table of a fixed size, in which the oldest of eight gives way; a fixed number of kinds. Nodes
//! may be gone: an entry has its node's epoch. All that was learned is lost with the process.

mod kinds;

use std::collections::BTreeSet;
use std::ops::RangeInclusive;

use undercroft_contract::session::TurnEnd;

use crate::forest::NodeId;
use crate::metrics::Counters;

use super::ids::{RequestId, SessionId};

use kinds::{By, Kind, Kinds};

/// Conversations that are remembered: sets of this many, of which the oldest gives way.
const WAYS: usize = 8;
const SETS_LOG2: u32 = 9;
/// Pauses are counted in units, of which the least pause that predicts something has so many: with two seconds, a unit is
/// a millisecond.
const PAUSE_LEAST: u64 = 2000;
/// A conversation is read this long before its return, and an eighth of its pause.
const LEAD: u64 = 500;
/// A conversation that is later than this, and than an eighth of its pause, was not predicted.
const SLACK: u64 = 1000;
/// The credit of a basis: a right prediction earns one, a wrong one costs several, and without credit nothing is read.
const CREDIT_AT_START: u32 = 12;
const CREDIT_MAX: u32 = 32;
const WRONG_COSTS: u32 = 4;
/// Times of entries that one call looks at.
const TIMES_LOOKED_AT: usize = 8;

/// A node, and its epoch: it may be gone.
pub(super) type NodeAt = (NodeId, u32);

/// Where an entry is in the table.
type Place = u32;

/// When a conversation is expected, in nanoseconds.
#[derive(Clone, Copy, Debug)]
struct Expectation {
    from_ns: u64,
    expected_ns: u64,
    to_ns: u64,
    basis: Basis,
}

/// The basis of a prediction. Each basis has a credit of its own: pauses that differ much, or that are random and alike by
/// chance, do not keep others from being read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Basis {
    /// By the conversation's own pauses, which differ by up to a sixteenth, a quarter, or a half.
    Alike,
    Similar,
    Near,
    /// By the pauses after turns with the same end.
    End,
    /// By the pauses of other conversations.
    Other,
}

const BASES: usize = 5;

/// After pauses between `least` and `most`, give or take `apart`, the pause after which a conversation is expected is in the
/// range, in units. `None`: it is too short.
fn range((least, most): (u64, u64), apart: u64) -> Option<RangeInclusive<u64>> {
    let from = least.saturating_sub(LEAD + apart.max(least / 8));
    let to = most + SLACK + apart.max(most / 8);
    (least >= PAUSE_LEAST).then_some(from..=to)
}

/// Where a request's chain ends, and what is known of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct ChainEnd {
    pub(super) end: NodeAt,
    pub(super) session: SessionId,
    /// The instance of the namespace.
    pub(super) instance: u64,
    /// Distinguishes the chain's first block from others.
    pub(super) first: u64,
    /// Hash blocks of the chain.
    pub(super) depth: u32,
}

#[derive(Clone, Copy, Debug)]
struct Conversation {
    chain: ChainEnd,
    turn_end: TurnEnd,
    /// When it ended or came back last.
    since_ns: u64,
    /// Its last pauses, the latest first; 0: it had none.
    pauses: [u32; 2],
    /// How the turns before these pauses ended.
    ends: [TurnEnd; 2],
    /// The last pause was as the two before it.
    is_regular: bool,
    turns: u8,
    window: Option<Expectation>,
    /// Bytes that were read for its next turn.
    read_bytes: u64,
}

impl Conversation {
    /// The kinds that its next pause belongs to, the most particular first.
    fn kinds(&self) -> impl Iterator<Item = Kind> {
        let (instance, turns) = (self.chain.instance, self.turns);
        let end = Some(self.turn_end).filter(|end| end.is_known());
        let by = [
            Some(By::First(self.chain.first, self.turn_end)),
            end.map(By::End),
            Some(By::Depth(self.chain.depth.max(1).ilog2() as u8)),
        ];
        by.into_iter().flatten().map(move |by| Kind {
            instance,
            turns,
            by,
        })
    }

    /// The prediction from its last pauses, if they agree: its basis, after which pause at the least, and the range.
    fn own(&self) -> Option<(Basis, u64, RangeInclusive<u64>)> {
        let [last, before] = self.pauses.map(u64::from);
        let (least, most) = (last.min(before), last.max(before));
        let apart = most - least;
        let basis = match apart {
            _ if apart * 16 <= least => Basis::Alike,
            _ if apart * 4 <= least => Basis::Similar,
            _ if apart * 2 <= least => Basis::Near,
            _ => return None,
        };
        Some((basis, least, range((least, most), apart)?))
    }
}

/// A conversation whose blocks are being read, in pieces from the front.
#[derive(Debug)]
pub(super) struct ReturnRead {
    pub(super) end: NodeAt,
    pub(super) session: SessionId,
    /// The next node of the search for the first block that is not in the arena, from the end upwards.
    pub(super) at: Option<NodeAt>,
    /// Hash blocks of a piece.
    pub(super) piece: u32,
    /// The ends of the pieces that are not read yet, the deepest first.
    pub(super) ends: Vec<NodeAt>,
    /// Hash blocks above the next piece.
    pub(super) from: u32,
    /// The piece under way.
    pub(super) request: Option<RequestId>,
    /// When the blocks that would make way are looked at again.
    pub(super) look_ns: u64,
    /// Whether a conversation that needs no read counts as just used.
    pub(super) renews: bool,
}

/// The conversations that have ended, and their pauses.
///
/// Invariants: an entry with a window has one time in `times`; `expected` has those whose time has come, whose basis has credit,
/// and that are still to be read; `awaited_bytes` is the sum over the entries.
#[derive(Debug)]
pub(super) struct Returns {
    /// The unit of pauses; 0: nothing is learned.
    unit_ns: u64,
    /// Nodes of the table's entries, for a search in one cache line; `None` before the first entry.
    nodes: Vec<Option<NodeId>>,
    table: Vec<Conversation>,
    times: BTreeSet<(u64, Place)>,
    /// Those that are to be read, the soonest first.
    expected: BTreeSet<(u64, Place)>,
    kinds: Kinds,
    pub(super) reading: Option<ReturnRead>,
    awaited_bytes: u64,
    /// By the basis of the prediction.
    credits: [u32; BASES],
}

/// The first place of a node's set.
fn set_of(node: NodeId) -> usize {
    (node.wrapping_mul(0x9e37_79b1) >> (u32::BITS - SETS_LOG2)) as usize * WAYS
}

impl Returns {
    /// Pauses of `least_ns` and more are learned; 0: none.
    pub(super) fn new(least_ns: u64) -> Self {
        Self {
            unit_ns: least_ns.div_ceil(PAUSE_LEAST),
            nodes: Vec::new(),
            table: Vec::new(),
            times: BTreeSet::new(),
            expected: BTreeSet::new(),
            kinds: Kinds::default(),
            reading: None,
            awaited_bytes: 0,
            credits: [CREDIT_AT_START; BASES],
        }
    }

    /// Whether anything is learned.
    pub(super) fn learns(&self) -> bool {
        self.unit_ns > 0
    }

    fn find(&self, (node, epoch): NodeAt) -> Option<Place> {
        let from = set_of(node);
        let set = self.nodes.get(from..from + WAYS)?;
        let at = from + set.iter().position(|&of| of == Some(node))?;
        (self.table[at].chain.end.1 == epoch).then_some(at as Place)
    }

    /// A request has come whose chain ends at `end`. `in_host`: whether its blocks are in the arena.
    pub(super) fn came(
        &mut self,
        end: NodeAt,
        now_ns: u64,
        in_host: impl FnOnce() -> bool,
        counters: &mut Counters,
    ) {
        let Some(place) = self.find(end) else {
            return;
        };
        let before = self.table[place as usize];
        let pause = (now_ns - before.since_ns) / self.unit_ns;
        let pause = pause.clamp(1, u64::from(u32::MAX)) as u32;
        let is_predicted = |of: &Expectation| now_ns >= of.from_ns || before.read_bytes > 0;
        // A read that waits for room or for idle disks says nothing of the prediction.
        let is_unread = |of: &Expectation| {
            before.read_bytes > 0 && self.expected.contains(&(of.expected_ns, place))
        };
        let judged = before.window.filter(is_predicted);
        if let Some(window) = judged.filter(|of| !is_unread(of)) {
            let is_right = now_ns <= window.to_ns && (before.read_bytes == 0 || in_host());
            self.judge(window.basis, is_right, before.read_bytes, counters);
        }
        self.expect(place, None);
        self.count(&before, Some(pause));
        let of = &mut self.table[place as usize];
        let own = of.own();
        of.is_regular = own.is_some_and(|(.., range)| range.contains(&u64::from(pause)));
        of.pauses = [pause, of.pauses[0]];
        of.ends = [of.turn_end, of.ends[0]];
        of.turns = of.turns.saturating_add(1).min(3);
        of.since_ns = now_ns;
    }

    /// A request that goes on has saved blocks: its chain, which ended at `before`, is `chain` now.
    pub(super) fn saved(
        &mut self,
        before: Option<NodeAt>,
        chain: ChainEnd,
        now_ns: u64,
        counters: &mut Counters,
    ) {
        let end = chain.end;
        if self.table.is_empty() {
            let places = WAYS << SETS_LOG2;
            self.nodes = vec![None; places];
            self.table = Vec::with_capacity(places);
            let none = Conversation {
                chain,
                turn_end: TurnEnd::UNKNOWN,
                since_ns: 0,
                pauses: [0; 2],
                ends: [TurnEnd::UNKNOWN; 2],
                is_regular: false,
                turns: 0,
                window: None,
                read_bytes: 0,
            };
            self.table.resize(places, none);
        }
        let old = before.and_then(|before| self.find(before));
        let history = old.or_else(|| self.find(end));
        let history = history.map(|place| self.table[place as usize]);
        // A chain that goes on without a lookup has come back, too.
        if let Some(place) = old {
            self.settle(place, true, counters);
            self.nodes[place as usize] = None;
        }
        let place = self.place_for(end, counters);
        self.nodes[place as usize] = Some(end.0);
        self.table[place as usize] = Conversation {
            chain,
            turn_end: TurnEnd::UNKNOWN,
            since_ns: now_ns,
            pauses: history.map_or([0; 2], |of| of.pauses),
            ends: history.map_or([TurnEnd::UNKNOWN; 2], |of| of.ends),
            is_regular: history.is_some_and(|of| of.is_regular),
            turns: history.map_or(0, |of| of.turns),
            window: None,
            read_bytes: 0,
        };
    }

    /// The request whose chain ends at `end` has finished: its conversation may be expected from now on.
    pub(super) fn finished(&mut self, end: NodeAt, turn_end: TurnEnd, now_ns: u64) {
        let Some(place) = self.find(end) else {
            return;
        };
        let of = &mut self.table[place as usize];
        // Blocks that were read before are for another request.
        if of.window.is_none() {
            (of.turn_end, of.since_ns) = (turn_end, now_ns);
            let window = self.predicted(&self.table[place as usize]);
            self.expect(place, window);
        }
    }

    /// The place of a node, whose last entry is settled: its own, a free one, or that of the oldest entry of its set.
    fn place_for(&mut self, end: NodeAt, counters: &mut Counters) -> Place {
        let node = end.0;
        let from = set_of(node);
        let places = from..from + WAYS;
        let own = places.clone().find(|&at| self.nodes[at] == Some(node));
        let age = |&at: &usize| (self.nodes[at].is_some(), self.table[at].since_ns, at);
        let at = own.or_else(|| places.min_by_key(age));
        let place = at.expect("a set has places") as Place;
        if self.nodes[place as usize].is_some() {
            if own.is_none() {
                let of = self.table[place as usize];
                self.count(&of, None);
            }
            let is_own = self.table[place as usize].chain.end == end;
            self.settle(place, is_own, counters);
        }
        place
    }

    fn predicted(&self, of: &Conversation) -> Option<Expectation> {
        // Own pauses after other ends count for less than those of others after the same end.
        let is_alike = of.ends == [of.turn_end; 2];
        let is_own = of.is_regular && (is_alike || !of.kinds().any(|kind| self.tells(kind)));
        let own = of.own().filter(|_| is_own);
        let (basis, least, range) = own.or_else(|| self.predicted_by_kind(of))?;
        let at = |pause: u64| {
            of.since_ns
                .saturating_add(pause.saturating_mul(self.unit_ns))
        };
        Some(Expectation {
            from_ns: at(*range.start()),
            expected_ns: at(least),
            to_ns: at(*range.end()),
            basis,
        })
    }

    /// Whether the pauses after a turn's end are known.
    fn tells(&self, kind: Kind) -> bool {
        kind.names_end() && self.kinds.knows(kind)
    }

    /// The prediction from the pauses of others. Where the conversation's own pauses say something, those of
    /// conversations that have only the depth in common say nothing.
    fn predicted_by_kind(&self, of: &Conversation) -> Option<(Basis, u64, RangeInclusive<u64>)> {
        let is_young = of.pauses[1] == 0;
        let mut kinds = of.kinds().filter(|of| is_young || of.names_end());
        // The most particular kind decides, also that nothing is predicted.
        let kind = kinds.find(|&kind| self.kinds.knows(kind))?;
        let pauses = self.kinds.narrow(kind)?;
        let basis = match kind.names_end() {
            true => Basis::End,
            false => Basis::Other,
        };
        Some((basis, pauses.0, range(pauses, 0)?))
    }

    /// Changes when a conversation is expected. Bytes read for it do not count any more.
    fn expect(&mut self, place: Place, window: Option<Expectation>) {
        let of = &mut self.table[place as usize];
        self.awaited_bytes -= std::mem::take(&mut of.read_bytes);
        let before = std::mem::replace(&mut of.window, window);
        if let Some(before) = before {
            self.times.remove(&(before.from_ns, place));
            self.times.remove(&(before.to_ns, place));
            self.expected.remove(&(before.expected_ns, place));
        }
        if let Some(window) = window {
            self.times.insert((window.from_ns, place));
        }
    }

    /// Ends the expectation of a conversation, which was right or not.
    fn settle(&mut self, place: Place, is_right: bool, counters: &mut Counters) {
        let of = self.table[place as usize];
        if let Some(window) = of.window.filter(|_| of.read_bytes > 0) {
            self.judge(window.basis, is_right, of.read_bytes, counters);
        }
        self.expect(place, None);
    }

    /// A prediction was right or wrong. Those that led to no read count, too: so reads begin again.
    fn judge(&mut self, basis: Basis, is_right: bool, read_bytes: u64, counters: &mut Counters) {
        let credit = &mut self.credits[basis as usize];
        *credit = match is_right {
            true => (*credit + 1).min(CREDIT_MAX),
            false => credit.saturating_sub(WRONG_COSTS),
        };
        let has_read = u64::from(read_bytes > 0);
        match is_right {
            true => counters.return_reads_used += has_read,
            false => counters.return_reads_wasted += has_read,
        }
    }

    fn count(&mut self, of: &Conversation, pause: Option<u32>) {
        for kind in of.kinds() {
            self.kinds.count(kind, pause);
        }
    }

    /// Notes which conversations are expected now, and which have not come.
    pub(super) fn pass_time(&mut self, now_ns: u64, counters: &mut Counters) {
        for _ in 0..TIMES_LOOKED_AT {
            let Some(&(at_ns, place)) = self.times.first().filter(|&&(at, _)| at <= now_ns) else {
                return;
            };
            let of = self.table[place as usize];
            let window = of.window.expect("an entry with a time has a window");
            if at_ns == window.from_ns {
                self.times.remove(&(at_ns, place));
                self.times.insert((window.to_ns, place));
                if self.credits[window.basis as usize] > 0 {
                    self.expected.insert((window.expected_ns, place));
                }
                continue;
            }
            // Its history is forgotten.
            self.judge(window.basis, false, of.read_bytes, counters);
            self.count(&of, None);
            self.expect(place, None);
            let of = &mut self.table[place as usize];
            (of.pauses, of.is_regular) = ([0; 2], false);
        }
    }

    /// The conversation to read next, and its session.
    pub(super) fn next(&self) -> Option<(NodeAt, SessionId)> {
        let &(_, place) = self.expected.first()?;
        let of = &self.table[place as usize];
        Some((of.chain.end, of.chain.session))
    }

    /// Whether a conversation is expected, and has yet to be read.
    pub(super) fn is_expected(&self, end: NodeAt) -> bool {
        self.find(end).is_some_and(|place| {
            let window = self.table[place as usize].window;
            window.is_some_and(|window| self.expected.contains(&(window.expected_ns, place)))
        })
    }

    /// When a conversation comes back, if that is predicted.
    pub(super) fn expected_ns(&self, end: NodeAt) -> Option<u64> {
        let window = self.table[self.find(end)? as usize].window?;
        Some(window.expected_ns)
    }

    /// Nothing is left to read for a conversation.
    pub(super) fn done(&mut self, end: NodeAt) {
        if let Some(place) = self.find(end)
            && let Some(window) = self.table[place as usize].window
        {
            self.expected.remove(&(window.expected_ns, place));
        }
    }

    /// All blocks of a conversation are in the arena. It is looked at again later, if it does not come before.
    pub(super) fn stays(&mut self, end: NodeAt, now_ns: u64) {
        self.done(end);
        let Some(place) = self.find(end) else {
            return;
        };
        let Some(window) = &mut self.table[place as usize].window else {
            return;
        };
        let half_ns = window.expected_ns.saturating_sub(now_ns) / 2;
        if half_ns > LEAD * self.unit_ns && self.times.remove(&(window.to_ns, place)) {
            window.from_ns = now_ns + half_ns;
            self.times.insert((window.from_ns, place));
        }
    }

    /// Notes bytes that were read for a conversation, if it has not come meanwhile.
    pub(super) fn note_read(&mut self, end: NodeAt, bytes: u64) {
        if self.is_expected(end)
            && let Some(place) = self.find(end)
        {
            self.table[place as usize].read_bytes += bytes;
            self.awaited_bytes += bytes;
        }
    }

    /// Bytes that were read for conversations that have not come yet.
    pub(super) fn awaited_bytes(&self) -> u64 {
        self.awaited_bytes
    }

    /// Whether no conversation has a time, and none is being read.
    pub(super) fn is_empty(&self) -> bool {
        self.times.is_empty() && self.reading.is_none()
    }

    /// Whether a conversation may be read before `by_ns`, or is to be given up.
    pub(super) fn is_due(&self, by_ns: u64) -> bool {
        let is_near = self.times.first().is_some_and(|&(at_ns, _)| at_ns <= by_ns);
        is_near || self.reading.is_some() || self.next().is_some()
    }

    /// Whether a search for the blocks to read goes on.
    pub(super) fn has_rest(&self) -> bool {
        self.reading.as_ref().is_some_and(|of| of.at.is_some())
    }

    /// Whether every invariant holds.
    #[cfg(feature = "check")]
    pub(super) fn check(&self) -> Result<(), String> {
        use super::ensure::ensure;
        let (mut times, mut expected, mut bytes) = (0, 0, 0);
        for (place, of) in (0..).zip(&self.table) {
            let Some(node) = self.nodes[place as usize] else {
                continue;
            };
            ensure!(
                of.chain.end.0 == node && self.find(of.chain.end) == Some(place),
                "conversation {node} is not found"
            );
            bytes += of.read_bytes;
            let Some(window) = of.window else {
                ensure!(of.read_bytes == 0, "conversation {node} was read in vain");
                continue;
            };
            let is_expected = self.times.contains(&(window.to_ns, place));
            let waits = self.times.contains(&(window.from_ns, place));
            ensure!(waits != is_expected, "conversation {node} has not one time");
            times += 1;
            expected += usize::from(self.expected.contains(&(window.expected_ns, place)));
        }
        let counted = (times, expected, bytes);
        let held = (self.times.len(), self.expected.len(), self.awaited_bytes);
        ensure!(
            counted == held,
            "times, expected conversations and bytes {held:?}, of entries {counted:?}"
        );
        Ok(())
    }
}
