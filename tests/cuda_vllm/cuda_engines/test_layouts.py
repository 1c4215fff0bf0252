"""KV cache layouts in which each number of ranks has a cache of its own, and the line of the log that says why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fake_cuda
import real_engine
from engine_checks import flush, nothing_left, stats
from fake_cuda import Fake
from prompts import MEMORY, PROMPTS, TOKENS, cached, slow, tokens
from real_engine import Engine
from tiny_models import Shape, make_llama
from undercroft import _core
from undercroft.log import logger

pytestmark = pytest.mark.skipif(not fake_cuda.is_loaded(), reason="ranks on GPUs need NCCL")

Start = Callable[..., Engine]
TWO: dict[str, Any] = {"executor": "mp", "tensor_parallel_size": 2, "disable_custom_all_reduce": True}
BLOCK = 32
"""Tokens of a block, so that the page of a rank of two is as large as those that are not gathered."""
ON_DEVICE = 96
"""Most tokens that a prompt shares with another one, in the device's own cache."""


@pytest.fixture(scope="session")
def wide(model_root: Path) -> Path:
    """A model with pages of 64 KiB on one rank."""
    shape = Shape(hidden=64, intermediate=128, layers=2, heads=4, kv_heads=2, head_dim=128)
    return make_llama(model_root / "llama_wide", shape)


@pytest.fixture
def start(engine: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Start:
    """Starts an engine of so many ranks, in a KV cache layout, on the test's one directory."""
    monkeypatch.setattr(real_engine, "PRELOADED", ["fake_ranks"])
    options = {**MEMORY, "disk_path": str(tmp_path / "cache"), "disk_capacity": "128MiB"}

    def start(model: Path, ranks: int, layout: str, **arguments: Any) -> Engine:
        from vllm import envs

        envs.disable_envs_cache()
        monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", layout)
        return engine(model, options, **{"block_size": BLOCK, **(TWO if ranks == 2 else {}), **arguments})

    return start


def ask(one: Engine, prompts: list[list[int]], ranks: int) -> tuple[list[list[int]], list[int]]:
    """Tokens of the answers, and the tokens of each prompt that were not computed. All is then on disk."""
    if ranks == 1:
        slow(Fake())
    answers = one.generate_all(prompts, TOKENS)
    nothing_left(one)
    flush(one)
    assert stats(one)["load_failures"] == stats(one)["checksum_failures"] == 0
    return tokens(answers), cached(answers)


def held(prompts: list[list[int]], block: int = BLOCK) -> list[int]:
    """Tokens in whole blocks, from `min_load_tokens` on."""
    whole = [len(ids) // block * block for ids in prompts]
    return [tokens if tokens >= 64 else 0 for tokens in whole]


@pytest.mark.parametrize(
    ("layout", "block", "reason"),
    [
        # The layout that vLLM chooses on GPUs; the others are in tests/unit/test_ranks.py.
        ("LBNHC", BLOCK, "in the KV cache layout LBNHC a payload for"),
        ("LBHNC", 16, "KV cache group 0 (FullAttentionSpec) has pages of 16384 bytes on each rank, too small"),
    ],
)
def test_a_cache_that_depends_on_the_ranks_is_kept_apart_and_the_log_says_why(
    start: Start,
    wide: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    block: int,
    reason: str,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(logger, "info", lambda text, *values: said.append(text % values))
    expected = None
    for ranks, is_hit in ((1, False), (2, False), (2, True)):
        running = start(wide, ranks, layout, block_size=block)
        assert running.core.scheduler.kv_cache_config.kv_cache_layout == layout
        found, hits = ask(running, PROMPTS, ranks)
        assert hits == held(PROMPTS, block) if is_hit else max(hits) <= ON_DEVICE, ranks
        assert found == (expected or found)
        expected = found
        if ranks == 2:
            assert running.core.collective_rpc("broken") == [[], []]
        running.close()
    assert len(_core.inspect(str(tmp_path / "cache"))["namespaces"]) == 2
    [one, again] = [line for line in said if "tensor_parallel_size" in line]
    assert one == again
    assert f"the cache serves tensor_parallel_size = 2 only: {reason}" in one
