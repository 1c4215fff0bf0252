//! Pins: leases that hints ask for. A pin keeps a chain in the tiers until its time to live has passed without a use.
//!
//! Pins have a budget, a part of the arena. Above it the pin that was used least recently ends. Blocks that two pins
//! share count once (`tree`).

mod tree;

use std::collections::BTreeSet;

use hashbrown::HashMap;
use slotmap::SlotMap;
use undercroft_contract::key::HashSource;

use crate::forest::{NONE, NodeId, NsId};
use crate::metrics::Counters;
use crate::work;

use super::residency::Residency;
use tree::{PinTree, Shared, SpanKey};

/// Pins that there may be at once.
const PINS_MAX: usize = 16_384;
/// Pins that one entry ends to make room.
const ENDED_MAX: usize = 16;
/// Pins of one chain that one entry renews or releases, the deepest ones first.
const ON_CHAIN_MAX: usize = 128;
/// Pins that one entry looks at, in search of those that have lost their blocks.
const LOOKS: usize = 32;

slotmap::new_key_type! {
    pub(super) struct PinKey;
}

#[derive(Debug)]
struct Pin {
    ns: NsId,
    /// The leased node.
    node: NodeId,
    span: SpanKey,
    /// Bytes of windows and states at the end.
    end_bytes: u64,
    ttl_ns: u64,
    ends_ns: u64,
    /// Counts the uses of all pins.
    used: u64,
    name: Box<str>,
}

/// The properties of a pin to begin.
#[derive(Clone, Copy, Debug)]
pub(super) struct PinSpec<'a> {
    pub(super) ns: NsId,
    pub(super) ttl_ns: u64,
    pub(super) name: &'a str,
}

/// The pins of all namespaces.
///
/// Invariants: `bytes` are at most `budget` and equal the bytes of all pinned chains, shared blocks counted once; each
/// pin leases its node; the orders have each pin once.
#[derive(Debug)]
pub(super) struct Pins {
    budget: u64,
    bytes: u64,
    pins: SlotMap<PinKey, Pin>,
    tree: PinTree,
    names: HashMap<(NsId, Box<str>), PinKey>,
    /// Pins in the order of their last use.
    by_use: BTreeSet<(u64, PinKey)>,
    /// Pins in the order in which their times end.
    by_end: BTreeSet<(u64, PinKey)>,
    uses: u64,
    /// The pin that was looked at last, see [`LOOKS`].
    looked_at: (u64, PinKey),
}

impl Pins {
    pub(super) fn new(budget: u64) -> Self {
        Self {
            budget,
            bytes: 0,
            pins: SlotMap::with_key(),
            tree: PinTree::default(),
            names: HashMap::new(),
            by_use: BTreeSet::new(),
            by_end: BTreeSet::new(),
            uses: 0,
            looked_at: (0, PinKey::default()),
        }
    }

    /// Sets the budget, at least to the bytes that are pinned now: no pin ends.
    pub(super) fn set_budget(&mut self, budget: u64) {
        self.budget = budget.max(self.bytes);
    }

    pub(super) fn budget(&self) -> u64 {
        self.budget
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn len(&self) -> usize {
        self.pins.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.pins.is_empty()
    }

    /// Whether the time of a pin is over.
    pub(super) fn is_due(&self, now_ns: u64) -> bool {
        let first = self.by_end.first();
        first.is_some_and(|&(ends_ns, _)| ends_ns <= now_ns)
    }

    /// Pins the chain of `hashes`, of which `depth` hash blocks are in the index, as far as the budget has room for it.
    /// Returns the depth of the pin, 0 if nothing of the chain is pinned.
    pub(super) fn add(
        &mut self,
        spec: PinSpec<'_>,
        hashes: &dyn HashSource,
        depth: u32,
        now_ns: u64,
        (residency, counters): (&mut Residency, &mut Counters),
    ) -> u32 {
        if let Some(&same) = self.names.get(&(spec.ns, Box::from(spec.name))) {
            self.end(same, residency);
        }
        let mut end = residency.pin_end(spec.ns, hashes, depth);
        while let Some(node) = end {
            let depth = residency.node(node).depth;
            let shared = self.shared(spec.ns, hashes, depth, residency);
            let same = self.tree.unnamed_at(&shared, depth);
            if let Some(same) = same.filter(|_| spec.name.is_empty()) {
                self.end(same, residency);
            }
            let shared = self.shared(spec.ns, hashes, depth, residency);
            self.make_room(spec.ns, &shared, depth, residency, counters);
            let shared = self.shared(spec.ns, hashes, depth, residency);
            let needed = needed(residency, spec.ns, &shared, depth);
            if self.bytes + needed <= self.budget && self.pins.len() < PINS_MAX {
                self.insert(spec, node, &shared, now_ns, residency);
                return depth;
            }
            if self.pins.len() >= PINS_MAX {
                return 0;
            }
            let room = self.budget - self.bytes;
            let fits = |depth: u32| depth > 0 && fits(residency, spec.ns, &shared, depth, room);
            let most = largest(depth - 1, fits);
            end = residency.pin_end(spec.ns, hashes, most);
        }
        0
    }

    /// How far the chain of `hashes` is pinned, up to a depth.
    fn shared(
        &self,
        ns: NsId,
        hashes: &dyn HashSource,
        depth: u32,
        residency: &Residency,
    ) -> Shared {
        self.tree.shared(|at| {
            let hash = (at <= depth).then(|| hashes.get(at as usize - 1)).flatten();
            hash.and_then(|hash| residency.forest().find(ns, &hash))
        })
    }

    /// Ends pins, the least recently used ones first, until there is room for a pin of `depth`, whose first blocks
    /// are `shared`.
    fn make_room(
        &mut self,
        ns: NsId,
        shared: &Shared,
        depth: u32,
        residency: &mut Residency,
        counters: &mut Counters,
    ) {
        let needed = needed(residency, ns, shared, depth);
        let most = self.budget.saturating_sub(needed);
        if needed > self.budget {
            // The pin is clipped in any case: its remaining blocks get all of the budget.
            return self.end_oldest(shared, 0, residency, counters);
        }
        self.end_oldest(shared, most, residency, counters);
    }

    /// Ends the least recently used pins, except those of a chain, until the other pins take at most `most` bytes.
    fn end_oldest(
        &mut self,
        but: &Shared,
        most: u64,
        residency: &mut Residency,
        counters: &mut Counters,
    ) {
        for _ in 0..ENDED_MAX {
            if self.bytes <= most && self.pins.len() < PINS_MAX {
                return;
            }
            let mut oldest = self.by_use.iter().map(|&(_, key)| key).take(LOOKS);
            let ends = |key: &PinKey| {
                work::queued();
                !self.tree.is_on(but, self.pins[*key].span)
            };
            let Some(key) = oldest.find(ends) else {
                return;
            };
            counters.pins_over_budget += 1;
            self.end(key, residency);
        }
    }

    fn insert(
        &mut self,
        spec: PinSpec<'_>,
        node: NodeId,
        shared: &Shared,
        now_ns: u64,
        residency: &mut Residency,
    ) {
        let depth = residency.node(node).depth;
        let end_bytes = residency.end_bytes(spec.ns, depth);
        self.bytes += residency.chain_bytes(spec.ns, shared.depth, depth) + end_bytes;
        let mut new = Vec::with_capacity((depth - shared.depth) as usize);
        let mut at = node;
        while at != NONE && residency.node(at).depth > shared.depth {
            work::node();
            new.push(at);
            at = residency.node(at).parent();
        }
        new.reverse();
        residency.pin_hit(node);
        self.uses += 1;
        let (used, ends_ns) = (self.uses, now_ns.saturating_add(spec.ttl_ns));
        let pin = Pin {
            ns: spec.ns,
            node,
            span: SpanKey::default(),
            end_bytes,
            ttl_ns: spec.ttl_ns,
            ends_ns,
            used,
            name: spec.name.into(),
        };
        let key = self.pins.insert(pin);
        self.pins[key].span = self.tree.add(key, !spec.name.is_empty(), shared, new);
        if !spec.name.is_empty() {
            self.names.insert((spec.ns, spec.name.into()), key);
        }
        self.by_use.insert((used, key));
        self.by_end.insert((ends_ns, key));
    }

    /// Renews the pins that end on the chain of `hashes`, which a request has used. The first `depth` hash blocks of
    /// the chain are in the index.
    pub(super) fn used(
        &mut self,
        ns: NsId,
        hashes: &dyn HashSource,
        depth: u32,
        now_ns: u64,
        residency: &Residency,
    ) {
        if self.pins.is_empty() {
            return;
        }
        let shared = self.shared(ns, hashes, depth, residency);
        let used: Vec<PinKey> = self.tree.pins_on(&shared).take(ON_CHAIN_MAX).collect();
        for key in used {
            work::queued();
            let pin = &mut self.pins[key];
            self.by_use.remove(&(pin.used, key));
            self.by_end.remove(&(pin.ends_ns, key));
            self.uses += 1;
            (pin.used, pin.ends_ns) = (self.uses, now_ns.saturating_add(pin.ttl_ns));
            self.by_use.insert((pin.used, key));
            self.by_end.insert((pin.ends_ns, key));
        }
    }

    /// Ends the pin of a name. Without a name, ends the pins on the chain of `hashes`. Returns the depth of the deepest
    /// pin that ended.
    pub(super) fn release(
        &mut self,
        (ns, name): (NsId, &str),
        hashes: &dyn HashSource,
        depth: u32,
        residency: &mut Residency,
    ) -> u32 {
        let ended: Vec<PinKey> = if name.is_empty() {
            let shared = self.shared(ns, hashes, depth, residency);
            let on_chain = self.tree.unnamed_on(&shared);
            on_chain.take(ON_CHAIN_MAX).collect()
        } else {
            let named = self.names.get(&(ns, Box::from(name)));
            named.copied().into_iter().collect()
        };
        let depths = ended
            .iter()
            .map(|&key| residency.node(self.pins[key].node).depth);
        let deepest = depths.max().unwrap_or(0);
        for key in ended {
            work::queued();
            self.end(key, residency);
        }
        deepest
    }

    /// Ends some of the pins whose time is over, and some that have lost their blocks.
    pub(super) fn step(&mut self, now_ns: u64, residency: &mut Residency, counters: &mut Counters) {
        for _ in 0..ENDED_MAX {
            let first = self.by_end.first().copied();
            let Some((_, key)) = first.filter(|&(ends_ns, _)| ends_ns <= now_ns) else {
                break;
            };
            counters.pins_expired += 1;
            self.end(key, residency);
        }
        let from = (
            std::ops::Bound::Excluded(self.looked_at),
            std::ops::Bound::Unbounded,
        );
        let some: Vec<(u64, PinKey)> = self.by_use.range(from).take(LOOKS).copied().collect();
        self.looked_at = some.last().copied().unwrap_or((0, PinKey::default()));
        for (_, key) in some {
            work::node();
            if residency.node(self.pins[key].node).is_detached() {
                counters.pins_lost += 1;
                self.end(key, residency);
            }
        }
    }

    /// Ends the least recently used pin: a running request finds no memory although nothing is being written or freed.
    pub(super) fn give_way(&mut self, residency: &mut Residency, counters: &mut Counters) {
        if let Some(&(_, key)) = self.by_use.first() {
            counters.pins_gave_way += 1;
            self.end(key, residency);
        }
    }

    fn end(&mut self, key: PinKey, residency: &mut Residency) {
        work::queued();
        let pin = self.pins.remove(key).expect("a pin ends once");
        let (after, to) = self.tree.remove(pin.span, key);
        let bytes = residency.chain_bytes(pin.ns, after, to) + pin.end_bytes;
        let left = self.bytes.checked_sub(bytes);
        self.bytes = left.expect("`bytes` counts every pin");
        self.by_use.remove(&(pin.used, key));
        self.by_end.remove(&(pin.ends_ns, key));
        if !pin.name.is_empty() {
            self.names.remove(&(pin.ns, pin.name));
        }
        residency.unpin_hit(pin.node);
    }

    /// The leased nodes.
    #[cfg(feature = "check")]
    pub(super) fn nodes(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.pins.values().map(|pin| pin.node)
    }

    /// Whether the invariants hold.
    #[cfg(feature = "check")]
    pub(super) fn check(&self, residency: &Residency) -> Result<(), String> {
        use super::ensure::ensure;
        self.tree.check(|id| {
            let parent = residency.node(id).parent();
            (parent != NONE).then_some(parent)
        })?;
        let of_runs = self
            .tree
            .runs()
            .map(|(after, to, last)| residency.chain_bytes(residency.node(last).ns, after, to));
        let of_ends = self.pins.values().map(|pin| pin.end_bytes);
        let bytes = of_runs.chain(of_ends).sum::<u64>();
        ensure!(
            bytes == self.bytes,
            "{bytes} bytes are pinned, not {}",
            self.bytes
        );
        ensure!(
            bytes <= self.budget,
            "{bytes} bytes are pinned of {}",
            self.budget
        );
        let pins = self.pins.len();
        ensure!(
            self.by_use.len() == pins,
            "{pins} pins, {} by use",
            self.by_use.len()
        );
        ensure!(
            self.by_end.len() == pins,
            "{pins} pins, {} by end",
            self.by_end.len()
        );
        let named = self
            .pins
            .values()
            .filter(|pin| !pin.name.is_empty())
            .count();
        ensure!(
            self.names.len() == named,
            "{named} named pins, {}",
            self.names.len()
        );
        Ok(())
    }
}

/// Bytes that a pin of `depth` takes beyond the shared bytes.
fn needed(residency: &Residency, ns: NsId, shared: &Shared, depth: u32) -> u64 {
    residency.chain_bytes(ns, shared.depth.min(depth), depth) + residency.end_bytes(ns, depth)
}

fn fits(residency: &Residency, ns: NsId, shared: &Shared, depth: u32, room: u64) -> bool {
    needed(residency, ns, shared, depth) <= room
}

/// The largest number up to `most` for which `holds` is true; 0 if there is none. `holds` is true, or nearly so, for
/// all smaller numbers.
fn largest(most: u32, holds: impl Fn(u32) -> bool) -> u32 {
    let (mut low, mut high) = (0, most + 1);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if holds(middle) {
            low = middle;
        } else {
            high = middle;
        }
    }
    low
}
