"""vLLM's sleep with its own allocator: the memory of the KV cache goes while copies were under way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import fake_cuda
from engine_checks import nothing_left, stats
from fake_cuda import Fake
from prompts import CACHED, MEMORY, PROMPTS, TOKENS, cached, slow, tokens
from real_engine import Engine, prompt

Make = Callable[..., Engine]
Reference = Callable[..., list[int]]
LATE = prompt(300, seed=9)


def test_saves_end_before_sleep_frees_the_memory(
    fake: Fake, engine: Make, llama: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    class InItsOwnProcess(EngineCoreProc):
        """Where no trainer can change the model unseen, so that the cache stays."""

        pause_scheduler = EngineCore.pause_scheduler

    expected = [reference(ids, TOKENS) for ids in PROMPTS]
    late = reference(LATE, TOKENS)
    one = engine(llama, MEMORY, enable_sleep_mode=True)
    monkeypatch.setattr(one.core, "__class__", InItsOwnProcess)
    allocations = fake.counts()["device_allocations"] if fake_cuda.is_loaded() else 0
    assert tokens(one.generate_all(PROMPTS, TOKENS)) == expected
    nothing_left(one)
    slow(fake, bytes_per_second=2e5)
    assert one.generate(LATE, TOKENS).tokens == late
    if fake_cuda.is_loaded():
        assert stats(one)["saves"] > 0, "copies are to be under way"
    one.core.sleep(1)
    slow(fake)
    one.core.wake_up()
    nothing_left(one)
    if fake_cuda.is_loaded():
        assert fake.counts()["device_allocations"] > allocations, "memory was given back and mapped again"
    assert one.generate(LATE, TOKENS).tokens == late
    awake = one.generate_all(PROMPTS, TOKENS)
    assert (tokens(awake), cached(awake)) == (expected, CACHED)
    nothing_left(one)
    one.core.sleep(2)
    one.core.wake_up(["weights"])
    one.core.collective_rpc("reload_weights")
    one.core.wake_up(["kv_cache"])
    # The weights may be others now: the third prompt finds only blocks of the first, on the device.
    reloaded = one.generate_all(PROMPTS, TOKENS)
    assert (tokens(reloaded), cached(reloaded)) == (expected, [0, 0, 96, 0])
    nothing_left(one)
    again = one.generate_all(PROMPTS, TOKENS)
    assert tokens(again) == expected
    nothing_left(one)
