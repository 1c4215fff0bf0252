"""Two ranks with undercroft's own copies: each is a process with a device of its own, and copies its heads, or some of
the latents that both have."""

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
from tiny_models import Shape, make_deepseek, make_llama
from undercroft import _core

Make = Callable[..., Engine]
TWO: dict[str, Any] = {"executor": "mp", "tensor_parallel_size": 2, "disable_custom_all_reduce": True}
LATENTS = 2 * 16 * (256 + 64) * 4
"""Bytes of a block of the model with latent attention: layers, tokens, values, size of a number."""

pytestmark = pytest.mark.skipif(not fake_cuda.is_loaded(), reason="ranks on GPUs need NCCL")


class Ranks:
    """Engines of a model with any number of ranks, one after the other, on one directory."""

    def __init__(self, fake: Fake, engine: Make, model: Path, directory: Path, **arguments: Any) -> None:
        self._fake, self._engine, self._model, self._arguments = fake, engine, model, arguments
        self._options = {**MEMORY, "disk_path": str(directory), "disk_capacity": "128MiB"}
        plain = Reference(model, **{**fake_device.ENGINE, **arguments})
        self._expected = [plain(ids, TOKENS) for ids in PROMPTS]
        plain.close()

    def answers(self, ranks: int, *asked: list[list[int]]) -> list[list[int]]:
        """The hits of several lists of prompts, whose blocks are then on disk. The tokens are those of vLLM alone."""
        one = self._engine(self._model, self._options, **(TWO if ranks == 2 else {}), **self._arguments)
        if ranks == 1:
            slow(self._fake)
        hits = []
        for prompts in asked:
            found = one.generate_all(prompts, TOKENS)
            assert tokens(found) == self._expected[: len(prompts)]
            hits.append(cached(found))
            nothing_left(one)
            flush(one)
        assert stats(one)["checksum_failures"] == stats(one)["load_failures"] == 0
        assert (stats(one)["disk_reads"] > 0) == (hits[0][0] > 0)
        if ranks == 2:
            assert one.core.collective_rpc("broken") == [[], []]
        one.close()
        return hits


@pytest.fixture(autouse=True)
def on_the_fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_engine, "PRELOADED", ["fake_ranks"])


def test_two_ranks_with_large_pages_share_a_cache_with_one_rank(
    fake: Fake, engine: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks save two prompts, then one rank all of them, then two ranks find all."""
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "LBHNC")
    shape = Shape(hidden=64, intermediate=128, layers=2, heads=4, kv_heads=4, head_dim=128)
    shared = Ranks(fake, engine, make_llama(tmp_path / "model", shape), tmp_path / "cache")
    assert shared.answers(2, PROMPTS[:2], PROMPTS[:2]) == [[0, 0], CACHED[:2]]
    assert shared.answers(1, PROMPTS) == [[*CACHED[:2], 96, 0]]
    assert shared.answers(2, PROMPTS) == [CACHED]


def test_one_rank_and_two_ranks_keep_latents_once(fake: Fake, engine: Make, tmp_path: Path) -> None:
    """One rank saves two prompts, then two ranks all of them, then one rank finds all."""
    import mla

    mla.install()
    directory = tmp_path / "cache"
    shared = Ranks(fake, engine, make_deepseek(tmp_path / "model"), directory, **mla.ARGUMENTS)
    kept = []
    for ranks, asked, hits in (
        (1, [PROMPTS[:2]], [[0, 0]]),
        (2, [PROMPTS, PROMPTS], [[*CACHED[:2], 96, 0], CACHED]),
        (1, [PROMPTS], [CACHED]),
    ):
        assert shared.answers(ranks, *asked) == hits, ranks
        [namespace] = _core.inspect(str(directory))["namespaces"]
        kept.append(namespace["bytes"] / LATENTS)
    # Whole blocks of the prompts and their answers; the third has six of the first one's.
    assert kept == [12 + 15, 12 + 15 + 6 + 2, 12 + 15 + 6 + 2]
