//! How long a request waits for its promotion.

use crate::session::PromotionWait;

use super::coordinator::Engine;
use super::fetch::Promotion;
use super::ids::RequestId;
use super::promotions::QueuePlace;

/// A device that was not polled for this many times the limit counts as stalled.
const NO_POLL_STALLS: u64 = 5;

impl Engine {
    /// Whether a request that may gain `gain` tokens has waited for long enough, or waits for a
    /// device that does not answer.
    pub(super) fn is_late(&self, id: RequestId, gain: u32) -> bool {
        let waits = &self.shares[id].waits;
        let since_ns = waits.since_ns.unwrap_or(self.now_ns);
        let waited = match waits.limit.unwrap_or(self.config.promotion_wait) {
            PromotionWait::Complete => false,
            PromotionWait::Planned => self.plan_stops(id).is_some(),
            PromotionWait::Limit {
                base_ns,
                per_1k_tokens_ns,
            } => {
                let part = u128::from(per_1k_tokens_ns) * u128::from(gain) / 1000;
                let since = self.now_ns - since_ns;
                u128::from(since) >= u128::from(base_ns) + part
            }
        };
        let promotion = waits.disk.as_ref();
        waited || promotion.is_some_and(|promotion| self.is_stalled(promotion))
    }

    /// Whether a promotion waits for a device that does not answer. A promotion that waits for its turn is not stalled,
    /// however long it waits.
    pub(super) fn is_stalled(&self, promotion: &Promotion) -> bool {
        // If the process was delayed, its reads may have ended meanwhile. But a device may block the polling thread for
        // ever.
        let polled_ns = self.last_poll_ns.max(promotion.started_ns);
        let stall_ns = self.config.stall_ns;
        let after =
            |since_ns: u64, stalls: u64| since_ns.saturating_add(stall_ns.saturating_mul(stalls));
        if self.now_ns >= after(polled_ns, NO_POLL_STALLS) {
            return true;
        }
        // Reads in flight end, or their device is known not to answer. A read that finds no memory waits while other
        // reads of its device end. If none ends, the requests that hold the memory may be waiting for this request.
        let device = promotion.place.and_then(QueuePlace::device);
        let (Some(device), Some(short_ns)) = (device, promotion.short_ns) else {
            return false;
        };
        let since_ns = self.operations.read_progress_ns(device).max(short_ns);
        self.last_poll_ns >= after(since_ns, 1)
    }
}
