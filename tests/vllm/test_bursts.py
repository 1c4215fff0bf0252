"""Bursts of requests that share prefixes: each block is loaded once, and the device holds no more than without us."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine_checks import Reference, add, finish, nothing_left, override_session, stats, step, step_until, worker
from hybrid_engine import MODELS, Model
from real_engine import Engine, Generation, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

Start = Callable[..., Engine]
OPTIONS = {"host_memory": "256MiB"}
REQUESTS = 8
LONG = prompt(897)
HIT = 896


class Burst:
    """Prompts that are asked for at once, and the steps and device blocks that they take."""

    def __init__(self, one: Engine, prompts: list[list[int]], n: int, **more: Any) -> None:
        pool = one.scheduler.kv_cache_manager.block_pool
        self.most_blocks = 0
        self.computing_steps = 0
        self.loaded_tokens = 0
        schedule = one.scheduler.schedule

        def counted(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self.most_blocks = max(self.most_blocks, pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())
            self.computing_steps += output.total_num_scheduled_tokens > 0
            return output

        one.scheduler.schedule = counted
        if one.connector is not None:
            begin = one.connector.update_state_after_alloc

            def begun(request: Any, blocks: Any, num_external_tokens: int) -> None:
                self.loaded_tokens += num_external_tokens
                begin(request, blocks, num_external_tokens)

            one.connector.update_state_after_alloc = begun
        self.answers: list[Generation] = one.generate_all(prompts, n, **more)


def prompts_of(model: Model, kind: str) -> list[list[int]]:
    shared = model.ids(3, 0)
    if kind == "one prefix":
        return [shared + prompt(40, 100 + i) for i in range(REQUESTS)]
    if kind == "two prefixes":
        return [(model.ids(2, 0, 9) if i % 2 else shared) + prompt(40, 100 + i) for i in range(REQUESTS)]
    return [shared + prompt(model.block + 40, 100 + i) for i in range(REQUESTS)]


@pytest.fixture(params=["llama", *MODELS])
def model(request: pytest.FixtureRequest) -> Model:
    directory = request.getfixturevalue(request.param)
    dtype, block, group = MODELS.get(request.param, ("float32", 128, 0))
    return Model(request.param, directory, dtype, block, group)


@pytest.mark.parametrize("kind", ["one prefix", "two prefixes", "one prefix and own ones"])
def test_a_burst_takes_no_more_device_blocks_or_steps_than_a_cold_vllm(model: Model, kind: str) -> None:
    prompts = prompts_of(model, kind)
    plain = model.start(max_num_batched_tokens=1024)
    try:
        cold = Burst(plain, prompts, 8, logprobs=5)
    finally:
        plain.close()
    one = model.start(OPTIONS, max_num_batched_tokens=1024)
    try:
        for ids in prompts:
            one.generate(ids, 1)
        nothing_left(one)
        warm = Burst(one, prompts, 8, logprobs=5)
        for mine, expected in zip(warm.answers, cold.answers, strict=True):
            assert model.same(mine, expected)
            assert mine.cached >= 2 * model.block
        if model.name == "llama":
            assert warm.most_blocks <= cold.most_blocks
            assert warm.loaded_tokens == model.block * {"one prefix": 3, "two prefixes": 5}.get(kind, 3 + REQUESTS)
        else:
            # A load has a block more for its state, or for its window. Prompts that part inside a load longer than the
            # window load a copy of the prefix each: the window at the place where they part is not part of that load.
            copies = 3 if (model.name, kind) == ("gemma2", "one prefix and own ones") else 1
            assert warm.most_blocks <= cold.most_blocks + copies * REQUESTS
        # A request whose load ends a step later than another's ends a step later.
        assert warm.computing_steps <= cold.computing_steps + 2
        nothing_left(one)
    finally:
        one.close()


@pytest.fixture
def one(llama: Path) -> Any:
    """An engine with LONG in host memory."""
    engine = Engine(llama, OPTIONS, blocks=64)
    engine.generate(LONG, 1)
    nothing_left(engine)
    yield engine
    engine.close()


def held_load(one: Engine, monkeypatch: pytest.MonkeyPatch, *names: str) -> Any:
    """The first of some requests loads, and its end goes unnoticed for as long as the result lasts."""
    held = monkeypatch.context()
    held.__enter__().setattr(worker(), "_collect", lambda: None)
    for number, name in enumerate(names):
        add(one, name, [*LONG[:HIT], number + 5], 4)
    step_until(one, lambda: stats(one)["loads"] >= 1)
    step(one, 3)
    assert stats(one)["loads"] == 1
    return held


def still_right(one: Engine, reference: Reference, done: dict[str, list[int]], *names: str) -> None:
    for number, name in enumerate(names):
        if name in done:
            assert done[name] == reference([*LONG[:HIT], number + 5], 4), name
    nothing_left(one)


def test_the_abort_of_the_request_that_loads_leaves_the_load_to_the_next(
    one: Engine, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("first", "second", "third")
    held = held_load(one, monkeypatch, *names)
    one.llm.llm_engine.abort_request(["first"])
    step_until(one, lambda: stats(one)["loads"] == 2)
    step(one, 3)
    assert stats(one)["loads"] == 2
    held.__exit__(None, None, None)
    done = finish(one)
    assert set(done) == {"second", "third"}
    still_right(one, reference, done, *names)


def test_the_abort_of_a_request_that_waits_disturbs_nobody(
    one: Engine, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("first", "second", "third")
    held = held_load(one, monkeypatch, *names)
    one.llm.llm_engine.abort_request(["second"])
    held.__exit__(None, None, None)
    done = finish(one)
    assert set(done) == {"first", "third"}
    still_right(one, reference, done, *names)


def test_all_requests_beside_a_failed_load_get_the_right_tokens(one: Engine, reference: Reference) -> None:
    names = ("first", "second", "third")
    failures = 1

    def failing(*args: Any) -> Any:
        nonlocal failures
        if failures:
            failures -= 1
            return None
        return session.wrapped.begin_load(*args)

    session = override_session(one, begin_load=failing)
    for number, name in enumerate(names):
        add(one, name, [*LONG[:HIT], number + 5], 4)
    done = finish(one)
    assert set(done) == set(names)
    still_right(one, reference, done, *names)


def test_preempted_requests_share_one_load(llama: Path, reference: Reference) -> None:
    shared = LONG[:512]
    prompts = [shared + prompt(100, 50 + i) for i in range(4)]
    # Each grows to seven blocks, of which four are shared: not all of them have room.
    one = Engine(llama, OPTIONS, blocks=4 + 4 * 2, max_num_seqs=4, max_model_len=1024)
    try:
        for ids in prompts:
            one.generate(ids, 1)
        nothing_left(one)
        preempted = one.scheduler._preempt_request
        preemptions = []
        one.scheduler._preempt_request = lambda *args, **kwargs: (preemptions.append(args), preempted(*args, **kwargs))[
            1
        ]
        answers = one.generate_all(prompts, 200)
        assert preemptions
        for ids, answer in zip(prompts, answers, strict=True):
            assert answer.tokens == reference(ids, 200)
        nothing_left(one)
    finally:
        one.close()
