"""A shared server's metrics over HTTP, in Prometheus' form: the names of `undercroft.metrics`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from undercroft.engine import io_engine
from undercroft.metrics import IO_ENGINE_HELP, IO_ENGINES, METRICS, PREFIX, SERVER_METRICS

if TYPE_CHECKING:
    from undercroft._core import Engine


class EngineCollector(Collector):
    """Reads the engine when it is scraped."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """The metrics that this process counts; vLLM's processes count the others."""
        status = self._engine.status()
        # Not the statistics in the status: only the engine's own count a missing file.
        values = self._engine.stats() | {f"server_{name}": value for name, value in status["server"].items()}
        for metric in (*METRICS, *SERVER_METRICS):
            sources = {key: labels for key, labels in metric.sources.items() if key in values}
            if not sources:
                continue
            family = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            found = family(PREFIX + metric.name, metric.help, labels=metric.labels)
            for key, labels in sources.items():
                found.add_metric(labels, values[key])
            yield found
        info = GaugeMetricFamily(PREFIX + "io_engine_info", IO_ENGINE_HELP, labels=["io_engine"])
        used = io_engine(status["info"])
        for name in IO_ENGINES:
            info.add_metric([name], int(name == used))
        yield info


def start(host: str, port: int, engine: Engine) -> int:
    """Serve the engine's metrics on threads of their own, and return the port (another one if ``port`` is 0).

    Raises OSError if the address is not available.
    """
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine))
    try:
        server, _ = start_http_server(port, host, registry)
    except OSError as error:
        raise OSError(f"metrics on {host} port {port}: {error.strerror}") from error
    return int(server.server_port)
