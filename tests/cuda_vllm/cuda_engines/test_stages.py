"""Two pipeline stages, each on a device of its own, with vLLM's V2 model runner and asynchronous scheduling."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fake_cuda
import real_engine
from engine_checks import add, finish, flush, nothing_left, stats, step
from fake_cuda import Fake
from prompts import CACHED, MEMORY, PROMPTS, TOKENS, cached, slow, tokens
from real_engine import Engine, prompt
from tiny_models import Shape, make_llama
from undercroft import _core

pytestmark = pytest.mark.skipif(not fake_cuda.is_loaded(), reason="stages on GPUs need NCCL")

Make = Callable[..., Engine]
Start = Callable[..., Engine]
TWO: dict[str, Any] = {"executor": "mp", "pipeline_parallel_size": 2}


@pytest.fixture(scope="session")
def uneven(model_root: Path) -> Path:
    """A model of three layers, of which one stage has two."""
    shape = Shape(hidden=64, intermediate=128, layers=3, heads=4, kv_heads=2, head_dim=32)
    return make_llama(model_root / "llama_three_layers", shape)


@pytest.fixture
def start(engine: Make, uneven: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Start:
    """Starts an engine of so many stages, on the test's one directory."""
    monkeypatch.setattr(real_engine, "PRELOADED", ["fake_ranks"])
    options = {**MEMORY, "disk_path": str(tmp_path / "cache"), "disk_capacity": "128MiB"}

    def start(stages: int, **arguments: Any) -> Engine:
        return engine(uneven, options, **(TWO if stages == 2 else {}), **arguments)

    return start


def settled(one: Engine) -> None:
    nothing_left(one)
    flush(one)
    assert stats(one)["load_failures"] == stats(one)["checksum_failures"] == 0


def test_one_stage_and_two_load_blocks_of_each_other(fake: Fake, start: Start, tmp_path: Path) -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    one = start(1)
    slow(fake)
    expected = tokens(one.generate_all(PROMPTS, TOKENS))
    settled(one)
    one.close()

    more = [prompt(150, seed=9), prompt(90, seed=10)]
    two = start(2)
    assert type(two.scheduler) is AsyncScheduler
    assert two.core.vllm_config.use_v2_model_runner
    assert two.core.batch_queue_size == 3
    loaded = two.generate_all(PROMPTS, TOKENS)
    assert (tokens(loaded), cached(loaded)) == (expected, CACHED)
    settled(two)
    assert stats(two)["disk_reads"] > 0
    computed = two.generate_all(more, TOKENS)
    assert cached(computed) == [0, 0]
    settled(two)
    from_memory = two.generate_all(more, TOKENS)
    assert (tokens(from_memory), cached(from_memory)) == (tokens(computed), [144, 80])
    settled(two)
    assert two.core.collective_rpc("broken") == [[], []]
    two.close()

    one = start(1)
    slow(fake, seed=1)
    again = one.generate_all([*PROMPTS, *more], TOKENS)
    assert (tokens(again), cached(again)) == (expected + tokens(computed), [*CACHED, 144, 80])
    settled(one)
    [_] = _core.inspect(str(tmp_path / "cache"))["namespaces"]


def test_requests_aborted_while_three_batches_are_in_flight_leave_nothing_behind(start: Start) -> None:
    long = prompt(320)
    two = start(2)
    computed = two.generate(long, TOKENS)
    settled(two)
    for steps in range(8):
        for name, ids in (("loads", long), ("saves", prompt(170, seed=40 + steps)), ("stays", prompt(40, seed=5))):
            add(two, f"{name}{steps}", ids, TOKENS)
        step(two, steps)
        two.llm.llm_engine.abort_request([f"loads{steps}", f"saves{steps}"])
        assert set(finish(two)) >= {f"stays{steps}"}
        settled(two)
    answer = two.generate(long, TOKENS)
    assert (answer.cached, answer.tokens) == (320, computed.tokens)
    assert two.core.collective_rpc("broken") == [[], []]


def test_vllm_refuses_stages_with_the_older_runner_and_asynchronous_scheduling(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import envs

    envs.disable_envs_cache()
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with pytest.raises(ValueError, match="pipeline parallelism with async scheduling"):
        start(2, async_scheduling=True)
