"""The jobs of a copier on one lane.

There are three rules of order. Jobs run after the event that `CopyStream.start` gets. A job has ended when an event
that is recorded after its last copy has happened, not before. Copies that were queued before an error still run, and
the job ends after them.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from undercroft.device.api import Ended
from undercroft.device.lane import Lane
from undercroft.log import LogOnce

Work = Callable[[Lane], Iterator[int]]
"""Queues the copies of some jobs. Now and then it yields the number of leading jobs that are queued in full."""


@dataclass(slots=True)
class _Submitted:
    ticket: int
    began: Any = None
    """Two events: the event for which the job's step waited, and the end of the earlier jobs."""
    end: Any = None
    ok: bool = True
    first: bool = False
    """Whether this is the first of the jobs with the same end: their time is counted once."""
    queued: bool = False
    """Set last: whether all copies of the job are queued, or the rest never will be."""


class CopyStream:
    """The jobs of one copier on a lane, in order."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._jobs: deque[_Submitted] = deque()
        self._last_end: Any = None
        self._log_once = LogOnce()

    def start(self, tickets: Sequence[int], ready: Any, work: Work) -> None:
        """Let the lane's thread call ``work``, whose copies run after the event ``ready``.

        Raises nothing. If the thread refuses the call, `poll` reports the jobs as failed, and none of them ever runs.
        """
        jobs = [_Submitted(ticket) for ticket in tickets]
        # An executor may raise after it has put the call into its queue. The first to take the lock decides, so that
        # jobs that are reported as failed do not run later, when their blocks and slots belong to other requests.
        decided = threading.Lock()
        try:
            queuing = self._lane.thread.submit(self._queue_once, decided, jobs, ready, work)
        except Exception as error:
            if decided.acquire(blocking=False):
                self._fail(jobs, error)
        else:
            queuing.add_done_callback(lambda done: self._check(jobs, done))
        self._jobs.extend(jobs)

    def poll(self) -> list[Ended]:
        """The jobs at the front that have ended, in order."""
        ended = []
        while self._jobs and (first := self._ended(self._jobs[0])) is not None:
            self._jobs.popleft()
            ended.append(first)
        return ended

    def drain(self) -> None:
        """Wait until all jobs have ended. Raises nothing: `poll` reports the jobs that failed."""
        try:
            self._lane.finish()
        except Exception as error:
            self._report(error)

    def _check(self, jobs: Sequence[_Submitted], done: Future[None]) -> None:
        """Fail the jobs that the lane's thread has left: the thread has ended in the middle, or it never began."""
        left = [job for job in jobs if not job.queued]
        if left:
            self._finish()
            self._fail(left, None if done.cancelled() else done.exception())

    def _fail(self, jobs: Sequence[_Submitted], error: BaseException | None) -> None:
        """End jobs as failed, none of whose copies is under way or follows."""
        self._report(error)
        for job in jobs:
            job.queued = True

    def _queue_once(self, decided: threading.Lock, jobs: Sequence[_Submitted], ready: Any, work: Work) -> None:
        if decided.acquire(blocking=False):
            self._queue(jobs, ready, work)

    def _queue(self, jobs: Sequence[_Submitted], ready: Any, work: Work) -> None:
        queued = 0
        try:
            self._lane.begin(ready)
            for done in work(self._lane):
                if done > queued:
                    self._end(jobs[queued:done], ready)
                    queued = done
        except Exception as error:
            for job in jobs[queued:]:
                job.ok = False
            self._report(error)
        if queued < len(jobs):
            self._end(jobs[queued:], ready)

    def _end(self, jobs: Sequence[_Submitted], ready: Any) -> None:
        """Record one event for the end of jobs whose copies are all queued, or were queued up to an error."""
        try:
            end = self._lane.end()
        except Exception as error:
            # Without an event, wait here for the copies. If this wait fails too, the device runs nothing any more.
            self._report(error)
            self._finish()
            end = None
        for job in jobs:
            job.first = job is jobs[0]
            job.began, job.end = (ready, self._last_end), end
            job.ok = job.ok and end is not None
            job.queued = True
        self._last_end = end

    def _finish(self) -> None:
        try:
            self._lane.finish_here()
        except Exception as error:
            self._report(error)

    def _ended(self, job: _Submitted) -> Ended | None:
        if not job.queued:
            return None
        if job.end is None:
            return Ended(job.ticket, False, 0.0)
        try:
            if not self._lane.streams.happened(job.end):
                return None
            seconds = self._seconds(job) if job.first else 0.0
        except Exception as error:
            # An event raises an error only after the device's context has failed, which ends all copies.
            self._report(error)
            return Ended(job.ticket, False, 0.0)
        return Ended(job.ticket, job.ok, seconds)

    def _seconds(self, job: _Submitted) -> float:
        """The seconds from the later of the job's two `began` events, when the lane was free, to its end."""
        return min(self._lane.streams.seconds(event, job.end) for event in job.began if event is not None)

    def _report(self, error: BaseException | None) -> None:
        message = "undercroft: copying between device and host memory failed: %s"
        # The numbers in a message (such as the number of a failed copy) differ each time. Its other words do not.
        kind = f"{type(error).__name__}: {re.sub('[0-9]+', '', str(error))}"
        self._log_once(logging.ERROR, kind, message, error, error=error)
