//! Pages move between size classes: which run of pages goes, and what becomes of the chains through it.
//!
//! A page holds parts of many chains. Leaves alone would not empty it, and to evict all that stands on its
//! nodes would empty most of an aged tier. So exactly the payloads in the run go. What stands on them
//! stays, out of reach until a request saves the missing payloads again.

use rustc_hash::FxHashSet;

use crate::forest::{DiskState, HostState, NodeId, Tier};
use crate::metrics::Counters;
use crate::policy::Leaf;
use crate::slots::{Class, Owner, Run, slot_offset};
use crate::work;

use super::geometry::Region;
use super::slots::Loss;
use super::state::Residency;

/// Candidates of each set of each other size class whose runs a search looks at.
const CANDIDATES: usize = 6;
/// Runs that a search looks at beside these: in time, the whole region.
const OTHER_RUNS: u64 = 8;
/// Nodes that the searches of one entry look at, for each region: bounds their work.
const VISITS_MAX: u32 = 4096;
/// Nodes that it looks at for one run: so many runs are looked at, or few that much stands on.
const RUN_VISITS: [u32; 4] = [2048, 512, VISITS_MAX, 1024];
/// Searches in vain after which a payload is refused: until then it waits for the next one.
const VAIN_MAX: usize = 16;

/// How far a region was searched.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RunSearch {
    /// Number of the run to look at next.
    next: u64,
    /// Slots of the tier that had been freed when no run was worth it.
    in_vain: Option<u64>,
    /// Searches in vain, one after the other.
    vain: usize,
    /// Nodes that the present entry may still look at.
    visits: u32,
}

/// What the size classes have done to each other since the start.
#[derive(Clone, Copy, Debug, Default)]
pub struct Moves {
    /// Runs of pages that another class got.
    pub runs: u64,
    /// Payloads evicted from runs while others stood on them.
    pub gaps: u64,
    /// Of these, those that were saved again.
    pub filled_gaps: u64,
}

/// What evicting a run would lose, while it is being added up.
struct RunLoss {
    /// Bytes, each divided by the ticks since its last use.
    loss: f64,
    /// Nodes that may still be looked at.
    visits: u32,
    /// Nodes whose payloads are counted as lost.
    unreachable: FxHashSet<NodeId>,
}

impl Residency {
    fn search_mut(&mut self, region: Region) -> &mut RunSearch {
        match region {
            Region::Host => &mut self.searches[0],
            Region::Disk(device) => &mut self.searches[1 + device.index()],
        }
    }

    pub(in crate::engine) fn moves(&self) -> Moves {
        self.moves
    }

    /// An entry of the engine begins that may need room: each region may be searched again.
    pub(in crate::engine) fn allow_searches(&mut self) {
        self.searches
            .iter_mut()
            .for_each(|search| search.visits = VISITS_MAX);
    }

    /// Whether a region has no room because the search for a run goes on in the next entry.
    pub(super) fn is_searching(&self, region: Region) -> bool {
        let search = match region {
            Region::Host => &self.searches[0],
            Region::Disk(device) => &self.searches[1 + device.index()],
        };
        search.visits == 0 && search.vain < VAIN_MAX
    }

    /// The run of other classes' pages whose eviction loses least, of those that a search looks at: nothing
    /// there is in use, and it is worth less than the same bytes of `own`, the class's own next candidate.
    pub(super) fn cheapest_run(
        &mut self,
        region: Region,
        class: Class,
        own: Option<Leaf>,
    ) -> Option<Run> {
        if !self.is_worth_a_search(region, class, own) {
            return None;
        }
        let own_worth = own.map_or(f64::INFINITY, |own| self.worth(own.last));
        let mut best: Option<(f64, Run)> = None;
        let mut visits = self.search_mut(region).visits;
        let run_visits = RUN_VISITS[self.search_mut(region).vain % RUN_VISITS.len()];
        for run in self.runs_to_look_at(region, class) {
            let bytes = self.slots(region).run_bytes(run) as f64;
            let most = best.map_or(own_worth, |(least, _)| least) * bytes;
            let allowed = visits.min(run_visits);
            let mut losses = RunLoss {
                loss: 0.0,
                visits: allowed,
                unreachable: FxHashSet::default(),
            };
            let may_go = self.add_up(region, class, run, most, &mut losses);
            visits -= allowed - losses.visits;
            if may_go && losses.loss < most {
                best = Some((losses.loss / bytes, run));
            }
        }
        let freed = self.freed[region.tier() as usize];
        let search = self.search_mut(region);
        search.visits = if best.is_none() { 0 } else { visits };
        search.in_vain = best.is_none().then_some(freed);
        search.vain = if best.is_none() { search.vain + 1 } else { 0 };
        best.map(|(_, run)| run)
    }

    /// Whether another class may have a run that is worth less than `own`. After a search in vain, as many
    /// slots are freed as a page has before the next one.
    fn is_worth_a_search(&mut self, region: Region, class: Class, own: Option<Leaf>) -> bool {
        let slots = self.slots(region);
        let others = slots.classes().filter(|&other| other != class);
        let others: Vec<Class> = others.filter(|&other| slots.used(other) > 0).collect();
        let pause = slots.slots_per_page(class) as u64;
        let freed = self.freed[region.tier() as usize];
        let search = *self.search_mut(region);
        if others.is_empty() || search.visits == 0 {
            return false;
        }
        let Some(own) = own else { return true };
        if search.in_vain.is_some_and(|then| freed < then + pause) {
            return false;
        }
        let mut victims = others
            .into_iter()
            .filter_map(|other| self.victim(region, other));
        victims.any(|leaf| leaf.last < own.last)
    }

    /// Some in turn, and those around the other classes' next candidates.
    fn runs_to_look_at(&mut self, region: Region, class: Class) -> Vec<Run> {
        let next = self.search_mut(region).next;
        self.search_mut(region).next = next + OTHER_RUNS;
        let others = self.slots(region).classes();
        let mut around = Vec::new();
        for other in others.filter(|&other| other != class) {
            for leaf in self.policies(region).victims(other, CANDIDATES) {
                let offset = self.slot_in(region, leaf.node, other);
                around.extend(offset.map(|offset| self.slots(region).run_at(offset, class)));
            }
        }
        let mut around = around.into_iter();
        let mut runs = Vec::new();
        // In turns: neither kind uses up what may be looked at.
        for number in next..next + OTHER_RUNS {
            runs.push(self.slots(region).run_number(number, class));
            runs.extend(around.next());
        }
        runs.extend(around);
        runs
    }

    /// Offset of a readable payload of a node that lies in a size class.
    fn slot_in(&self, region: Region, id: NodeId, class: Class) -> Option<u64> {
        let tier = region.tier();
        (0u8..)
            .zip(self.node(id).payloads())
            .find_map(|(group, payload)| {
                let slot = match tier {
                    Tier::Host => payload.host_slot,
                    Tier::Disk => payload.disk_slot,
                };
                let is_here = payload.is_readable(tier) && self.class(id, region, group) == class;
                is_here.then(|| slot_offset(slot))
            })
    }

    /// Expected use of a byte that was last used at a tick.
    fn worth(&self, last: u64) -> f64 {
        1.0 / (1 + self.tick.saturating_sub(last)) as f64
    }

    /// Adds up what evicting a run would lose, until that is `most`. False if something there must stay.
    fn add_up(
        &self,
        region: Region,
        class: Class,
        run: Run,
        most: f64,
        losses: &mut RunLoss,
    ) -> bool {
        for (of, owner) in self.slots(region).owners(run) {
            if of == class || !self.add_payload(region, owner, losses) {
                return false;
            }
            if losses.loss >= most {
                return true;
            }
        }
        true
    }

    /// Adds one payload, and those that no lookup reaches without it. False if it must stay.
    fn add_payload(&self, region: Region, owner: Owner, losses: &mut RunLoss) -> bool {
        let (tier, id) = (region.tier(), owner.node);
        let node = self.node(id);
        let payload = node.payload(owner.group);
        let Some(visits) = losses.visits.checked_sub(1) else {
            return false;
        };
        losses.visits = visits;
        if self.is_used(id) || node.uses().holds > 0 || !payload.is_readable(tier) {
            return false;
        }
        let bytes = self
            .slots(region)
            .slot_bytes(self.class(id, region, owner.group)) as f64;
        if !node.requires(owner.group) {
            losses.loss += bytes * self.worth(node.touch().last);
            return true;
        }
        let has_copy = match tier {
            Tier::Host => payload.disk == DiskState::Present,
            Tier::Disk => payload.host == HostState::Present,
        };
        // A restart would not find those below, and the copy in the arena could not leave it.
        if tier == Tier::Disk && has_copy && node.active_children(Tier::Disk) > 0 {
            return false;
        }
        let Some(last) = self.look_below(id, losses, !has_copy) else {
            return false;
        };
        if has_copy || !node.is_visible() {
            losses.loss += bytes * self.worth(last);
        }
        true
    }

    /// Looks at a node and those below. Returns the tick at which one of them was used last, `None` if one
    /// is in use or has left the index, or there are too many. Adds what `lost` ones are worth, each once.
    fn look_below(&self, id: NodeId, losses: &mut RunLoss, lost: bool) -> Option<u64> {
        let mut youngest = self.node(id).touch().last;
        let mut bytes = 0.0;
        let mut stack = vec![id];
        while let Some(id) = stack.pop() {
            if losses.unreachable.contains(&id) {
                continue;
            }
            losses.visits = losses.visits.checked_sub(1)?;
            work::node();
            if self.is_used(id) {
                return None;
            }
            let node = self.node(id);
            youngest = youngest.max(node.touch().last);
            if lost {
                losses.unreachable.insert(id);
                if node.is_visible() {
                    bytes += self.held_bytes(id) as f64;
                }
            }
            let before = stack.len();
            let most = losses.visits as usize;
            stack.extend(self.forest.children(id).take(most));
            // A child that has left the index is not listed: it goes soon, or is in use, with what is above.
            if stack.len() - before < node.children() as usize {
                return None;
            }
        }
        losses.loss += bytes * self.worth(youngest);
        Some(youngest)
    }

    /// Whether a lease, a copy or an IO operation needs a node, or one of its payloads is to be written.
    fn is_used(&self, id: NodeId) -> bool {
        let node = self.node(id);
        let mut payloads = node.payloads();
        node.is_detached() || !node.is_idle() || payloads.any(|payload| payload.is_in_flight())
    }

    /// Bytes of a node's payloads, in whatever tier.
    fn held_bytes(&self, id: NodeId) -> u64 {
        let payloads = (0u8..).zip(self.node(id).payloads());
        let held = payloads
            .filter(|(_, payload)| payload.has_slot(Tier::Host) || payload.has_slot(Tier::Disk));
        held.map(|(group, _)| self.slot_bytes(id, group)).sum()
    }

    /// Evicts all payloads of a run, none of which is in use.
    pub(super) fn empty_run(&mut self, region: Region, run: Run, counters: &mut Counters) {
        let owners = self.slots(region).owners(run).map(|(_, owner)| owner);
        let mut payloads: Vec<(Owner, u32)> = owners
            .map(|owner| (owner, self.node(owner.node).epoch))
            .collect();
        // Children first: a node without children and payloads goes.
        self.moves.runs += 1;
        payloads.sort_by_key(|(owner, _)| std::cmp::Reverse(self.node(owner.node).depth));
        for (owner, epoch) in payloads {
            if self.forest.is_live(owner.node, epoch) {
                self.evict_payload(region.tier(), owner, counters);
            }
        }
    }

    fn evict_payload(
        &mut self,
        tier: Tier,
        Owner { node: id, group }: Owner,
        counters: &mut Counters,
    ) {
        if !self.node(id).payload(group).has_slot(tier) {
            return;
        }
        work::eviction();
        match tier {
            Tier::Host => {
                counters.host_evictions += 1;
                self.free_host(id, group, Loss::Evicted);
            }
            Tier::Disk => {
                counters.disk_evictions += 1;
                self.free_disk(id, group, Loss::Evicted);
            }
        }
        if let Some(parent) = self.parent(id) {
            self.inherit_touch(parent, tier, self.node(id).touch().last);
        }
        if self.node(id).children() > 0 && self.lacks_payload(id) {
            self.make_gap(id);
        }
        self.reconcile(id);
    }
}
