"""The jobs of a copier on one lane.

Three rules of order: jobs run after the event that `CopyStream.start` gets. A job has ended when an event recorded
after its last copy has happened, not before. Copies queued before an error still run and are waited for.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from undercroft.device.api import Ended
from undercroft.device.lane import Lane
from undercroft.log import LogOnce

Work = Callable[[Lane], Iterator[int]]
"""Queues the copies of some jobs, and yields now and then how many of them, from the first, are queued in full."""


@dataclass(slots=True)
class _Submitted:
    ticket: int
    began: Any = None
    """Two events: the one that the jobs of its step waited for, and the end of the jobs before them."""
    end: Any = None
    ok: bool = True
    first: bool = False
    """Whether it is the first that ends at its event: the time is counted once."""
    queued: bool = False
    """Set last: everything is queued, or never will be."""


class CopyStream:
    """The jobs of one copier on a lane, in order."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._jobs: deque[_Submitted] = deque()
        self._last_end: Any = None
        self._log_once = LogOnce()

    def start(self, tickets: Sequence[int], ready: Any, work: Work) -> None:
        """Let the lane's thread call ``work``, whose copies run after the event ``ready``. Raises nothing."""
        jobs = [_Submitted(ticket) for ticket in tickets]
        self._jobs.extend(jobs)
        self._lane.thread.submit(self._queue, jobs, ready, work)

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

    def _queue(self, jobs: Sequence[_Submitted], ready: Any, work: Work) -> None:
        queued = 0
        try:
            self._lane.streams.wait(self._lane.handle, ready)
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
        """Everything of the jobs is queued, or never will be: one event tells when it has run."""
        try:
            end = self._lane.streams.record(self._lane.handle)
        except Exception as error:
            # Nothing tells when the copies end, so wait here; if that fails too, the device runs nothing any more.
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
            self._lane.streams.finish(self._lane.handle)
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
            # An event answers with an error only when the device's context has failed, and with it all copies.
            self._report(error)
            return Ended(job.ticket, False, 0.0)
        return Ended(job.ticket, job.ok, seconds)

    def _seconds(self, job: _Submitted) -> float:
        """The lane was free for the job from the later of the two events on."""
        return min(self._lane.streams.seconds(event, job.end) for event in job.began if event is not None)

    def _report(self, error: Exception) -> None:
        message = "undercroft: copying between device and host memory failed: %s"
        # The numbers in a message (copies, the one that failed) differ each time; its other words do not.
        kind = f"{type(error).__name__}: {re.sub('[0-9]+', '', str(error))}"
        self._log_once(logging.ERROR, kind, message, error, error=error)
