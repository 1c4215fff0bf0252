"""Sleep, pause and weight updates: vLLM never stays paused, and finds nothing of before that may be wrong now."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from connector_engine import LONG, TOKENS, References
from real_engine import Engine
from serve_process import ServeProcess
from served_client import until

pytestmark = pytest.mark.vllm

Make = Callable[..., Engine]


@pytest.fixture(scope="module")
def reference(llama: Path) -> References:
    """What a vLLM without any cache generates."""
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
    assert (thawed.cached, thawed.tokens) == (0, reference(LONG))
    # What it has saved since, it finds.
    one.idle_steps()
    assert one.reset_device_cache()
    assert one.generate(LONG, TOKENS).cached == 896
