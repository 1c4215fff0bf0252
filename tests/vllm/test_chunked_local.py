"""Chunked local attention in a real engine: a hit needs the blocks from the start of the chunk that it ends in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from connector_engine import core
from hybrid_engine import HOST, Crowd, Model, ask
from real_engine import Engine, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.usefixtures("least_recent")]

CHUNK = 512
BLOCK = 128
LONGEST = 6  # Blocks: half of the second chunk.
Start = Callable[..., Engine]


@pytest.fixture
def model(llama4: Path) -> Model:
    """Chunked local attention in group 0, full attention in group 1."""
    return Model("llama4", llama4, "float32", BLOCK, 0)


@pytest.fixture
def start(model: Model) -> Any:
    """Makes engines of the model and closes them when the test ends."""
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec

    started: list[Engine] = []

    def make(options: dict[str, Any], **arguments: Any) -> Engine:
        started.append(model.start(options, **arguments))
        chunked, full = (group.kv_cache_spec for group in started[-1].scheduler.kv_cache_config.kv_cache_groups)
        assert isinstance(chunked, ChunkedLocalAttentionSpec) and isinstance(full, FullAttentionSpec)
        assert (chunked.attention_chunk_size, chunked.block_size, full.block_size) == (CHUNK, BLOCK, BLOCK)
        return started[-1]

    yield make
    for one in reversed(started):
        one.close()


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The loads that were planned."""
    from undercroft.connector.scheduler import scheduler

    plans: list[Any] = []
    plan_load = scheduler.plan_load
    monkeypatch.setattr(scheduler, "plan_load", lambda *given: (plans.append(plan_load(*given)), plans[-1])[1])
    return plans


def loaded(plan: Any) -> tuple[int, int]:
    """Blocks of chunked and of full attention that a load copies."""
    counts = {copy.group: len(copy.offsets) for copy in plan.job.groups}
    return counts.get(0, 0), counts.get(1, 0)


@pytest.mark.parametrize("step", [4096, 384], ids=["whole", "in steps"])
def test_from_host_memory_and_turn_by_turn(model: Model, start: Start, loads: list[Any], step: int) -> None:
    running = start({"host_memory": HOST}, max_num_batched_tokens=step)
    # In the first chunk, at the start of the second, inside it, at the start of the third.
    for blocks, chunked in ((3, 3), (4, 0), (6, 2), (8, 0)):
        ids = model.ids(blocks, seed=blocks)
        cold = ask(running, ids)
        assert (cold.cached, loads) == (0, [])
        warm = ask(running, ids)
        assert (warm.cached, [loaded(plan) for plan in loads]) == (blocks * BLOCK, [(chunked, blocks)])
        assert model.same(warm, cold)
        # The next turn goes on from here, and ends in another chunk.
        turn = ids + cold.tokens + prompt(3 * BLOCK, seed=20)
        second, again = ask(running, turn), ask(running, turn)
        assert (second.cached, again.cached) == (blocks * BLOCK, (blocks + 3) * BLOCK)
        assert running.reset_device_cache(connector=True)
        alone = ask(running, turn)
        assert alone.cached == 0
        assert model.same(second, alone) and model.same(again, alone)
        loads.clear()
    assert core(running).stats()["load_failures"] == 0


def test_where_prompts_part(model: Model, start: Start) -> None:
    """In the last chunk a hit ends there at once, and where a chunk starts; else once another has asked for it."""
    running = start({"host_memory": HOST})
    for parts, at_once in ((5, 5), (4, 4), (3, 0)):
        siblings = [model.ids(parts, 0) + prompt(BLOCK + 9, seed=seed) for seed in (7, 8)]
        alone = []
        for sibling in siblings:
            assert running.reset_device_cache(connector=True)
            alone.append(ask(running, sibling))
        assert running.reset_device_cache(connector=True)
        ask(running, model.ids(LONGEST))
        answers = [ask(running, sibling) for sibling in siblings]
        assert [answer.cached for answer in (*alone, *answers)] == [0, 0, at_once * BLOCK, parts * BLOCK]
        assert all(model.same(answer, one) for answer, one in zip(answers, alone, strict=True))


def test_after_a_restart_and_from_every_mixture_of_tiers(model: Model, start: Start, tmp_path: Path) -> None:
    options = {"host_memory": "16MiB", "disk_path": str(tmp_path / "cache"), "disk_capacity": "2GiB"}
    first = start(options)
    cold = {LONGEST: ask(first, model.ids(LONGEST))}
    assert cold[LONGEST].cached == 0
    cold |= {count: ask(first, model.ids(count)) for count in range(1, LONGEST)}
    assert core(first).flush(30.0)
    first.close()
    crowd = Crowd(running := start(options))
    for count in (LONGEST, 4, 3):
        assert model.same(ask(running, model.ids(count)), cold[count])
    for host, device in ((0, 0), (3, 3), (5, 0), (5, 4), (5, 5), (LONGEST, 2), (LONGEST, 5)):
        crowd.push()
        if host:
            assert ask(running, model.ids(host), 1).cached == host * BLOCK
        if device:
            assert ask(running, model.ids(device), 1, reset=False).cached == device * BLOCK
        reads, answer = core(running).stats()["disk_reads"], ask(running, model.ids(LONGEST))
        split = f"{device} blocks on the device, {host - device} in host memory, {LONGEST - host} on disk"
        assert answer.cached == LONGEST * BLOCK, split
        assert model.same(answer, cold[LONGEST]), split
        assert (core(running).stats()["disk_reads"] > reads) == (host < LONGEST), split
    assert core(running).stats()["checksum_failures"] == core(running).stats()["load_failures"] == 0


def test_bytes_of_another_prompt_would_be_noticed(model: Model, start: Start, loads: list[Any]) -> None:
    from undercroft.connector.scheduler import scheduler

    running = start({"host_memory": HOST})
    cold = ask(running, model.ids(LONGEST))
    ask(running, model.ids(LONGEST, seed=4))
    ask(running, model.ids(LONGEST, seed=4))
    (theirs,) = [copy.offsets.copy() for copy in loads[0].job.groups if copy.group == 0]
    plan_load = scheduler.plan_load

    def swapped(*arguments: Any) -> Any:
        plan = plan_load(*arguments)
        next(copy for copy in plan.job.groups if copy.group == 0).offsets = theirs
        return plan

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "plan_load", swapped)
        wrong = ask(running, model.ids(LONGEST))
    assert wrong.cached == LONGEST * BLOCK
    assert not model.same(wrong, cold)
    assert model.same(ask(running, model.ids(LONGEST)), cold)
