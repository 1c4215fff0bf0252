"""A server that is killed while a worker copies: every load and save ends all the same, and the tokens are right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from connector_engine import LONG, OTHER, TOKENS, References
from engine_checks import add, finish, step_until, worker
from real_engine import Engine
from serve_process import ServeProcess
from served_client import until
from undercroft.device.api import Ended, Job

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


class Held:
    """A copier whose jobs begin a few polls after `release`, or when the worker waits for them."""

    def __init__(self, copier: Any) -> None:
        self._copier = copier
        self.jobs: list[tuple[bool, Sequence[Job]]] = []
        self._polls_left: int | None = None

    def release(self) -> None:
        self._polls_left = 3

    def submit(self, to_arena: bool, jobs: Sequence[Job]) -> list[int]:
        self.jobs.append((to_arena, jobs))
        return [0] * len(jobs)

    def select(self) -> None:
        self._copier.select()

    def poll(self) -> list[Ended]:
        if self._polls_left is not None:
            self._polls_left -= 1
            if self._polls_left < 0:
                self._begin()
        ended: list[Ended] = self._copier.poll()
        return ended

    def drain(self) -> None:
        self._begin()
        self._copier.drain()

    def close(self) -> None:
        self.drain()
        self._copier.close()

    def _begin(self) -> None:
        while self.jobs:
            self._copier.submit(*self.jobs.pop(0))


@pytest.fixture(scope="module")
def reference(llama: Path) -> References:
    """The tokens of a vLLM without any cache."""
    return References(llama, (LONG, TOKENS), (OTHER, TOKENS))


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[], ServeProcess]]:
    """Starts servers, always at the same socket."""
    (tmp_path / "run").mkdir(mode=0o700)
    started: list[ServeProcess] = []

    def start() -> ServeProcess:
        started.append(ServeProcess(tmp_path / "run" / "serve.sock"))
        return started[-1]

    yield start
    for server in started:
        server.close()


@pytest.mark.parametrize("returns", [False, True], ids=["gone", "restarted"])
@pytest.mark.parametrize("direction", ["load", "save"])
def test_a_server_killed_in_the_middle_of_a_copy(
    direction: str,
    returns: bool,
    engine: Callable[..., Engine],
    llama: Path,
    reference: References,
    serve: Callable[[], ServeProcess],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = serve()
    options = {"server": f"unix://{server.socket}", "server_timeout_ms": 2_000, "lookup_spin_us": 100_000}
    one = engine(llama, options, blocks=64)
    until("connected", lambda: one.connector._engine.connection()[0] == "up")
    assert one.generate(LONG, TOKENS).tokens == reference(LONG)
    one.idle_steps()
    until("saved", lambda: server.status()["stats"]["saved_blocks"] == 7)
    assert one.reset_device_cache()

    held = Held(worker()._copier)
    worker()._copier = held
    ids = LONG if direction == "load" else OTHER
    if direction == "save":
        monkeypatch.setattr(one.connector._scheduler, "get_num_new_matched_tokens", lambda *_: (0, False))
    add(one, "a", ids, TOKENS)
    step_until(one, lambda: bool(held.jobs))
    assert held.jobs[0][0] == (direction == "save")
    server.close()
    if returns:
        serve()
    held.release()
    assert finish(one) == {"a": reference(ids)}
    one.idle_steps()
    assert one.device_blocks_in_use() == 0
    assert one.connector._scheduler.idle()
    assert one.reset_device_cache()
    assert held.jobs == []
    # The watcher looks once in a second.
    until("released", lambda: worker()._copier is not held)

    monkeypatch.undo()
    if returns:
        until("connected again", lambda: one.connector._engine.connection()[0] == "up")
        assert one.generate(LONG, TOKENS).tokens == reference(LONG)
        one.idle_steps()
        assert one.reset_device_cache()
        assert one.generate(LONG, TOKENS).cached == 896
