"""Inputs of a model besides tokens: a block is found again only for a request with the same inputs."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from connector_engine import core, settled
from engine_checks import nothing_left
from real_engine import Engine, prompt
from tiny_models import LLAVA_IMAGE, Shape, make_llama, make_llava

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

BLOCK = 32
SHAPE = Shape(hidden=128, intermediate=256, layers=2, heads=2, kv_heads=1)
ARGUMENTS: dict[str, Any] = {"block_size": BLOCK, "max_model_len": 512}
MEMORY = {"host_memory": "32MiB", "min_load_tokens": 1}
IMAGES = {"max_num_batched_tokens": 128, "limit_mm_per_prompt": {"image": 3}, "skip_tokenizer_init": False}
"""A step takes 128 tokens, so that it ends inside images of 64 tokens."""

Answer = tuple[list[int], int]
"""The tokens of an answer, and the number of prompt tokens that were not computed."""


def answers(one: Engine, requests: list[dict[str, Any]]) -> list[Answer]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=16, detokenize=False, ignore_eos=True)
    outputs = one.llm.generate(requests, sampling, use_tqdm=False)
    return [(list(output.outputs[0].token_ids), output.num_cached_tokens or 0) for output in outputs]


@pytest.fixture(scope="session")
def small(model_root: Path) -> Path:
    return make_llama(model_root / "small_text", SHAPE, tokenizer=True)


def alone(model: Path, requests: list[dict[str, Any]], **arguments: Any) -> list[list[int]]:
    """The tokens of a vLLM without any cache."""
    plain = Engine(model, enable_prefix_caching=False, **ARGUMENTS, **arguments)
    try:
        return [answers(plain, [request])[0][0] for request in requests]
    finally:
        plain.close()


def test_embeddings_at_other_positions_or_of_another_type(small: Path, engine: Callable[..., Engine]) -> None:
    """The bytes of the embeddings and the token ids are the same: which of them are used is not, or their values."""
    torch.manual_seed(1)
    rows = torch.randn(96, SHAPE.hidden)
    masks = [[False] * 96, [True] * 64 + [False] * 32, [True] * 8 + [False] * 88, [False] * 40 + [True] * 56]
    requests: list[dict[str, Any]] = [
        {"prompt_embeds": rows.clone(), "prompt_token_ids": [0] * 96, "prompt_is_token_ids": mask} for mask in masks
    ]
    halves = torch.randn(96, SHAPE.hidden).to(torch.float16)
    requests += [{"prompt_embeds": halves}, {"prompt_embeds": halves.view(torch.bfloat16)}]
    expected = alone(small, requests, enable_prompt_embeds=True)
    assert len({tuple(tokens) for tokens in expected}) == len(requests)
    one = engine(small, MEMORY, enable_prompt_embeds=True, **ARGUMENTS)
    for turn in range(2):
        for request, tokens in zip(requests, expected, strict=True):
            # The last of these masks differs from the first in its second block.
            shared = BLOCK if request is requests[3] else 0
            assert answers(one, [request]) == [(tokens, 96 if turn else shared)]
            settled(one)
    nothing_left(one)


def pictures() -> list[Any]:
    from PIL import Image

    numbers = np.random.default_rng(0)
    return [Image.fromarray(numbers.integers(0, 255, (32, 32, 3), dtype=np.uint8)) for _ in range(4)]


TEXTS = [prompt(n, seed=n) for n in (40, 60, 33)]


def with_images(parts: list[Any], uuids: list[str] | None = None) -> dict[str, Any]:
    """A prompt of texts (lists of tokens) and pictures (their numbers)."""
    ids: list[int] = []
    for part in parts:
        ids += [LLAVA_IMAGE] if isinstance(part, int) else part
    images = [pictures()[part] for part in parts if isinstance(part, int)]
    request = {"prompt_token_ids": ids, "multi_modal_data": {"image": images}}
    return request | ({"multi_modal_uuids": {"image": uuids}} if uuids else {})


FIRST, SECOND, THIRD = TEXTS
CASES = [
    *[[FIRST, picture, SECOND] for picture in range(4)],
    [FIRST, 0, THIRD, 1, SECOND],
    [FIRST, 0, THIRD, 2, SECOND],
    [FIRST, 1, THIRD, 0, SECOND],
    [FIRST, 0, 1, 2, SECOND],
    [SECOND, 0, SECOND],
]


def test_images(model_root: Path, engine: Callable[..., Engine], tmp_path: Path) -> None:
    """The same pictures in other orders and places, cut by steps and by hits, aborted inside, and after a restart."""
    pytest.importorskip("torchvision", reason="transformers reads images with it: make build")
    model = make_llava(model_root / "llava")
    requests = [with_images(parts) for parts in CASES]
    expected = alone(model, requests, **IMAGES)
    assert len({tuple(tokens) for tokens in expected}) == len(CASES)
    options = {**MEMORY, "disk_path": str(tmp_path / "cache"), "disk_capacity": "64MiB"}
    one = engine(model, options, blocks=64, **ARGUMENTS, **IMAGES)
    for turn in range(2):
        order = random.Random(turn).sample(range(len(CASES)), len(CASES))
        for case in order:
            ((tokens, cached),) = answers(one, [requests[case]])
            assert tokens == expected[case], case
            assert cached >= turn * 160, case
            settled(one)
    assert [tokens for tokens, _ in answers(one, requests)] == expected
    settled(one)
    for steps in range(6):
        from vllm import SamplingParams

        one.llm.llm_engine.add_request(f"aborted-{steps}", requests[7], SamplingParams(max_tokens=4))
        for _ in range(steps):
            one.llm.llm_engine.step()
        one.llm.llm_engine.abort_request([f"aborted-{steps}"])
        settled(one)
    assert answers(one, [requests[7]])[0][0] == expected[7]
    # A client gives a picture a name, and after a restart it gives the name to another picture.
    named = [with_images(CASES[picture], ["photo-1"]) for picture in (0, 1)]
    assert answers(one, [named[0]])[0][0] == expected[0]
    settled(one)
    assert core(one).flush(30.0)
    one.close()

    restarted = engine(model, options, blocks=64, **ARGUMENTS, **IMAGES)
    assert answers(restarted, [named[1]]) == [(expected[1], BLOCK)], "only the text before the picture is shared"
    settled(restarted)
    # vLLM itself names pictures by their content, with the arguments of the processor.
    assert answers(restarted, [requests[0]]) == [(expected[0], 160)]
    settled(restarted)
    changed = requests[0] | {"mm_processor_kwargs": {"do_normalize": False}}
    assert answers(restarted, [changed])[0][1] == BLOCK
    settled(restarted)
    assert core(restarted).flush(30.0)
    restarted.close()

    trusting = engine(model, {**options, "unique_media_uuids": True}, blocks=64, **ARGUMENTS, **IMAGES)
    assert answers(trusting, [named[1]]) == [(expected[1], BLOCK)], "nothing was saved with this name"
    settled(trusting)
    assert answers(trusting, [named[1]]) == [(expected[1], 160)]
    nothing_left(trusting)


@pytest.mark.parametrize(("task", "most"), [("embed", 288), ("token_embed", 0)])
def test_pooling_of_the_last_token_and_of_each_token(
    task: str, most: int, small: Path, engine: Callable[..., Engine]
) -> None:
    """A vector for each token needs every token computed. A vector of the last token does not."""
    from vllm import PoolingParams
    from vllm.config import PoolerConfig

    arguments = {**ARGUMENTS, "runner": "pooling", "convert": "embed", "skip_tokenizer_init": False}
    one = engine(small, MEMORY, pooler_config=PoolerConfig(task=task), **arguments)
    request, found = {"prompt_token_ids": prompt(300)}, []
    for turn in range(3):
        parameters = PoolingParams(task=task)
        (output,) = one.llm.encode([request], pooling_params=parameters, pooling_task=task, use_tqdm=False)
        found.append(output.outputs.data.float())
        assert output.num_cached_tokens == (most if turn else 0)
        settled(one)
    assert found[0].shape[0] == (128 if task == "embed" else 300)
    for again in found[1:]:
        torch.testing.assert_close(again, found[0], rtol=1e-4, atol=1e-4)
    nothing_left(one)


class Session:
    """A session with streaming input in an engine that is stepped by hand."""

    def __init__(self, one: Engine) -> None:
        self.one = one
        self.tokens: dict[str, list[int]] = {}

    def add(self, name: str, ids: list[int], n: int, *, resumable: bool) -> None:
        from vllm import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        request = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=list(ids),
            mm_features=None,
            sampling_params=SamplingParams(temperature=0, max_tokens=n, detokenize=False, ignore_eos=True),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            resumable=resumable,
        )
        self.one.core.add_request(*self.one.core.preprocess_add_request(request))
        self.tokens.setdefault(name, [])

    def step_until(self, name: str, count: int) -> list[int]:
        """The tokens of a request, when it has so many."""
        for _ in range(2000):
            if len(self.tokens[name]) >= count:
                return self.tokens[name]
            for outputs in (self.one.core.step()[0] or {}).values():
                for output in outputs.outputs:
                    self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
        raise AssertionError(f"{name} has {self.tokens[name]} after 2000 steps")


def test_sessions_whose_turns_end_at_the_borders_of_blocks(small: Path, engine: Callable[..., Engine]) -> None:
    """A turn's last token gets no KV: the next turn's first token takes its place, and the block has another hash."""
    one = engine(small, MEMORY, **ARGUMENTS)
    asked: list[tuple[list[int], list[int]]] = []
    for length in (BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK):
        for n in (1, 2):
            session = Session(one)
            first, more = prompt(length, seed=length + n), prompt(40, seed=99)
            session.add("session", first, n, resumable=True)
            turn = list(session.step_until("session", n))
            session.add("session", more, 4, resumable=True)
            session.step_until("session", n + 4)
            one.core.abort_requests(["session"])
            settled(one)
            for ids in (first + turn[: n - 1] + more, first + turn + prompt(30, seed=5)):
                session.add("check", ids, 8, resumable=False)
                asked.append((ids, list(session.step_until("check", 8))))
                del session.tokens["check"]
                settled(one)
    assert one.connector._counts.collect() is not None
    nothing_left(one)
    one.close()
    requests = [{"prompt_token_ids": ids} for ids, _ in asked]
    plain = Engine(small, enable_prefix_caching=False, **ARGUMENTS)
    for request, (_, tokens) in zip(requests, asked, strict=True):
        assert answers(plain, [request])[0][0][:8] == tokens
    plain.close()
