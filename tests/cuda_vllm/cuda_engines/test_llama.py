"""A model of full attention, with vLLM's V2 model runner and asynchronous scheduling."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fake_cuda
from engine_checks import flush, nothing_left, stats
from fake_cuda import Fake
from prompts import CACHED, MEMORY, PROMPTS, TOKENS, cached, slow, tokens
from real_engine import Engine
from undercroft.device.cuda_streams import CudaStreams

Make = Callable[..., Engine]
Reference = Callable[..., list[int]]


def test_vllms_own_worker_and_scheduler_run(engine: Make, llama: Path) -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker

    one = engine(llama, MEMORY)
    worker: Any = one.core.model_executor.driver_worker.worker
    assert type(worker) is Worker
    assert type(worker.model_runner) is GPUModelRunner
    assert type(one.scheduler) is AsyncScheduler


@pytest.mark.parametrize("seed", [0, 1])
def test_blocks_come_back_from_host_memory(
    fake: Fake, engine: Make, llama: Path, reference: Reference, seed: int
) -> None:
    expected = [reference(ids, TOKENS) for ids in PROMPTS]
    one = engine(llama, MEMORY)
    slow(fake, seed)
    cold = one.generate_all(PROMPTS, TOKENS)
    assert tokens(cold) == expected
    nothing_left(one)
    hit = one.generate_all(PROMPTS, TOKENS)
    assert (tokens(hit), cached(hit)) == (expected, CACHED)
    nothing_left(one)
    assert stats(one)["load_failures"] == 0


def test_blocks_come_back_from_disk(
    fake: Fake, engine: Make, llama: Path, reference: Reference, tmp_path: Path
) -> None:
    expected = [reference(ids, TOKENS) for ids in PROMPTS]
    options = {**MEMORY, "disk_path": str(tmp_path / "cache"), "disk_capacity": "128MiB"}
    first = engine(llama, options)
    slow(fake)
    assert tokens(first.generate_all(PROMPTS, TOKENS)) == expected
    nothing_left(first)
    flush(first)
    first.close()
    second = engine(llama, options)
    slow(fake)
    hit = second.generate_all(PROMPTS, TOKENS)
    assert (tokens(hit), cached(hit)) == (expected, CACHED)
    nothing_left(second)
    assert stats(second)["disk_reads"] > 0


@pytest.mark.skipif(not fake_cuda.is_loaded(), reason="a GPU is too fast to show it each time")
def test_a_missing_wait_gives_other_tokens(
    fake: Fake, engine: Make, llama: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [reference(ids, TOKENS) for ids in PROMPTS]
    monkeypatch.setattr(CudaStreams, "wait", lambda *_: None)
    # PyTorch refuses to time copies that have begun before their event.
    monkeypatch.setattr(CudaStreams, "seconds", lambda *_: 0.0)
    one = engine(llama, MEMORY)
    slow(fake)
    answers = one.generate_all(PROMPTS, TOKENS)
    nothing_left(one)
    assert tokens(answers + one.generate_all(PROMPTS, TOKENS)) != expected * 2
