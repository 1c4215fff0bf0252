"""The connector adds no engine step: not to a hit of the device, nor to a miss, nor before a hit's load begins."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import undercroft
from engine_checks import add, begun, finish, nothing_left, step
from real_engine import Engine, prompt
from undercroft import compat
from undercroft.connector.observe.stats import EngineStats
from undercroft.device.cpu import CpuCopier

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

Start = Callable[..., Engine]
DTYPES = {"llama": "float32", "gemma2": "float32", "qwen3_next": "bfloat16"}
LONG = prompt(1000)
"""Seven blocks of 128 tokens, or one of the 640 that Qwen's blocks have."""
MOST_CALLS_COLD, MOST_CALLS_ANSWERS = 176, 30
"""Calls of undercroft's functions in the step of a new prompt, without its arrival, and in a later one."""
SEVERAL = [prompt(700, seed=90 + i) for i in range(3)]


@pytest.fixture(params=DTYPES)
def start(request: pytest.FixtureRequest, engine: Start, tmp_path: Path) -> Start:
    """Starts an engine of each model, with undercroft over a disk or without it."""
    directory = request.getfixturevalue(request.param)
    options = {"host_memory": "128MiB", "disk_path": str(tmp_path / "cache"), "disk_capacity": "256MiB"}

    def make(undercroft: bool, **arguments: Any) -> Engine:
        return engine(directory, options if undercroft else None, dtype=DTYPES[request.param], blocks=96, **arguments)

    return make


@pytest.mark.parametrize("budget", [4096, 512])
def test_misses_and_hits_of_the_device_take_as_many_steps_as_without_it(start: Start, budget: int) -> None:
    def steps(one: Engine) -> list[int]:
        counts, before = [], one.steps
        for prompts, held in ([LONG], False), ([LONG], True), (SEVERAL, False), (SEVERAL, True):
            answers = one.generate_all(prompts, 4)
            assert all((answer.cached >= 640) is held for answer in answers)
            counts.append(one.steps - before)
            before = one.steps
        return counts

    plain = start(False, max_num_batched_tokens=budget)
    expected = steps(plain)
    plain.close()
    assert steps(start(True, max_num_batched_tokens=budget)) == expected


def test_the_first_step_takes_every_request_up_that_need_not_wait_for_the_disk(start: Start) -> None:
    one = start(True)
    for held in ("nowhere", "on the device", "in host memory"):
        if held == "in host memory":
            nothing_left(one)
        add(one, held, LONG, 4)
        step(one)
        assert begun(one), held
        [request] = one.scheduler.requests.values()
        assert (request.status.name == "WAITING_FOR_REMOTE_KVS") is (held == "in host memory")
        finish(one)
    nothing_left(one)


def test_the_tokens_that_the_device_holds_are_those_of_vllms_own_walk(start: Start) -> None:
    one = start(True)
    one.generate_all(SEVERAL, 4)
    manager = one.scheduler.kv_cache_manager
    for ids in (LONG, *SEVERAL, [*SEVERAL[0][:650], *LONG]):
        add(one, "asked", ids, 1)
        [request] = one.scheduler.requests.values()
        walked = manager.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)[1]
        assert compat.device_hit_tokens(manager, request) == walked
        assert bool(walked) is (ids is not LONG)
        finish(one)


def calls(work: Callable[[], object]) -> int:
    """How many functions of undercroft's Python package ``work`` calls on this thread, which is vLLM's."""
    package, found = str(Path(undercroft.__file__).parent), 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal found
        found += event == "call" and frame.f_code.co_filename.startswith(package)

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


def _never_collect(one: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once in a second the engine's counters are read, which a busy machine would do in each of the counted steps."""
    monkeypatch.setattr(EngineStats, "collect", lambda *_, **__: {})
    one.connector._engine_stats.due = float("inf")


def test_a_step_takes_few_calls_with_a_new_prompt_and_with_answers_only(
    engine: Start, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"host_memory": "128MiB", "disk_path": str(tmp_path / "cache"), "disk_capacity": "256MiB"}
    one = engine(llama, options, blocks=96)
    _never_collect(one, monkeypatch)
    cold, answers = [], []
    for seed in range(8):
        add(one, str(seed), prompt(1000, seed=200 + seed), 6)
        # On a busy machine the step's copy ends within the step itself. Its end is counted in none.
        with monkeypatch.context() as patch:
            patch.setattr(CpuCopier, "poll", lambda _: [])
            cold.append(calls(lambda: step(one)))
        answers += [calls(lambda: step(one)) for _ in range(3)]
        finish(one)
    # The least: a copy may end in any later step.
    assert min(cold) <= MOST_CALLS_COLD, cold
    assert min(answers) <= MOST_CALLS_ANSWERS, answers
