//! The invariants of promotions.

use std::collections::{HashMap, HashSet};

use crate::forest::NodeId;

use super::super::ensure::ensure;
use super::super::fetch::Shares;
use super::super::ids::RequestId;
use super::Promotions;

impl Promotions {
    /// Whether every invariant holds, while the payloads in `reading` are being read.
    pub(crate) fn check(
        &self,
        shares: &Shares,
        reading: &HashSet<(NodeId, u8)>,
    ) -> Result<(), String> {
        for (node, group) in self.waiters.keys() {
            ensure!(
                reading.contains(&(*node, *group)),
                "node {node} group {group}: awaited and not read"
            );
        }
        let mut waiting: HashMap<RequestId, u32> = HashMap::new();
        for &(id, started) in self.waiters.values().flatten() {
            let share = shares.get(id);
            if share.is_some_and(|of| of.started == started && of.waits.disk.is_some()) {
                *waiting.entry(id).or_default() += 1;
            }
        }
        let (mut held, mut prefetched, mut reserved, mut places) = (0, 0, 0, 0);
        for (id, share) in shares {
            held += share.bytes;
            if !share.demanded {
                prefetched += share.bytes;
            }
            let Some(promotion) = &share.waits.disk else {
                continue;
            };
            reserved += promotion.reserved.unwrap_or(0);
            let (has, expected) = (promotion.waiting, waiting.get(&id).copied().unwrap_or(0));
            ensure!(
                has == expected,
                "{id:?} waits for {has} reads, {expected} know of it"
            );
            let Some(place) = promotion.place else {
                ensure!(
                    promotion.is_issued() && has > 0,
                    "{id:?}: no entry goes on with its promotion"
                );
                continue;
            };
            places += 1;
            ensure!(
                self.read_queues.at(place) == Some(id) && place.is_of(share.priority()),
                "{id:?} is not where it should wait: {place:?}"
            );
        }
        let queued = self.read_queues.len();
        ensure!(
            queued == places,
            "{queued} places in the read queues, {places} requests in them"
        );
        let counted = self.budget.counted();
        ensure!(
            counted == (held, prefetched, reserved),
            "bytes held, prefetched and reserved {counted:?}, of requests {held}, {prefetched} and {reserved}"
        );
        Ok(())
    }
}
