//! Pages move between size classes: the search for the run of pages to move, over several entries.
//!
//! A page holds parts of many chains. Evicting leaves alone would not empty it, and evicting everything below its
//! nodes would empty most of an aged tier. So exactly the payloads in the run are evicted (`emptying`). The
//! payloads below them stay, out of reach until a request saves the missing payloads again.
//!
//! The loss is added up node by node (`run_loss`). Between two entries, requests use the engine: a run is evicted
//! only if none of the nodes that were looked at was used meanwhile ([`Residency::note_use`]).

use std::collections::VecDeque;

use crate::forest::{NodeId, Tier};
use crate::metrics::Counters;
use crate::policy::Leaf;
use crate::slots::{Class, Run, slot_offset};

use super::asker::Asker;
use super::emptying::Emptying;
use super::geometry::Region;
use super::run_loss::RunLoss;
use super::state::Residency;

/// Number of candidates in each set of each other size class around which a search looks at runs.
const CANDIDATES: usize = 6;
/// Further runs that a search looks at in turn, so that searches reach the whole region in time.
const OTHER_RUNS: u64 = 8;
/// Nodes that a search looks at for one run, on average: many small runs, or few with long chains below.
const RUN_VISITS: [u32; 4] = [2048, 512, 4096, 1024];
/// After this many searches in vain, a payload is refused; until then it waits for the next search.
const VAIN_MAX: usize = 16;
/// How far a region was searched.
#[derive(Debug, Default)]
pub(super) struct RunSearch {
    /// Number of the run to look at next.
    next: u64,
    /// Number of slots freed in the tier when the last search found no run of less worth.
    in_vain: Option<u64>,
    /// Consecutive searches that found nothing.
    vain: usize,
    /// Nodes that the present entry may still look at.
    pub(super) visits: u32,
    pub(super) pass: Option<Pass>,
    pub(super) emptying: Option<Emptying>,
    /// The asker of the present search, or of the last one.
    pub(super) asker: Option<Asker>,
}

/// One search, for a size class that needs room.
#[derive(Debug)]
pub(super) struct Pass {
    class: Class,
    /// Worth of a byte of the class's own next candidate.
    own_worth: f64,
    /// Nodes that are looked at for one run.
    run_visits: u32,
    /// Runs to look at.
    runs: VecDeque<Run>,
    /// The run being looked at.
    at: Option<RunLoss>,
    /// The run with the least loss, of the runs that may be evicted.
    best: Option<RunLoss>,
}

/// Counters of pages that moved between size classes since the start.
#[derive(Clone, Copy, Debug, Default)]
pub struct Moves {
    /// Runs of pages that another class got.
    pub runs: u64,
    /// Payloads evicted from runs while others depended on them.
    pub gaps: u64,
    /// Payloads of gaps that were saved again.
    pub filled_gaps: u64,
}

impl Pass {
    /// Whether all runs have been looked at.
    fn is_over(&self) -> bool {
        self.at.is_none() && self.runs.is_empty()
    }
}

impl RunSearch {
    pub(super) fn spend(&mut self, visits: u32) {
        self.visits = self.visits.saturating_sub(visits);
    }

    pub(super) fn is_under_way(&self) -> bool {
        self.pass.is_some() || self.emptying.is_some()
    }

    /// Whether the class that the search is for waits for its end.
    fn is_waited_for(&self) -> bool {
        self.asker.is_some_and(|asker| asker.waits)
    }

    /// Whether the search goes on although its class does not ask: the search looks at pages for every class, and
    /// empties a run only for a class that waits.
    fn goes_on(&self) -> bool {
        match &self.pass {
            Some(pass) => !pass.is_over() || self.is_waited_for(),
            None => self.emptying.is_some() && self.is_waited_for(),
        }
    }

    /// The runs whose nodes were looked at.
    fn watched(&mut self) -> impl Iterator<Item = &mut RunLoss> {
        let of_pass = self.pass.iter_mut();
        let of_pass = of_pass.flat_map(|pass| pass.at.iter_mut().chain(&mut pass.best));
        of_pass.chain(self.emptying.iter_mut().map(|emptying| &mut emptying.run))
    }
}

impl Residency {
    pub(super) fn search_mut(&mut self, region: Region) -> &mut RunSearch {
        &mut self.searches[region.index()]
    }

    fn search(&self, region: Region) -> &RunSearch {
        &self.searches[region.index()]
    }

    pub(in crate::engine) fn moves(&self) -> Moves {
        self.moves
    }

    /// Allows the entry of the engine that begins now to look at about `visits` nodes of each region.
    pub(in crate::engine) fn allow_searches(&mut self, visits: u32) {
        self.searches
            .iter_mut()
            .for_each(|search| search.visits = visits);
    }

    /// Whether a region has no room because the search for a run goes on in the next entry. After many searches in
    /// vain, no caller waits until a slot is freed: a new search begins when the last ends, so the wait might never
    /// end.
    pub(super) fn is_searching(&self, region: Region) -> bool {
        let search = self.search(region);
        let freed = self.freed[region.tier() as usize];
        let is_hopeless =
            search.vain >= VAIN_MAX && search.in_vain == Some(freed) && search.emptying.is_none();
        (search.is_under_way() || search.visits == 0) && !is_hopeless
    }

    /// Whether a search of a region is under way.
    pub(super) fn is_at_work(&self, region: Region) -> bool {
        self.search(region).is_under_way()
    }

    /// Ends the search for a page to withhold: no page is to be withheld any more.
    pub(super) fn end_withholding(&mut self, region: Region) {
        let of_pass = self.search(region).pass.as_ref().map(|pass| pass.class);
        let classes = [of_pass, self.slots(region).closed_for()];
        let mut classes = classes.into_iter().flatten();
        if classes.any(|class| self.slots(region).withholds(class)) {
            let search = self.search_mut(region);
            (search.pass, search.emptying) = (None, None);
            self.slots_mut(region).open_run();
        }
    }

    /// Whether a search for a size class is under way.
    pub(super) fn is_searching_for(&self, region: Region, class: Class) -> bool {
        let search = self.search(region);
        let pass = search.pass.as_ref();
        pass.is_some_and(|pass| pass.class == class)
            || search.emptying.is_some() && self.slots(region).closed_for() == Some(class)
    }

    /// Whether a search is under way that goes on although no class asks.
    pub(in crate::engine) fn has_searches(&self) -> bool {
        self.searches.iter().any(RunSearch::goes_on)
    }

    /// Continues the searches that go on although no class asks.
    pub(in crate::engine) fn continue_searches(&mut self, counters: &mut Counters) {
        let disks = self.devices().map(Region::Disk);
        for region in std::iter::once(Region::Host).chain(disks) {
            if self.search(region).is_waited_for() {
                self.go_on(region, counters);
            } else if let Some(mut pass) = self.search_mut(region).pass.take() {
                while self.search(region).visits > 0 && !self.go_on_with(region, &mut pass) {}
                self.search_mut(region).pass = Some(pass);
            }
        }
    }

    /// Notes that a node is used from now on, or gets a child: a run with payloads of its ancestors stays.
    pub(super) fn note_use(&mut self, id: NodeId) {
        let searches = self.searches.iter_mut();
        for run in searches.flat_map(RunSearch::watched) {
            run.note_use(id);
        }
    }

    /// Notes that a class takes a slot of a region: the class does not wait any more, and a run around the slot has
    /// another payload.
    pub(super) fn note_slot(&mut self, region: Region, class: Class, offset: u64) {
        if !self.search(region).is_under_way() {
            return;
        }
        self.note_refusal(region, class, false);
        let mut search = std::mem::take(self.search_mut(region));
        for run in search.watched() {
            if self.slots(region).is_in(run.run, offset) {
                run.is_used = true;
            }
        }
        *self.search_mut(region) = search;
    }

    /// Continues the search for a run of other classes' pages that is worth less than the same bytes of `own`, the
    /// class's own next candidate, and empties the run. Returns whether the class has room now.
    pub(super) fn take_run(
        &mut self,
        region: Region,
        class: Class,
        own: Option<Leaf>,
        counters: &mut Counters,
    ) -> bool {
        if self.is_others(region, class, own.is_none()) {
            return !self.slots(region).is_full(class);
        }
        self.go_on(region, counters);
        if !self.search(region).is_under_way() && self.slots(region).kept_for().is_none() {
            self.start_search(region, class, own);
            self.go_on(region, counters);
        }
        !self.slots(region).is_full(class)
    }

    /// Continues a search, as far as the entry may still look at nodes.
    fn go_on(&mut self, region: Region, counters: &mut Counters) {
        while self.search(region).visits > 0 {
            if self.search(region).emptying.is_some() {
                self.go_on_emptying(region, counters);
            } else if let Some(mut pass) = self.search_mut(region).pass.take() {
                if self.go_on_with(region, &mut pass) {
                    self.end_search(region, pass);
                } else {
                    self.search_mut(region).pass = Some(pass);
                }
            } else {
                return;
            }
        }
    }

    fn start_search(&mut self, region: Region, class: Class, own: Option<Leaf>) {
        if !self.is_worth_a_search(region, class, own) {
            return;
        }
        let runs = self.runs_to_look_at(region, class);
        let own_worth = own.map_or(f64::INFINITY, |own| self.worth(own.last));
        let search = self.search_mut(region);
        search.asker = Some(Asker::new(class));
        search.spend(runs.len() as u32);
        search.pass = Some(Pass {
            class,
            own_worth,
            run_visits: RUN_VISITS[search.vain % RUN_VISITS.len()],
            runs,
            at: None,
            best: None,
        });
    }

    /// Looks at one more payload. Returns whether all runs have been looked at.
    fn go_on_with(&mut self, region: Region, pass: &mut Pass) -> bool {
        let Some(mut at) = pass.at.take() else {
            let Some(run) = pass.runs.pop_front() else {
                return true;
            };
            self.search_mut(region).spend(1);
            if self.slots(region).has_withheld(run) {
                return false;
            }
            let bytes = self.slots(region).run_bytes(run) as f64;
            let best = pass.best.as_ref().filter(|best| !best.is_used);
            let most = best.map_or(pass.own_worth, |best| best.loss / best.bytes) * bytes;
            pass.at = Some(RunLoss::new(run, bytes, most, pass.run_visits));
            return false;
        };
        let (visits, ended) = self.add_up(region, pass.class, &mut at);
        self.search_mut(region).spend(visits);
        match ended {
            None => pass.at = Some(at),
            Some(true) if !at.is_used && at.loss < at.most => pass.best = Some(at),
            Some(_) => {}
        }
        false
    }

    /// Ends a search, and begins to empty the best run.
    fn end_search(&mut self, region: Region, pass: Pass) {
        let freed = self.freed[region.tier() as usize];
        if let Some(best) = pass.best.filter(|best| !best.is_used) {
            if self.slots(region).is_free(best.run) {
                // The run has become empty meanwhile.
                let search = self.search_mut(region);
                (search.in_vain, search.vain) = (None, 0);
                return;
            }
            if self.slots(region).is_whole(best.run) {
                self.start_emptying(region, pass.class, best);
                return;
            }
        }
        let search = self.search_mut(region);
        (search.in_vain, search.visits) = (Some(freed), 0);
        search.vain += 1;
    }

    /// Ends the emptying of a run: the run is empty, or it stays because a node is used. The class that asks again and
    /// again may itself use the node, so a run that stays counts as a search in vain.
    pub(super) fn end_emptying(&mut self, region: Region, is_empty: bool) {
        let freed = self.freed[region.tier() as usize];
        let search = self.search_mut(region);
        search.emptying = None;
        if is_empty {
            (search.in_vain, search.vain) = (None, 0);
            self.moves.runs += 1;
        } else {
            (search.in_vain, search.vain) = (Some(freed), search.vain + 1);
        }
        if !is_empty || self.slots(region).kept_for().is_none() {
            // The remaining payloads are used, or have left the index and are still being read.
            self.slots_mut(region).open_run();
        }
    }

    /// Whether another class may have a run that is worth less than `own`. After a search in vain, the next search
    /// begins only when as many slots were freed as a page has.
    fn is_worth_a_search(&mut self, region: Region, class: Class, own: Option<Leaf>) -> bool {
        let slots = self.slots(region);
        let others = slots.classes().filter(|&other| other != class);
        let others: Vec<Class> = others.filter(|&other| slots.used(other) > 0).collect();
        let pause = slots.slots_per_page(class) as u64;
        let freed = self.freed[region.tier() as usize];
        let search = self.search(region);
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

    /// The runs that a search looks at: some in turn, and the runs around the other classes' next candidates.
    fn runs_to_look_at(&mut self, region: Region, class: Class) -> VecDeque<Run> {
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
        let mut runs = VecDeque::new();
        // Alternately: neither kind uses up the nodes that the search may look at.
        for number in next..next + OTHER_RUNS {
            runs.push_back(self.slots(region).run_number(number, class));
            runs.extend(around.next());
        }
        runs.extend(around);
        runs
    }

    /// Offset of a readable payload of a node whose slot has the size class.
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
}
