"""Real engines whose cache is a server's, shared with others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from connector_engine import LONG, OTHER, TOKENS, References
from hybrid_engine import BEST, MODELS, Model
from real_engine import Engine, prompt
from served_client import until

pytestmark = pytest.mark.vllm

Make = Callable[..., Engine]
MIB = 1 << 20
PATIENT = {"server_timeout_ms": 30_000, "lookup_spin_us": 100_000}
"""A loaded machine may take its time; these tests do not test the deadline."""


@pytest.fixture(scope="module")
def reference(llama: Path) -> References:
    """The tokens of a vLLM without any cache."""
    return References(llama, (LONG, TOKENS), (OTHER, TOKENS))


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Starts a server's engine in this process, always at the same socket."""
    from undercroft import _core

    servers: list[Any] = []

    def start(**options: Any) -> Any:
        socket = str(tmp_path / "run" / "serve.sock")
        servers.append(_core.Engine({"host_memory": 64 * MIB, "socket": socket, **options}))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def options(server: Any) -> dict[str, Any]:
    return {"server": f"unix://{server.arena.socket}", **PATIENT}


def at_rest(one: Engine, server: Any) -> None:
    """Every copy is acknowledged, nothing is held any more, and the server knows it."""
    one.idle_steps()
    assert one.device_blocks_in_use() == 0
    end = time.monotonic() + 60
    while any(server.stats()[name] for name in ("active_lookups", "loads", "saves")):
        assert time.monotonic() < end, "the server still keeps something for it"
    assert server.flush(30.0)


def test_one_engine_loads_blocks_that_another_computed(
    engine: Make, llama: Path, reference: References, serve: Callable[..., Any]
) -> None:
    server = serve()
    first = engine(llama, options(server))
    assert first.generate(LONG, TOKENS).tokens == reference(LONG)
    at_rest(first, server)
    first.close()
    second = engine(llama, options(server))
    warm = second.generate(LONG, TOKENS)
    assert (warm.cached, warm.tokens) == (896, reference(LONG))
    at_rest(second, server)
    mixed = second.generate(OTHER, TOKENS)
    assert (mixed.cached, mixed.tokens) == (640, reference(OTHER))
    at_rest(second, server)
    assert second.reset_device_cache()
    both = second.generate_all([LONG, OTHER], TOKENS)
    assert [(one.cached, one.tokens) for one in both] == [(896, reference(LONG)), (1152, reference(OTHER))]
    at_rest(second, server)
    stats = server.stats()
    assert (stats["active_lookups"], stats["loads"], stats["saves"], stats["host_pinned_bytes"]) == (0, 0, 0, 0)


def test_a_server_that_restarts_costs_misses_only(
    engine: Make, llama: Path, reference: References, serve: Callable[..., Any], tmp_path: Path
) -> None:
    disk = {"disks": [(str(tmp_path / "disk"), 256 * MIB)]}
    server = serve(**disk)
    one = engine(llama, options(server))
    assert one.generate(LONG, TOKENS).tokens == reference(LONG)
    at_rest(one, server)
    server.close()
    assert one.reset_device_cache()
    cold = one.generate(LONG, TOKENS)
    assert (cold.cached, cold.tokens) == (0, reference(LONG))
    again = serve(**disk)
    arena_id = again.arena.arena_id
    until("at the next server", lambda: one.connector._engine.arena.arena_id == arena_id)
    assert one.reset_device_cache()
    warm = one.generate(LONG, TOKENS)
    assert (warm.cached, warm.tokens) == (896, reference(LONG))
    at_rest(one, again)
    assert again.stats()["disk_reads"] == 7


@pytest.mark.parametrize("name", MODELS)
def test_windows_and_states_go_through_a_server_too(
    name: str, engine: Make, request: pytest.FixtureRequest, serve: Callable[..., Any], tmp_path: Path
) -> None:
    model = Model(name, request.getfixturevalue(name), *MODELS[name])
    ids = model.ids(3)
    server = serve(disks=[(str(tmp_path / "disk"), 1 << 30)], host_memory=512 * MIB)
    running = model.start(options(server))
    try:
        cold = running.generate(ids, TOKENS, logprobs=BEST)
        at_rest(running, server)
        assert running.reset_device_cache()
        warm = running.generate(ids, TOKENS, logprobs=BEST)
        assert warm.cached == 3 * model.block
        assert model.same(warm, cold)
        # The next turn, with the device's own cache empty and with it full.
        turn = ids + cold.tokens + prompt(model.block, seed=5)
        found = []
        for reset in (True, False):
            at_rest(running, server)
            assert not reset or running.reset_device_cache()
            found.append(running.generate(turn, TOKENS, logprobs=BEST))
        assert found[0].cached == 3 * model.block
        assert model.same(found[1], found[0])
        at_rest(running, server)
        stats = server.stats()
        assert (stats["active_lookups"], stats["loads"], stats["saves"], stats["load_failures"]) == (0, 0, 0, 0)
    finally:
        running.close()


def test_hits_inside_a_block_go_through_a_server_too(qwen3_next: Path, serve: Callable[..., Any]) -> None:
    model = Model("qwen3_next", qwen3_next, *MODELS["qwen3_next"])
    server = serve()
    running = model.start(options(server), prefix_match_unit=64)
    try:
        for length, end in ((model.block + 200, 832), (300, 256)):
            ids = prompt(length, seed=length)
            cold = running.generate(ids, TOKENS, logprobs=BEST)
            at_rest(running, server)
            assert running.reset_device_cache()
            warm = running.generate(ids, TOKENS, logprobs=BEST)
            at_rest(running, server)
            assert (cold.cached, warm.cached) == (0, end)
            assert model.same(warm, cold)
        stats = server.stats()
        assert (stats["active_lookups"], stats["loads"], stats["saves"], stats["load_failures"]) == (0, 0, 0, 0)
    finally:
        running.close()


def test_an_engine_that_finds_its_directory_in_use_shares_it_and_takes_it_over(
    engine: Make, llama: Path, reference: References, tmp_path: Path
) -> None:
    from undercroft import _core

    path = str(tmp_path / "cache")
    owner = _core.Engine({"host_memory": 64 * MIB, "disks": [{"path": path, "capacity": 256 * MIB}]})
    own = {"host_memory": "64MiB", "disk_path": path, "disk_capacity": "256MiB", **PATIENT}
    one = engine(llama, own)
    assert one.connector._engine.is_shared
    assert one.generate(LONG, TOKENS).tokens == reference(LONG)
    at_rest(one, owner)
    assert owner.stats()["saved_blocks"] == 7
    owner.close()
    shared = one.connector._engine
    until("it has taken over", lambda: shared.took_over and shared.connection()[0] == "up")
    assert one.reset_device_cache()
    warm = one.generate(LONG, TOKENS)
    assert (warm.cached, warm.tokens) == (896, reference(LONG))
