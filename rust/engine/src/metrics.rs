//! The engine's counters and gauges. Plain numbers, since one thread at a time owns them.

use serde::Serialize;
use undercroft_contract::explain::Reason;

/// An order to a running engine: of an operator, or of a vLLM that resets its cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names are those of the commands")]
pub enum Order {
    Clear,
    Drain,
    Resize,
    Pin,
    Unpin,
    Reset,
}

impl Order {
    /// The name in logs and metrics: that of the command.
    pub fn name(self) -> &'static str {
        match self {
            Self::Clear => "clear",
            Self::Drain => "drain",
            Self::Resize => "resize",
            Self::Pin => "pin",
            Self::Unpin => "unpin",
            Self::Reset => "reset",
        }
    }
}

/// Counters since the start. Bytes are payload bytes; `_ns` are sums of durations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[expect(
    missing_docs,
    reason = "the names say it; undercroft.connector.observe.stats documents each"
)]
pub struct Counters {
    pub promotions: u64,
    pub promotion_ns: u64,
    pub promotions_cancelled: u64,
    pub promotions_given_up: u64,
    pub disk_reads: u64,
    pub disk_read_bytes: u64,
    pub disk_read_ns: u64,
    pub disk_writes: u64,
    pub disk_write_bytes: u64,
    pub disk_write_ns: u64,
    pub saved_blocks: u64,
    pub deduplicated_blocks: u64,
    pub refused_host_full: u64,
    pub refused_disk_full: u64,
    pub refused_write_rate: u64,
    pub refused_disk_behind: u64,
    pub refused_admission: u64,
    pub refused_disk_degraded: u64,
    pub host_evictions: u64,
    pub disk_evictions: u64,
    pub checksum_failures: u64,
    pub host_checksum_failures: u64,
    pub decryption_failures: u64,
    pub read_failures: u64,
    pub write_failures: u64,
    pub load_failures: u64,
    pub save_failures: u64,
    pub given_up_loads_reset: u64,
    pub given_up_loads_closed: u64,
    pub given_up_saves_reset: u64,
    pub given_up_saves_weights: u64,
    pub given_up_saves_closed: u64,
    pub given_up_saves_retry: u64,
    pub plans_load_faster: u64,
    pub plans_load_unknown: u64,
    pub plans_load_other_way: u64,
    pub plans_compute_faster: u64,
    pub plans_compute_measure: u64,
    pub plans_compute_small: u64,
    pub plans_compute_other_way: u64,
    pub plans_stopped_rest: u64,
    pub plans_stopped_guarantee: u64,
    pub remote_plans_load_faster: u64,
    pub remote_plans_load_unknown: u64,
    pub remote_plans_load_other_way: u64,
    pub remote_plans_compute_faster: u64,
    pub remote_plans_compute_measure: u64,
    pub remote_plans_compute_other_way: u64,
    pub remote_plans_stopped_rest: u64,
    pub remote_plans_stopped_guarantee: u64,
    pub tokens_not_loaded_disk: u64,
    pub tokens_not_loaded_remote: u64,
    pub tokens_not_loaded_small: u64,
    pub tokens_not_loaded_other_way: u64,
    pub tokens_not_loaded_rest: u64,
    pub tokens_not_loaded_guarantee: u64,
    pub plan_predicted_disk_ns: u64,
    pub plan_actual_disk_ns: u64,
    pub plan_error_disk_ns: u64,
    pub plan_predicted_remote_ns: u64,
    pub plan_actual_remote_ns: u64,
    pub plan_error_remote_ns: u64,
    pub plan_predicted_host_ns: u64,
    pub plan_actual_host_ns: u64,
    pub plan_error_host_ns: u64,
    pub plan_saved_ns: u64,
    pub answered_lookups: u64,
    pub answered_tokens: u64,
    pub answered_device_tokens: u64,
    pub answered_hit_tokens: u64,
    pub misses_never_seen: u64,
    pub misses_not_admitted: u64,
    pub misses_evicted_host: u64,
    pub misses_evicted_disk: u64,
    pub misses_lost: u64,
    pub misses_incomplete: u64,
    pub misses_other_identity: u64,
    pub misses_no_boundary: u64,
    pub misses_too_few: u64,
    pub misses_planned: u64,
    pub misses_remote_planned: u64,
    pub misses_timed_out: u64,
    pub misses_disk_silent: u64,
    pub misses_budget: u64,
    pub misses_repeated: u64,
    pub misses_threshold: u64,
    pub misses_load_failed: u64,
    pub misses_draining: u64,
    pub hints_prefetch_accepted: u64,
    pub hints_prefetch_clipped: u64,
    pub hints_prefetch_rejected: u64,
    pub hints_pin_accepted: u64,
    pub hints_pin_clipped: u64,
    pub hints_pin_rejected: u64,
    pub hints_demote_accepted: u64,
    pub hints_demote_clipped: u64,
    pub hints_demote_rejected: u64,
    pub hints_release_accepted: u64,
    pub hints_release_rejected: u64,
    pub return_reads_used: u64,
    pub return_reads_wasted: u64,
    pub orders_clear: u64,
    pub orders_drain: u64,
    pub orders_resize: u64,
    pub orders_pin: u64,
    pub orders_unpin: u64,
    pub orders_reset: u64,
    pub pins_expired: u64,
    pub pins_over_budget: u64,
    pub pins_gave_way: u64,
    pub pins_lost: u64,
    pub remote_lookups: u64,
    pub remote_probes: u64,
    pub remote_gets: u64,
    pub remote_get_bytes: u64,
    pub remote_get_ns: u64,
    pub remote_gets_without_memory: u64,
    pub remote_hit_tokens: u64,
    pub remote_puts: u64,
    pub remote_put_bytes: u64,
    pub remote_put_ns: u64,
    pub remote_puts_known: u64,
    pub remote_puts_failed: u64,
    pub remote_puts_dropped_queue: u64,
    pub remote_puts_dropped_gone: u64,
    pub remote_corrupt: u64,
    pub remote_failures: u64,
    pub remote_throttled: u64,
}

impl Counters {
    /// Counts an order, even if it is refused.
    pub(crate) fn count_order(&mut self, order: Order) {
        let counter = match order {
            Order::Clear => &mut self.orders_clear,
            Order::Drain => &mut self.orders_drain,
            Order::Resize => &mut self.orders_resize,
            Order::Pin => &mut self.orders_pin,
            Order::Unpin => &mut self.orders_unpin,
            Order::Reset => &mut self.orders_reset,
        };
        *counter += 1;
    }

    /// Counts a request that has found nothing to load, for this reason.
    pub(crate) fn count_miss(&mut self, reason: Reason) {
        let counter = match reason {
            // Neither reason is a miss of the engine.
            Reason::Complete | Reason::NoServer => return,
            Reason::NeverSeen => &mut self.misses_never_seen,
            Reason::NotAdmitted => &mut self.misses_not_admitted,
            Reason::EvictedHost => &mut self.misses_evicted_host,
            Reason::EvictedDisk => &mut self.misses_evicted_disk,
            Reason::Lost => &mut self.misses_lost,
            Reason::Incomplete => &mut self.misses_incomplete,
            Reason::OtherIdentity => &mut self.misses_other_identity,
            Reason::NoBoundary => &mut self.misses_no_boundary,
            Reason::TooFew => &mut self.misses_too_few,
            Reason::Planned => &mut self.misses_planned,
            Reason::RemotePlanned => &mut self.misses_remote_planned,
            Reason::TimedOut => &mut self.misses_timed_out,
            Reason::DiskSilent => &mut self.misses_disk_silent,
            Reason::Budget => &mut self.misses_budget,
            Reason::Repeated => &mut self.misses_repeated,
            Reason::Threshold => &mut self.misses_threshold,
            Reason::LoadFailed => &mut self.misses_load_failed,
            Reason::Draining => &mut self.misses_draining,
        };
        *counter += 1;
    }
}

/// The gauges: values of the present.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[expect(
    missing_docs,
    reason = "the names say it; undercroft.connector.observe.stats documents each"
)]
pub struct Gauges {
    pub host_capacity_bytes: u64,
    pub host_target_bytes: u64,
    pub host_used_bytes: u64,
    pub host_pinned_bytes: u64,
    pub host_blocks: u64,
    pub disk_capacity_bytes: u64,
    pub disk_target_bytes: u64,
    pub disk_used_bytes: u64,
    pub disk_blocks: u64,
    pub disk_degraded: u64,
    pub nodes: u64,
    pub namespaces: u64,
    pub volatile_namespaces: u64,
    pub sessions: u64,
    pub sessions_opened: u64,
    pub active_lookups: u64,
    pub loads: u64,
    pub saves: u64,
    pub draining: u64,
    pub promotion_queue_bytes: u64,
    pub pins: u64,
    pub pin_bytes: u64,
    pub pin_capacity_bytes: u64,
    pub plan_disk_bytes_per_s: u64,
    pub plan_disk_latency_ns: u64,
    pub plan_remote_bytes_per_s: u64,
    pub plan_remote_latency_ns: u64,
    pub plan_copy_bytes_per_s: u64,
    pub plan_copy_latency_ns: u64,
    pub plan_prefill_tokens_per_s: u64,
    pub plan_prefill_tokens_per_s_32k: u64,
    pub plan_bytes_per_token: u64,
    pub remote_degraded: u64,
    pub remote_breaker_open: u64,
    pub remote_window_bytes: u64,
    pub remote_get_bytes_in_flight: u64,
    pub remote_put_queue_segments: u64,
}
