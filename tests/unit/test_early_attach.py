"""The arena is attached and pinned before the first step, if the scheduler's half has announced it by then."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from test_worker import Host, Rank, job, meta
from undercroft._core import Arena
from undercroft.connector.announcement import Announced
from undercroft.connector.metadata import UndercroftWorkerMetadata
from undercroft.connector.worker import attached, worker

OURS = Announced("/a", 0, 0)


class Pinner:
    """Pins at once, and tells."""

    def __init__(self, address: int) -> None:
        self.address = address
        self.pinned_bytes = 0
        self.closed = threading.Event()

    def close(self) -> None:
        self.closed.set()


class Pins:
    """Stands in for the pinning of a GPU's arenas."""

    def __init__(self) -> None:
        self.made: list[Pinner] = []
        self.began = threading.Semaphore(0)

    def pin(self, device: Any, arena: Arena) -> Pinner:
        self.made.append(Pinner(arena.address))
        self.began.release()
        return self.made[-1]


@pytest.fixture
def pins(monkeypatch: pytest.MonkeyPatch) -> Pins:
    pins = Pins()
    monkeypatch.setattr(worker, "uses_pinned", lambda device: True)
    monkeypatch.setattr(attached, "pin_arena", pins.pin)
    return pins


def rank(host: Host) -> Rank:
    one = Rank(host)
    one.worker.register_kv_caches(one.caches)
    return one


def save(one: Rank, socket: str = "/a") -> bool:
    answer = one.step(meta(socket, saves=[job(11, [2], [0])]))[2]
    return answer == UndercroftWorkerMetadata({11: 1})


def test_pinning_begins_before_the_first_step_which_uses_the_attached_arena(pins: Pins) -> None:
    host = Host()
    one = rank(host)
    one.worker.attach_early(OURS)
    assert pins.began.acquire(timeout=60), "no step has run yet"
    one.worker._arena._early._ended.wait(60)
    assert save(one)
    assert host.attempts == ["/a"]
    assert [pinner.address for pinner in pins.made] == [host.arenas["/a"].address]
    one.worker.shutdown()
    assert pins.made[0].closed.is_set()


def test_another_arena_than_the_announced_one_is_attached_anew(pins: Pins) -> None:
    host = Host()
    host.arenas["/b"] = Arena.create(1 << 20)
    one = rank(host)
    one.worker.attach_early(OURS)
    assert pins.began.acquire(timeout=60)
    one.worker._arena._early._ended.wait(60)
    assert save(one, "/b")
    assert host.attempts == ["/a", "/b"]
    assert pins.made[0].closed.wait(60), "what nobody uses is unpinned"
    assert not pins.made[1].closed.is_set()


def test_an_announced_engine_that_cannot_be_attached_costs_the_first_job_nothing(pins: Pins) -> None:
    host = Host()
    arena = host.arenas.pop("/a")
    one = rank(host)
    one.worker.attach_early(OURS)
    one.worker._arena._early._ended.wait(60)
    host.arenas["/a"] = arena
    assert save(one), "the attempt before counts for nothing"
    assert host.attempts == ["/a", "/a"]


def test_an_attempt_that_ends_after_it_is_given_up_leaves_nothing_pinned(pins: Pins) -> None:
    host = Host()
    go, arrived = threading.Event(), threading.Event()
    plain = host.attach

    def slow(socket: str, session: int) -> Arena:
        arrived.set()
        assert go.wait(60)
        return plain(socket, session)

    one = rank(host)
    one.worker._arena._attach = slow
    one.worker.attach_early(OURS)
    early = one.worker._arena._early
    assert arrived.wait(60)
    one.worker.shutdown()
    go.set()
    assert early._ended.wait(60)
    assert pins.made == []


def test_shutdown_releases_an_arena_that_no_step_has_used(pins: Pins) -> None:
    one = rank(Host())
    one.worker.attach_early(OURS)
    assert pins.began.acquire(timeout=60)
    one.worker._arena._early._ended.wait(60)
    one.worker.shutdown()
    assert pins.made[0].closed.is_set()


def test_a_device_that_gains_nothing_attaches_with_the_first_job() -> None:
    host = Host()
    one = rank(host)
    one.worker.attach_early(OURS)
    assert host.attempts == []
    assert save(one)
