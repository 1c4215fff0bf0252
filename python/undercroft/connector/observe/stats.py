"""Statistics: the engine's counters, their way to vLLM's frontend, and the log line."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from undercroft.compat import KVConnectorStats
from undercroft.connector.observe.disk_times import DiskTimes, added
from undercroft.engine import io_engine
from undercroft.health import ConnectionHealth, DiskHealth, NamespaceHealth, RemoteHealth
from undercroft.hours import HourlySums
from undercroft.log import logger
from undercroft.metrics import CLIENT_FIELDS_NOT_USED, ORDERS, SHADOWS
from undercroft.reasons import MISSED, MISSES, REASONS, REASONS_OF_TOKENS

if TYPE_CHECKING:
    from undercroft._core import Engine

STATS_KEYS: dict[str, tuple[str, str]] = {
    # name: ("counter" since the start | "gauge" now, meaning)
    "host_capacity_bytes": ("gauge", "size of the arena, as far as slots may use it"),
    "host_target_bytes": ("gauge", "size of the arena when a resize has ended (undercroft resize)"),
    "host_used_bytes": ("gauge", "bytes of slots that hold a payload, visible or being filled"),
    "host_pinned_bytes": ("gauge", "of these, bytes that a load, save, promotion or lease protects from eviction"),
    "host_blocks": ("gauge", "visible payloads in host memory"),
    "disk_capacity_bytes": ("gauge", "capacity of all directories"),
    "disk_target_bytes": ("gauge", "capacity of all directories when a resize has ended"),
    "disk_used_bytes": ("gauge", "bytes of disk slots that hold a payload"),
    "disk_blocks": ("gauge", "visible payloads on disk"),
    "disk_degraded": ("gauge", "directories that accept no writes, do not answer, have failed, or lack a file"),
    "nodes": ("gauge", "nodes of the prefix forest"),
    "namespaces": ("gauge", "namespaces with at least one node"),
    "volatile_namespaces": ("gauge", "namespaces that are in no entry of a directory: a restart does not find them"),
    "sessions": ("gauge", "registered sessions"),
    "sessions_opened": ("counter", "sessions registered, those that have ended included"),
    "active_lookups": ("gauge", "lookups in progress: neither loaded nor ended"),
    "loads": ("gauge", "loads in progress"),
    "saves": ("gauge", "saves in progress"),
    "draining": ("gauge", "1 while the engine drains (undercroft drain)"),
    "promotion_queue_bytes": ("gauge", "bytes of reads that are pending: for the promotion budget or the disk"),
    "promotions": ("counter", "lookups that read from disk and have ended"),
    "promotion_seconds": ("counter", "time from the first read to the end of these lookups, summed"),
    "promotions_cancelled": (
        "counter",
        "lookups whose reads were cancelled: the request was aborted or superseded",
    ),
    "promotions_given_up": ("counter", "lookups whose reads were given up: a disk did not answer, or promotion_wait"),
    "disk_read_bytes": ("counter", "payload bytes read from disk"),
    "disk_read_seconds": ("counter", "time from submission to completion of these reads, summed"),
    "disk_reads": ("counter", "payload reads"),
    "disk_write_bytes": ("counter", "payload bytes written to disk"),
    "disk_write_seconds": ("counter", "time from submission to completion of these writes, summed"),
    "disk_writes": ("counter", "payload writes"),
    "saved_blocks": ("counter", "payloads that became visible by a save"),
    "deduplicated_blocks": ("counter", "payloads not saved because they were cached or being saved already"),
    "refused_host_full": ("counter", "payloads refused: host memory is full of data in use"),
    "refused_disk_full": ("counter", "payloads not written: the disk is full of data in use"),
    "refused_write_rate": ("counter", "payloads not written: over disk_write_rate"),
    "refused_disk_behind": ("counter", "payloads not written: half of host memory waits to be written already"),
    "refused_admission": ("counter", "payloads not written: not admitted by disk_admission or the policy"),
    "refused_disk_degraded": ("counter", "payloads not written: the directory takes no writes"),
    "host_evictions": ("counter", "payloads evicted from host memory"),
    "disk_evictions": ("counter", "payloads evicted from disk"),
    "checksum_failures": ("counter", "payloads or records whose checksum did not match"),
    "host_checksum_failures": ("counter", "payloads in host memory whose checksum did not match"),
    "decryption_failures": ("counter", "payloads read from disk that no key of key_file decrypts"),
    "read_failures": ("counter", "failed reads from disk"),
    "write_failures": ("counter", "failed writes to disk"),
    "load_failures": ("counter", "loads that ended with a failure or could not begin"),
    "save_failures": ("counter", "saves that ended with a failure"),
    "given_up_loads_reset": ("counter", "loads that a reset has overtaken"),
    "given_up_loads_closed": ("counter", "loads under way when a vLLM ended"),
    "given_up_saves_reset": ("counter", "saves that a reset has overtaken"),
    "given_up_saves_weights": ("counter", "saves under way when the weights may have changed"),
    "given_up_saves_closed": ("counter", "saves under way when a vLLM ended"),
    "given_up_saves_retry": ("counter", "saves of blocks that the device no longer held for them; retried"),
    "plans_load_faster": ("counter", "prompts read from disk: that takes less time than computing"),
    "plans_load_unknown": ("counter", "prompts read from disk before enough was measured"),
    "plans_load_other_way": ("counter", "prompts read from disk as one in a hundred near-even decisions"),
    "plans_compute_faster": ("counter", "prompts not read from disk: computing takes less time"),
    "plans_compute_measure": ("counter", "the same, and a few of their blocks were read to measure the disk"),
    "plans_compute_small": ("counter", "hits in host memory not loaded: computing takes less time than the copy"),
    "plans_compute_other_way": ("counter", "prompts not read from disk as one in a hundred near-even decisions"),
    "plans_stopped_rest": ("counter", "waits for the disk that ended: the rest took longer than it saved"),
    "plans_stopped_guarantee": (
        "counter",
        "waits for the disk that ended: load_margin was over, and too few tokens had arrived",
    ),
    "remote_plans_load_faster": (
        "counter",
        "prompts fetched from the remote store: that takes less time than computing",
    ),
    "remote_plans_load_unknown": ("counter", "prompts fetched from the remote store before enough was measured"),
    "remote_plans_load_other_way": ("counter", "prompts fetched from it as one in a hundred near-even decisions"),
    "remote_plans_compute_faster": ("counter", "prompts not fetched: computing takes less time, or little is there"),
    "remote_plans_compute_measure": ("counter", "the same, and a few segments were fetched to measure the store"),
    "remote_plans_compute_other_way": ("counter", "prompts not fetched as one in a hundred near-even decisions"),
    "remote_plans_stopped_rest": ("counter", "waits for the store that ended: the rest took longer than it saved"),
    "remote_plans_stopped_guarantee": (
        "counter",
        "waits for the store that ended: load_margin was over, and too few tokens had arrived",
    ),
    "tokens_not_loaded_remote": ("counter", "tokens that may be in the remote store and were computed"),
    "tokens_not_loaded_disk": (
        "counter",
        "tokens on disk that were computed by plans_compute_faster and plans_compute_measure",
    ),
    "tokens_not_loaded_small": ("counter", "tokens in host memory that were computed by plans_compute_small"),
    "tokens_not_loaded_other_way": ("counter", "tokens on disk that were computed by plans_compute_other_way"),
    "tokens_not_loaded_rest": ("counter", "tokens that had not arrived by plans_stopped_rest"),
    "tokens_not_loaded_guarantee": ("counter", "tokens that had not arrived by plans_stopped_guarantee"),
    "plan_predicted_disk_seconds": ("counter", "predicted time of finished promotions, summed"),
    "plan_actual_disk_seconds": ("counter", "actual time of the same promotions, summed"),
    "plan_error_disk_seconds": ("counter", "difference of the two, without its sign, summed"),
    "plan_predicted_remote_seconds": ("counter", "predicted time of finished flights from the remote store, summed"),
    "plan_actual_remote_seconds": ("counter", "actual time of the same flights, summed"),
    "plan_error_remote_seconds": ("counter", "difference of the two, without its sign, summed"),
    "plan_predicted_host_seconds": ("counter", "predicted time of loads from host memory, summed"),
    "plan_actual_host_seconds": ("counter", "actual time of the same loads, summed"),
    "plan_error_host_seconds": ("counter", "difference of the two, without its sign, summed"),
    "answered_lookups": ("counter", "requests whose lookup was answered"),
    "answered_tokens": ("counter", "tokens of the whole blocks that these lookups asked for"),
    "answered_device_tokens": ("counter", "of these, tokens that the device had"),
    "answered_hit_tokens": ("counter", "of these, further tokens that the first answer found in the tiers"),
    **{f"misses_{reason}": ("counter", f"lookups that found nothing to load: {REASONS[reason]}") for reason in MISSES},
    "plan_saved_seconds": ("counter", "predicted time of computing less the actual time of loads, summed"),
    "plan_disk_bytes_per_s": ("gauge", "learned rate of all disks together; 0 before enough was read"),
    "plan_disk_latency_seconds": ("gauge", "learned latency of the slowest disk"),
    "plan_remote_bytes_per_s": ("gauge", "learned rate of the remote store; 0 before enough was fetched"),
    "plan_remote_latency_seconds": ("gauge", "learned latency of the remote store"),
    "plan_copy_bytes_per_s": ("gauge", "learned rate of loads from host memory; 0 before enough were made"),
    "plan_copy_latency_seconds": ("gauge", "learned fixed part of the time of a load"),
    "plan_prefill_tokens_per_s": ("gauge", "learned rate of computing at a prompt's start; 0 before enough steps"),
    "plan_prefill_tokens_per_s_32k": ("gauge", "the same at 32,768 tokens"),
    **{
        f"hints_{verb}_{answer}": ("counter", f"hints to {verb} that were {answer}")
        for verb in ("prefetch", "pin", "demote", "release")
        for answer in ("accepted", "clipped", "rejected")
        if (verb, answer) != ("release", "clipped")
    },
    "return_reads_used": ("counter", "conversations that came back to blocks which had been read for their return"),
    "return_reads_wasted": ("counter", "conversations that were read for their return and did not come in time"),
    **{f"orders_{verb}": ("counter", f"orders to {verb}, refused ones included") for verb in ORDERS},
    "pins": ("gauge", "pins"),
    "pin_bytes": ("gauge", "bytes of host memory that the pinned chains take, or would take"),
    "pin_capacity_bytes": ("gauge", "budget of pins"),
    "pins_expired": ("counter", "pins that ended after their time to live"),
    "pins_over_budget": ("counter", "pins that ended because others needed their part of the budget"),
    "pins_gave_way": ("counter", "pins that ended because a running request found no host memory"),
    "pins_lost": ("counter", "pins that ended because their blocks were dropped"),
    "remote_lookups": ("counter", "prompts whose missing blocks were looked for in the remote store"),
    "remote_probes": ("counter", "segments that the remote store was asked for without reading them"),
    "remote_gets": ("counter", "segments read from the remote store"),
    "remote_get_bytes": ("counter", "bytes of these segments"),
    "remote_get_seconds": ("counter", "time from submission to completion of these reads, summed"),
    "remote_gets_without_memory": ("counter", "reads from the remote store given up: no host memory is free"),
    "remote_hit_tokens": ("counter", "tokens loaded that were read from the remote store for their request"),
    "remote_puts": ("counter", "segments written to the remote store"),
    "remote_put_bytes": ("counter", "bytes of these segments"),
    "remote_put_seconds": ("counter", "time from submission to completion of these writes, summed"),
    "remote_puts_known": ("counter", "segments not written: the remote store had them already"),
    "remote_puts_failed": ("counter", "failed writes to the remote store"),
    "remote_puts_dropped_queue": ("counter", "segments not written: too many wait to be written already"),
    "remote_puts_dropped_gone": ("counter", "segments not written: their blocks left host memory first"),
    "remote_corrupt": ("counter", "objects that do not match their names, or fail their checksum"),
    "remote_failures": ("counter", "operations of the remote store that failed or took too long"),
    "remote_throttled": ("counter", "operations that the remote store refused for their number"),
    "remote_degraded": ("gauge", "1 if the remote store failed last, or if it takes no writes, else 0"),
    "remote_breaker_open": ("gauge", "1 while the remote store gets no requests because it failed, else 0"),
    "remote_window_bytes": ("gauge", "bytes that reads from the remote store may have in flight"),
    "remote_get_bytes_in_flight": ("gauge", "bytes of segments that are being read from the remote store"),
    "remote_put_queue_segments": ("gauge", "segments to be written to the remote store, or being written"),
    "plan_bytes_per_token": ("gauge", "bytes of a token in the tiers, of the model that reported last"),
}
"""Keys of `_core.Engine.stats`, one flat dict of numbers. Seconds are floats; all other values are whole numbers."""

SHADOW_KEYS = tuple(f"shadow_capacity_bytes_{number}" for number in SHADOWS)
"""Gauges of the option ``shadow``: the sizes."""

CAPACITY_KEYS = ("host_capacity_tokens", "disk_capacity_tokens")
"""Gauges that the connector computes: the tokens of its model that fit into a tier's capacity."""

WORKER_KEYS: dict[str, str] = {
    "load_bytes": "bytes copied from the arena to the device",
    "load_seconds": "time from the start to the end of these copies, summed",
    "loads_done": "loads ended by a rank",
    "save_bytes": "bytes copied from the device to the arena",
    "save_seconds": "time from the start to the end of these copies, summed",
    "saves_done": "saves ended by a rank",
    "registered_bytes": "bytes of the arena registered with a rank's device as pinned memory",
}
"""Counters of each rank, which workers report. They are summed over the ranks."""

SCHEDULER_KEYS: dict[str, str] = {
    "lookups_host": "lookups whose hit was in host memory at once",
    "lookups_disk": "lookups that waited for the disk and hit",
    "lookups_on_device": "lookups of which the device had all cached tokens, perhaps by another request's load",
    "lookups_miss": "lookups without a hit",
    "lookups_timed_out": "lookups that reached their limit: the hit, if any, ended with the part in host memory",
    "asked_tokens": "prompt tokens of the requests that have run",
    "device_tokens": "of these, tokens that the device had",
    "hit_tokens_host": "of these, tokens loaded from host memory",
    "hit_tokens_disk": "of these, tokens loaded that were read from disk",
    "hit_tokens_remote": "of these, tokens loaded that were read from the remote store",
    **{f"missed_tokens_{reason}": f"of these, tokens not loaded: {REASONS_OF_TOKENS[reason]}" for reason in MISSED},
    "failed_loads": "loads the workers reported as failed",
    "rejected_request": "requests rejected by their own hit threshold",
    "rejected_global": "requests rejected by the configured hit threshold",
    "shadow_prompt_tokens": "prompt tokens looked up in the caches of the option shadow",
    **{f"shadow_hit_tokens_{number}": f"tokens that the cache of size {number} would have had" for number in SHADOWS},
    **{f"not_used_{name}": f"requests whose {name} was not used as given" for name in CLIENT_FIELDS_NOT_USED},
    "hints_unknown": "hints of unknown kinds, which were ignored",
    "hints_unserved": "hints that no engine could take: the server was away",
    "hook_errors": "errors caught in the connector's hooks; each kind is logged once",
}
"""Counters that the connector itself keeps."""


def _counters() -> frozenset[str]:
    engine = {name for name, (kind, _) in STATS_KEYS.items() if kind == "counter"}
    return frozenset(engine | set(WORKER_KEYS) | set(SCHEDULER_KEYS))


COUNTERS = _counters()
GAUGES = frozenset(
    {name for name, (kind, _) in STATS_KEYS.items() if kind == "gauge"}.union(CAPACITY_KEYS, SHADOW_KEYS)
)
_COUNTED = tuple(name for name in STATS_KEYS if name in COUNTERS)
_GAUGED = tuple(name for name in STATS_KEYS if name in GAUGES)
SAMPLES = ("lookup_seconds", "wait_seconds")
"""Single observations for histograms: seconds from a lookup's first call to its answer, of all lookups, and of
the lookups that waited."""


@dataclass
class UndercroftStats(KVConnectorStats):
    """The statistics since the last report, in plain types that travel between processes.

    ``data`` holds ``counters`` (added up), ``gauges`` (the latest counts), ``samples`` (lists of seconds, appended),
    ``io_engine`` (a name; empty or absent without a disk tier), ``disks`` and ``disk_times`` (the paths of the
    directories and the times of their operations, as in `DiskTimes`), and ``socket`` (path of the engine's socket).
    """

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    @classmethod
    def of(cls, *parts: dict[str, Any]) -> UndercroftStats:
        """Merge the data of several collections. Most collections are empty in most steps."""
        stats = cls()
        for data in parts:
            if data:
                stats = stats.aggregate(cls(data)) if stats.data else cls(data)
        return stats

    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> UndercroftStats:
        """Merge ``other`` (another rank's or a later interval's statistics) into this."""
        mine, theirs = self.data, other.data
        counters = dict(mine.get("counters", {}))
        for name, value in theirs.get("counters", {}).items():
            counters[name] = counters.get(name, 0) + value
        samples = {name: list(values) for name, values in mine.get("samples", {}).items()}
        for name, values in theirs.get("samples", {}).items():
            samples.setdefault(name, []).extend(values)
        data = {
            "counters": counters,
            "gauges": {**mine.get("gauges", {}), **theirs.get("gauges", {})},
            "samples": samples,
            "io_engine": theirs.get("io_engine") or mine.get("io_engine"),
            "disks": theirs.get("disks") or mine.get("disks"),
            "disk_times": added(mine.get("disk_times", {}), theirs.get("disk_times", {})),
            "socket": theirs.get("socket") or mine.get("socket"),
        }
        return UndercroftStats({name: value for name, value in data.items() if value})

    def reduce(self) -> dict[str, int | float]:
        """The figures of one log line: the ones that an operator needs first."""
        counters, gauges = self.data.get("counters", {}), self.data.get("gauges", {})
        get = counters.get
        line: dict[str, int | float] = {
            "undercroft lookups": sum(get(name, 0) for name in SCHEDULER_KEYS if name.startswith("lookups_")),
            "host hits": get("lookups_host", 0),
            "disk hits": get("lookups_disk", 0),
            "hit tokens": sum(get(f"hit_tokens_{tier}", 0) for tier in ("host", "disk", "remote")),
            "loaded MB": round(get("load_bytes", 0) / 1e6, 1),
            "saved MB": round(get("save_bytes", 0) / 1e6, 1),
            "disk read MB": round(get("disk_read_bytes", 0) / 1e6, 1),
            "disk write MB": round(get("disk_write_bytes", 0) / 1e6, 1),
        }
        for tier in ("host", "disk"):
            if capacity := gauges.get(f"{tier}_capacity_bytes", 0):
                line[f"{tier} used %"] = round(100 * gauges.get(f"{tier}_used_bytes", 0) / capacity, 1)
        troubles = (
            "failed_loads",
            "checksum_failures",
            "host_checksum_failures",
            "decryption_failures",
            "hook_errors",
            "lookups_timed_out",
            "refused_host_full",
        )
        line.update({name.replace("_", " "): get(name) for name in troubles if get(name)})
        return line


class Counts:
    """Counts of one half of the connector. `collect` returns the differences since its last call."""

    def __init__(self) -> None:
        self.counters: dict[str, int] = {}
        """Counts since the last `collect`."""
        self._samples: dict[str, list[float]] = {}

    def add(self, name: str, amount: int = 1) -> None:
        """Raise a counter of `SCHEDULER_KEYS`."""
        if amount:
            self.counters[name] = self.counters.get(name, 0) + amount

    def add_all(self, amounts: Iterable[tuple[str, int]]) -> None:
        """Raise several counters."""
        counters = self.counters
        for name, amount in amounts:
            if amount:
                counters[name] = counters.get(name, 0) + amount

    def lookup(self, seconds: float, outcome: str, waited: bool) -> None:
        """Count a lookup that was answered ``seconds`` after the scheduler's first call.

        ``waited``: whether the lookup waited for the disk.
        """
        self.add(f"lookups_{outcome}")
        self._samples.setdefault("lookup_seconds", []).append(seconds)
        if waited:
            self._samples.setdefault("wait_seconds", []).append(seconds)

    def collect(self) -> dict[str, Any]:
        """The counts since the last call, as the data of `UndercroftStats`."""
        if not self.counters and not self._samples:
            return {}
        data = {"counters": self.counters, "samples": self._samples}
        self.counters, self._samples = {}, {}
        return {name: value for name, value in data.items() if value}


class EngineStats:
    """The engine's counters as differences, read at most once in ``interval`` seconds.

    ``tokens_in``: returns the tokens that a tier with a capacity in bytes holds. ``idle_s``: seconds without a
    collection after which the engine's health is checked.
    """

    def __init__(
        self,
        engine: Engine,
        interval: float = 1.0,
        tokens_in: Callable[[int], int] = lambda _: 0,
        idle_s: float = 5.0,
    ) -> None:
        self._engine = engine
        # A tier's size seldom changes.
        self._tokens_in = functools.cache(tokens_in)
        self._interval = interval
        self._last: dict[str, float] = {}
        self._disk_times = DiskTimes()
        self.due = 0.0
        """When the next reading is due, in seconds of a monotonic clock."""
        self._health = DiskHealth(engine)
        self._remote = RemoteHealth(engine)
        self._namespaces = NamespaceHealth()
        self._link = ConnectionHealth(engine)
        self._checking = threading.Lock()
        self._closed = threading.Event()
        self._hours = HourlySums(engine, self._stats)
        threading.Thread(target=self._watch, args=(idle_s,), name="undercroft-health", daemon=True).start()

    def collect(self, now: float, force: bool = False) -> dict[str, Any]:
        """The changes since the last reading, as the data of `UndercroftStats`; empty before the interval has passed.

        ``now``: seconds of a monotonic clock. ``force``: read even before the interval has passed.
        """
        if now < self.due and not force:
            return {}
        self.due = now + self._interval
        stats = self._stats()
        self._check(stats)
        if not stats:
            return {}
        # Most differences are zero, and are left out.
        counters = {
            name: since
            for name in _COUNTED
            if (count := stats.get(name)) and (since := _since(count, self._last.get(name, 0)))
        }
        gauges = {name: stats[name] for name in _GAUGED if name in stats}
        for key in CAPACITY_KEYS:
            if tokens := self._tokens_in(stats.get(key.replace("tokens", "bytes"), 0)):
                gauges[key] = tokens
        self._last = stats
        info = self._engine.info()
        disks = info.get("disks", ())
        return {
            "counters": counters,
            "gauges": gauges,
            "io_engine": io_engine(info),
            "disks": [disk["path"] for disk in disks],
            "disk_times": self._disk_times.since(disks),
            "socket": self._engine.arena.socket,
        }

    def close(self) -> None:
        """End the checks. Call this before the engine is closed."""
        self._closed.set()
        self._hours.close()

    def _stats(self) -> dict[str, float]:
        if self._engine.is_shared and not self._engine.took_over:
            # The process that has the engine reports the counters of all its clients.
            return {}
        # Empty after a takeover of the directories until the engine has answered.
        return self._engine.stats()

    def _check(self, stats: dict[str, float]) -> None:
        # The scheduler's thread does not wait for the thread that checks now.
        if not self._checking.acquire(blocking=False):
            return
        try:
            self._link.check()
            if stats:
                self._health.check(int(stats.get("disk_degraded", 0)))
                self._remote.check(int(stats.get("remote_degraded", 0)))
                self._namespaces.check(int(stats.get("volatile_namespaces", 0)))
        finally:
            self._checking.release()

    def _watch(self, idle_s: float) -> None:
        """Check the health while vLLM is idle: vLLM collects statistics only in its steps."""
        while not self._closed.wait(idle_s):
            try:
                if time.monotonic() >= self.due + idle_s - self._interval:
                    self._check(self._stats())
            except Exception as error:
                logger.debug("undercroft: the health check failed: %s", error)


def _since(now: float, before: float) -> float:
    """The increase since ``before``. A counter that is lower than before has restarted at zero."""
    return now - before if now >= before else now
