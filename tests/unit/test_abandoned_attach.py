"""An arena that a worker gets and does not use: the engine learns it, and need not wait for the worker's end."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from slow_rank import Attachments
from test_worker import Rank, job
from undercroft.connector.announcement import Announced
from undercroft.connector.metadata import UndercroftMetadata, UndercroftWorkerMetadata
from undercroft.connector.worker import attached, worker


class Slow(Attachments):
    """Its engines answer when the test says so, and a step does not wait for them."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = threading.Event()
        self.asked = threading.Semaphore(0)

    def attach(self, socket: str, session: int) -> Any:
        self.asked.release()
        assert self.answers.wait(60)
        return super().attach(socket, session)


def rank(host: Attachments) -> Rank:
    one = Rank(host)  # type: ignore[arg-type]
    one.worker._arena._timeout_s = 0.0 if isinstance(host, Slow) else 60.0
    one.worker.register_kv_caches(one.caches)
    return one


def step(session: int, arena_id: int = 10, **jobs: Any) -> UndercroftMetadata:
    return UndercroftMetadata("/a", arena_id, session, **jobs)


def begin(one: Rank, session: int = 1, arena_id: int = 10) -> None:
    save = job(1, [1], [0], session=session)
    assert one.step(step(session, arena_id, saves=[save]))[2] == UndercroftWorkerMetadata({1: 1}, {1})


@pytest.mark.parametrize("how", ["another session", "shutdown"])
def test_an_arena_that_comes_after_its_attempt_is_given_up_is_let_go(how: str) -> None:
    host = Slow()
    one = rank(host)
    begin(one)
    attempt = one.worker._arena._attempt
    assert attempt is not None
    assert host.asked.acquire(timeout=60)
    if how == "shutdown":
        one.worker.shutdown()
    else:
        one.step(step(2))
    host.answers.set()
    assert attempt._ended.wait(60)
    assert host.made[("/a", 1)].gone == 1


def test_an_arena_that_no_step_has_taken_is_let_go_with_its_session() -> None:
    host = Slow()
    one = rank(host)
    begin(one)
    attempt = one.worker._arena._attempt
    assert attempt is not None
    host.answers.set()
    assert attempt._ended.wait(60)
    assert host.made[("/a", 1)].gone == 0
    one.step(step(2))
    assert host.made[("/a", 1)].gone == 1


def test_another_arena_than_the_expected_one_is_let_go() -> None:
    host = Attachments()
    begin(rank(host), arena_id=11)
    assert host.made[("/a", 1)].gone == 1


def unpinnable(device: Any, arena: Any) -> None:
    raise RuntimeError("can't start new thread")


def test_an_arena_whose_pinning_cannot_begin_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attached, "pin_arena", unpinnable)
    host = Attachments()
    begin(rank(host))
    assert host.made[("/a", 1)].gone == 1


def test_an_arena_attached_early_whose_pinning_cannot_begin_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "uses_pinned", lambda device: True)
    monkeypatch.setattr(attached, "pin_arena", unpinnable)
    host = Attachments()
    one = rank(host)
    one.worker.attach_early(Announced("/a", 10, 1))
    early = one.worker._arena._early
    assert early is not None
    assert early._ended.wait(60)
    assert host.made[("/a", 1)].gone == 1


def test_an_arena_without_a_copier_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("no driver")

    monkeypatch.setattr(worker, "make_copier", refuse)
    host = Attachments()
    begin(rank(host))
    assert host.made[("/a", 1)].gone == 1
