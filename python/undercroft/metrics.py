"""The metrics: their names, kinds and labels, and the statistics from which their values come.

The names begin with ``vllm:undercroft_``: when an engine is made anew in the same process, vLLM drops the metrics with
its own prefix. Metrics with any other prefix would then be registered twice.

Counters get the suffix ``_total`` when they are exposed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from undercroft.reasons import MISSED, MISSES

PREFIX = "vllm:undercroft_"
IO_ENGINES = ("io_uring", "thread_pool")


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric, and the keys of its values in the data of `UndercroftStats`."""

    name: str
    kind: str
    """counter, gauge or histogram."""
    help: str
    labels: tuple[str, ...] = ()
    sources: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Key of the statistics -> the labels' values."""


def _one(name: str, kind: str, help_text: str, key: str | None = None) -> Metric:
    return Metric(name, kind, help_text, (), {key or name: ()})


_TIERS = ("host", "disk")
_SOURCES = (*_TIERS, "remote")
CLIENT_FIELDS_NOT_USED: dict[str, tuple[str, ...]] = {
    **{name: (name, "over_limit") for name in ("lookup", "lookup_timeout_ms", "promotion_wait")},
    **{name: (name, "not_allowed") for name in ("cache_hit_threshold", "explain", "kv_hints")},
    "other": ("other", "unknown"),
}
"""Fields of requests that are not used as given: the label's values of the field and the reason."""
ORDERS = ("clear", "drain", "resize", "pin", "unpin", "reset")
"""The label's values of `orders`."""
SHADOWS = range(1, 5)
"""Places of the sizes of the option ``shadow``."""

# fmt: off
METRICS: tuple[Metric, ...] = (
    Metric(
        "lookups", "counter",
        "Lookups by outcome: host and disk for hits, on_device if the device has all cached tokens, miss if nothing is "
        "loaded, timed_out at a time limit.", ("outcome",),
        {f"lookups_{outcome}": (outcome,) for outcome in ("host", "disk", "on_device", "miss", "timed_out")},
    ),
    Metric("misses", "counter", "Lookups that found nothing to load, by reason, of all clients of the engine.",
           ("reason",), {f"misses_{reason}": (reason,) for reason in MISSES}),
    _one("lookup_seconds", "histogram", "Time from the scheduler's first call for a request to the final answer."),
    _one("wait_seconds", "histogram", "The same time, only of lookups that waited for the disk."),
    _one("asked_tokens", "counter",
         "Prompt tokens of the requests that have run, each request once: the sum of device_tokens, hit_tokens and "
         "missed_tokens."),
    _one("device_tokens", "counter", "Tokens of asked_tokens that the device had."),
    Metric(
        "hit_tokens", "counter",
        "Tokens of asked_tokens that were loaded, by the tier that held them.", ("tier",),
        {f"hit_tokens_{tier}": (tier,) for tier in _SOURCES},
    ),
    Metric("missed_tokens", "counter", "The other tokens of asked_tokens, by the reason.", ("reason",),
           {f"missed_tokens_{reason}": (reason,) for reason in MISSED}),
    Metric(
        "transfer_bytes", "counter",
        "Bytes moved, by tier and direction. Tier host counts copies between device and host memory.",
        ("tier", "direction"),
        {
            "load_bytes": ("host", "load"), "save_bytes": ("host", "save"),
            "disk_read_bytes": ("disk", "load"), "disk_write_bytes": ("disk", "save"),
            "remote_get_bytes": ("remote", "load"), "remote_put_bytes": ("remote", "save"),
        },
    ),
    Metric(
        "transfer_seconds", "counter", "Sum of the durations of these transfers, which may overlap.",
        ("tier", "direction"),
        {
            "load_seconds": ("host", "load"), "save_seconds": ("host", "save"),
            "disk_read_seconds": ("disk", "load"), "disk_write_seconds": ("disk", "save"),
            "remote_get_seconds": ("remote", "load"), "remote_put_seconds": ("remote", "save"),
        },
    ),
    Metric(
        "transfers", "counter", "Transfers completed.", ("tier", "direction"),
        {
            "loads_done": ("host", "load"), "saves_done": ("host", "save"),
            "disk_reads": ("disk", "load"), "disk_writes": ("disk", "save"),
            "remote_gets": ("remote", "load"), "remote_puts": ("remote", "save"),
        },
    ),
    _one("registered_bytes", "counter",
         "Bytes of host memory registered with the devices as pinned memory, summed over the workers."),
    _one("promotions", "counter", "Lookups that read from disk."),
    _one("promotion_time_seconds", "counter", "Sum of the times from the first read to the last of each promotion.",
         "promotion_seconds"),
    _one("promotions_cancelled", "counter", "Promotions cancelled because the request was aborted or superseded."),
    _one("promotions_given_up", "counter",
         "Promotions given up: a disk did not answer, or promotion_wait was over. Blocks already read were used."),
    _one("promotion_queue_bytes", "gauge", "Bytes of pending reads from disk."),
    _one("volatile_namespaces", "gauge", "Namespaces without an entry on disk, which a restart does not find."),
    Metric("capacity_bytes", "gauge", "Capacity of a tier.", ("tier",),
           {f"{tier}_capacity_bytes": (tier,) for tier in _TIERS}),
    Metric("target_bytes", "gauge", "Capacity of a tier when a resize has ended (undercroft resize).", ("tier",),
           {f"{tier}_target_bytes": (tier,) for tier in _TIERS}),
    Metric("capacity_tokens", "gauge", "Tokens of this model that a tier of this capacity holds.", ("tier",),
           {f"{tier}_capacity_tokens": (tier,) for tier in _TIERS}),
    Metric("used_bytes", "gauge", "Bytes of a tier in use.", ("tier",),
           {f"{tier}_used_bytes": (tier,) for tier in _TIERS}),
    Metric("blocks", "gauge", "Blocks in a tier.", ("tier",), {f"{tier}_blocks": (tier,) for tier in _TIERS}),
    Metric("evictions", "counter", "Blocks evicted from a tier.", ("tier",),
           {f"{tier}_evictions": (tier,) for tier in _TIERS}),
    _one("draining", "gauge", "1 while the engine drains before maintenance (undercroft drain)."),
    _one("host_pinned_bytes", "gauge", "Host memory that loads, saves, disk reads and leases protect from eviction."),
    _one("saved_blocks", "counter", "Blocks saved."),
    _one("deduplicated_blocks", "counter", "Blocks not saved because they were cached already."),
    Metric(
        "refused_saves", "counter",
        "Blocks not saved to host memory (host_full; admission, without a disk) or not written to disk (the others).",
        ("reason",),
        {
            f"refused_{reason}": (reason,)
            for reason in ("host_full", "disk_full", "write_rate", "disk_behind", "admission", "disk_degraded")
        },
    ),
    _one("checksum_failures", "counter", "Blocks or records dropped because their checksum did not match."),
    _one("host_checksum_failures", "counter", "Blocks in host memory dropped because they changed after their save."),
    _one("decryption_failures", "counter", "Blocks dropped because no key of key_file decrypts them."),
    Metric("io_failures", "counter", "Failed disk operations.", ("direction",),
           {"read_failures": ("load",), "write_failures": ("save",)}),
    _one("degraded_disks", "gauge", "Directories that accept no writes, do not answer, have failed, or lack a file.",
         "disk_degraded"),
    _one("load_failures", "counter", "Failed loads. Their requests computed the tokens.", "failed_loads"),
    _one("save_failures", "counter", "Failed saves. Their blocks were dropped."),
    Metric("given_up_transfers", "counter",
           "Loads and saves that were not wanted any more: after a reset (also by a pause or for sleep), a change of "
           "the weights, or the end of a vLLM, or because the save was tried again. None has failed.",
           ("direction", "reason"),
           {f"given_up_{direction}s_{reason}": (direction, reason)
            for direction, reason in (
                ("load", "reset"), ("load", "closed"),
                ("save", "reset"), ("save", "weights"), ("save", "closed"), ("save", "retry"))}),
    Metric(
        "plans", "counter", "Decisions to load or to compute, by their reason.", ("decision", "reason", "tier"),
        {
            f"{prefix}plans_{decision}_{reason}": (decision, reason, "host" if reason == "small" else tier)
            for prefix, tier in (("", "disk"), ("remote_", "remote"))
            for decision, reasons in (
                ("load", ("faster", "unknown", "other_way")),
                ("compute", ("faster", "measure", "small", "other_way")),
                ("stopped", ("rest", "guarantee")),
            )
            for reason in reasons
            if (reason, tier) != ("small", "remote")
        },
    ),
    Metric("tokens_not_loaded", "counter", "Cached tokens that were computed, by the reason.", ("reason",),
           {f"tokens_not_loaded_{why}": (why,)
            for why in ("disk", "small", "other_way", "rest", "guarantee", "remote")}),
    Metric("plan_predicted_time_seconds", "counter", "Predicted times of loads that have ended, by tier.", ("tier",),
           {f"plan_predicted_{tier}_seconds": (tier,) for tier in _SOURCES}),
    Metric("plan_actual_time_seconds", "counter", "Actual times of the same loads.", ("tier",),
           {f"plan_actual_{tier}_seconds": (tier,) for tier in _SOURCES}),
    Metric("plan_error_time_seconds", "counter",
           "Sum of the differences of predicted and actual times, without signs. Divide by the actual times.",
           ("tier",),
           {f"plan_error_{tier}_seconds": (tier,) for tier in _SOURCES}),
    _one("saved_time_seconds", "counter", "Time saved by loads: predicted time of computing less time of loading.",
         "plan_saved_seconds"),
    Metric("learned_bytes_per_second", "gauge", "Learned rate of reads from a tier, and of loads from host memory.",
           ("tier",), {"plan_copy_bytes_per_s": ("host",), "plan_disk_bytes_per_s": ("disk",),
                       "plan_remote_bytes_per_s": ("remote",)}),
    Metric("learned_latency_seconds", "gauge", "Learned fixed part of the time of a read or a load.", ("tier",),
           {"plan_copy_latency_seconds": ("host",), "plan_disk_latency_seconds": ("disk",),
            "plan_remote_latency_seconds": ("remote",)}),
    Metric("learned_prefill_tokens_per_second", "gauge", "Learned rate of computing, by the position in the prompt.",
           ("position",), {"plan_prefill_tokens_per_s": ("0",), "plan_prefill_tokens_per_s_32k": ("32768",)}),
    _one("bytes_per_token", "gauge", "Bytes of a token in the tiers.", "plan_bytes_per_token"),
    _one("shadow_prompt_tokens", "counter", "Prompt tokens looked up in the caches of the option shadow."),
    Metric("shadow_hit_tokens", "counter", "Prompt tokens that each cache of the option shadow would have had.",
           ("size",), {f"shadow_hit_tokens_{number}": (str(number),) for number in SHADOWS}),
    Metric("shadow_capacity_bytes", "gauge", "Size of each cache of the option shadow.",
           ("size",), {f"shadow_capacity_bytes_{number}": (str(number),) for number in SHADOWS}),
    Metric(
        "hints", "counter", "Hints of requests about their prompts, by verb and answer.", ("verb", "answer"),
        {
            **{
                f"hints_{verb}_{answer}": (verb, answer)
                for verb in ("prefetch", "pin", "demote", "release")
                for answer in ("accepted", "clipped", "rejected")
                if (verb, answer) != ("release", "clipped")
            },
            "hints_unknown": ("unknown", "ignored"), "hints_unserved": ("any", "unserved"),
        },
    ),
    Metric("return_reads", "counter",
           "Conversations that were read from disk before their expected return, by whether it came.",
           ("result",), {f"return_reads_{result}": (result,) for result in ("used", "wasted")}),
    Metric("request_fields_not_used", "counter",
           "Fields of requests that were not used as given, by the reason: above the configuration's value, not in "
           "client_fields, or unknown and like one of undercroft's.", ("field", "reason"),
           {f"not_used_{name}": labels for name, labels in CLIENT_FIELDS_NOT_USED.items()}),
    Metric("orders", "counter",
           "Orders to the running engine, by command (reset: of a vLLM's prefix cache). The log has a line of each.",
           ("verb",), {f"orders_{verb}": (verb,) for verb in ORDERS}),
    _one("pins", "gauge", "Pins."),
    _one("pin_bytes", "gauge", "Host memory that the pinned chains take, or would take."),
    _one("pin_capacity_bytes", "gauge", "Budget of pins."),
    Metric("pins_ended", "counter", "Pins that ended without being released, by the reason.", ("reason",),
           {f"pins_{reason}": (reason,) for reason in ("expired", "over_budget", "gave_way", "lost")}),
    _one("remote_lookups", "counter", "Prompts whose missing blocks were looked for in the remote store."),
    _one("remote_probes", "counter", "Segments that the remote store was asked for without reading them."),
    _one("remote_hit_tokens", "counter", "Tokens loaded that were read from the remote store for their request."),
    Metric("remote_not_transferred", "counter", "Segments neither read from the remote store nor written to it.",
           ("direction", "reason"),
           {"remote_gets_without_memory": ("load", "memory"), "remote_puts_known": ("save", "known"),
            "remote_puts_failed": ("save", "failed"), "remote_puts_dropped_queue": ("save", "queue"),
            "remote_puts_dropped_gone": ("save", "gone")}),
    Metric("remote_failures", "counter", "Operations of the remote store without a usable result, by the kind.",
           ("kind",),
           {"remote_failures": ("failed",), "remote_corrupt": ("corrupt",), "remote_throttled": ("throttled",)}),
    _one("remote_degraded", "gauge", "1 if the remote store failed last, or if it takes no writes, else 0."),
    _one("remote_breaker_open", "gauge", "1 while the remote store gets no requests because it failed, else 0."),
    _one("remote_window_bytes", "gauge", "Bytes that reads from the remote store may have in flight."),
    _one("remote_get_bytes_in_flight", "gauge", "Bytes of segments that are being read from the remote store."),
    _one("remote_put_queue_segments", "gauge", "Segments to be written to the remote store, or being written."),
    Metric("rejected_requests", "counter", "Requests rejected by the hit threshold, by the source of the threshold.",
           ("source",), {"rejected_request": ("request",), "rejected_global": ("global",)}),
    _one("hook_errors", "counter", "Errors caught in the connector's hooks."),
)

TENANT_SHARE = Metric(
    "tenant_share", "gauge",
    "The share of each tier that a model keeps, from 0 to 1. Only of models with a tenant_share and a vLLM, 15 at "
    "most; the namespace's first digits are those of undercroft status.", ("namespace",),
)
TENANT_BYTES = Metric("tenant_bytes", "gauge", "Bytes of the same models in each tier.", ("namespace", "tier"))
SERVER_METRICS: tuple[Metric, ...] = (
    _one("sessions", "gauge", "Open sessions."),
    _one("sessions_opened", "counter", "Sessions opened, those that have ended included."),
    _one("active_lookups", "gauge", "Lookups in progress."),
    _one("loads", "gauge", "Loads in progress."),
    _one("saves", "gauge", "Saves in progress."),
    _one("connections", "gauge", "Open connections, including the one used for this scrape.", "server_connections"),
    _one("attached_workers", "gauge", "Workers that have the host memory mapped.", "server_workers"),
    _one("served_lookups", "counter", "Lookups submitted by clients.", "server_lookups"),
    _one("refused_connections", "counter", "Refused connections: of another user, or too many.", "server_refused"),
    _one("malformed_frames", "counter", "Malformed frames. Each one closes its connection.", "server_malformed"),
    _one("open_descriptors", "gauge", "Open file descriptors of the server.", "server_descriptors"),
    TENANT_SHARE,
    TENANT_BYTES,
)
"""Further metrics of a shared server. A key ``server_x`` is ``x`` of the server's part of `Engine.status`. Values of
tenants are in the status of their sessions."""

DISK_OPERATIONS = Metric(
    "disk_operation_seconds", "histogram",
    "Time of each read and write of a directory, by its place in disk_path, from 0. Left out under Ray.",
    ("disk", "direction"),
)
DISK_INFO = Metric("disk_info", "gauge", "The path of a directory, as a label; always 1.", ("disk", "path"))
IO_ENGINE_INFO = Metric(
    "io_engine_info", "gauge", "The IO engine of the disk tier: 1 for the one in use. Without a disk tier, 0 for each.",
    ("io_engine",),
)
BUILD_INFO = Metric("build_info", "gauge", "The version of undercroft, as a label; always 1.", ("version",))
INFO_METRICS = (DISK_OPERATIONS, DISK_INFO, IO_ENGINE_INFO, BUILD_INFO)
"""Metrics whose values come from `Engine.info`, and the version. Those of directories exist for the directories that
there are."""
DISK_LIMITS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
"""The limits by which the engine counts the times of operations."""
# fmt: on
