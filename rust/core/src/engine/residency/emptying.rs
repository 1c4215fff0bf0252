//! A run of pages is emptied for another size class, in steps: exactly the payloads in the run are evicted.

use crate::forest::Tier;
use crate::metrics::Counters;
use crate::slots::{Class, Owner};
use crate::work;

use super::geometry::Region;
use super::run_loss::RunLoss;
use super::slots::Loss;
use super::state::Residency;

/// Cost of an eviction, in nodes that are looked at.
const EVICTION_VISITS: u32 = 16;

/// A run that is being emptied. It is closed: no slot of the run is allocated.
#[derive(Debug)]
pub(super) struct Emptying {
    /// The payloads that are left in the run, and the nodes that have to stay unused.
    pub(super) run: RunLoss,
}

impl Residency {
    /// Begins to empty a run for `class`.
    pub(super) fn start_emptying(&mut self, region: Region, class: Class, run: RunLoss) {
        self.slots_mut(region).open_run();
        self.slots_mut(region).close_run(run.run, class);
        self.search_mut(region).emptying = Some(Emptying { run });
    }

    /// Evicts one payload of the run being emptied. When the last payload is evicted, the run is kept for its class.
    /// When a payload is used, the run is opened again.
    pub(super) fn go_on_emptying(&mut self, region: Region, counters: &mut Counters) {
        let Some(emptying) = &mut self.search_mut(region).emptying else {
            return;
        };
        let next = emptying.run.payloads.pop();
        let is_last = emptying.run.payloads.is_empty();
        if emptying.run.is_used {
            // The run may have become empty before, and the class may have taken it already.
            let is_taken = self.slots(region).closed_for().is_none();
            self.end_emptying(region, is_taken);
            return;
        }
        if let Some((owner, epoch)) = next {
            self.search_mut(region).spend(EVICTION_VISITS);
            if self.forest.is_live(owner.node, epoch) {
                let hidden = self.evict_payload(region, owner, counters);
                self.search_mut(region).spend(hidden);
            }
        }
        if is_last {
            self.end_emptying(region, true);
        }
    }

    /// Evicts a payload that is not in use. Returns how many nodes lookups no longer reach.
    fn evict_payload(
        &mut self,
        region: Region,
        Owner { node: id, group }: Owner,
        counters: &mut Counters,
    ) -> u32 {
        let tier = region.tier();
        let node = self.node(id);
        // The payload may have left the tier meanwhile.
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
