"""Errors that refuse the start of a vLLM with undercroft, and vLLM's log lines and metrics once it runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from engine_checks import Reference, nothing_left
from real_engine import Engine, prompt

pytestmark = pytest.mark.vllm

Make = Callable[..., Engine]
MEMORY = {"host_memory": "64MiB"}
LONG = prompt(897)
HIT = 896


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"disk_pth": "/nowhere"}, r"disk_pth.*disk_path"),
        ({"host_memory": "lots"}, r"host_memory.*lots"),
        ({"host_memory": True}, r"host_memory"),
        ({"save": "some"}, r"save.*some.*(all|prompt)"),
        (
            {"host_memory": "64MiB", "disk_path": "/proc/undercroft", "on_disk_error": "refuse"},
            r"/proc/undercroft",
        ),
    ],
    ids=["unknown key", "bad value", "bad type", "bad word", "impossible directory"],
)
def test_bad_configuration_refuses_the_start(llama: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        Engine(llama, options, blocks=64)


def test_a_foreign_directory_refuses_the_start(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "letters.txt").write_text("dear diary")
    options = {**MEMORY, "disk_path": str(tmp_path), "disk_capacity": "64MiB"}
    with pytest.raises(Exception, match=r"letters\.txt"):
        Engine(llama, options, blocks=64)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["letters.txt"]


def metrics(one: Engine) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """vLLM's metrics by name and labels; of histograms, the number of observations."""
    found = {}
    for metric in one.llm.get_metrics():
        labels = {k: v for k, v in metric.labels.items() if k not in ("model_name", "engine")}
        value = metric.count if hasattr(metric, "count") else getattr(metric, "value", None)
        if value is not None:
            found[metric.name, tuple(sorted(labels.items()))] = value
    return found


def test_metrics_show_each_tier(engine: Make, llama: Path, tmp_path: Path) -> None:
    options = {**MEMORY, "disk_path": str(tmp_path / "cache"), "disk_capacity": "64MiB"}

    def settle(one: Engine) -> dict[Any, float]:
        nothing_left(one)
        one.generate([3], 1)  # changes travel with a step
        return metrics(one)

    def host(name: str) -> tuple[str, tuple[tuple[str, str], ...]]:
        return f"vllm:undercroft_{name}", (("tier", "host"),)

    def disk(name: str) -> tuple[str, tuple[tuple[str, str], ...]]:
        return f"vllm:undercroft_{name}", (("tier", "disk"),)

    one = engine(llama, options, blocks=64)
    start = metrics(one)

    def since(after: dict[Any, float], key: Any) -> float:
        return after.get(key, 0) - start.get(key, 0)

    one.generate(LONG, 1)
    settle(one)
    assert one.generate(LONG, 1).cached == HIT
    warm = settle(one)
    sources = "vllm:prompt_tokens_cached_by_source"
    assert since(warm, host("hit_tokens")) == since(warm, (sources, (("source", "host"),))) == HIT
    assert since(warm, disk("hit_tokens")) == since(warm, (sources, (("source", "disk"),))) == 0
    assert (warm[host("blocks")], warm[disk("blocks")]) == (7, 7)
    assert since(warm, ("vllm:undercroft_lookups", (("outcome", "host"),))) == 1
    assert since(warm, ("vllm:undercroft_lookup_seconds", ())) >= 2
    assert since(warm, ("vllm:undercroft_hook_errors", ())) == 0
    one.close()

    # Read when it is asked for, so that the question is answered "later" however slow this process is.
    two = engine(llama, options | {"early_prefetch": False}, blocks=64)
    start = metrics(two)
    assert two.generate(LONG, 1).cached == HIT
    found = settle(two)
    assert since(found, disk("hit_tokens")) == since(found, (sources, (("source", "disk"),))) == HIT
    assert since(found, host("hit_tokens")) == 0
    assert since(found, ("vllm:undercroft_lookups", (("outcome", "disk"),))) == 1


@pytest.mark.parametrize("first", ["undercroft", "example"])
def test_one_of_two_children_of_a_multi_connector(
    engine: Make, llama: Path, reference: Reference, tmp_path: Path, first: str
) -> None:
    """With vLLM's own example before or after it, which loads synchronously and from files of its own."""
    children = {
        "undercroft": {
            "kv_connector": "UndercroftConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": MEMORY,
        },
        "example": {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
        },
    }
    order = [children.pop(first), *children.values()]
    one = engine(llama, {"connectors": order}, connector="MultiConnector", blocks=64)
    # A length that the example can serve too: it leaves out the last token before it counts blocks, and again after.
    ids = prompt(1025)
    for turn in range(3):
        answer = one.generate(ids, 8)
        assert answer.tokens == reference(ids, 8)
        assert (answer.cached > 0) == (turn > 0)
        one.idle_steps()
        assert one.device_blocks_in_use() == 0
        assert one.reset_device_cache()


def test_vllms_page_is_text_although_prometheus_prefers_openmetrics() -> None:
    # At /metrics/, with a slash, vLLM answers in OpenMetrics (docs/troubleshooting.md).
    frontend = pytest.importorskip("vllm.entrypoints.serve.instrumentator.metrics")
    app = FastAPI()
    frontend.attach_router(app)
    page = TestClient(app).get("/metrics", headers={"Accept": "application/openmetrics-text;version=1.0.0"})
    assert page.headers["content-type"].startswith("text/plain")
