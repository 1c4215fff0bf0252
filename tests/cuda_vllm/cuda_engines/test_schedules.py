"""Blocks change hands while copies run: preemption, aborts, chunked prefill; and the other ways to run a step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fake_cuda
from engine_checks import add, finish, nothing_left, stats, step, step_until
from fake_cuda import Fake
from prompts import CACHED, MEMORY, PROMPTS, TOKENS, cached, slow, tokens
from real_engine import Engine, prompt

Make = Callable[..., Engine]
Reference = Callable[..., list[int]]


def comes_back(one: Engine, expected: list[list[int]], hits: list[int] = CACHED) -> None:
    """The prompts are computed and saved, then loaded, with the same tokens."""
    assert tokens(one.generate_all(PROMPTS, TOKENS)) == expected
    nothing_left(one)
    again = one.generate_all(PROMPTS, TOKENS)
    assert (tokens(again), cached(again)) == (expected, hits)
    nothing_left(one)
    assert stats(one)["load_failures"] == 0


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({"max_num_batched_tokens": 48}, id="chunked prefill"),
        pytest.param({"async_scheduling": False}, id="each step waits for the last"),
        pytest.param(
            {
                "enforce_eager": False,
                "compilation_config": {
                    "custom_ops": ["none"],
                    "mode": 0,
                    "cudagraph_mode": "FULL_DECODE_ONLY",
                    "cudagraph_capture_sizes": [1, 2, 4],
                },
            },
            id="decodes in graphs",
        ),
    ],
)
def test_blocks_come_back_however_steps_are_run(
    fake: Fake, engine: Make, llama: Path, reference: Reference, arguments: dict[str, Any]
) -> None:
    expected = [reference(ids, TOKENS) for ids in PROMPTS]
    one = engine(llama, MEMORY, **arguments)
    slow(fake)
    comes_back(one, expected)


@pytest.mark.skipif(not fake_cuda.is_loaded(), reason="PyTorch 2.11 ends such a capture on a GPU with an assertion")
def test_blocks_come_back_with_graphs_between_attention(
    fake: Fake, engine: Make, llama: Path, reference: Reference
) -> None:
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper

    expected = [reference(ids, TOKENS) for ids in PROMPTS]
    pieces = {"custom_ops": ["none"], "mode": 0, "cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [4, 256]}
    one = engine(llama, MEMORY, enforce_eager=False, compilation_config=pieces, max_num_batched_tokens=256)
    captures = [
        entry.capture for graphs in BreakableCUDAGraphWrapper._all_instances for entry in graphs.entries.values()
    ]
    assert [(capture.num_graphs, capture.num_eager_breaks) for capture in captures] == [(3, 2), (3, 2)]
    slow(fake)
    comes_back(one, expected)


def test_blocks_come_back_with_the_older_model_runner(
    fake: Fake, engine: Make, llama: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import envs
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    expected = [reference(ids, TOKENS) for ids in PROMPTS]
    envs.disable_envs_cache()
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    one = engine(llama, MEMORY)
    assert type(one.core.model_executor.driver_worker.worker.model_runner) is GPUModelRunner
    slow(fake)
    comes_back(one, expected)


def test_preempted_requests_resume_from_saved_blocks(
    fake: Fake, engine: Make, llama: Path, reference: Reference
) -> None:
    prompts = [[(17 * i + 7 * j) % 990 + 5 for i in range(110)] for j in range(4)]
    expected = [reference(ids, 20) for ids in prompts]
    one = engine(llama, MEMORY, blocks=24, max_model_len=256)
    slow(fake)
    preempted: set[str] = set()
    half = one.connector._scheduler
    build = half.build_connector_meta

    def counting(output: Any) -> Any:
        preempted.update(output.preempted_req_ids or ())
        return build(output)

    half.build_connector_meta = counting
    assert tokens(one.generate_all(prompts, 20)) == expected
    assert preempted
    nothing_left(one)


def test_blocks_of_an_aborted_load_go_to_nobody_before_it_has_ended(
    fake: Fake, engine: Make, llama: Path, reference: Reference
) -> None:
    long, other = prompt(320), prompt(330, seed=5)
    expected = {ids: reference(ids, TOKENS) for ids in (tuple(long), tuple(other))}
    one = engine(llama, MEMORY, blocks=40)
    one.generate(long, TOKENS)
    nothing_left(one)
    for seed in range(3):
        slow(fake, seed, bytes_per_second=3e6)
        add(one, f"aborted {seed}", long, TOKENS)
        step_until(one, lambda: stats(one)["loads"] == 1)
        one.llm.llm_engine.abort_request([f"aborted {seed}"])
        # The device has no room for both.
        add(one, f"other {seed}", other, TOKENS)
        step(one, 3)
        assert list(finish(one).values()) == [expected[tuple(other)]]
        slow(fake, seed)
        nothing_left(one)
        assert one.generate(long, TOKENS).tokens == expected[tuple(long)]
        nothing_left(one)
