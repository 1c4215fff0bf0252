"""Pressure on undercroft: tiers smaller than the served prompts, many requests at once, and no step too many."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine_checks import BLOCK, PAYLOAD, Reference, add, finish, nothing_left, stats, step, worker
from real_engine import Engine, prompt

pytestmark = pytest.mark.vllm

Make = Callable[..., Engine]
MEMORY = {"host_memory": "64MiB"}
LONG = prompt(897)
HIT = 896


def disk(path: Path, host: str = "64MiB", capacity: str = "256MiB") -> dict[str, Any]:
    return {"host_memory": host, "disk_path": str(path / "cache"), "disk_capacity": capacity}


def test_many_requests_of_one_prefix_read_the_disk_once(
    engine: Make, llama: Path, reference: Reference, tmp_path: Path
) -> None:
    first = engine(llama, disk(tmp_path), blocks=128)
    first.generate(LONG, 1)
    nothing_left(first)
    first.close()
    second = engine(llama, disk(tmp_path), blocks=128)
    prompts = [LONG, LONG, *(LONG[:-1] + prompt(20 + i, seed=i) for i in range(4))]
    answers = second.generate_all(prompts, 4)
    assert [answer.tokens for answer in answers] == [reference(ids, 4) for ids in prompts]
    assert all(answer.cached == HIT for answer in answers)
    nothing_left(second)
    found = stats(second)
    assert (found["disk_reads"], found["disk_read_bytes"]) == (HIT // BLOCK, HIT // BLOCK * PAYLOAD)


@pytest.mark.parametrize("capacity", ["128MiB", "36MiB"], ids=["all on disk", "disk too small as well"])
def test_tiers_smaller_than_the_working_set(
    engine: Make, llama: Path, reference: Reference, tmp_path: Path, capacity: str
) -> None:
    """Twelve prompts of 7 blocks, four at a time: 64 blocks fit the host tier, 256 or about 64 the disk."""
    one = engine(llama, disk(tmp_path, "32MiB", capacity), blocks=64)
    prompts = [prompt(897, seed=70 + i) for i in range(12)]
    for turn in range(3):
        for several in (prompts[:4], prompts[4:8], prompts[8:]):
            answers = one.generate_all(several, 4)
            assert [answer.tokens for answer in answers] == [reference(ids, 4) for ids in several], turn
            nothing_left(one)
    found = stats(one)
    assert found["host_evictions"] > 0
    assert found["checksum_failures"] == found["load_failures"] == 0
    assert found["host_used_bytes"] <= found["host_capacity_bytes"]
    assert found["disk_used_bytes"] <= found["disk_capacity_bytes"]
    if capacity == "36MiB":
        assert found["disk_evictions"] > 0
    else:
        assert found["disk_reads"] > 0
        assert all(answer.cached == HIT for answer in answers)


def test_a_hit_in_host_memory_loads_in_the_step_that_asks(
    engine: Make, llama: Path, reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = engine(llama, disk(tmp_path), blocks=64)
    one.generate(LONG, 1)
    nothing_left(one)
    add(one, "hit", LONG, 4)
    with monkeypatch.context() as held:
        held.setattr(worker(), "_collect", lambda: None)
        step(one)
        assert stats(one)["loads"] == 1
        # The copy is in the workers' hands after this one step.
        assert len(worker()._running) == 1
        worker()._copier.drain()
    step(one)  # hears that it has ended
    step(one)  # and computes the last token
    [request] = one.scheduler.requests.values()
    assert request.num_computed_tokens == len(LONG)
    assert finish(one) == {"hit": reference(LONG, 4)}
    nothing_left(one)


def test_chunked_prefill_while_others_load(engine: Make, llama: Path, reference: Reference) -> None:
    one = engine(llama, MEMORY, blocks=128, max_num_batched_tokens=192, max_num_seqs=4)
    one.generate(LONG, 4)
    nothing_left(one)
    prompts = [prompt(700, seed=5), LONG, LONG[:500] + prompt(400, seed=6), prompt(640, seed=7)]
    answers = one.generate_all(prompts, 16)
    assert [answer.tokens for answer in answers] == [reference(ids, 16) for ids in prompts]
    assert [answer.cached for answer in answers] == [0, HIT, 384, 0]
    nothing_left(one)
    answers = one.generate_all(prompts, 16)
    assert [answer.tokens for answer in answers] == [reference(ids, 16) for ids in prompts]
    assert [answer.cached for answer in answers] == [640, HIT, HIT, 640]
    nothing_left(one)


def test_preempted_requests_resume_from_saved_blocks(engine: Make, llama: Path, reference: Reference) -> None:
    one = engine(llama, MEMORY, blocks=18, max_model_len=1024)
    prompts = [[(17 * i + 7 * j) % 990 + 5 for i in range(500)] for j in range(4)]
    preempted: set[str] = set()
    loaded: list[tuple[int, int]] = []
    half = one.connector._scheduler
    ask, build = half.update_state_after_alloc, half.build_connector_meta

    def listening(request: Any, blocks: Any, tokens: int) -> None:
        if request.num_preemptions and tokens:
            loaded.append((half.requests.of(request).num_computed_tokens, tokens))
        ask(request, blocks, tokens)

    def counting(output: Any) -> Any:
        preempted.update(output.preempted_req_ids or ())
        return build(output)

    half.update_state_after_alloc, half.build_connector_meta = listening, counting
    answers = one.generate_all(prompts, 300)
    assert [answer.tokens for answer in answers] == [reference(ids, 300) for ids in prompts]
    assert preempted
    assert loaded
    # Tokens that were generated before the preemption are loaded too.
    assert max(local + tokens for local, tokens in loaded) > 500
    nothing_left(one)
