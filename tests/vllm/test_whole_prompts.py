"""Prompts that end with a block: all of their blocks are hit, and vLLM computes the last token again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from connector_engine import BLOCK, core, settled
from engine_checks import Reference, nothing_left
from hybrid_engine import HOST, MODELS, Model, ask
from real_engine import Engine, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

MEMORY = {"host_memory": "64MiB"}
WHOLE = prompt(4 * BLOCK)


def scheduled(one: Engine) -> list[int]:
    """The number of tokens of each later step that computes some."""
    counts: list[int] = []
    schedule = one.scheduler.schedule

    def noted(*arguments: Any, **named: Any) -> Any:
        output = schedule(*arguments, **named)
        if output.total_num_scheduled_tokens:
            counts.append(output.total_num_scheduled_tokens)
        return output

    one.scheduler.schedule = noted
    return counts


@pytest.mark.parametrize("n", [1, 16])
def test_only_the_last_token_is_computed(
    n: int, engine: Callable[..., Engine], llama: Path, reference: Reference, tmp_path: Path
) -> None:
    """From host memory, from disk after a restart, and where the device holds all blocks but the last."""
    disk = {**MEMORY, "disk_path": str(tmp_path / "cache"), "disk_capacity": "64MiB"}
    one = engine(llama, disk)
    cold = one.generate(WHOLE, n)
    settled(one)
    counts = scheduled(one)
    warm = one.generate(WHOLE, n)
    assert counts == [1] * n
    settled(one, reset=False)
    again = one.generate(WHOLE, n)
    assert core(one).flush(30.0)
    one.close()
    restarted = engine(llama, disk)
    read = restarted.generate(WHOLE, n)
    answers = [cold, warm, again, read]
    assert [answer.cached for answer in answers] == [0, *[4 * BLOCK] * 3]
    assert all(answer.tokens == reference(WHOLE, n) for answer in answers)
    nothing_left(restarted)


def test_the_block_of_the_last_token_may_be_shared(
    engine: Callable[..., Engine], llama: Path, reference: Reference
) -> None:
    """The last token's KV is written again while other requests read the block. Only rounding may change."""
    longer = [*WHOLE, *prompt(60, seed=5)]
    prompts = [WHOLE, longer, WHOLE, [*WHOLE, 7]]
    one = engine(llama, MEMORY)
    one.generate(WHOLE, 1)
    settled(one)
    for turn in range(2):
        answers = one.generate_all(prompts if turn else prompts[::-1], 8)
        expected = prompts if turn else prompts[::-1]
        assert [answer.tokens for answer in answers] == [reference(ids, 8) for ids in expected]
        assert all(answer.cached == 4 * BLOCK for answer in answers)
        settled(one)


def test_the_last_token_gets_the_same_values_again(engine: Callable[..., Engine], llama: Path) -> None:
    one = engine(llama, MEMORY)
    one.generate(WHOLE, 1)
    settled(one)
    add, step = one.llm.llm_engine.add_request, one.llm.llm_engine.step
    from vllm import SamplingParams

    add("again", {"prompt_token_ids": WHOLE}, SamplingParams(temperature=0, max_tokens=1, detokenize=False))
    caches = [layer.kv_cache for layer in one.core.vllm_config.compilation_config.static_forward_context.values()]
    while not one.scheduler.finished_recving_kv_req_ids:
        step()
    loaded = [cache.clone() for cache in caches]
    counts = scheduled(one)
    while one.llm.llm_engine.has_unfinished_requests():
        step()
    assert counts == [1]
    for before, after in zip(loaded, caches, strict=True):
        assert before.abs().max() > 0.1
        torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)
    nothing_left(one)


def test_a_resumed_request_may_end_with_a_block(
    engine: Callable[..., Engine], llama: Path, reference: Reference
) -> None:
    """Preempted when prompt and answer fill whole blocks: the generated tokens are hit too."""
    one = engine(llama, MEMORY)
    start = prompt(2 * BLOCK - 4, seed=3)
    from vllm import SamplingParams

    llm = one.llm.llm_engine
    sampling = SamplingParams(temperature=0, max_tokens=12, detokenize=False, ignore_eos=True)
    llm.add_request("a", {"prompt_token_ids": start}, sampling)
    (request,) = one.scheduler.requests.values()
    while request.num_tokens < 2 * BLOCK:
        llm.step()
    assert one.scheduler.reset_prefix_cache(reset_running_requests=True)
    counts = scheduled(one)
    outputs: list[Any] = []
    while llm.has_unfinished_requests():
        outputs += llm.step()
    assert list(outputs[-1].outputs[0].token_ids) == reference(start, 12)
    # The KV of the token that was generated last did not exist yet: its block is not in the tiers.
    assert counts[0] == BLOCK
    nothing_left(one)


@pytest.mark.parametrize("name", MODELS)
def test_windows_and_states_leave_the_last_token_out(name: str, request: pytest.FixtureRequest) -> None:
    dtype, block, group = MODELS[name]
    model = Model(name, request.getfixturevalue(name), dtype, block, group)
    one = model.start({"host_memory": HOST, "min_load_tokens": 1})
    try:
        whole = model.ids(2, extra=0)
        answers = [ask(one, whole), ask(one, whole)]
        assert [answer.cached for answer in answers] == [0, len(whole) - block]
        assert model.same(*answers)
    finally:
        one.close()
