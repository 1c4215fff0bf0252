"""A shared server over HTTP: a page for people, its status, whether it serves, and its metrics in the format
of Prometheus. `undercroft.metrics` has the names of the metrics."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from http.server import HTTPServer
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import MetricsHandler
from prometheus_client.registry import Collector

from undercroft._core import ServerError, server_status
from undercroft.engine import io_engine
from undercroft.log import logger
from undercroft.metrics import (
    BUILD_INFO,
    DISK_INFO,
    DISK_OPERATIONS,
    IO_ENGINE_INFO,
    IO_ENGINES,
    METRICS,
    PREFIX,
    SERVER_METRICS,
    TENANT_BYTES,
    TENANT_SHARE,
)
from undercroft.metrics import Metric as Described
from undercroft.view import page
from undercroft.view.readings import Reading, from_status
from undercroft.view.tables import Engine as Shown
from undercroft.view.tables import tables

if TYPE_CHECKING:
    from undercroft._core import Engine

# Most connections at a time; Prometheus opens one.
CONNECTIONS_MAX = 16
# Longest time of one read or write of a peer, and of its whole request.
REQUEST_TIMEOUT_S = 5.0
CONNECTION_TIMEOUT_S = 10.0
# A server that does not answer for this long counts as stuck. Probes wait longer.
HEALTH_TIMEOUT_S = 2.0
# The page's rates are those since a reading of this age; without one they are left out.
RATES_OVER_S = (4.0, 60.0)
NOT_OPEN = "the engine is not open yet"
PATHS = "this server has /, /status, /health and /metrics"


class EngineCollector(Collector):
    """Reads the engine at each scrape."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """The metrics that this process counts. vLLM's processes count the other metrics."""
        status = self._engine.status()
        # Only the engine's own statistics count a missing file. The statistics in the status do not.
        values = self._engine.stats() | {f"server_{name}": value for name, value in status["server"].items()}
        for metric in (*METRICS, *SERVER_METRICS):
            sources = {key: labels for key, labels in metric.sources.items() if key in values}
            if not sources:
                continue
            found = _family(metric)
            for key, labels in sources.items():
                found.add_metric(labels, values[key])
            yield found
        yield from _of_disks(status["info"]["disks"])
        yield from _of_tenants(status["sessions"])
        info = _family(IO_ENGINE_INFO)
        used = io_engine(status["info"])
        for name in IO_ENGINES:
            info.add_metric([name], int(name == used))
        yield info
        build = _family(BUILD_INFO)
        build.add_metric([status["version"]], 1)
        yield build


def _family(metric: Described) -> Any:
    kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
    return kinds[metric.kind](PREFIX + metric.name, metric.help, labels=metric.labels)


def _of_disks(disks: list[dict[str, Any]]) -> Iterator[Metric]:
    """The metrics of the directories. ``disks``: as in `Engine.info`."""
    times, paths = _family(DISK_OPERATIONS), _family(DISK_INFO)
    for place, disk in enumerate(disks):
        paths.add_metric([str(place), disk["path"]], 1)
        latency = disk["latency"]
        limits = [*map(str, latency["limits_s"]), "+Inf"]
        for direction in ("load", "save"):
            found = latency[direction]
            buckets = list(zip(limits, found["at_most"], strict=True))
            times.add_metric([str(place), direction], buckets, found["seconds"])
    yield times
    yield paths


def _of_tenants(sessions: list[dict[str, Any]]) -> Iterator[Metric]:
    """The metrics of the models that have a share: the engine refuses a sixteenth one, so they are bounded in number,
    as models without a share are not. ``sessions``: as in `Engine.status`."""
    shares, sizes = _family(TENANT_SHARE), _family(TENANT_BYTES)
    # The sessions of a namespace have the same figures, those of all of them together.
    tenants = {session["namespace"][:12]: session for session in sessions if session["tenant_share"]}
    for namespace, one in tenants.items():
        shares.add_metric([namespace], one["tenant_share"])
        sizes.add_metric([namespace, "host"], one["host_bytes"])
        sizes.add_metric([namespace, "disk"], one["disk_bytes"])
    yield shares
    yield sizes


class _Handler(MetricsHandler):
    """Answers the one request of a connection."""

    timeout = REQUEST_TIMEOUT_S
    page: Page

    def do_GET(self) -> None:  # noqa: N802
        """Answer the addresses of `PATHS`."""
        path = self.path.partition("?")[0]
        if path not in ("/", "/status", "/health", "/metrics"):
            return self._say(404, f"{PATHS}\n")
        if path == "/metrics":
            return self._metrics()
        try:
            status = self.page.status()
        except _NoAnswerError as error:
            return self._say(503, f"{error}\n")
        if path == "/health":
            return self._say(200, "serves\n")
        if path == "/status":
            return self._say(200, f"{json.dumps(status)}\n", "application/json")
        return self._say(200, self.page.picture(status), "text/html; charset=utf-8")

    def _metrics(self) -> None:
        if not self.page.is_open:
            return self._say(503, f"{NOT_OPEN}\n")
        # The text format, even if the client accepts OpenMetrics. There prometheus_client 0.26 writes "vllm_" for
        # "vllm:", and no rule or dashboard finds the series.
        del self.headers["Accept"]
        return super().do_GET()

    def _say(self, code: int, text: str, kind: str = "text/plain; charset=utf-8") -> None:
        body = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", page.POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_error(self, format: str, *args: object) -> None:
        """Log nothing: any process may connect and send anything."""


class _MetricsServer(ThreadingMixIn, HTTPServer):
    """Allows few connections at a time, each for some seconds. So a client of the port cannot take the descriptors and
    threads that vLLM's connections need. A further connection ends the oldest."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = CONNECTIONS_MAX

    def __init__(self, host: str, port: int, handler: type[MetricsHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._lock = threading.Lock()
        # Connections in the order in which they came.
        self._open: dict[socket.socket, float] = {}
        self._said: set[str] = set()
        super().__init__((host, port), handler)

    def verify_request(self, request: Any, _: object) -> bool:
        """Count the connection."""
        with self._lock:
            while len(self._open) >= CONNECTIONS_MAX:
                self._end(next(iter(self._open)))
            self._open[request] = time.monotonic()
        return True

    def shutdown_request(self, request: Any) -> None:
        """Forget a connection whose request was answered or has failed."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """End the connections that send or read too slowly; called twice a second and after each connection."""
        now = time.monotonic()
        with self._lock:
            for request, since in list(self._open.items()):
                if now - since > CONNECTION_TIMEOUT_S:
                    self._end(request)

    def handle_error(self, _request: Any, _address: object) -> None:
        """Log an error once per kind. A peer that disconnects is no error."""
        error = sys.exception()
        kind = type(error).__name__
        if not isinstance(error, OSError) and kind not in self._said:
            self._said.add(kind)
            logger.warning("undercroft: the metrics cannot be read (%s: %s)", kind, error)

    def _end(self, request: socket.socket) -> None:
        """Shut a connection down. Its thread then reads the end of the stream, and closes the connection."""
        del self._open[request]
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)


class _NoAnswerError(Exception):
    """Why the server does not serve."""


class Page:
    """The addresses of `PATHS`, on threads of their own.

    Before the engine is open, all answer 503.
    """

    def __init__(self, host: str, port: int) -> None:
        """Listen on ``port``, which the system chooses if it is 0. Raises OSError if the address is not available."""
        self._registry = CollectorRegistry()
        self._socket: str | None = None
        self._lock = threading.Lock()
        self._earlier: list[Reading] = []
        """Readings for the rates of the page, the oldest first."""
        handler = _Handler.factory(self._registry)
        handler.page = self  # type: ignore[attr-defined]
        try:
            server = _MetricsServer(host, port, handler)
        except OSError as error:
            raise OSError(f"metrics on {host} port {port}: {error.strerror}") from error
        self.port = int(server.server_port)
        threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()

    def opened(self, engine: Engine, socket_path: str) -> None:
        """The engine is open, and its server listens at ``socket_path``."""
        self._registry.register(EngineCollector(engine))
        self._socket = socket_path

    @property
    def is_open(self) -> bool:
        """Whether the engine is open."""
        return self._socket is not None

    def status(self) -> dict[str, Any]:
        """The status, without the options, which are not for everybody who reaches the port.

        Asks like a client: the answer needs the server's thread and the engine. Raises _NoAnswerError.
        """
        if self._socket is None:
            raise _NoAnswerError(NOT_OPEN)
        try:
            status = server_status(self._socket, HEALTH_TIMEOUT_S)
        except ServerError as error:
            raise _NoAnswerError(error) from None
        if not status["stats"]["host_capacity_bytes"]:
            raise _NoAnswerError("the engine has failed")
        return status | {"info": {name: value for name, value in status["info"].items() if name != "options"}}

    def picture(self, status: dict[str, Any]) -> str:
        """The page for a browser."""
        now = from_status(status, time.monotonic())
        young, old = RATES_OVER_S
        with self._lock:
            before = next((one for one in reversed(self._earlier) if young <= now.at - one.at <= old), None)
            if not self._earlier or now.at - self._earlier[-1].at >= young:
                self._earlier = [*self._earlier[-1:], now]
        name = f"pid {status['pid']}"
        return page.html(f"undercroft {now.version} on {socket.gethostname()}", tables([Shown(name, now, before)]))
