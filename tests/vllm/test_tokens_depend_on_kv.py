"""The oracle itself: without a connector, tokens repeat, and depend on the KV cache's contents."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from real_engine import Engine, prompt

pytestmark = pytest.mark.vllm

# Model, dtype, prompt length, cached tokens when the prompt comes a second time.
CASES = [
    ("llama", "float32", 897, 896),
    ("gemma2", "float32", 897, 896),
    ("qwen3_next", "bfloat16", 1281, 1280),
]


@pytest.mark.parametrize(("name", "dtype", "length", "cached"), CASES, ids=[case[0] for case in CASES])
def test_tokens_depend_on_the_kv_cache(
    engine: Callable[..., Engine],
    request: pytest.FixtureRequest,
    name: str,
    dtype: str,
    length: int,
    cached: int,
) -> None:
    model: Path = request.getfixturevalue(name)
    one = engine(model, dtype=dtype, max_model_len=2048, blocks=64)
    ids = prompt(length)
    cold = one.generate(ids, 16, logprobs=5)
    assert cold.cached == 0
    warm = one.generate(ids, 16, logprobs=5)
    assert (warm.tokens, warm.cached) == (cold.tokens, cached)

    corrupt_kv_cache(one)
    wrong = one.generate(ids, 16, logprobs=5)
    assert wrong.cached == cached
    assert wrong.logprobs != warm.logprobs
    if name != "gemma2":  # its tokens hardly change, its probabilities do
        assert wrong.tokens != warm.tokens

    assert one.device_blocks_in_use() == 0
    assert one.reset_device_cache()
    assert one.generate(ids, 16).tokens == cold.tokens


def corrupt_kv_cache(one: Engine) -> None:
    """Swap the device blocks among each other, so that every one holds real values of another place."""
    caches = one.core.model_executor.driver_worker.worker.model_runner.kv_caches
    for cache in caches:
        cache.copy_(torch.roll(cache.clone(), 1, dims=0))
