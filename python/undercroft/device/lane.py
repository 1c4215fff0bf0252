"""Lanes: each has two streams, memory on the device, and a thread that queues work, for copies of one kind.

Lanes are made once for a device and live as long as the process. A copier borrows lanes. Memory stays with the stream
for which it was allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from undercroft.device.streams import Streams
from undercroft.log import logger

STAGING_BYTES = 64 << 20
"""Device memory of the staging buffer of each direction."""
UNPINNED_STAGING_BYTES = 16 << 20
"""Device memory of the staging buffer for memory that is not pinned, whose copies are slow in any case."""
_ALIGNMENT = 512
"""Alignment of a staging buffer's second half in bytes, as of PyTorch's memory: kernels move 16 bytes at a time."""
ROW_NUMBERS = 1 << 20
"""Most row numbers in flight (8 bytes each, in pinned memory and on the device). A prompt of 128k tokens has fewer, so
one copy uploads all of them."""


class Half(NamedTuple):
    """A half of a lane's staging buffer, or all of it where a shard is larger than a half."""

    shards: torch.Tensor
    """uint8 [shard, byte]."""
    parts: range
    """Which halves it covers."""


class Lane:
    """A stream of copies, a stream of kernels, and the buffers that only these two use.

    While the kernel of one half of the staging buffer runs, the copies of the other half run. Kernels come before those
    of the model, for which the bus would stand still otherwise. Only the lane's own thread queues work on the streams.
    """

    def __init__(self, streams: Streams, staging_bytes: int, thread: Executor, row_numbers: int = ROW_NUMBERS) -> None:
        """``thread``: an executor with one thread, which runs and has called `Streams.select`."""
        self.streams = streams
        self.handle = streams.create()
        """The stream of copies."""
        self.kernels = streams.create(urgent=True)
        """The stream of kernels between pages and the staging buffer."""
        self.staging_bytes = staging_bytes
        self.row_numbers = row_numbers
        self.thread = thread
        self._staging: torch.Tensor | None = None
        self._free: list[Any] = [None, None]
        """For each half of the staging buffer, an event after all work that uses it."""
        self._ready: Any = None
        """An event for which the kernels of this job still have to wait."""
        self._scattered = False
        """Whether kernels of this job follow its copies."""
        self._refused: int | None = None
        self._numbers_here: torch.Tensor | None = None
        self._numbers_there: torch.Tensor | None = None
        self._numbers_used = 0

    def begin(self, ready: Any) -> None:
        """A job begins: its work runs after the event ``ready``."""
        self.streams.wait(self.handle, ready)
        self._ready, self._scattered = ready, False

    def gathers(self, half: Half, kernel: Callable[[], None], copy: Callable[[], None]) -> None:
        """Queue a kernel that fills the half, and then the copies from it."""
        with self._settled():
            if self._ready is not None:
                self.streams.wait(self.kernels, self._ready)
                self._ready = None
            self._wait_for(half, self.kernels)
            self.streams.run(self.kernels, kernel)
            self.streams.wait(self.handle, self.streams.record(self.kernels))
            copy()
            self._use(half, self.handle)

    def scatters(self, half: Half, kernel: Callable[[], None], copy: Callable[[], None]) -> None:
        """Queue the copies to the half, and then a kernel that empties it."""
        with self._settled():
            self._scattered = True
            self._wait_for(half, self.handle)
            copy()
            self.streams.wait(self.kernels, self.streams.record(self.handle))
            self.streams.run(self.kernels, kernel)
            self._use(half, self.kernels)

    def end(self) -> Any:
        """An event that happens when all work of the job so far has run. Later copies do not wait for it."""
        if not self._scattered:
            return self.streams.record(self.handle)
        self.streams.wait(self.kernels, self.streams.record(self.handle))
        return self.streams.record(self.kernels)

    @contextmanager
    def _settled(self) -> Iterator[None]:
        """After an error wait for both streams: one of them may have work that the other one does not wait for."""
        try:
            yield
        except BaseException:
            self.finish_here()
            raise

    def _wait_for(self, half: Half, stream: Any) -> None:
        for part in half.parts:
            if self._free[part] is not None:
                self.streams.wait(stream, self._free[part])

    def _use(self, half: Half, last: Any) -> None:
        event = self.streams.record(last)
        for part in half.parts:
            self._free[part] = event

    def staging(self, row_bytes: int) -> list[Half] | None:
        """The staging buffer's halves as rows of ``row_bytes``, at least one row.

        None if the device has not enough memory, or the host not enough pinned memory. A size that failed once is not
        tried again.
        """
        size = max(self.staging_bytes, row_bytes)
        if self._refused is not None and size >= self._refused:
            return None
        if self._staging is None or self._staging.numel() < size:
            try:
                if not self._make_numbers():
                    self._refused = 0
                    return None
                self._staging = self.streams.buffer(self.handle, size)
            except torch.OutOfMemoryError:
                self._refused = size
                logger.warning(
                    "undercroft: the device has no %d bytes free for a staging buffer; small pages are copied one by "
                    "one, which is slower. Lower gpu_memory_utilization a little.",
                    size,
                )
                return None
        assert self._staging is not None
        half = self._staging.numel() // 2 // _ALIGNMENT * _ALIGNMENT
        if row_bytes > half:
            return [Half(_rows(self._staging, row_bytes), range(2))]
        return [
            Half(_rows(self._staging[part * half : (part + 1) * half], row_bytes), range(part, part + 1))
            for part in (0, 1)
        ]

    def upload(self, numbers: np.ndarray) -> torch.Tensor:
        """Upload at most `row_numbers` int64 values. They are valid until `row_numbers` further values are uploaded."""
        if self._numbers_used + numbers.size > self.row_numbers:
            # Kernels may still read the earlier numbers. The lane's own thread waits here, once in many jobs.
            self.streams.finish(self.kernels)
            self._numbers_used = 0
        begin, end = self._numbers_used, self._numbers_used + numbers.size
        assert self._numbers_here is not None
        assert self._numbers_there is not None
        here, there = self._numbers_here[begin:end], self._numbers_there[begin:end]
        here.numpy()[:] = numbers
        self._numbers_used = end
        self.streams.run(self.kernels, lambda: there.copy_(here, non_blocking=True))
        return there

    def finish(self) -> None:
        """Wait until all work that the lane has got has run."""
        try:
            self.thread.submit(self.finish_here).result()
        except RuntimeError:
            # A thread that has ended may have queued copies before.
            self.finish_here()

    def finish_here(self) -> None:
        """Wait in the calling thread until all work that is queued on the lane's streams has run."""
        self.streams.finish(self.handle)
        self.streams.finish(self.kernels)

    def _make_numbers(self) -> bool:
        """Make the buffers of row numbers once. Returns False if the host has not enough pinned memory."""
        if self._numbers_here is None:
            there = self.streams.buffer(self.kernels, self.row_numbers * 8)
            try:
                here = self.streams.pinned(self.row_numbers * 8)
            except RuntimeError as error:
                # PyTorch has no exception of its own for host memory.
                logger.warning(
                    "undercroft: the driver does not pin %d bytes of host memory for row numbers (%s); small pages are "
                    "copied one by one, which is slower. Raise the limit on locked memory (ulimit -l, or memlock of "
                    "the container).",
                    self.row_numbers * 8,
                    error,
                )
                return False
            self._numbers_there, self._numbers_here = there.view(torch.int64), here.view(torch.int64)
        return True


def _rows(memory: torch.Tensor, row_bytes: int) -> torch.Tensor:
    rows = memory.numel() // row_bytes
    return memory[: rows * row_bytes].view(rows, row_bytes)


class Lanes(NamedTuple):
    """The lanes of one copier."""

    save: Lane
    load: Lane
    unpinned: Lane
    """For copies of memory that is not pinned, in both directions: the driver blocks the thread that queues them."""

    @classmethod
    def make(
        cls,
        streams: Streams,
        staging_bytes: int = STAGING_BYTES,
        row_numbers: int = ROW_NUMBERS,
        thread: Callable[[str], Executor] | None = None,
    ) -> Lanes:
        """``thread``: makes an executor with one thread of the given name.

        Raises RuntimeError if a thread cannot start, or cannot select the device.
        """
        make = thread or (lambda name: ThreadPoolExecutor(1, thread_name_prefix=name, initializer=streams.select))
        threads = _started([make(f"undercroft-{name}") for name in cls._fields])
        sizes = (staging_bytes, staging_bytes, min(staging_bytes, UNPINNED_STAGING_BYTES))
        lanes = zip(sizes, threads, strict=True)
        return cls(*(Lane(streams, size, thread, row_numbers) for size, thread in lanes))


def _started(threads: Sequence[Executor]) -> Sequence[Executor]:
    """Wait until each executor has run a call. A thread that starts with its first job may be refused in that job."""
    try:
        for thread in threads:
            thread.submit(lambda: None).result()
    except Exception:
        for thread in threads:
            thread.shutdown(wait=False)
        raise
    return threads


_idle: dict[torch.device, list[Lanes]] = {}


def borrow(device: torch.device, make: Callable[[], Lanes]) -> Lanes:
    """Lanes of a device that no copier uses. New lanes are made only if there are no such lanes."""
    idle = _idle.setdefault(device, [])
    return idle.pop() if idle else make()


def give_back(device: torch.device, lanes: Lanes) -> None:
    """Return lanes whose work has all run. Another copier may use them from now on."""
    _idle.setdefault(device, []).append(lanes)
