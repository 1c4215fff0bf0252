"""undercroft's metrics through vLLM's interface for tiers: the names and labels are those of the connector's."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
)

from undercroft.connector.observe.stats import STATS_KEYS
from undercroft.metrics import METRICS, PREFIX, Metric

_CLASSES = {"counter": OffloadingCounterMetadata, "gauge": OffloadingGaugeMetadata}


def _engine_metrics() -> list[Metric]:
    return [metric for metric in METRICS if metric.kind in _CLASSES and metric.sources.keys() & STATS_KEYS.keys()]


_PLACES = {key: (metric, labels) for metric in _engine_metrics() for key, labels in metric.sources.items()}
"""Each key of the engine's statistics: its metric, and the labels' values."""


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """The metrics that come from the engine, by name. The frontend registers them."""
    return {
        PREFIX + metric.name: _CLASSES[metric.kind](documentation=metric.help, labelnames=metric.labels)
        for metric in _engine_metrics()
    }


def of_engine(data: dict[str, Any]) -> OffloadingConnectorStats | None:
    """The data of `EngineStats.collect` in vLLM's form; None if there is nothing."""
    stats = OffloadingConnectorStats()
    for key, amount in data.get("counters", {}).items():
        if (place := _PLACES.get(key)) is not None:
            stats.increase_counter(PREFIX + place[0].name, amount, place[1])
    for key, amount in data.get("gauges", {}).items():
        if (place := _PLACES.get(key)) is not None:
            stats.set_gauge(PREFIX + place[0].name, amount, place[1])
    return None if stats.is_empty() else stats
