"""Planned loads in a real vLLM, whose disk is as fast, or as slow, as the test says."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engine_checks import Reference, flush, inject_faults, nothing_left, stats
from real_engine import Engine, prompt

pytestmark = pytest.mark.vllm

Make = Callable[..., Engine]
TOKENS = 1025
HIT = 1024


@pytest.fixture
def planned(engine: Make, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine that plans and whose disk can be made slow, with 20 prompts on disk only, which has learned."""
    inject_faults(monkeypatch)
    options = {
        "host_memory": "32MiB",
        "disk_path": str(tmp_path / "disk"),
        "disk_capacity": "256MiB",
        "promotion_wait": "planned",
        "min_load_tokens": None,
    }
    one = engine(llama, options, blocks=64)
    for seed in range(20):
        one.generate(prompt(TOKENS, seed), 1)
        nothing_left(one)
    for seed in range(100, 105):
        one.generate(prompt(TOKENS, seed), 1)
        nothing_left(one)
    flush(one)
    for seed in range(4):
        one.generate(prompt(TOKENS, seed), 1)
        nothing_left(one)
    return one


def counts(one: Engine, *names: str) -> list[int]:
    found = stats(one)
    return [found[name] for name in names]


def test_steps_and_reads_are_learned(planned: Engine) -> None:
    found = stats(planned)
    assert found["plan_prefill_tokens_per_s"] > 100
    assert found["plan_disk_bytes_per_s"] > 1e6
    assert found["plan_bytes_per_token"] == 4096


def test_a_disk_that_hangs_or_is_slow_is_not_waited_for_and_one_that_is_fast_again_is_read(
    planned: Engine, reference: Reference
) -> None:
    engine = planned.connector._engine
    stopped = ("plans_stopped_rest", "plans_stopped_guarantee", "promotions_given_up")
    before = counts(planned, *stopped)
    assert engine.limit_reads(0.0)
    ids = prompt(TOKENS, 5)
    hung = planned.generate(ids, 4)
    assert hung.tokens == reference(ids, 4)
    assert hung.cached < HIT
    assert sum(counts(planned, *stopped)) > sum(before)
    # 4 MiB at 200 kB a second are 20 s.
    engine.limit_reads(2e5)
    for seed in range(6, 9):
        ids = prompt(TOKENS, seed)
        slow = planned.generate(ids, 4)
        assert slow.tokens == reference(ids, 4)
        assert slow.cached < HIT
    engine.limit_reads(None)
    cached = 0
    for seed in range(9, 20):
        ids = prompt(TOKENS, seed)
        fast = planned.generate(ids, 4)
        assert fast.tokens == reference(ids, 4)
        cached = max(cached, fast.cached)
        if cached == HIT:
            break
        # A disk that was slow is measured again after a quarter of a second without a read.
        time.sleep(0.3)
    assert cached == HIT


def test_a_slow_disk_is_measured_beside_a_prompt_that_is_computed(planned: Engine, reference: Reference) -> None:
    # 4 MiB at 5 MB a second are 0.8 s.
    assert planned.connector._engine.limit_reads(5e6)
    names = ("plans_compute_measure", "promotions", "promotions_given_up")
    for seed in range(5, 20):
        before = counts(planned, *names)
        ids = prompt(TOKENS, seed)
        computed = planned.generate(ids, 4)
        assert computed.tokens == reference(ids, 4)
        measured, *promotions = counts(planned, *names)
        if measured > before[0]:
            assert (computed.cached, promotions) == (0, before[1:])
            return
        time.sleep(0.3)
    raise AssertionError("the disk was not measured")
