"""Log lines and gauges of the cache's health while vLLM is idle, and the names of options that do not count."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from undercroft import _core
from undercroft.config import UndercroftConfig
from undercroft.connector.differences import ignored_options
from undercroft.connector.groups import GroupRegistration
from undercroft.connector.observe.idle_gauges import IdleGauges
from undercroft.connector.observe.prometheus import UndercroftPromMetrics
from undercroft.connector.observe.stats import EngineStats
from undercroft.engine import open_engine
from undercroft.log import logger

MIB = 1 << 20


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Any]:
    """An engine with one directory."""
    disk = {"path": str(tmp_path / "cache"), "capacity": 64 * MIB}
    one = _core.Engine({"host_memory": 16 * MIB, "disks": [disk], "socket": str(tmp_path / "run" / "s.sock")})
    yield one
    one.close()


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_directory_that_breaks_is_logged_without_a_step(
    engine: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.WARNING, logger.name)
    stats = EngineStats(engine, idle_s=0.02)
    try:
        (tmp_path / "cache" / "table").unlink()
        until(lambda: any("is still used, but its blocks are lost" in message for message in caplog.messages))
    finally:
        stats.close()
        logger.removeHandler(caplog.handler)


@pytest.mark.parametrize(
    ("url", "said"),
    [("redis://127.0.0.1:1/0", "check the host and the port"), ("file://{}/mount/remote", "mount the file system")],
)
def test_a_remote_store_that_cannot_be_used_is_logged_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, url: str, said: str
) -> None:
    url = url.format(tmp_path)
    socket = str(tmp_path / "run" / "s.sock")
    engine = _core.Engine({"host_memory": 16 * MIB, "disks": [], "socket": socket, "remote": url})
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.WARNING, logger.name)
    stats = EngineStats(engine, idle_s=0.02)
    try:
        until(lambda: any(f"remote {url} cannot be used: " in line and said in line for line in caplog.messages))
    finally:
        stats.close()
        logger.removeHandler(caplog.handler)
        engine.close()


def test_the_gauges_of_an_idle_vllm_move(engine: Any, tmp_path: Path) -> None:
    registry = CollectorRegistry()

    def bound(metric: Any) -> Any:
        return lambda **kwargs: metric(registry=registry, **kwargs)

    types: Any = {kind: bound(kind) for kind in (Counter, Gauge, Histogram)}
    config: Any = SimpleNamespace(kv_transfer_config=None)
    metrics = UndercroftPromMetrics(config, types, ["engine"], {0: ["0"], 1: ["1"]})
    metrics._idle = IdleGauges(metrics._show, idle_s=0.02)
    stats = EngineStats(engine)
    metrics.observe(stats.collect(time.monotonic()), 1)
    stats.close()

    def degraded(index: str) -> float | None:
        return registry.get_sample_value("vllm:undercroft_degraded_disks", {"engine": index})

    assert degraded("1") == 0
    (tmp_path / "cache" / "table").unlink()
    until(lambda: degraded("1") == 1)
    assert degraded("0") == 0, "that engine of vLLM has not said where its tiers are"
    engine.close()


def test_options_that_do_not_count_are_named(tmp_path: Path) -> None:
    common = {"disk_path": str(tmp_path / "cache"), "host_memory": "16MiB", "disk_capacity": "64MiB"}
    first = open_engine(UndercroftConfig.parse(common | {"disk_write_rate": 7}, {}))
    others = {"host_memory": "32MiB", "disk_admission": "second_touch", "disk_capacity": "50%", "io_depth": 4}
    config = UndercroftConfig.parse(common | others, {})
    second = open_engine(config)
    try:
        assert second.is_shared
        second.register("{}", [GroupRegistration("full", 16, 4096, 0)], 16, 16, 0)
        until(lambda: bool(second.info()))
        ignored = ignored_options(config, second.info())
        assert [one.split()[0] for one in ignored] == [
            "host_memory",
            "disk_admission",
            "disk_write_rate",
            "io_depth",
            "disks",
        ]
        assert ignored[0] == f"host_memory {16 * MIB} instead of {32 * MIB}"
        assert ignored[-1].endswith(f"({64 * MIB} bytes) instead of {common['disk_path']} (50%)")
        same = UndercroftConfig.parse(common | {"disk_write_rate": 7}, {})
        assert ignored_options(same, second.info()) == []
        served = UndercroftConfig.parse({"server": "unix:///run/s.sock"}, {})
        assert ignored_options(served, second.info()) == []
    finally:
        second.close()
        first.close()
