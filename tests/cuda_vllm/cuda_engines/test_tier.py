"""undercroft as a tier of vLLM's offloading, whose own copies fill and empty the host memory in between."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fake_cuda import Fake
from prompts import PROMPTS, TOKENS, cached, slow, tokens
from real_engine import Engine
from tier_engine import OFFLOADING, extra_config, settled, stats
from tiny_models import Shape, make_eagle

Make = Callable[..., Engine]
Reference = Callable[..., list[int]]
HITS = [192, 240, 176, 32]
"""Tokens of the prompts in whole blocks."""


def options(directory: Path) -> dict[str, Any]:
    """With vLLM's own specification, and host memory for 256 blocks."""
    found = extra_config(directory / "cache", cpu_bytes_to_use=4 << 20, min_load_tokens=0) | {
        "spec_name": "TieringOffloadingSpec"
    }
    del found["spec_module_path"]
    return found


def comes_back(make: Callable[[], Engine], fake: Fake, expected: list[list[int]], hits: list[int]) -> None:
    """The prompts are computed and saved. They come back from vLLM's host memory, and after a restart from disk."""
    first = make()
    slow(fake)
    assert tokens(first.generate_all(PROMPTS, TOKENS)) == expected
    settled(first)
    again = first.generate_all(PROMPTS, TOKENS)
    assert (tokens(again), cached(again)) == (expected, hits)
    settled(first)
    assert stats(first)["disk_reads"] == 0
    first.close()
    second = make()
    slow(fake, seed=1)
    again = second.generate_all(PROMPTS, TOKENS)
    assert (tokens(again), cached(again)) == (expected, hits)
    settled(second)
    found = stats(second)
    assert found["disk_reads"] > 0
    assert found["checksum_failures"] == found["load_failures"] == 0


def test_blocks_come_back(fake: Fake, engine: Make, llama: Path, reference: Reference, tmp_path: Path) -> None:
    expected = [reference(ids, TOKENS) for ids in PROMPTS]
    comes_back(lambda: engine(llama, options(tmp_path), **OFFLOADING), fake, expected, HITS)


def test_chunks_of_several_blocks_come_back(
    fake: Fake, engine: Make, llama: Path, reference: Reference, tmp_path: Path
) -> None:
    expected = [reference(ids, TOKENS) for ids in PROMPTS]
    whole = options(tmp_path) | {"blocks_per_chunk": 2}
    comes_back(lambda: engine(llama, whole, **OFFLOADING), fake, expected, [192, 224, 160, 32])


@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_a_drafts_layers_come_back(
    method: str, fake: Fake, engine: Make, llama: Path, reference: Reference, tmp_path: Path
) -> None:
    expected = [reference(ids, TOKENS) for ids in PROMPTS]
    shape = Shape(hidden=64, intermediate=128, layers=1, heads=4, kv_heads=2, head_dim=32)
    model = make_eagle(tmp_path / "eagle", shape) if method == "eagle" else llama
    draft = {"method": method, "model": str(model), "num_speculative_tokens": 2}

    def make() -> Engine:
        return engine(llama, options(tmp_path), speculative_config=draft, **OFFLOADING)

    comes_back(make, fake, expected, HITS)
