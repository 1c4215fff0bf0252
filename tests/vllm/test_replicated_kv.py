"""KV that two ranks hold alike is kept once: each saves some of the blocks, and both load all."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core import kv_cache_utils

from connector_engine import BLOCK, LONG, TOKENS, References, core, settled
from real_engine import Engine, prompt
from tiny_models import Shape, make_llama
from undercroft import _core

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

MORE = LONG + prompt(BLOCK * 4, 7)
"""Four blocks more."""


@pytest.fixture(scope="module")
def one_head(model_root: Path) -> Path:
    """A model with one head of keys and values, which every rank holds."""
    return make_llama(model_root / "llama_one_head", Shape(kv_heads=1))


@pytest.fixture(scope="module")
def reference(one_head: Path) -> References:
    """The tokens of a vLLM of one rank without any cache."""
    return References(one_head, (LONG, TOKENS), (MORE, TOKENS))


@pytest.fixture
def start(one_head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    """Starts an engine of so many ranks, whose vLLM reports the KV that they replicate.

    vLLM reports it for latent attention only. On a CPU it runs that with prefix caching only where the CPU has AMX.
    """
    started: list[Engine] = []

    def start(ranks: int, directory: str) -> Engine:
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join(map(str, range(ranks))))
        # The module is kv_cache_planning from vLLM 0.33 on.
        planning = sys.modules.get("vllm.v1.core.kv_cache_planning", kv_cache_utils)
        monkeypatch.setattr(planning, "kv_cache_groups_tp_replicas", lambda *_: ranks)
        options = {"host_memory": "64MiB", "disk_path": str(tmp_path / directory), "disk_capacity": "64MiB"}
        arguments: dict[str, Any] = {"executor": "mp", "tensor_parallel_size": 2} if ranks == 2 else {}
        started.append(Engine(one_head, options, max_model_len=2048, blocks=64, **arguments))
        return started[-1]

    yield start
    for running in started:
        running.close()


def test_two_ranks_keep_as_many_bytes_as_one(
    start: Callable[..., Engine], reference: References, tmp_path: Path
) -> None:
    kept = {}
    for ranks in (1, 2):
        running = start(ranks, str(ranks))
        assert running.generate(LONG, TOKENS).tokens == reference(LONG)
        settled(running)
        assert core(running).flush(30.0)
        stats = core(running).stats()
        [namespace] = _core.inspect(str(tmp_path / str(ranks)))["namespaces"]
        kept[ranks] = (stats["host_used_bytes"], stats["disk_write_bytes"], namespace["bytes"])
        again = running.generate(LONG, TOKENS)
        assert (again.cached, again.tokens) == (len(LONG) // BLOCK * BLOCK, reference(LONG))
        # Blocks of which the other rank may have saved those that this one loads, and a longer prompt's.
        assert running.generate(MORE, TOKENS).tokens == reference(MORE)
        settled(running)
        assert core(running).flush(30.0)
        running.close()
    assert kept[1] == kept[2]
    restarted = start(2, "2")
    answer = restarted.generate(MORE, TOKENS)
    assert (answer.cached, answer.tokens) == (len(MORE) // BLOCK * BLOCK, reference(MORE))
    stats = core(restarted).stats()
    assert stats["disk_reads"] > 0
    assert stats["checksum_failures"] == 0
