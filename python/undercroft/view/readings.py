"""The figures of an engine at one moment, from its status or from a page of metrics."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from undercroft.metrics import DISK_INFO, DISK_OPERATIONS, METRICS, PREFIX, SERVER_METRICS
from undercroft.reasons import OTHER_CONNECTOR

if TYPE_CHECKING:
    from prometheus_client.samples import Sample

_BUILD_INFO = f"{PREFIX}build_info"
_DISK_BUCKET = f"{PREFIX}{DISK_OPERATIONS.name}_bucket"
_DISK_PATH = f"{PREFIX}{DISK_INFO.name}"
_TIMES = {f"{PREFIX}lookup_seconds_bucket": "lookup", f"{PREFIX}wait_seconds_bucket": "wait"} | {
    "vllm:time_to_first_token_seconds_bucket": "first token"
}
"""Histograms of a page -> their names in `Reading.times`."""
COMPUTED, OTHER = "computed", "other"
_KEYS = {
    (PREFIX + metric.name + ("_total" if metric.kind == "counter" else ""), *labels): (key, metric.labels)
    for metric in (*METRICS, *SERVER_METRICS)
    if metric.kind != "histogram"
    for key, labels in metric.sources.items()
}
"""Name of a sample and its labels' values -> key of the statistics."""
_LABELS = {name: labels for (name, *_), (_, labels) in _KEYS.items()}


@dataclass(frozen=True, slots=True)
class Times:
    """How many operations took at most each of the limits; the last count has no limit."""

    limits_s: tuple[float, ...] = ()
    at_most: tuple[float, ...] = ()

    def since(self, before: Times | None) -> Times:
        """Those that came after ``before``; all of them if none did, or if the process has counted anew."""
        if before is None or before.limits_s != self.limits_s or not self.at_most:
            return self
        new = tuple(now - then for now, then in zip(self.at_most, before.at_most, strict=True))
        return Times(self.limits_s, new) if new[-1] > 0 and min(new) >= 0 else self

    def within(self, part: float) -> str:
        """The limit within which this part of the operations ended."""
        if not self.at_most or not self.at_most[-1]:
            return "-"
        for limit, count in zip(self.limits_s, self.at_most, strict=False):
            if count >= part * self.at_most[-1]:
                return f"<= {limit * 1000:g} ms"
        return f"> {self.limits_s[-1]:g} s"


@dataclass(frozen=True, slots=True)
class Disk:
    """A directory. A page of metrics tells neither health nor fault."""

    path: str
    load: Times
    save: Times
    health: str = ""
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Reading:
    """One engine at one moment."""

    name: str
    """Which of the engines at this address: the model and the rank; empty if the address is of one engine."""
    at: float
    """Seconds of the reader's clock."""
    version: str = ""
    uptime_s: float | None = None
    stats: Mapping[str, float] = field(default_factory=dict)
    """By the keys of `undercroft.metrics`."""
    disks: tuple[Disk, ...] = ()
    remote: Mapping[str, Any] | None = None
    """``url``, ``health`` and ``fault`` of the remote store, if the status told them."""
    times: Mapping[str, Times] = field(default_factory=dict)
    tokens: Mapping[str, float] = field(default_factory=dict)
    """Prompt tokens by their source: the device, a tier, `OTHER` connectors, or `COMPUTED`.
    Only vLLM's page has them."""


def from_status(status: Mapping[str, Any], at: float) -> Reading:
    """The reading in an answer of `undercroft status`."""
    disks = tuple(
        Disk(one["path"], *of_latency(one.get("latency")), one["health"], one["fault"] or "")
        for one in status["info"].get("disks", ())
    )
    stats = status["stats"] | {f"server_{name}": value for name, value in status["server"].items()}
    return Reading("", at, status["version"], status["uptime_s"], stats, disks, status["info"].get("remote"))


def of_latency(latency: Mapping[str, Any] | None) -> tuple[Times, Times]:
    """The times of reads and of writes in a directory's ``latency``."""
    if latency is None:
        return Times(), Times()
    load, save = (tuple(latency[direction]["at_most"]) for direction in ("load", "save"))
    limits = tuple(latency["limits_s"])
    return Times(limits, load), Times(limits, save)


def from_page(text: str, at: float) -> list[Reading]:
    """A reading for each engine on a page of metrics, vLLM's or a server's; none if undercroft is not there.

    Raises ValueError if the text is no such page.
    """
    # Commands that read a status do not wait for it.
    from prometheus_client.parser import text_string_to_metric_families

    engines: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            engines[sample.labels.get("model_name", ""), sample.labels.get("engine", "")].append(sample)
    ours = {place: samples for place, samples in engines.items() if any(one.name == _BUILD_INFO for one in samples)}
    names = {place: " ".join(part for part in place if part) if len(ours) > 1 else "" for place in ours}
    return [_of_samples(names[place], at, samples) for place, samples in sorted(ours.items())]


def _of_samples(name: str, at: float, samples: Iterable[Sample]) -> Reading:
    stats: dict[str, float] = {}
    version = ""
    buckets: dict[tuple[str, ...], list[tuple[float, float]]] = defaultdict(list)
    paths: dict[str, str] = {}
    for sample in samples:
        labels, value = sample.labels, sample.value
        if found := _KEYS.get((sample.name, *(labels.get(one, "") for one in _LABELS.get(sample.name, ())))):
            stats[found[0]] = value
        elif sample.name == _BUILD_INFO:
            version = labels["version"]
        elif sample.name == _DISK_PATH:
            paths[labels["disk"]] = labels["path"]
        elif sample.name == _DISK_BUCKET:
            buckets["disk", labels["disk"], labels["direction"]].append((float(labels["le"]), value))
        elif sample.name in _TIMES:
            buckets[(_TIMES[sample.name],)].append((float(labels["le"]), value))
    times = {key: _of_buckets(found) for key, found in buckets.items()}
    disks = tuple(
        Disk(path, times.get(("disk", place, "load"), Times()), times.get(("disk", place, "save"), Times()))
        for place, path in sorted(paths.items())
    )
    waits = {key[0]: found for key, found in times.items() if len(key) == 1}
    return Reading(name, at, version, None, stats, disks, None, waits, _tokens(stats))


def _tokens(stats: Mapping[str, float]) -> dict[str, float]:
    if not stats.get("asked_tokens"):
        return {}
    tokens = {tier: stats.get(f"hit_tokens_{tier}", 0.0) for tier in ("host", "disk", "remote")}
    tokens |= {"device": stats.get("device_tokens", 0.0), OTHER: stats.get(f"missed_tokens_{OTHER_CONNECTOR}", 0.0)}
    return tokens | {COMPUTED: max(0.0, stats["asked_tokens"] - sum(tokens.values()))}


def _of_buckets(buckets: list[tuple[float, float]]) -> Times:
    ordered = sorted(buckets)
    limits = tuple(limit for limit, _ in ordered if not math.isinf(limit))
    return Times(limits, tuple(count for _, count in ordered))
