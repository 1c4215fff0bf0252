//! A run of pages is emptied for another size class, in steps: the payloads that lie there go, and no others.

use crate::forest::Tier;
use crate::metrics::Counters;
use crate::slots::{Class, Owner};
use crate::work;

use super::geometry::Region;
use super::run_loss::RunLoss;
use super::slots::Loss;
use super::state::Residency;

/// What an eviction costs, in nodes that are looked at.
const EVICTION_VISITS: u32 = 16;

/// A run that is being emptied. It is closed: nothing new comes to it.
#[derive(Debug)]
pub(super) struct Emptying {
    /// The payloads that are left, and the nodes that have to stay unused.
    pub(super) run: RunLoss,
}

impl Residency {
    /// Begins to empty a run for `class`.
    pub(super) fn start_emptying(&mut self, region: Region, class: Class, run: RunLoss) {
        self.slots_mut(region).open_run();
        self.slots_mut(region).close_run(run.run, class);
        self.search_mut(region).emptying = Some(Emptying { run });
    }

    /// Evicts one payload of the run being emptied. The run is kept for its class when the last one has gone, and left
    /// as it is when one is used.
    pub(super) fn go_on_emptying(&mut self, region: Region, counters: &mut Counters) {
        let freed = self.freed[region.tier() as usize];
        let search = self.search_mut(region);
        let Some(emptying) = &mut search.emptying else {
            return;
        };
        if emptying.run.is_used {
            search.emptying = None;
            self.slots_mut(region).open_run();
            return;
        }
        let Some((owner, epoch)) = emptying.run.payloads.pop() else {
            search.emptying = None;
            search.emptied = freed;
            self.moves.runs += 1;
            if self.slots(region).kept_for().is_none() {
                // A payload that nobody finds any more is still being read.
                self.slots_mut(region).open_run();
            }
            return;
        };
        search.spend(EVICTION_VISITS);
        if self.forest.is_live(owner.node, epoch) {
            let hidden = self.evict_payload(region, owner, counters);
            self.search_mut(region).spend(hidden);
        }
    }

    /// Evicts a payload that is in no use; returns how many nodes lookups do not reach any more.
    fn evict_payload(
        &mut self,
        region: Region,
        Owner { node: id, group }: Owner,
        counters: &mut Counters,
    ) -> u32 {
        let tier = region.tier();
        let node = self.node(id);
        // It may have gone by itself.
        if !node.payload(group).has_slot(tier)
            || node.is_detached()
            || self.region(id, tier) != region
        {
            return 0;
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
        let mut hidden = 0;
        if self.node(id).children() > 0 && self.lacks_payload(id) {
            hidden = self.make_gap(id);
        }
        self.reconcile(id);
        hidden
    }
}
