"""A copy stream and the jobs on it.

Three rules of order: a job runs after the event that `CopyStream.start` gets. A job has ended when the event recorded
after its last copy has happened, not before. Copies queued before an error still run and are waited for.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import torch

from undercroft.device.api import Ended
from undercroft.device.streams import Streams
from undercroft.log import LogOnce, logger


@dataclass(slots=True)
class _Job:
    ticket: int
    begin: Any = None
    end: Any = None
    ok: bool = True
    issued: bool = False
    """Set last: everything is queued, or never will be."""


class CopyStream:
    """One stream, the staging buffer that only it uses, and its jobs in order. Work is queued by one thread only."""

    def __init__(self, streams: Streams, staging_bytes: int, background: Executor | None = None) -> None:
        """``background``: where jobs are queued from, if queueing them may block; else by the caller."""
        self.streams = streams
        self.handle = streams.create()
        self._staging_bytes = staging_bytes
        self._staging: torch.Tensor | None = None
        self._refused: int | None = None
        self._background = background
        self._jobs: deque[_Job] = deque()
        self._log_once = LogOnce()

    def start(self, ticket: int, ready: Any, work: Callable[[CopyStream], None]) -> None:
        """Let ``work`` queue a job's copies, which run after the event ``ready``. Raises nothing."""
        job = _Job(ticket)
        self._jobs.append(job)
        if self._background is None:
            self._issue(job, ready, work)
        else:
            self._background.submit(self._issue, job, ready, work)

    def staging(self, row_bytes: int) -> torch.Tensor | None:
        """Device memory as rows of ``row_bytes``, at least one; used by this stream's work alone, in its order.

        None if the device has no memory for it; it is asked once.
        """
        size = max(self._staging_bytes, row_bytes)
        if self._refused is not None and size >= self._refused:
            return None
        if self._staging is None or self._staging.numel() < size:
            try:
                self._staging = self.streams.buffer(self.handle, size)
            except torch.OutOfMemoryError:
                self._refused = size
                logger.warning(
                    "undercroft: the device has no %d bytes free for a staging buffer; small pages are copied one by "
                    "one, which is slower. Lower gpu_memory_utilization a little.",
                    size,
                )
                return None
        rows = self._staging.numel() // row_bytes
        return self._staging[: rows * row_bytes].view(rows, row_bytes)

    def poll(self) -> list[Ended]:
        """The jobs at the front that have ended, in order."""
        ended = []
        while self._jobs and (first := self._ended(self._jobs[0])) is not None:
            self._jobs.popleft()
            ended.append(first)
        return ended

    def drain(self) -> None:
        """Wait until all jobs have ended. Raises nothing: what failed is in `poll`'s answer."""
        if self._background is not None:
            self._background.submit(lambda: None).result()
        self._finish()

    def _issue(self, job: _Job, ready: Any, work: Callable[[CopyStream], None]) -> None:
        try:
            self.streams.wait(self.handle, ready)
            job.begin = self.streams.record(self.handle)
            work(self)
        except Exception as error:
            job.ok = False
            self._report(error)
        try:
            job.end = self.streams.record(self.handle)
        except Exception as error:
            # Nothing tells when the copies end, so wait here; if that fails too, the device runs nothing any more.
            job.ok = False
            self._report(error)
            self._finish()
        job.issued = True

    def _finish(self) -> None:
        try:
            self.streams.finish(self.handle)
        except Exception as error:
            self._report(error)

    def _ended(self, job: _Job) -> Ended | None:
        if not job.issued:
            return None
        if job.end is None:
            return Ended(job.ticket, False, 0.0)
        try:
            if not self.streams.happened(job.end):
                return None
            seconds = self.streams.seconds(job.begin, job.end) if job.begin is not None else 0.0
        except Exception as error:
            # An event answers with an error only when the device's context has failed, and with it all copies.
            self._report(error)
            return Ended(job.ticket, False, 0.0)
        return Ended(job.ticket, job.ok, seconds)

    def _report(self, error: Exception) -> None:
        message = "undercroft: copying between device and host memory failed: %s"
        self._log_once(logging.ERROR, type(error), message, error, error=error)
