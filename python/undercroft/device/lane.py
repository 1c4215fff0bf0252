"""Lanes: each has two streams, memory on the device, and a thread that queues work, for copies of one kind.

Lanes are made once for a device and live as long as the process. A copier borrows lanes. Memory stays with the stream
for which it was allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from undercroft._core import BlockPieces, StagedCopies
from undercroft.device.streams import Streams
from undercroft.log import logger

STAGING_BYTES = 64 << 20
"""Device memory of the staging buffer of each direction."""
UNPINNED_STAGING_BYTES = 16 << 20
"""Device memory of the staging buffer for memory that is not pinned, whose copies are slow in any case."""


class Lane:
    """A stream of copies, a stream of kernels, and the staging buffer that only these two use.

    While the kernel of one half of the staging buffer runs, the copies of the other half run. Kernels come before those
    of the model, for which the bus would stand still otherwise. Only the lane's own thread queues work on the streams.
    """

    def __init__(self, streams: Streams, staging_bytes: int, thread: Executor) -> None:
        """``thread``: an executor with one thread, which runs and has called `Streams.select`."""
        self.streams = streams
        self.handle = streams.create()
        """The stream of copies."""
        self.kernels = streams.create(urgent=True)
        """The stream of kernels between pages and the staging buffer."""
        self.staging_bytes = staging_bytes
        self.thread = thread
        self._staging: torch.Tensor | None = None
        self._staged: StagedCopies | None = None
        self._ready: Any = None
        """An event for which the kernels of this job still have to wait."""
        self._scattered = False
        """Whether kernels of this job follow its copies."""
        self._copied_since = False
        """Whether copies of this job follow its last kernel, on the other stream."""
        self._refused: int | None = None
        """Bytes of a staging buffer that cannot be had; 0: of any."""

    def begin(self, ready: Any) -> None:
        """A job begins: its work runs after the event ``ready``."""
        self.streams.wait(self.handle, ready)
        self._ready, self._scattered, self._copied_since = ready, False, False

    def copy(self, to_arena: bool, pieces: BlockPieces, arena: int, *, staged: bool) -> None:
        """Queue copies between the device and the arena at the address ``arena``.

        ``staged``: through the staging buffer; `stages` has said that this works.
        """
        if not staged:
            self._copied_since = True
            self.streams.copy(self.handle, pieces, arena, to_arena=to_arena)
            return
        assert self._staged is not None
        assert self._staging is not None
        try:
            if not to_arena:
                # The last kernel waits for all copies before it.
                self._scattered, self._copied_since = True, False
            elif self._ready is not None:
                self.streams.wait(self.kernels, self._ready)
                self._ready = None
            self._staged.queue(to_arena, pieces, (self._staging.data_ptr(), self._staging.numel()), arena)
        except BaseException:
            # One of the streams may have work that the other one does not wait for.
            self.finish_here()
            raise

    def end(self) -> Any:
        """An event that happens when all work of the job so far has run. Later copies do not wait for it."""
        if not self._scattered:
            return self.streams.record(self.handle)
        if self._copied_since:
            self.streams.wait(self.kernels, self.streams.record(self.handle))
        return self.streams.record(self.kernels)

    def stages(self, shard_bytes: int) -> bool:
        """Whether shards of so many bytes can be copied through the staging buffer, which is made if it is too small.

        A size that failed once is not tried again.
        """
        size = max(self.staging_bytes, shard_bytes)
        if self._refused is not None and size >= self._refused:
            return False
        if self._staging is None or self._staging.numel() < size:
            self._refused = self._refusal(size)
        return self._refused is None or size < self._refused

    def _refusal(self, size: int) -> int | None:
        """Make a staging buffer. Returns the smallest size that fails, as far as that is known now."""
        try:
            if self._staged is None:
                self._staged = self.streams.staged(self.handle, self.kernels)
            if self._staged is None:
                return 0
            if self._staging is not None:
                self.finish_here()
            self._staging = self.streams.buffer(self.handle, size)
        except torch.OutOfMemoryError:
            logger.warning(
                "undercroft: the device has no %d bytes free for a staging buffer; small pages are copied one by "
                "one, which is slower. Lower gpu_memory_utilization a little.",
                size,
            )
            return size
        except RuntimeError as error:
            logger.warning(
                "undercroft: the driver refuses the kernel that gathers small pages (%s); they are copied one by one, "
                "which is slower.",
                error,
            )
            return 0
        return self._refused

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
        thread: Callable[[str], Executor] | None = None,
    ) -> Lanes:
        """``thread``: makes an executor with one thread of the given name.

        Raises RuntimeError if a thread cannot start, or cannot select the device.
        """
        make = thread or (lambda name: ThreadPoolExecutor(1, thread_name_prefix=name, initializer=streams.select))
        threads = _started([make(f"undercroft-{name}") for name in cls._fields])
        sizes = (staging_bytes, staging_bytes, min(staging_bytes, UNPINNED_STAGING_BYTES))
        lanes = zip(sizes, threads, strict=True)
        return cls(*(Lane(streams, size, thread) for size, thread in lanes))


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
