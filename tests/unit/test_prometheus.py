"""The metrics on vLLM's page: the real Prometheus client, with one process and with several API servers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from vllm.v1.metrics import ray_wrappers

import undercroft
from undercroft.connector.observe.prometheus import UndercroftPromMetrics
from undercroft.metrics import DISK_LIMITS_S, METRICS, PREFIX

ENGINES = {0: ["m", "0"], 1: ["m", "1"]}


@pytest.fixture
def registry():
    return CollectorRegistry()


def prometheus(registry):
    def bound(metric):
        return lambda **kwargs: metric(registry=registry, **kwargs)

    types = {Counter: bound(Counter), Gauge: bound(Gauge), Histogram: bound(Histogram)}
    config = SimpleNamespace(kv_transfer_config=None)
    return UndercroftPromMetrics(config, types, ["model_name", "engine"], ENGINES)


def series(registry):
    """All series but the times of creation, as (name, labels) -> value."""
    samples = (sample for family in registry.collect() for sample in family.samples)
    found = {}
    for sample in samples:
        if not sample.name.endswith("_created"):
            found[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return found


def test_every_series_exists_with_zero_before_anything_is_counted(registry):
    metrics = prometheus(registry)
    start = series(registry)
    expected = set()
    for model, engine in ENGINES.values():
        own = {"model_name": model, "engine": engine}
        for metric in METRICS:
            name = PREFIX + metric.name + {"counter": "_total", "gauge": "", "histogram": "_count"}[metric.kind]
            for values in metric.sources.values():
                labels = own | dict(zip(metric.labels, values, strict=True))
                expected.add((name, tuple(sorted(labels.items()))))
        for name in ("io_uring", "thread_pool"):
            expected.add((PREFIX + "io_engine_info", tuple(sorted((own | {"io_engine": name}).items()))))
        expected.add((PREFIX + "build_info", tuple(sorted((own | {"version": undercroft.__version__}).items()))))
    assert expected <= start.keys()
    assert {name for (name, _), value in start.items() if value} == {PREFIX + "build_info"}
    counters = {key: 1 for metric in METRICS if metric.kind == "counter" for key in metric.sources}
    gauges = {key: 1 for metric in METRICS if metric.kind == "gauge" for key in metric.sources}
    metrics.observe({"counters": counters, "gauges": gauges, "samples": {"wait_seconds": [1]}, "io_engine": "io_uring"})
    assert series(registry).keys() == start.keys()


def test_the_times_of_disk_operations_are_histograms_of_the_directories_that_there_are(registry):
    metrics = prometheus(registry)
    times = [*range(len(DISK_LIMITS_S)), 12, 2.5]
    for engine in (0, 1, 1):
        metrics.observe({"disks": ["/a", "/b"][: engine + 1], "disk_times": {"0 load": times}}, engine)
    found = {
        (name.removeprefix(PREFIX), labels): value
        for (name, labels), value in series(registry).items()
        if "undercroft_disk_" in name
    }
    of = {engine: (("direction", "load"), ("disk", "0"), ("engine", str(engine))) for engine in ENGINES}
    model = (("model_name", "m"),)
    assert found["disk_operation_seconds_sum", of[0] + model] == 2.5
    assert found["disk_operation_seconds_count", of[1] + model] == 24
    for at, limit in enumerate(DISK_LIMITS_S):
        assert found["disk_operation_seconds_bucket", of[1] + (("le", str(limit)),) + model] == 2 * at
    zeros = {dict(labels)["disk"] for (name, labels), value in found.items() if name.endswith("count") and not value}
    assert zeros == {"0", "1"}, "directories without an operation have series"
    paths = {tuple(value for _, value in labels) for name, labels in found if name == "disk_info"}
    assert paths == {("0", "0", "m", "/a"), ("0", "1", "m", "/a"), ("1", "1", "m", "/b")}


def test_a_failed_update_of_metrics_is_logged_once_and_not_raised(registry, caplog):
    metrics = prometheus(registry)
    for _ in range(3):
        metrics.observe({"counters": {"load_bytes": -1}}, 0)
        metrics.observe({"counters": {"load_bytes": 1}, "io_engine": "io_uring"}, 7)
    assert len([record for record in caplog.records if "failed to update metrics" in record.getMessage()]) == 1
    metrics.observe({"counters": {"load_bytes": 2}}, 0)
    assert 'load",engine="0",model_name="m",tier="host"} 2.0' in generate_latest(registry).decode()


def test_prometheus_export(registry):
    metrics = prometheus(registry)
    counters = {"lookups_host": 2, "load_bytes": 10, "disk_read_bytes": 5, "unheard_of": 1, "refused_host_full": 1}
    data = {
        "counters": counters,
        "gauges": {"host_used_bytes": 7},
        "samples": {"lookup_seconds": [0.002, 0.004]},
        "io_engine": "io_uring",
    }
    metrics.observe(data, 0)
    metrics.observe(data, 1)
    metrics.observe(data, 1)
    text = generate_latest(registry).decode()
    for line in (
        'vllm:undercroft_lookups_total{engine="0",model_name="m",outcome="host"} 2.0',
        'vllm:undercroft_lookups_total{engine="1",model_name="m",outcome="host"} 4.0',
        'vllm:undercroft_transfer_bytes_total{direction="load",engine="0",model_name="m",tier="host"} 10.0',
        'vllm:undercroft_transfer_bytes_total{direction="load",engine="0",model_name="m",tier="disk"} 5.0',
        'vllm:undercroft_refused_saves_total{engine="0",model_name="m",reason="host_full"} 1.0',
        'vllm:undercroft_used_bytes{engine="1",model_name="m",tier="host"} 7.0',
        'vllm:undercroft_lookup_seconds_count{engine="0",model_name="m"} 2.0',
        'vllm:undercroft_io_engine_info{engine="0",io_engine="io_uring",model_name="m"} 1.0',
        'vllm:undercroft_io_engine_info{engine="0",io_engine="thread_pool",model_name="m"} 0.0',
    ):
        assert line in text
    metrics.observe({"io_engine": "thread_pool"}, 0)
    text = generate_latest(registry).decode()
    assert 'io_engine_info{engine="0",io_engine="io_uring",model_name="m"} 0.0' in text
    assert 'io_engine_info{engine="0",io_engine="thread_pool",model_name="m"} 1.0' in text


API_SERVER = """
import sys
from types import SimpleNamespace
from prometheus_client import Counter, Gauge, Histogram
import undercroft
from undercroft.connector.observe.prometheus import UndercroftPromMetrics

types = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
metrics = UndercroftPromMetrics(SimpleNamespace(kv_transfer_config=None), types, ["engine"], {0: ["0"]})
for line in sys.stdin:
    used, name = line.split()
    metrics.observe({"gauges": {"host_used_bytes": int(used)}, "counters": {"saves_done": 1}, "io_engine": name})
    print("observed", flush=True)
"""


def test_with_several_api_servers_a_gauge_is_the_latest_value_of_any(tmp_path: Path):
    """Each step's statistics reach one of them, so those of the others are old."""
    from prometheus_client.multiprocess import MultiProcessCollector

    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    servers = [
        subprocess.Popen(
            [sys.executable, "-c", API_SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for _ in range(3)
    ]
    try:
        for server, line in ((0, "700 thread_pool"), (1, "900 io_uring"), (0, "100 io_uring")):
            servers[server].stdin.write(line + "\n")
            servers[server].stdin.flush()
            assert servers[server].stdout.readline() == "observed\n"
    finally:
        for server in servers:
            server.communicate(timeout=60)
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(tmp_path))
    found = series(registry)
    used = {labels: value for (name, labels), value in found.items() if name == "vllm:undercroft_used_bytes"}
    assert used == {(("engine", "0"), ("tier", "host")): 100}
    info = {dict(labels)["io_engine"]: value for (name, labels), value in found.items() if name.endswith("engine_info")}
    assert info == {"io_uring": 1, "thread_pool": 0}
    saves = (("direction", "save"), ("engine", "0"), ("tier", "host"))
    assert found["vllm:undercroft_transfers_total", saves] == 3
    assert found["vllm:undercroft_checksum_failures_total", (("engine", "0"),)] == 0


class RayMetric:
    """As much of Ray's metrics as vLLM's wrappers use."""

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...], boundaries: object = None) -> None:
        self._tag_keys = tag_keys
        self.values: list[tuple[float, dict[str, str]]] = []

    def record(self, value: float, tags: dict[str, str]) -> None:
        assert tags.keys() == set(self._tag_keys)
        self.values.append((value, tags))

    inc = set = observe = record


def test_the_wrappers_for_ray_take_the_metrics(monkeypatch):
    made = []

    def make(**kwargs):
        made.append(RayMetric(**kwargs))
        return made[-1]

    monkeypatch.setattr(ray_wrappers, "ray_metrics", SimpleNamespace(Counter=make, Gauge=make, Histogram=make))
    types = {
        Counter: ray_wrappers.RayCounterWrapper,
        Gauge: ray_wrappers.RayGaugeWrapper,
        Histogram: ray_wrappers.RayHistogramWrapper,
    }
    metrics = UndercroftPromMetrics(SimpleNamespace(kv_transfer_config=None), types, ["engine"], {0: ["0"]})
    metrics.observe({"gauges": {"host_used_bytes": 5}, "counters": {"saves_done": 2}, "samples": {"wait_seconds": [1]}})
    metrics.observe({"disks": ["/a"], "disk_times": {"0 load": [1, 1, 0.5]}})
    recorded = [value for metric in made for value, _ in metric.values if value]
    assert sorted(recorded) == [1, 1, 1, 2, 5]
