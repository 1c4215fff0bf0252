//! Pages move between size classes: a class without room gets pages of other classes that are used less.
//!
//! A class looks at the runs of pages around the other classes' next candidates, and takes the run whose bytes are
//! worth the least, if they are worth less than its own next candidate. A page holds parts of many chains. Evicting
//! leaves alone would not empty it, and evicting everything below its nodes would empty most of an aged tier. So exactly
//! the payloads in the run are evicted, over several entries. The payloads below them stay, out of reach until a request
//! saves the missing payloads again.
//!
//! Requests use the engine between two entries, so each payload is looked at again just before it is evicted. If it is
//! in use by then, the class does not get the run.

use rustc_hash::FxHashSet;
use undercroft_contract::tier::Tier;

use crate::forest::{DiskState, HostState, NodeId};
use crate::metrics::Counters;
use crate::policy::{Leaf, Tenants};
use crate::slots::{Class, Owner, Run, slot_offset};
use crate::work;

use super::progress::{Emptying, PageMove};
use super::state::{Region, Residency};

/// Candidates in each set of each other size class around which a class looks for a run.
const CANDIDATES: usize = 6;
/// Further runs that a class looks at in turn, so that it gets to each page in time.
const OTHER_RUNS: u64 = 4;
/// Limit of the nodes below one evicted payload: one entry puts all of them out of reach.
const BELOW_MAX: usize = 512;
/// Cost of an eviction, in nodes that are looked at.
const EVICTION_VISITS: usize = 16;
/// After so many runs in a row that could not be had, a payload is refused; until then it waits for the next run.
const VAIN_MAX: u32 = 16;
/// A run is kept for a class that does not ask any more until other classes have asked as often as a sixteenth of the
/// slots in use, within these limits.
const OTHERS: std::ops::RangeInclusive<u64> = 16..=4096;

impl Residency {
    fn page_move(&self, region: Region) -> &PageMove {
        &self.page_moves[region.index()]
    }

    fn page_move_mut(&mut self, region: Region) -> &mut PageMove {
        &mut self.page_moves[region.index()]
    }

    #[cfg(feature = "check")]
    pub(crate) fn moves(&self) -> super::progress::Moves {
        self.moves
    }

    /// Allows the entry of the engine that begins now to look at about `visits` nodes of each region.
    pub(crate) fn allow_page_moves(&mut self, visits: u32) {
        let moves = self.page_moves.iter_mut();
        moves.for_each(|of| of.visits = visits as usize);
    }

    /// Whether a region may have room in the next entry. After many runs in vain, no caller waits until a slot is freed:
    /// the wait might never end.
    pub(super) fn may_have_room_soon(&self, region: Region) -> bool {
        let of = self.page_move(region);
        let freed = self.freed[region.tier() as usize];
        let is_hopeless = of.vain >= VAIN_MAX && of.in_vain == Some(freed);
        !is_hopeless && (of.emptying.is_some() || of.visits == 0)
    }

    /// Whether a run of a region is being emptied.
    pub(super) fn is_emptying(&self, region: Region) -> bool {
        self.page_move(region).emptying.is_some()
    }

    /// Whether a run is being emptied for a size class.
    pub(super) fn is_emptying_for(&self, region: Region, class: Class) -> bool {
        let of = self.page_move(region);
        of.emptying.is_some() && of.class == class
    }

    /// Whether a run is being emptied for a class that waits for it.
    pub(crate) fn has_page_moves(&self) -> bool {
        let mut moves = self.page_moves.iter();
        moves.any(|of| of.emptying.is_some() && of.waits)
    }

    /// Goes on to empty the runs for which a class waits.
    pub(crate) fn continue_page_moves(&mut self, counters: &mut Counters) {
        for region in self.regions() {
            if self.page_move(region).waits {
                self.go_on_emptying(region, counters);
            }
        }
    }

    /// Notes whether a class that asked for room was refused, and will ask again, or got room.
    pub(super) fn note_refusal(&mut self, region: Region, class: Class, is_refused: bool) {
        let of = self.page_move_mut(region);
        if of.class == class {
            of.waits = is_refused;
        }
    }

    /// Keeps no page from other classes in order to withhold it: no page is to be withheld any more.
    pub(super) fn end_withholding(&mut self, region: Region) {
        let class = self.slots(region).closed_for();
        if class.is_some_and(|class| self.slots(region).withholds(class)) {
            self.give_up_run(region);
        }
    }

    fn give_up_run(&mut self, region: Region) {
        self.page_move_mut(region).emptying = None;
        self.slots_mut(region).open_run();
    }

    /// Goes on to empty a run for a class, or begins to, if its bytes are worth less than those of `own`, the class's
    /// own next candidate. Returns whether the class has room now.
    pub(super) fn take_run(
        &mut self,
        region: Region,
        class: Class,
        own: Option<Leaf>,
        kept: Tenants,
        counters: &mut Counters,
    ) -> bool {
        if !self.is_others(region, class, own.is_none()) {
            self.page_move_mut(region).kept = kept;
            self.go_on_emptying(region, counters);
            let is_kept = self.slots(region).kept_for().is_some();
            if !is_kept && !self.is_emptying(region) && self.is_worth_a_search(region, class, own) {
                self.choose_run(region, class, own);
                self.go_on_emptying(region, counters);
            }
        }
        !self.slots(region).is_full(class)
    }

    /// Whether the run that is being emptied, or is empty, belongs to another class than `class`. The other class loses
    /// the run if it has not asked for long, and an empty run also if `class` has no slot that it could evict.
    fn is_others(&mut self, region: Region, class: Class, has_nothing: bool) -> bool {
        let is_kept = self.slots(region).kept_for().is_some();
        let most = self.slots(region).blocks() / OTHERS.start();
        let of = self.page_move_mut(region);
        if of.class == class {
            of.others = 0;
            return false;
        }
        if !is_kept && of.emptying.is_none() {
            return false;
        }
        of.others += 1;
        let most = most.clamp(*OTHERS.start(), *OTHERS.end());
        let gives_way = of.others > most || is_kept && has_nothing;
        if gives_way {
            self.give_up_run(region);
        }
        !gives_way
    }

    /// Whether another class may have a run that is worth less than `own`. After a run that could not be had, a class
    /// looks for the next only when as many slots were freed as a page has.
    fn is_worth_a_search(&mut self, region: Region, class: Class, own: Option<Leaf>) -> bool {
        let slots = self.slots(region);
        let others = slots.classes().filter(|&other| other != class);
        let others: Vec<Class> = others.filter(|&other| slots.used(other) > 0).collect();
        let pause = slots.slots_per_page(class) as u64;
        let freed = self.freed[region.tier() as usize];
        let of = self.page_move(region);
        let kept = of.kept;
        if others.is_empty() || of.visits == 0 {
            return false;
        }
        let Some(own) = own else { return true };
        if of.in_vain.is_some_and(|then| freed < then + pause) {
            return false;
        }
        let mut others = others.into_iter();
        others.any(|other| {
            let victim = self.victim(region, other, kept);
            victim.is_some_and(|leaf| leaf.last < own.last)
        })
    }

    /// Closes the run that is worth the least for a class, of those that the entry may still look at.
    fn choose_run(&mut self, region: Region, class: Class, own: Option<Leaf>) {
        let own_worth = own.map_or(f64::INFINITY, |own| self.worth(own.last));
        let mut best = (own_worth, None);
        let mut visits = self.page_move(region).visits;
        for run in self.runs_to_look_at(region, class) {
            if visits == 0 {
                break;
            }
            let worth = self.run_worth(region, class, run, &mut visits);
            if let Some(worth) = worth.filter(|&worth| worth < best.0) {
                best = (worth, Some(run));
            }
        }
        let freed = self.freed[region.tier() as usize];
        let of = self.page_move_mut(region);
        of.visits = visits;
        if let Some(run) = best.1 {
            (of.class, of.waits, of.others) = (class, false, 0);
            of.emptying = Some(Emptying {
                run,
                unit: run.first_unit(),
                left: Vec::new(),
            });
            self.slots_mut(region).close_run(run, class);
        } else {
            (of.in_vain, of.vain, of.visits) = (Some(freed), of.vain + 1, 0);
        }
    }

    /// The runs around the other classes' next candidates, and some in turn.
    fn runs_to_look_at(&mut self, region: Region, class: Class) -> Vec<Run> {
        let slots = self.slots(region);
        let next = self.page_move(region).next;
        let others = slots.classes().filter(|&other| other != class);
        let in_turn = (next..next + OTHER_RUNS).map(|number| slots.run_number(number, class));
        let in_turn: Vec<Run> = in_turn.collect();
        self.page_move_mut(region).next += OTHER_RUNS;
        let mut around = Vec::new();
        for other in others {
            let kept = self.page_move(region).kept;
            for leaf in self.policies(region).victims(other, CANDIDATES, kept) {
                let offset = self.slot_in(region, leaf.node, other);
                around.extend(offset.map(|offset| self.slots(region).run_at(offset, class)));
            }
        }
        // Alternately: neither kind uses up the nodes that the entry may look at.
        let mut around = around.into_iter();
        let mut runs = Vec::with_capacity(in_turn.len() + around.len());
        for run in in_turn {
            runs.extend(around.next());
            runs.push(run);
        }
        runs.extend(around);
        runs
    }

    /// Offset of a readable payload of a node whose slot has the size class.
    fn slot_in(&self, region: Region, id: NodeId, class: Class) -> Option<u64> {
        let tier = region.tier();
        let mut payloads = (0u8..).zip(self.node(id).payloads());
        payloads.find_map(|(group, payload)| {
            let is_here = payload.is_readable(tier) && self.class(id, region, group) == class;
            is_here.then(|| slot_offset(payload.slot(tier)))
        })
    }

    /// Worth of a byte that was last used at the tick `last`.
    fn worth(&self, last: u64) -> f64 {
        1.0 / (1 + self.tick.saturating_sub(last)) as f64
    }

    /// Worth of a byte of a run for the classes that use it; `None` if the run must stay. Where the entry may look at
    /// fewer nodes, the first payloads stand for the others.
    fn run_worth(&self, region: Region, class: Class, run: Run, visits: &mut usize) -> Option<f64> {
        let slots = self.slots(region);
        if slots.has_withheld(run) {
            return None;
        }
        let mut lost = FxHashSet::default();
        let (mut loss, mut bytes, mut unit) = (0.0, 0, run.first_unit());
        while let Some((of, owners, next)) = slots.owners_from(run, unit) {
            if of == class {
                return None;
            }
            *visits = visits.saturating_sub(owners.len());
            for owner in owners {
                if *visits == 0 && bytes > 0 {
                    return Some(loss / bytes as f64);
                }
                loss += self.loss(region, owner, &mut lost, visits)?;
                bytes += slots.slot_bytes(of);
            }
            unit = next;
        }
        // A free run is none to empty.
        (bytes > 0).then(|| loss / slots.run_bytes(run) as f64)
    }

    /// The loss that the eviction of a payload would cause: the sum of its bytes and of those that no lookup would reach
    /// without it, each multiplied with its worth. `lost` are the nodes that are out of reach already. `None` if the
    /// payload must stay: it is in use, or a payload below, or there are too many below, or its tenant keeps it.
    fn loss(
        &self,
        region: Region,
        Owner { node: id, group }: Owner,
        lost: &mut FxHashSet<NodeId>,
        visits: &mut usize,
    ) -> Option<f64> {
        let tier = region.tier();
        let node = self.node(id);
        let payload = node.payload(group);
        if self.is_used(id) || node.uses().holds > 0 || !payload.is_readable(tier) {
            return None;
        }
        if self.page_move(region).kept.has(self.shares.of(node.ns)) {
            return None;
        }
        let bytes = self.slots(region).slot_bytes(self.class(id, region, group)) as f64;
        if !node.requires(group) {
            return Some(bytes * self.worth(node.touch().last));
        }
        let has_copy = match tier {
            Tier::Host => payload.disk == DiskState::Present,
            Tier::Disk => payload.host == HostState::Present,
        };
        // A restart would not find the payloads below, and the copy in the arena could not be evicted.
        if tier == Tier::Disk && has_copy && node.active_children(Tier::Disk) > 0 {
            return None;
        }
        let mut kept = FxHashSet::default();
        let seen = if has_copy { &mut kept } else { lost };
        let (youngest, below) = self.look_below(id, seen, visits)?;
        let lost = if has_copy { 0.0 } else { below as f64 };
        let own = if has_copy || !node.is_visible() {
            bytes
        } else {
            0.0
        };
        Some((lost + own) * self.worth(youngest))
    }

    /// Looks at a node and the nodes below, except those in `seen`. Returns the tick of their latest use, and the bytes
    /// of those that lookups reach; `None` if a node is in use or has left the index, or if there are too many nodes.
    fn look_below(
        &self,
        id: NodeId,
        seen: &mut FxHashSet<NodeId>,
        visits: &mut usize,
    ) -> Option<(u64, u64)> {
        let (mut youngest, mut bytes, mut left) = (self.node(id).touch().last, 0, BELOW_MAX);
        let mut stack = vec![id];
        while let Some(id) = stack.pop() {
            if !seen.insert(id) {
                continue;
            }
            left = left.checked_sub(1)?;
            *visits = visits.saturating_sub(1);
            work::node();
            if self.is_used(id) {
                return None;
            }
            let node = self.node(id);
            youngest = youngest.max(node.touch().last);
            if node.is_visible() {
                bytes += self.held_bytes(id);
            }
            let before = stack.len();
            stack.extend(self.forest.children(id).take(left));
            // A child that has left the index is not in the list. It is freed soon, or it keeps its ancestors in use.
            if stack.len() - before < node.children() as usize {
                return None;
            }
        }
        Some((youngest, bytes))
    }

    /// Whether a lease, a copy or an IO operation needs a node, or a payload of the node is to be written.
    fn is_used(&self, id: NodeId) -> bool {
        let node = self.node(id);
        let mut payloads = node.payloads();
        node.is_detached() || !node.is_idle() || payloads.any(|payload| payload.is_in_flight())
    }

    /// Bytes of a node's payloads in all tiers.
    fn held_bytes(&self, id: NodeId) -> u64 {
        let payloads = (0u8..).zip(self.node(id).payloads());
        let held = payloads
            .filter(|(_, payload)| payload.has_slot(Tier::Host) || payload.has_slot(Tier::Disk));
        held.map(|(group, _)| self.slot_bytes(id, group)).sum()
    }

    /// Evicts the payloads of the run being emptied, as far as the entry may still look at nodes. When the last payload is
    /// evicted, the run is kept for its class. When a payload is used, the run is opened again.
    fn go_on_emptying(&mut self, region: Region, counters: &mut Counters) {
        let Some(mut of) = self.page_move_mut(region).emptying.take() else {
            return;
        };
        // The run may have become empty by itself, and the class may have taken it already.
        while self.slots(region).kept_for().is_none() && self.slots(region).closed_for().is_some() {
            if self.page_move(region).visits == 0 {
                self.page_move_mut(region).emptying = Some(of);
                return;
            }
            if let Some(owner) = of.left.pop() {
                if !self.evict_from_run(region, of.run, owner, counters) {
                    return self.end_emptying(region, false);
                }
            } else if let Some(page) = self.slots(region).owners_from(of.run, of.unit) {
                (_, of.left, of.unit) = page;
                self.page_move_mut(region).spend(1 + of.left.len());
            } else {
                // A payload has left the index, and is still being read.
                return self.end_emptying(region, false);
            }
        }
        self.end_emptying(region, true);
    }

    fn end_emptying(&mut self, region: Region, is_empty: bool) {
        let freed = self.freed[region.tier() as usize];
        let of = self.page_move_mut(region);
        if is_empty {
            (of.in_vain, of.vain) = (None, 0);
            self.moves.runs += 1;
        } else {
            // The class that asks again and again may itself use the payload.
            (of.in_vain, of.vain) = (Some(freed), of.vain + 1);
            self.slots_mut(region).open_run();
        }
    }

    /// Evicts a payload of a run, unless it has left the run. False if it must stay.
    fn evict_from_run(
        &mut self,
        region: Region,
        run: Run,
        owner: Owner,
        counters: &mut Counters,
    ) -> bool {
        let (tier, Owner { node: id, group }) = (region.tier(), owner);
        if !self.forest.is_used(id) || !self.is_in_run(region, run, owner) {
            return true;
        }
        let mut visits = self.page_move(region).visits;
        let loss = self.loss(region, owner, &mut FxHashSet::default(), &mut visits);
        self.page_move_mut(region).visits = visits;
        if loss.is_none() {
            return false;
        }
        self.page_move_mut(region).spend(EVICTION_VISITS);
        work::eviction();
        self.evict_payload((id, group), tier, counters);
        if let Some(parent) = self.parent(id) {
            self.inherit_touch(parent, self.node(id).touch());
        }
        if self.node(id).children() > 0 && self.lacks_payload(id) {
            let hidden = self.make_gap(id);
            self.page_move_mut(region).spend(hidden as usize);
        }
        self.reconcile(id);
        true
    }

    /// Whether a payload of a live node lies in a run.
    fn is_in_run(&self, region: Region, run: Run, Owner { node: id, group }: Owner) -> bool {
        let tier = region.tier();
        let node = self.node(id);
        let is_group = node.groups().any(|of| of == group);
        is_group && node.payload(group).has_slot(tier) && self.region(id, tier) == region && {
            let offset = slot_offset(node.payload(group).slot(tier));
            self.slots(region).is_in(run, offset)
        }
    }
}
