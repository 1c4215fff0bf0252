"""Blocks that come from elsewhere than this engine's own memory: a server outlives its vLLM."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fake_device
from engine_checks import Reference, nothing_left, stats
from fake_cuda import Fake
from prompts import CACHED, MEMORY, PROMPTS, TOKENS, cached, slow, tokens
from real_engine import Engine, prompt

Make = Callable[..., Engine]


@pytest.fixture
def expected(reference: Callable[..., list[int]]) -> list[list[int]]:
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


def test_blocks_come_from_another_hosts_remote_store(fake: Fake, engine: Make, llama: Path, tmp_path: Path) -> None:
    """Hosts share nothing but a directory of objects, each of which has 64 blocks."""
    long: dict[str, Any] = {"blocks": 140, "max_model_len": 1200}
    ids = prompt(1030)
    plain = Reference(llama, **{**fake_device.ENGINE, **long})
    expected = plain(ids, TOKENS)
    plain.close()

    def host(name: str) -> Engine:
        disk = {"disk_path": str(tmp_path / name), "disk_capacity": "128MiB"}
        return engine(llama, {**MEMORY, **disk, "remote": f"file://{tmp_path}/remote", "remote_object": "1MiB"}, **long)

    first = host("first")
    slow(fake)
    assert first.generate(ids, TOKENS).tokens == expected
    nothing_left(first)
    deadline = time.monotonic() + 60
    while not stats(first)["remote_puts"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    first.close()
    second = host("second")
    slow(fake, seed=1)
    hit = second.generate(ids, TOKENS)
    assert (hit.tokens, hit.cached, stats(second)["remote_gets"]) == (expected, 1024, 1)
    nothing_left(second)
    assert stats(second)["load_failures"] == 0
