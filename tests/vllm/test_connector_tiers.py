"""The whole connector in real engines of their own: vLLM must generate the same tokens as without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from connector_engine import LONG, MEMORY, OTHER, TOKENS, References, core, settled
from real_engine import Engine, prompt

pytestmark = pytest.mark.vllm

Make = Callable[..., Engine]
CROWD = [[(17 * i + 7 * j) % 990 + 5 for j in range(500)] for i in range(4)]
MANY = [prompt(897, seed=70 + i) for i in range(12)]


@pytest.fixture(scope="module")
def reference(llama: Path) -> References:
    """The tokens of a vLLM without any cache."""
    return References(llama, (LONG, TOKENS), (OTHER, TOKENS), *((p, 80) for p in CROWD), *((p, 4) for p in MANY))


def test_hit_from_host_memory_and_partly_from_the_device(engine: Make, llama: Path, reference: References) -> None:
    running = engine(llama, MEMORY)
    assert running.generate(LONG, TOKENS).tokens == reference(LONG)
    settled(running)
    warm = running.generate(LONG, TOKENS)
    assert (warm.cached, warm.tokens) == (896, reference(LONG))
    settled(running, reset=False)
    # The device has the shared five blocks, and nothing has the rest.
    mixed = running.generate(OTHER, TOKENS)
    assert (mixed.cached, mixed.tokens) == (640, reference(OTHER))
    settled(running)
    assert running.generate(OTHER[:400], 1).cached == 384
    settled(running, reset=False)
    # Three blocks from the device, six from host memory.
    mixed = running.generate(OTHER, TOKENS)
    assert (mixed.cached, mixed.tokens) == (1152, reference(OTHER))
    settled(running)


def test_a_wrong_block_would_be_noticed(
    engine: Make, llama: Path, reference: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    from undercroft.connector.scheduler import scheduler

    running = engine(llama, MEMORY)
    running.generate(LONG, TOKENS)
    settled(running)
    plan = scheduler.plan_load

    def doubled(*args: Any) -> Any:
        planned = plan(*args)
        # Another order would not do: attention does not see the order of whole blocks, whose keys know their positions.
        [copy] = planned.job.groups
        copy.offsets = copy.offsets.copy()
        copy.offsets[3] = copy.offsets[2]
        return planned

    monkeypatch.setattr(scheduler, "plan_load", doubled)
    wrong = running.generate(LONG, TOKENS)
    assert wrong.cached == 896
    assert wrong.tokens != reference(LONG)


def test_restart_finds_the_cache_on_disk(engine: Make, llama: Path, reference: References, tmp_path: Path) -> None:
    options = {**MEMORY, "disk_path": str(tmp_path / "cache"), "disk_capacity": "256MiB"}
    first = engine(llama, options)
    first.generate_all([LONG, OTHER], TOKENS)
    settled(first)
    first.close()
    second = engine(llama, options)
    warm = second.generate(OTHER, TOKENS)
    assert (warm.cached, warm.tokens) == (1152, reference(OTHER))
    settled(second)
    assert core(second).stats()["disk_reads"] == 9
    warm = second.generate(LONG, TOKENS)
    assert (warm.cached, warm.tokens) == (896, reference(LONG))
    settled(second)
    # Five blocks are shared and were in memory by then.
    assert core(second).stats()["disk_reads"] == 11


def test_chunked_prefill(engine: Make, llama: Path, reference: References) -> None:
    chunked = engine(llama, MEMORY, max_num_batched_tokens=256, max_num_seqs=4)
    assert chunked.generate(LONG, TOKENS).tokens == reference(LONG)
    settled(chunked)
    both = chunked.generate_all([LONG, OTHER], TOKENS)
    assert [answer.cached for answer in both] == [896, 640]
    assert [answer.tokens for answer in both] == [reference(LONG), reference(OTHER)]
    settled(chunked)


def test_preempted_requests_resume_from_here(engine: Make, llama: Path, reference: References) -> None:
    crowded = engine(llama, MEMORY, blocks=18, max_model_len=2048)
    resumed: list[int] = []
    allocated = crowded.connector.update_state_after_alloc

    def listening(request: Any, blocks: Any, external: int) -> None:
        if request.num_preemptions and external:
            resumed.append(external)
        allocated(request, blocks, external)

    crowded.connector.update_state_after_alloc = listening
    answers = crowded.generate_all(CROWD, 80)
    assert [answer.tokens for answer in answers] == [reference(ids, 80) for ids in CROWD]
    settled(crowded)
    # There was no memory for all: some requests were preempted, and came back with their saved blocks.
    assert sum(resumed) > 0


def test_host_tier_smaller_than_the_working_set(
    engine: Make, llama: Path, reference: References, tmp_path: Path
) -> None:
    # A block is 512 KiB: 64 of them fit the host tier, the prompts have 84.
    options = {"host_memory": "32MiB", "disk_path": str(tmp_path), "disk_capacity": "128MiB"}
    small = engine(llama, options)
    for turn in range(3):
        for ids in MANY:
            answer = small.generate(ids, 4)
            assert answer.tokens == reference(ids, 4)
            if turn:
                assert answer.cached == 896
            settled(small)
            assert core(small).flush(10.0)
    stats = core(small).stats()
    assert stats["host_evictions"] > 0
    assert stats["disk_reads"] > 0
    assert stats["checksum_failures"] == 0


def test_child_of_a_multi_connector(
    engine: Make, llama: Path, reference: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = {"kv_connector": "UndercroftConnector", "kv_role": "kv_both", "kv_connector_extra_config": MEMORY}
    running = engine(llama, {"connectors": [child]}, connector="MultiConnector")
    (ours,) = running.connector._connectors
    running.generate(LONG, TOKENS)
    running.idle_steps()
    assert running.reset_device_cache()
    warm = running.generate(LONG, TOKENS)
    assert (warm.cached, warm.tokens) == (896, reference(LONG))
    running.idle_steps()
    assert running.reset_device_cache()
    assert ours._scheduler.idle()
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    monkeypatch.setattr(get_kv_transfer_group()._connectors[0]._worker, "_current_copier", None)
    answer = running.generate(LONG, TOKENS)
    assert (answer.finish_reason, answer.tokens) == ("length", reference(LONG))
    running.idle_steps()
    assert running.device_blocks_in_use() == 0


def test_bad_configuration_refuses_the_start(llama: Path) -> None:
    with pytest.raises(Exception, match="did you mean 'host_memory'"):
        Engine(llama, {"host_memmory": "1GiB"})


def test_prompt_only_saving(engine: Make, llama: Path) -> None:
    running = engine(llama, {**MEMORY, "save": "prompt"})
    running.generate(prompt(200), 200)
    settled(running)
    assert core(running).stats()["saved_blocks"] == 1


def test_hits_by_tier_reach_vllm(engine: Make, llama: Path) -> None:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    running = engine(llama, MEMORY)
    running.generate(LONG, 1)
    settled(running)
    seen: list[Any] = []
    ask = running.connector.get_external_cache_hit_sources

    def listening(*args: Any) -> Any:
        seen.append(ask(*args))
        return seen[-1]

    running.connector.get_external_cache_hit_sources = listening
    running.generate(LONG, 1)
    assert seen == [{CacheHitSource.HOST: 896}]
