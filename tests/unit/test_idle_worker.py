"""A worker without steps (its vLLM is idle or sleeps) keeps no memory of an engine that has ended."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serve_process import ServeProcess
from served_client import Peer, until
from slow_rank import Attachments, SlowRank
from test_worker import Rank, job
from undercroft import _core
from undercroft.connector.announcement import Announced
from undercroft.connector.metadata import UndercroftMetadata, UndercroftWorkerMetadata
from undercroft.connector.worker import attached, worker


class Pinner:
    """Unpins when the test says so, as a driver that takes seconds."""

    def __init__(self) -> None:
        self.pinned_bytes = 0
        self.unpins = threading.Event()
        self.closed = threading.Event()

    def stop(self) -> None:
        self.closed.set()

    def close(self) -> None:
        assert self.unpins.wait(60)
        self.closed.set()


@pytest.fixture
def pinner(monkeypatch: pytest.MonkeyPatch) -> Pinner:
    pinner = Pinner()
    monkeypatch.setattr(attached, "pin_arena", lambda device, arena: pinner)
    monkeypatch.setattr(worker, "uses_pinned", lambda device: True)
    monkeypatch.setattr(worker, "WATCH_S", 0.01)
    return pinner


def step(session: int = 1, **jobs: Any) -> UndercroftMetadata:
    return UndercroftMetadata("/a", 10, session, **jobs)


def saved(one: SlowRank) -> None:
    one.hooks(step(saves=[job(1, [1], [0], session=1)]))
    one.settle()
    assert one.hooks(step())[2] == UndercroftWorkerMetadata({1: 1})


def test_the_arena_of_an_engine_that_ends_is_released_without_a_step(
    monkeypatch: pytest.MonkeyPatch, pinner: Pinner
) -> None:
    host = Attachments()
    one = SlowRank(monkeypatch, host)
    saved(one)
    arena = host.made[("/a", 1)]
    arena.is_served = False
    until("released", lambda: arena.gone == 1)
    # The driver still unpins, which holds up no step.
    assert one.hooks(step()) == (set(), set(), None)
    assert not pinner.closed.is_set()
    pinner.unpins.set()
    assert pinner.closed.wait(60)
    assert one.free, "the lanes are free for the next copier"
    one.worker.shutdown()
    assert arena.gone == 1


def test_registered_bytes_are_counted_between_steps(monkeypatch: pytest.MonkeyPatch, pinner: Pinner) -> None:
    monkeypatch.setattr(worker, "WATCH_S", 3600.0)
    one = SlowRank(monkeypatch, Attachments())
    one.hooks(step(loads=[job(1, [1], [0], "a", 1)]))
    one.worker.get_kv_connector_stats()
    counted = []
    for pinner.pinned_bytes in (0, 1000, 1000, 2500):
        one.worker.release_unserved()
        counted.append((one.worker.get_kv_connector_stats() or {}).get("registered_bytes"))
    assert counted == [None, 1000, None, 1500]
    one.settle()
    pinner.unpins.set()
    one.worker.shutdown()


def test_an_arena_whose_copies_run_is_released_after_them(monkeypatch: pytest.MonkeyPatch, pinner: Pinner) -> None:
    host = Attachments()
    one = SlowRank(monkeypatch, host)
    one.hooks(step(loads=[job(1, [1], [0], "a", 1)]))
    host.made[("/a", 1)].is_served = False
    one.worker.release_unserved()
    assert host.made[("/a", 1)].gone == 0
    assert one.hooks(step()) == (set(), set(), None), "now the worker knows"
    one.worker.release_unserved()
    assert host.made[("/a", 1)].gone == 0
    one.settle()
    assert one.hooks(step())[:2] == ({"a"}, {"a"})
    assert host.made[("/a", 1)].gone == 1
    pinner.unpins.set()
    one.worker.shutdown()


def test_an_arena_is_released_without_a_step_even_if_its_copies_end_after_the_last_step(
    monkeypatch: pytest.MonkeyPatch, pinner: Pinner
) -> None:
    """vLLM makes no step for a save that is late."""
    monkeypatch.setattr(worker, "WATCH_S", 3600.0)
    host = Attachments()
    one = SlowRank(monkeypatch, host)
    selected: list[bool] = []
    monkeypatch.setattr(one.streams, "select", lambda: selected.append(True))
    pinner.unpins.set()
    late = job(1, [1], [0], session=1)
    one.hooks(step(saves=[late]))
    arena = host.made[("/a", 1)]
    arena.is_served = False
    one.worker.release_unserved()
    assert arena.gone == 0, "the copy runs"
    one.settle()
    one.worker.release_unserved()
    assert arena.gone == 1
    assert selected, "another thread asks the device"
    assert one.hooks(step())[2] == UndercroftWorkerMetadata({1: 1})

    one.hooks(UndercroftMetadata("/b", 11, 2, saves=[job(2, [1], [0], session=2)]))
    one.hooks(UndercroftMetadata("/c", 12, 3))
    arena = host.made[("/b", 2)]
    one.worker.release_unserved()
    assert arena.gone == 0, "the copy runs on the arena that the worker has left"
    one.settle()
    one.worker.release_unserved()
    assert arena.gone == 1
    assert one.hooks(UndercroftMetadata("/c", 12, 3))[2] == UndercroftWorkerMetadata({2: 1}, {2})
    one.worker.shutdown()


def test_an_arena_that_was_attached_early_is_released_without_a_step(
    monkeypatch: pytest.MonkeyPatch, pinner: Pinner
) -> None:
    host = Attachments()
    one = SlowRank(monkeypatch, host)
    pinner.unpins.set()
    one.worker.attach_early(Announced("/a", 10, 1))
    until("attached", lambda: ("/a", 1) in host.made)
    host.made[("/a", 1)].is_served = False
    until("released", lambda: host.made[("/a", 1)].gone == 1)
    assert pinner.closed.wait(60)
    one.worker.shutdown()


def test_an_arena_that_no_session_holds_is_released_after_a_minute(
    monkeypatch: pytest.MonkeyPatch, pinner: Pinner
) -> None:
    host = Attachments()
    one = SlowRank(monkeypatch, host)
    saved(one)
    one.hooks(step(2))
    assert host.made[("/a", 1)].gone == 1
    host.now += 59
    one.worker.release_unserved()
    assert one.worker._arena.attached is not None, "the next session may have the same arena"
    host.now += 2
    one.worker.release_unserved()
    assert one.worker._arena.attached is None
    pinner.unpins.set()
    assert pinner.closed.wait(60)
    one.worker.shutdown()


def test_an_arena_is_unpinned_even_if_no_thread_can_start(monkeypatch: pytest.MonkeyPatch, pinner: Pinner) -> None:
    host = Attachments()
    one = SlowRank(monkeypatch, host)
    saved(one)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        host.made[("/a", 1)].is_served = False
        one.worker.release_unserved()
    assert pinner.closed.is_set()
    one.worker.shutdown()


def test_the_thread_ends_with_its_worker(monkeypatch: pytest.MonkeyPatch, pinner: Pinner) -> None:
    one = SlowRank(monkeypatch, Attachments())
    saved(one)
    watcher = one.worker._watcher
    assert watcher is not None
    ended = weakref.ref(one.worker)
    monkeypatch.undo()
    del one
    gc.collect()
    assert ended() is None, "the thread keeps a worker that nobody uses"
    watcher._thread.join(60)
    assert not watcher._thread.is_alive()


def is_mapped(inode: int) -> bool:
    return any(line.split()[4] == str(inode) for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.server
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "stopped"])
def test_the_memory_of_a_server_that_ends_is_unmapped_without_a_step(tmp_path: Path, number: signal.Signals) -> None:
    socket = tmp_path / "serve.sock"
    with ServeProcess(socket) as server:
        peer = Peer(_core.Engine({"server": f"unix://{socket}", "server_timeout_ms": 1000}))
        until("connected", peer.is_up)
        address = peer.engine.arena
        one = Rank(SimpleNamespace(attach=_core.Arena.attach, now=0.0))  # type: ignore[arg-type]
        one.worker._arena._timeout_s = 60.0
        one.worker.register_kv_caches(one.caches)
        save = job(1, [1], [0], session=address.session)
        metadata = UndercroftMetadata(address.socket, address.arena_id, address.session, saves=[save])
        assert one.step(metadata)[2] == UndercroftWorkerMetadata({1: 1})
        assert one.worker._arena.attached is not None
        inode = os.fstat(one.worker._arena.attached.mapping.fileno()).st_ino
        assert is_mapped(inode)
        server.stop(number)
        until("unmapped", lambda: not is_mapped(inode))
        assert one.step(metadata)[2] == UndercroftWorkerMetadata({1: 1}, {1})
        one.worker.shutdown()
        peer.close()
