"""Sleep, pause and weight updates: vLLM never stays paused, and finds no earlier block that may be wrong now."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from connector_engine import LONG, MEMORY, TOKENS, References, settled
from real_engine import Engine
from serve_process import ServeProcess
from served_client import until

pytestmark = pytest.mark.vllm

Make = Callable[..., Engine]


@pytest.fixture(scope="module")
def reference(llama: Path) -> References:
    """The tokens of a vLLM without any cache."""
    return References(llama, (LONG, TOKENS))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServeProcess]:
    """A server in a process of its own, so that it can be frozen."""
    (tmp_path / "run").mkdir(mode=0o700)
    with ServeProcess(tmp_path / "run" / "serve.sock") as server:
        yield server


def options(socket: Path) -> dict[str, Any]:
    # Long enough for two busy cores; a frozen server is waited for once.
    return {"server": f"unix://{socket}", "server_timeout_ms": 2_000, "lookup_spin_us": 100_000}


def sleep_and_pause(one: Engine) -> None:
    """Both ways in which vLLM clears all caches, and back."""
    one.core.sleep(1)
    one.core.wake_up()
    assert not one.core.is_scheduler_paused()
    one.core.pause_scheduler(clear_cache=True)
    one.core.resume_scheduler()
    assert not one.core.is_scheduler_paused()


def test_sleep_and_pause_without_the_server(engine: Make, llama: Path, reference: References, tmp_path: Path) -> None:
    one = engine(llama, options(tmp_path / "nobody.sock"))
    sleep_and_pause(one)
    assert one.reset_device_cache(connector=True)
    assert one.generate(LONG, TOKENS).tokens == reference(LONG)


def test_sleep_and_pause_while_the_server_is_frozen(
    engine: Make, llama: Path, reference: References, server: ServeProcess
) -> None:
    one = engine(llama, options(server.socket))
    until("connected", lambda: one.connector._engine.connection()[0] == "up")
    assert one.generate(LONG, TOKENS).tokens == reference(LONG)
    one.idle_steps()
    until("saved", lambda: server.status()["stats"]["saved_blocks"] == 7)
    server.process.send_signal(signal.SIGSTOP)
    try:
        sleep_and_pause(one)
        frozen = one.generate(LONG, TOKENS)
        assert (frozen.cached, frozen.tokens) == (0, reference(LONG))
    finally:
        server.process.send_signal(signal.SIGCONT)
    until("the server answers", lambda: server.status()["stats"]["saved_blocks"] == 7)
    one.idle_steps()
    assert one.reset_device_cache()
    thawed = one.generate(LONG, TOKENS)
    assert thawed.tokens == reference(LONG)
    # On a busy machine the blocks that were computed meanwhile may be saved already: then these are found, not the old.
    assert thawed.cached == 0 or server.status()["stats"]["saved_blocks"] > 7
    # The engine finds the blocks that it has saved since.
    one.idle_steps()
    assert one.reset_device_cache()
    assert one.generate(LONG, TOKENS).cached == 896


def test_a_weight_update_over_collective_rpc_makes_the_next_reset_ours_too(
    engine: Make, llama: Path, reference: References
) -> None:
    one = engine(llama, MEMORY)
    cached = []
    for update in (False, True, False):
        assert one.generate(LONG, TOKENS).tokens == reference(LONG)
        settled(one, reset=False)
        if update:
            one.core.collective_rpc(lambda worker: None)
        assert one.reset_device_cache()
        cached.append(one.generate(LONG, TOKENS).cached)
        settled(one)
    assert cached == [896, 0, 896]


def test_the_option_makes_every_reset_ours_too(engine: Make, llama: Path, reference: References) -> None:
    one = engine(llama, {**MEMORY, "reset_with_prefix_cache": True})
    for _ in range(2):
        again = one.generate(LONG, TOKENS)
        assert (again.cached, again.tokens) == (0, reference(LONG))
        settled(one)


def test_a_sleep_of_level_1_keeps_the_cache_where_the_weights_cannot_change_unseen(
    engine: Make, llama: Path, reference: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    class InItsOwnProcess(EngineCoreProc):
        pause_scheduler = EngineCore.pause_scheduler

    one = engine(llama, MEMORY)

    def cached_after(*levels: int, update: bool = False) -> int:
        one.generate(LONG, TOKENS)
        settled(one)
        for level in levels:
            one.core.sleep(level)
            if update:
                one.core.collective_rpc(lambda worker: None)
            one.core.wake_up()
        again = one.generate(LONG, TOKENS)
        assert again.tokens == reference(LONG)
        return again.cached

    # In the process of a trainer, which may have changed the model directly.
    assert cached_after(1) == 0
    monkeypatch.setattr(one.core, "__class__", InItsOwnProcess)
    assert cached_after(1) == 896
    assert cached_after(2) == 0
    assert cached_after(1, update=True) == 0
    # From then on it is a trainer's.
    assert cached_after(1) == 0
