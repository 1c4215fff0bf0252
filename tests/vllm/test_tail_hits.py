"""Hits that end inside a block: with hashes finer than the blocks, the end of a prompt is found again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from connector_engine import core, settled
from hybrid_engine import HOST, MODELS, Crowd, Model, ask
from real_engine import Engine, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

STEP = 64
"""Tokens of a hash; ten of them are a block."""


@pytest.fixture
def model(qwen3_next: Path) -> Model:
    """Full attention and linear attention."""
    return Model("qwen3_next", qwen3_next, *MODELS["qwen3_next"])


@pytest.fixture
def start(model: Model) -> Any:
    """Makes engines of the model with fine hashes, and closes them when the test ends."""
    started: list[Engine] = []

    def make(options: dict[str, Any] | None) -> Engine:
        started.append(model.start(options, prefix_match_unit=STEP))
        return started[-1]

    yield make
    for one in reversed(started):
        one.close()


Start = Callable[[dict[str, Any] | None], Engine]


def forget(running: Engine) -> None:
    assert running.reset_device_cache(connector=True)


def test_a_prompt_is_found_up_to_its_last_whole_hash(model: Model, start: Start) -> None:
    running = start({"host_memory": HOST})
    for length, end in ((model.block + 200, 832), (300, 256), (2 * model.block + 1, 2 * model.block), (60, 0)):
        ids = prompt(length, seed=length)
        cold = ask(running, ids)
        assert cold.cached == 0
        warm = ask(running, ids)
        assert warm.cached == end, length
        assert model.same(warm, cold)
    stats = core(running).stats()
    assert stats["load_failures"] == 0


def test_the_next_turn_continues_from_the_end_of_the_last_prompt(model: Model, start: Start) -> None:
    running = start({"host_memory": HOST})
    first = prompt(model.block + 200, seed=1)
    turn = first + ask(running, first).tokens + prompt(150, seed=2)
    # It ends in the next block, and a third one after it again inside.
    third = turn + prompt(500, seed=3)
    second_warm, third_warm = ask(running, turn), ask(running, third)
    assert second_warm.cached == 832
    assert third_warm.cached == (len(turn) - 1) // STEP * STEP
    for ids, warm in ((turn, second_warm), (third, third_warm)):
        forget(running)
        cold = ask(running, ids)
        assert cold.cached == 0
        assert model.same(warm, cold)


def test_prompts_that_part_inside_a_block_share_the_whole_ones_only(model: Model, start: Start) -> None:
    running = start({"host_memory": HOST})
    ids = prompt(model.block + 200, seed=1)
    other = ids[: model.block + 100] + prompt(90, seed=4)
    alone = ask(running, other)
    forget(running)
    ask(running, ids)
    shared = ask(running, other)
    assert shared.cached == model.block
    assert model.same(shared, alone)


def test_a_tail_is_loaded_beside_the_device_blocks(model: Model, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    from undercroft.connector.scheduler import scheduler

    running = start({"host_memory": HOST})
    ids = prompt(2 * model.block + 200, seed=1)
    cold = ask(running, ids)
    # The device holds one block, and a tail of its own in the second one.
    ask(running, ids[: model.block + 200], 1, reset=False)
    warm = ask(running, ids)
    assert warm.cached == 2 * model.block + 192
    assert model.same(warm, cold)
    # It holds all of it: nothing is loaded.
    ask(running, ids, reset=False)
    monkeypatch.setattr(scheduler, "plan_load", None)
    assert ask(running, ids).cached == 2 * model.block + 192


@pytest.mark.parametrize("lookup", ["async", "blocking"])
def test_after_a_restart_and_from_disk(model: Model, start: Start, tmp_path: Path, lookup: str) -> None:
    options = {
        "host_memory": HOST,
        "disk_path": str(tmp_path / "cache"),
        "disk_capacity": "2GiB",
        "lookup": lookup,
        "lookup_timeout_ms": 30_000,
    }
    prompts = [prompt(length, seed=length) for length in (model.block + 200, 300)]
    first = start(options)
    cold = [ask(first, ids) for ids in prompts]
    assert core(first).flush(30.0)
    first.close()
    running = start(options)
    for ids, expected, end in zip(prompts, cold, (832, 256), strict=True):
        warm = ask(running, ids)
        assert warm.cached == end
        assert model.same(warm, expected)
    # Once more, with the whole block in host memory and the tail on disk.
    crowd = Crowd(running)
    crowd.push()
    assert ask(running, prompts[0][: model.block + 1], 1).cached == model.block
    assert ask(running, prompts[0]).cached == 832
    stats = core(running).stats()
    assert (stats["load_failures"], stats["checksum_failures"]) == (0, 0)


def test_bytes_of_another_tail_would_be_noticed(model: Model, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    from undercroft.connector.scheduler import scheduler

    running = start({"host_memory": HOST})
    ids, other = prompt(model.block + 200, seed=1), prompt(model.block + 200, seed=9)
    cold = ask(running, ids)
    ask(running, other)
    planned: list[Any] = []
    plan_load = scheduler.plan_load

    def exchanged(*arguments: Any) -> Any:
        plan = plan_load(*arguments)
        assert plan is not None
        planned.append([copy.offsets.copy() for copy in plan.job.groups])
        if len(planned) == 2:
            for copy, others in zip(plan.job.groups, planned[0], strict=True):
                copy.offsets = np.concatenate([copy.offsets[:-1], others[-1:]])
        return plan

    monkeypatch.setattr(scheduler, "plan_load", exchanged)
    assert ask(running, other).cached == 832
    wrong = ask(running, ids)
    assert wrong.cached == 832
    assert not model.same(wrong, cold)
    right = ask(running, ids)
    assert model.same(right, cold)


def test_an_abort_while_it_is_looked_up_leaves_nothing(model: Model, start: Start, tmp_path: Path) -> None:
    running = start({"host_memory": HOST, "disk_path": str(tmp_path / "cache"), "disk_capacity": "2GiB"})
    ids = prompt(model.block + 200, seed=1)
    ask(running, ids)
    Crowd(running).push()
    from vllm import SamplingParams

    engine = running.llm.llm_engine
    for steps in range(3):
        name = f"aborted-{steps}"
        engine.add_request(name, {"prompt_token_ids": ids}, SamplingParams(max_tokens=4, detokenize=False))
        for _ in range(steps):
            running.core.step()
        engine.abort_request([name])
        settled(running)
    assert core(running).stats()["load_failures"] == 0


def test_a_request_that_ends_at_a_tail_leaves_it(model: Model, start: Start) -> None:
    from vllm import SamplingParams

    running = start({"host_memory": HOST})
    ids = prompt(model.block + 200, seed=1)
    cold = ask(running, ids)
    forget(running)
    engine = running.llm.llm_engine
    engine.add_request("aborted", {"prompt_token_ids": ids}, SamplingParams(max_tokens=4, detokenize=False))
    for _ in range(10):
        running.core.step()
        [request] = running.scheduler.requests.values()
        if request.num_computed_tokens == 832:
            break
    assert request.num_computed_tokens == 832
    engine.abort_request(["aborted"])
    settled(running)
    warm = ask(running, ids)
    assert warm.cached == 832
    assert model.same(warm, cold)
