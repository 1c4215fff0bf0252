"""Prometheus metrics of undercroft, which vLLM's frontend exports with its own metrics."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import undercroft
from undercroft.compat import KVConnectorPromMetrics
from undercroft.connector.observe.idle_gauges import IdleGauges
from undercroft.connector.observe.stats import GAUGES
from undercroft.log import LogOnce
from undercroft.metrics import (
    BUILD_INFO,
    DISK_INFO,
    DISK_LIMITS_S,
    DISK_OPERATIONS,
    IO_ENGINE_INFO,
    IO_ENGINES,
    METRICS,
    PREFIX,
    Metric,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class UndercroftPromMetrics(KVConnectorPromMetrics):
    """The metrics of `METRICS`, for each engine that this frontend serves.

    All series exist from the start: a rate or an alert would miss the increase that creates a series. With several API
    servers only counters and histograms do, like vLLM's own; a gauge then begins with its first value.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._log_once = LogOnce()
        self._series: dict[tuple[int, str], Any] = {}
        """One series for each engine and key of the statistics."""
        self._io_engines: dict[tuple[int, str], Any] = {}
        self._labels = per_engine_labelvalues
        self._disk_operations = self._family(DISK_OPERATIONS, DISK_LIMITS_S)
        self._disk_info = self._family(DISK_INFO)
        for metric in METRICS:
            family = self._family(metric)
            for engine, values in per_engine_labelvalues.items():
                for key, labels in metric.sources.items():
                    self._series[engine, key] = family.labels(*values, *labels)
        self._idle = IdleGauges(self._show)
        family = self._family(BUILD_INFO)
        for values in per_engine_labelvalues.values():
            family.labels(*values, undercroft.__version__).set(1)
        family = self._family(IO_ENGINE_INFO)
        for engine, values in per_engine_labelvalues.items():
            for name in IO_ENGINES:
                self._io_engines[engine, name] = family.labels(*values, name)

    def _family(self, metric: Metric, buckets: tuple[float, ...] = _SECONDS) -> Any:
        common: dict[str, Any] = {
            "name": PREFIX + metric.name,
            "documentation": metric.help,
            "labelnames": [*self._labelnames, *metric.labels],
        }
        if metric.kind == "counter":
            return self._counter_cls(**common)
        if metric.kind == "histogram":
            return self._histogram_cls(**common, buckets=buckets)
        # Each of several API servers gets the reports of some steps. Like vLLM's gauges, this shows the latest value.
        return self._gauge_cls(**common, multiprocess_mode="mostrecent")

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record one step's data of `UndercroftStats`.

        Raises nothing: in vLLM's frontend an error here would end all requests.
        """
        try:
            self._observe(transfer_stats_data, engine_idx)
        except Exception as error:
            self._log_once(
                logging.ERROR,
                "observe",
                "undercroft: failed to update metrics; further errors are suppressed (%r)",
                error,
                error=error,
            )

    def _show(self, stats: dict[str, Any], engine: int) -> None:
        """Set the gauges among these statistics."""
        for key in GAUGES & stats.keys():
            if (series := self._series.get((engine, key))) is not None:
                series.set(stats[key])

    def _observe(self, data: dict[str, Any], engine: int) -> None:
        for key, amount in data.get("counters", {}).items():
            if (series := self._series.get((engine, key))) is not None:
                series.inc(amount)
        self._show(data.get("gauges", {}), engine)
        if socket := data.get("socket"):
            self._idle.reported(engine, socket)
        for key, values in data.get("samples", {}).items():
            if (series := self._series.get((engine, key))) is not None:
                for value in values:
                    series.observe(value)
        if used := data.get("io_engine"):
            for name in IO_ENGINES:
                self._io_engines[engine, name].set(int(name == used))
        for place, path in enumerate(data.get("disks", ())):
            self._disk_info.labels(*self._labels[engine], str(place), path).set(1)
            for direction in ("load", "save"):
                # From the first report on, like all series.
                self._disk_operations.labels(*self._labels[engine], str(place), direction)
        for key, times in data.get("disk_times", {}).items():
            _add(self._disk_operations.labels(*self._labels[engine], *key.split()), times)


def _add(histogram: Any, times: list[float]) -> None:
    """Add operations that the engine has counted, as in `DiskTimes`. The client of Prometheus has no public way to add
    more than one at a time, and thousands a second would hold vLLM's frontend up. Ray has no way at all."""
    buckets = getattr(histogram, "_buckets", ())
    for bucket, upto, below in zip(buckets, times, [0, *times], strict=False):
        bucket.inc(upto - below)
    if buckets:
        histogram._sum.inc(times[-1])
