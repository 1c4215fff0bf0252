"""Latent attention (MLA), as DeepSeek's models have it, with vLLM's Triton kernels for decodes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fake_device
from engine_checks import Reference, nothing_left, stats
from fake_cuda import Fake
from prompts import CACHED, MEMORY, PROMPTS, TOKENS, cached, slow, tokens
from real_engine import Engine

Make = Callable[..., Engine]


@pytest.fixture(scope="session")
def arguments() -> dict[str, Any]:
    """Of the engines."""
    import mla

    mla.install()
    return mla.ARGUMENTS


@pytest.fixture(scope="session")
def deepseek(model_root: Path) -> Path:
    from tiny_models import make_deepseek

    return make_deepseek(model_root / "deepseek")


def test_latent_blocks_come_back(fake: Fake, engine: Make, deepseek: Path, arguments: dict[str, Any]) -> None:
    plain = Reference(deepseek, **{**fake_device.ENGINE, **arguments})
    expected = [plain(ids, TOKENS) for ids in PROMPTS]
    plain.close()
    one = engine(deepseek, MEMORY, **arguments)
    assert one.core.vllm_config.model_config.use_mla
    slow(fake)
    assert tokens(one.generate_all(PROMPTS, TOKENS)) == expected
    nothing_left(one)
    hit = one.generate_all(PROMPTS, TOKENS)
    assert (tokens(hit), cached(hit)) == (expected, CACHED)
    nothing_left(one)
    assert stats(one)["load_failures"] == 0
