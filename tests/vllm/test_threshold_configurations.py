"""The hit threshold on engines of other configurations, one for each test."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from real_engine import Engine, prompt
from threshold_engine import FIFTH, HALF, WHOLE, limit, make, nothing_left, rejected
from undercroft import threshold, vllm_patches
from undercroft.threshold import policy
from undercroft.vllm_patches import table

pytestmark = pytest.mark.vllm


@pytest.fixture
def start(llama: Path) -> Iterator[Callable[..., Engine]]:
    """Starts an engine of the test's own."""
    started: list[Engine] = []

    def start(*args: Any, **kwargs: Any) -> Engine:
        started.append(make(llama, *args, **kwargs))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The threshold's messages, through a logger of its own, since vLLM sets up its loggers when an engine starts."""
    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    private = logging.Logger("test", logging.INFO)
    private.addHandler(Keep())
    monkeypatch.setattr(threshold, "logger", private)
    monkeypatch.setattr(policy, "logger", private)
    return messages


def test_walk(start: Callable[..., Engine], log: list[str]) -> None:
    """Fill, too little, enough, and the global threshold where the request has none."""
    one = start(0.8)
    reference = one.generate(HALF, 8, params=limit(0))
    assert one.reset_device_cache()
    assert not rejected(one.generate(WHOLE, 8, params=limit(0)))

    refused = one.generate(FIFTH, 8, params=limit(0.33))
    assert rejected(refused)
    assert (refused.tokens, refused.cached) == ([], 0)
    assert refused.kv_transfer_params == {
        "cache_threshold": {
            "hit_rate": pytest.approx(128 / 897, abs=1e-6),
            "threshold": 0.33,
            "source": "request",
            "local_tokens": 128,
            "external_tokens": 0,
            "required_tokens": 897,
        }
    }

    served = one.generate(HALF, 8, params=limit(0.33))
    assert (served.tokens, served.cached, served.finish_reason) == (reference.tokens, 384, "length")

    # Asked for again, its own blocks would be there.
    assert rejected(one.generate(prompt(897, seed=9), 8))
    assert one.connector.threshold.rejections == {"request": 1, "global": 1}
    assert [line.partition(" rejected: ")[2] for line in log] == [
        "cache hit rate 0.14 < threshold 0.33 (request)",
        "cache hit rate 0.00 < threshold 0.8 (global)",
    ]
    nothing_left(one)


def test_request_wins_also_with_zero(start: Callable[..., Engine]) -> None:
    one = start(1.0)
    assert not rejected(one.generate(WHOLE, 4, params=limit(0)))
    assert not rejected(one.generate(WHOLE, 4, params=limit(896 / 897)))
    assert rejected(one.generate(WHOLE, 4, params=limit(0.9999)))
    assert rejected(one.generate(WHOLE, 4))
    nothing_left(one)


def test_prefix_caching_off(start: Callable[..., Engine]) -> None:
    one = start(enable_prefix_caching=False)
    one.generate(WHOLE, 4)
    assert rejected(one.generate(WHOLE, 4, params=limit(0.1)))
    assert not rejected(one.generate(WHOLE, 4, params=limit(0.9) | {"pretend": 896}))
    nothing_left(one)


def test_preempted_request(start: Callable[..., Engine]) -> None:
    """A request that comes back to an empty cache is rejected with the tokens it has, and its neighbours go on."""
    one = start(blocks=18, enable_prefix_caching=False)
    prompts = [[5 + (17 * i + 7 * j) % 990 for i in range(500)] for j in range(4)]
    plain = one.generate_all(prompts, 100)
    assert all(rejected(result) for result in one.generate_all(prompts, 100, params=limit(0.001)))
    results = one.generate_all(prompts, 100, params=limit(0.001) | {"pretend_at_arrival": 500})
    given_back = [result for result in results if rejected(result)]
    assert 1 <= len(given_back) < 4
    for result, reference in zip(results, plain, strict=True):
        if rejected(result):
            assert 0 < len(result.tokens) < 100
            measured = result.kv_transfer_params["cache_threshold"]
            assert measured["required_tokens"] == 500 + len(result.tokens)
            assert result.tokens == reference.tokens[: len(result.tokens)]
        else:
            assert result.tokens == reference.tokens
    nothing_left(one)


def test_threshold_zero_changes_nothing(
    engine: Callable[..., Engine], start: Callable[..., Engine], llama: Path
) -> None:
    prompts = [WHOLE, HALF, FIFTH]
    plain = engine(llama, max_model_len=2048, blocks=64)
    before = plain.steps
    expected = plain.generate_all(prompts, 16)
    steps = plain.steps - before
    plain.close()
    ours = start()
    before = ours.steps
    assert ours.generate_all(prompts, 16) == expected
    assert ours.steps - before == steps


def test_inside_multi_connector(engine: Callable[..., Engine], llama: Path, tmp_path: Path) -> None:
    vllm_patches.reject_requests()
    child = {"kv_role": "kv_both", "kv_connector": "StandIn", "kv_connector_module_path": "threshold_standin"}
    other = {
        "kv_role": "kv_both",
        "kv_connector": "ExampleConnector",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    one = engine(
        llama,
        {"connectors": [other, child | {"kv_connector_extra_config": limit(0.6)}]},
        connector="MultiConnector",
        max_model_len=2048,
        blocks=64,
    )
    assert rejected(one.generate(WHOLE, 4))
    assert not rejected(one.generate(WHOLE, 4, params=limit(0)))
    assert not rejected(one.generate(WHOLE, 4))
    with pytest.raises(Exception, match="cache_hit_threshold = 2"):
        one.generate(WHOLE, 4, params=limit(2))
    assert one.scheduler.requests == {}
    assert one.device_blocks_in_use() == 0


@pytest.fixture
def unknown_internals(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vLLM whose output processor has another signature than the hooks know."""
    from vllm.v1.engine.output_processor import OutputProcessor

    monkeypatch.setattr(table, "_problems", dict(table._problems))
    monkeypatch.setattr(OutputProcessor, "process_outputs", lambda self, batch: None)


@pytest.mark.usefixtures("unknown_internals")
def test_unknown_internals_change_nothing() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.input_processor import InputProcessor

    before = (Scheduler.update_from_output, InputProcessor.__init__, InputProcessor.process_inputs)
    vllm_patches.reject_requests()
    assert (Scheduler.update_from_output, InputProcessor.__init__, InputProcessor.process_inputs) == before
    problem = vllm_patches.problem(vllm_patches.HIT_THRESHOLD)
    assert "OutputProcessor.process_outputs has no parameter engine_core_outputs" in str(problem)


@pytest.mark.usefixtures("unknown_internals")
def test_unknown_internals_refuse_the_start_if_a_threshold_is_configured(start: Callable[..., Engine]) -> None:
    with pytest.raises(threshold.ThresholdUnavailableError, match=r"cache_hit_threshold = 0\.5 is configured"):
        start(0.5)


def test_unknown_internals_without_a_threshold_serve_everything(
    start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    monkeypatch.setattr(vllm_patches, "problem", lambda _patch: "this version of vLLM is unknown")
    one = start()
    assert not rejected(one.generate(WHOLE, 4, params=limit(0.9)))
    assert len([message for message in log if "is ignored" in message]) == 2  # at start, and for the first request
    nothing_left(one)
