"""Prometheus metrics, exported by vLLM's frontend beside its own."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge, Histogram

from undercroft.compat import KVConnectorPromMetrics
from undercroft.log import LogOnce
from undercroft.metrics import METRICS, PREFIX

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class UndercroftPromMetrics(KVConnectorPromMetrics):
    """The metrics of `METRICS`, for each engine that this frontend serves."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        make = {"counter": metric_types[Counter], "gauge": metric_types[Gauge], "histogram": metric_types[Histogram]}
        self._sources: dict[str, tuple[Any, str, tuple[str, ...]]] = {}
        self._log_once = LogOnce()
        for metric in METRICS:
            extra = {"buckets": _SECONDS} if metric.kind == "histogram" else {}
            family = make[metric.kind](
                name=PREFIX + metric.name,
                documentation=metric.help,
                labelnames=[*labelnames, *metric.labels],
                **extra,
            )
            for key, labels in metric.sources.items():
                self._sources[key] = (family, metric.kind, labels)
        self._io_engine = make["gauge"](
            name=PREFIX + "io_engine_info",
            documentation="The IO engine in use: 1 for its name.",
            labelnames=[*labelnames, "io_engine"],
        )

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

    def _observe(self, transfer_stats_data: dict[str, Any], engine_idx: int) -> None:
        engine_labels = self.per_engine_labelvalues[engine_idx]
        for key, amount in transfer_stats_data.get("counters", {}).items():
            if child := self._child(key, engine_labels):
                child.inc(amount)
        for key, value in transfer_stats_data.get("gauges", {}).items():
            if child := self._child(key, engine_labels):
                child.set(value)
        for key, values in transfer_stats_data.get("samples", {}).items():
            if child := self._child(key, engine_labels):
                for value in values:
                    child.observe(value)
        if name := transfer_stats_data.get("io_engine"):
            self._io_engine.labels(*engine_labels, name).set(1)

    def _child(self, key: str, engine_labels: list[object]) -> Any | None:
        found = self._sources.get(key)
        return None if found is None else found[0].labels(*engine_labels, *found[2])
