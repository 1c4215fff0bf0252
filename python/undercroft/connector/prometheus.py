"""Prometheus metrics of undercroft, which vLLM's frontend exports with its own metrics."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import undercroft
from undercroft.compat import KVConnectorPromMetrics
from undercroft.connector.idle_gauges import IdleGauges
from undercroft.connector.stats import GAUGES
from undercroft.log import LogOnce
from undercroft.metrics import BUILD_HELP, IO_ENGINE_HELP, IO_ENGINES, METRICS, PREFIX

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
        for metric in METRICS:
            family = self._family(metric.kind, metric.name, metric.help, metric.labels)
            for engine, values in per_engine_labelvalues.items():
                for key, labels in metric.sources.items():
                    self._series[engine, key] = family.labels(*values, *labels)
        self._idle = IdleGauges(self._show)
        family = self._family("gauge", "build_info", BUILD_HELP, ("version",))
        for values in per_engine_labelvalues.values():
            family.labels(*values, undercroft.__version__).set(1)
        family = self._family("gauge", "io_engine_info", IO_ENGINE_HELP, ("io_engine",))
        for engine, values in per_engine_labelvalues.items():
            for name in IO_ENGINES:
                self._io_engines[engine, name] = family.labels(*values, name)

    def _family(self, kind: str, name: str, documentation: str, labels: tuple[str, ...]) -> Any:
        common: dict[str, Any] = {
            "name": PREFIX + name,
            "documentation": documentation,
            "labelnames": [*self._labelnames, *labels],
        }
        if kind == "counter":
            return self._counter_cls(**common)
        if kind == "histogram":
            return self._histogram_cls(**common, buckets=_SECONDS)
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
