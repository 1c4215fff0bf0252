"""Blocks that come from elsewhere than this engine's own memory: a server outlives its vLLM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fake_cuda import Fake
from prompts import CACHED, PROMPTS, TOKENS, cached, slow, tokens
from real_engine import Engine

Make = Callable[..., Engine]
Reference = Callable[..., list[int]]


@pytest.fixture
def expected(reference: Reference) -> list[list[int]]:
    return [reference(ids, TOKENS) for ids in PROMPTS]


def settle(one: Engine) -> None:
    one.idle_steps()
    assert one.device_blocks_in_use() == 0
    assert one.reset_device_cache()


def test_blocks_come_back_from_a_server(
    fake: Fake, engine: Make, llama: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    from undercroft import _core

    server = _core.Engine({"host_memory": 64 << 20, "socket": str(tmp_path / "serve.sock")})
    options = {
        "server": f"unix://{server.arena.socket}",
        "server_timeout_ms": 30_000,
        "lookup_spin_us": 100_000,
    }
    first = engine(llama, options)
    slow(fake)
    assert tokens(first.generate_all(PROMPTS, TOKENS)) == expected
    settle(first)
    hit = first.generate_all(PROMPTS, TOKENS)
    assert (tokens(hit), cached(hit)) == (expected, CACHED)
    settle(first)
    first.close()
    second = engine(llama, options)
    slow(fake, seed=1)
    hit = second.generate_all(PROMPTS, TOKENS)
    assert (tokens(hit), cached(hit)) == (expected, CACHED), "the server outlives its vLLM"
    settle(second)
    second.close()
    assert server.stats()["load_failures"] == 0
    server.close()
