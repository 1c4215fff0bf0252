"""Two ranks with undercroft's own copies: each is a process with a device of its own, and copies its heads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fake_cuda
import fake_device
import real_engine
from engine_checks import Reference, flush, nothing_left, stats
from fake_cuda import Fake
from prompts import CACHED, MEMORY, PROMPTS, TOKENS, cached, slow, tokens
from real_engine import Engine
from tiny_models import Shape, make_llama

Make = Callable[..., Engine]
TWO: dict[str, Any] = {"executor": "mp", "tensor_parallel_size": 2, "disable_custom_all_reduce": True}

pytestmark = pytest.mark.skipif(not fake_cuda.is_loaded(), reason="ranks on GPUs need NCCL")


def test_two_ranks_with_large_pages_share_a_cache_with_one_rank(
    fake: Fake,
    engine: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two ranks save two prompts, then one rank all of them, then two ranks find all."""
    monkeypatch.setattr(real_engine, "PRELOADED", ["fake_ranks"])
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "LBHNC")
    shape = Shape(hidden=64, intermediate=128, layers=2, heads=4, kv_heads=4, head_dim=128)
    model = make_llama(tmp_path / "model", shape)
    options = {**MEMORY, "disk_path": str(tmp_path / "cache"), "disk_capacity": "128MiB"}
    plain = Reference(model, **fake_device.ENGINE)
    expected = [plain(ids, TOKENS) for ids in PROMPTS]
    plain.close()

    def answers(running: Engine, prompts: list[list[int]]) -> list[int]:
        """The hits of prompts, whose blocks are then on disk."""
        found = running.generate_all(prompts, TOKENS)
        assert tokens(found) == expected[: len(prompts)]
        nothing_left(running)
        flush(running)
        assert stats(running)["checksum_failures"] == stats(running)["load_failures"] == 0
        return cached(found)

    two = engine(model, options, **TWO)
    assert answers(two, PROMPTS[:2]) == [0, 0]
    assert answers(two, PROMPTS[:2]) == CACHED[:2]
    assert two.core.collective_rpc("broken") == [[], []]
    two.close()

    one = engine(model, options)
    slow(fake)
    assert answers(one, PROMPTS) == [*CACHED[:2], 96, 0]
    one.close()

    two = engine(model, options, **TWO)
    assert answers(two, PROMPTS) == CACHED
    assert stats(two)["disk_reads"] > 0
    assert two.core.collective_rpc("broken") == [[], []]
