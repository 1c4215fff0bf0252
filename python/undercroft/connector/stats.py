"""Statistics: the engine's counters, their way to vLLM's frontend, and the log line."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from undercroft.compat import KVConnectorStats
from undercroft.connector.health import ConnectionHealth, DiskHealth, NamespaceHealth
from undercroft.engine import io_engine

if TYPE_CHECKING:
    from undercroft._core import Engine

STATS_KEYS: dict[str, tuple[str, str]] = {
    # name: ("counter" since the start | "gauge" now, meaning)
    "host_capacity_bytes": ("gauge", "size of the arena"),
    "host_used_bytes": ("gauge", "bytes of slots that hold a payload, visible or being filled"),
    "host_pinned_bytes": ("gauge", "of these, bytes that a load, save, promotion or lease protects from eviction"),
    "host_blocks": ("gauge", "visible payloads in host memory"),
    "disk_capacity_bytes": ("gauge", "capacity of all directories"),
    "disk_used_bytes": ("gauge", "bytes of disk slots that hold a payload"),
    "disk_blocks": ("gauge", "visible payloads on disk"),
    "disk_degraded": ("gauge", "directories that accept no writes, do not answer, have failed, or lack a file"),
    "nodes": ("gauge", "nodes of the prefix forest"),
    "namespaces": ("gauge", "namespaces with at least one node"),
    "volatile_namespaces": ("gauge", "namespaces that are in no entry of a directory: a restart does not find them"),
    "sessions": ("gauge", "registered sessions"),
    "active_lookups": ("gauge", "lookups in progress: neither loaded nor ended"),
    "loads": ("gauge", "loads in progress"),
    "saves": ("gauge", "saves in progress"),
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
    "read_failures": ("counter", "failed reads from disk"),
    "write_failures": ("counter", "failed writes to disk"),
    "load_failures": ("counter", "loads that ended with a failure or could not begin"),
    "save_failures": ("counter", "saves that ended with a failure"),
}
"""Keys of `_core.Engine.stats`: one flat dict of numbers. Seconds are floats, everything else whole numbers."""

CAPACITY_KEYS = ("host_capacity_tokens", "disk_capacity_tokens")
"""Gauges that the connector computes: tokens of its model that a tier of the capacity in bytes holds."""

WORKER_KEYS: dict[str, str] = {
    "load_bytes": "bytes copied from the arena to the device",
    "load_seconds": "time from the start to the end of these copies, summed",
    "loads_done": "loads ended by a rank",
    "save_bytes": "bytes copied from the device to the arena",
    "save_seconds": "time from the start to the end of these copies, summed",
    "saves_done": "saves ended by a rank",
}
"""Counters that workers report, of each rank; they are summed over the ranks."""

SCHEDULER_KEYS: dict[str, str] = {
    "lookups_host": "lookups whose hit was in host memory at once",
    "lookups_disk": "lookups that waited for the disk and hit",
    "lookups_device": "lookups that waited for another request's load, and hit on the device",
    "lookups_miss": "lookups without a hit",
    "lookups_timed_out": "lookups that reached their limit: the hit, if any, ended with the part in host memory",
    "hit_tokens_host": "tokens loaded from host memory",
    "hit_tokens_disk": "tokens loaded that were read from disk",
    "failed_loads": "loads the workers reported as failed",
    "rejected_request": "requests rejected by their own hit threshold",
    "rejected_global": "requests rejected by the configured hit threshold",
    "hook_errors": "errors caught in the connector's hooks; each kind is logged once",
}
"""Counters that the connector itself keeps."""


def _counters() -> frozenset[str]:
    engine = {name for name, (kind, _) in STATS_KEYS.items() if kind == "counter"}
    return frozenset(engine | set(WORKER_KEYS) | set(SCHEDULER_KEYS))


COUNTERS = _counters()
GAUGES = frozenset({name for name, (kind, _) in STATS_KEYS.items() if kind == "gauge"}.union(CAPACITY_KEYS))
SAMPLES = ("lookup_seconds", "wait_seconds")
"""Single observations, for histograms: from first question to answer, of all lookups and of those that waited."""


@dataclass
class UndercroftStats(KVConnectorStats):
    """The statistics since the last report, in plain types that travel between processes.

    ``data`` holds ``counters`` (added up), ``gauges`` (the latest counts), ``samples`` (lists of seconds, appended) and
    ``io_engine`` (a name; empty or absent without a disk tier).
    """

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> UndercroftStats:
        """This and ``other`` (another rank's, or a later interval's) together."""
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
        }
        return UndercroftStats({name: value for name, value in data.items() if value})

    def reduce(self) -> dict[str, int | float]:
        """The figures of one log line, those that an operator needs first."""
        counters, gauges = self.data.get("counters", {}), self.data.get("gauges", {})
        get = counters.get
        line: dict[str, int | float] = {
            "undercroft lookups": sum(get(name, 0) for name in SCHEDULER_KEYS if name.startswith("lookups_")),
            "host hits": get("lookups_host", 0),
            "disk hits": get("lookups_disk", 0),
            "hit tokens": get("hit_tokens_host", 0) + get("hit_tokens_disk", 0),
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
            "hook_errors",
            "lookups_timed_out",
            "refused_host_full",
        )
        line.update({name.replace("_", " "): get(name) for name in troubles if get(name)})
        return line


class Counts:
    """Counts of one half of the connector, handed out as differences."""

    def __init__(self) -> None:
        self._counters: dict[str, int] = {}
        self._samples: dict[str, list[float]] = {}

    def add(self, name: str, amount: int = 1) -> None:
        """Raise a counter of `SCHEDULER_KEYS`."""
        if amount:
            self._counters[name] = self._counters.get(name, 0) + amount

    def lookup(self, seconds: float, outcome: str, waited: bool) -> None:
        """Count a lookup that was answered ``seconds`` after the scheduler's first call.

        ``waited``: whether it waited for the disk.
        """
        self.add(f"lookups_{outcome}")
        self._samples.setdefault("lookup_seconds", []).append(seconds)
        if waited:
            self._samples.setdefault("wait_seconds", []).append(seconds)

    def collect(self) -> dict[str, Any]:
        """The counts since the last call, as the data of `UndercroftStats`."""
        data = {"counters": self._counters, "samples": self._samples}
        self._counters, self._samples = {}, {}
        return {name: value for name, value in data.items() if value}


class EngineStats:
    """The engine's counters as differences, read at most once in ``interval`` seconds.

    ``tokens_in``: the tokens that a tier of so many bytes holds.
    """

    def __init__(self, engine: Engine, interval: float = 1.0, tokens_in: Callable[[int], int] = lambda _: 0) -> None:
        self._engine = engine
        # A tier's size seldom changes.
        self._tokens_in = functools.cache(tokens_in)
        self._interval = interval
        self._last: dict[str, float] = {}
        self._due = 0.0
        self._health = DiskHealth(engine)
        self._namespaces = NamespaceHealth()
        self._link = ConnectionHealth(engine)

    def collect(self, now: float, force: bool = False) -> dict[str, Any]:
        """The changes since the last reading, as the data of `UndercroftStats`; empty before the interval has passed.

        ``now``: monotonic seconds. ``force``: read whatever the time.
        """
        if now < self._due and not force:
            return {}
        self._due = now + self._interval
        self._link.check()
        if self._engine.is_shared and not self._engine.took_over:
            # Another process counts for all that share its engine.
            return {}
        stats = self._engine.stats()
        if not stats:
            # The directories were taken over, and the engine has not answered yet.
            return {}
        self._health.check(stats.get("disk_degraded", 0))
        self._namespaces.check(stats.get("volatile_namespaces", 0))
        counters = {
            name: since
            for name in STATS_KEYS
            if name in COUNTERS and name in stats and (since := _since(stats[name], self._last.get(name, 0)))
        }
        gauges = {name: stats[name] for name in STATS_KEYS if name in GAUGES and name in stats}
        for key in CAPACITY_KEYS:
            if tokens := self._tokens_in(stats.get(key.replace("tokens", "bytes"), 0)):
                gauges[key] = tokens
        self._last = stats
        return {"counters": counters, "gauges": gauges, "io_engine": io_engine(self._engine.info())}


def _since(now: float, before: float) -> float:
    """The increase since ``before``. A counter that went back has restarted at zero."""
    return now - before if now >= before else now
