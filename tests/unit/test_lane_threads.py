"""Threads of lanes that do not start, and that end: each job ends as failed all the same, after its copies."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from manual_streams import Event, ManualStreams, Queue
from undercroft._core import Arena
from undercroft.device.api import Ended, Job
from undercroft.device.cuda import CudaCopier
from undercroft.device.lane import Lanes
from undercroft.device.layout import GroupCopy
from undercroft.device.synthetic import synthetic_cache

PAGE, LAYERS = 1000, 3


def copier(streams: ManualStreams, thread: Callable[[str], Executor]) -> CudaCopier:
    lanes = Lanes.make(streams, 2 * PAGE * LAYERS, thread)
    cache = synthetic_cache(PAGE, 7, LAYERS, "LBHNC")
    return CudaCopier(cache.layout, Arena.create(64 << 10), lanes, None, strategy="direct")


def job(ticket: int) -> Job:
    return Job(ticket, [GroupCopy(0, np.array([ticket]), np.array([0]))])


def ended(one: CudaCopier, executors: list[ThreadPoolExecutor]) -> list[Ended]:
    """The jobs that have ended, when the threads have done all that they can."""
    for executor in executors:
        executor.shutdown()
    return one.poll()


class Ending(ManualStreams):
    """A device whose copies end the thread that queues them."""

    finished = 0

    def copy(self, *args: Any, **direction: bool) -> None:
        super().copy(*args, **direction)
        raise SystemExit

    def finish(self, stream: Queue) -> None:
        self.finished += 1
        super().finish(stream)


def test_a_thread_that_ends_in_the_middle_fails_the_job_after_its_copies() -> None:
    streams = Ending(0)
    executors: list[ThreadPoolExecutor] = []

    def thread(name: str) -> Executor:
        executors.append(ThreadPoolExecutor(1, thread_name_prefix=name))
        return executors[-1]

    one = copier(streams, thread)
    one.submit(True, [job(1)])
    assert ended(one, executors) == [Ended(1, False, 0.0)]
    assert streams.finished == 2, "the copies that were queued may still be under way"


class Waiting(ManualStreams):
    """Records for which streams it has waited."""

    def __init__(self) -> None:
        super().__init__(0)
        self.waited: list[Queue] = []

    def finish(self, stream: Queue) -> None:
        self.waited.append(stream)

    def happened(self, event: Event) -> bool:
        return True


def test_a_lane_whose_thread_has_ended_still_waits_for_the_copies_that_it_queued() -> None:
    streams = Waiting()
    executor = ThreadPoolExecutor(1)
    one = copier(streams, lambda name: executor)
    one.submit(True, [job(1)])
    executor.shutdown()
    one.drain()
    assert len(streams.waited) == 6, "both streams of the three lanes"


def test_lanes_without_a_thread_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[threading.Thread] = []
    plain = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        plain(thread)
        started.append(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        Lanes.make(ManualStreams(0))
    for thread in started:
        thread.join(60)
        assert not thread.is_alive()
    assert len(started) == 2, "threads start with the lanes, not with the first job"


def test_lanes_whose_thread_cannot_select_the_device_are_not_made() -> None:
    class Unselectable(ManualStreams):
        def select(self) -> None:
            raise RuntimeError("CUDA error: out of memory")

    with pytest.raises(RuntimeError):
        Lanes.make(Unselectable(0))
