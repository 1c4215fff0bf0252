"""Copies between a CUDA device and the arena, in the background of the model's own work.

The model runner's thread records one event and passes the jobs of a step to a lane's thread, which queues all copies,
those of a large job in one call. Large pages are copied directly between pages and slots. Small pages are gathered and
scattered by kernels, a chunk at a time, and whole shards are copied while the kernels of the next chunk run. Jobs on
memory that is not pinned have a lane of their own, since the driver blocks the thread that queues such copies.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from undercroft._core import Arena
from undercroft.device.api import GATHER_BELOW, Ended, Job
from undercroft.device.copy_stream import CopyStream
from undercroft.device.lane import Lane, Lanes
from undercroft.device.layout import DeviceLayout, GroupCopy, GroupLayout, check_blocks
from undercroft.device.pinning import chunk_bytes

UNPINNED_GATHER_BELOW = 128 << 10
"""Pages smaller than this many bytes are gathered for memory that is not pinned, where each copy costs the driver's
caller more."""

STRATEGIES = ("auto", "direct", "gather")
"""How pages are copied: by their size ("auto"), directly, or through the staging buffer ("gather")."""


class Pinner(Protocol):
    """See `undercroft.device.pinning.ArenaPinner`."""

    @property
    def pinned_bytes(self) -> int:
        """Number of bytes at the arena's start that are pinned."""


class _Blocks(NamedTuple):
    """The blocks of one group in some jobs, checked against the bounds of device and arena."""

    layout: GroupLayout
    block_ids: np.ndarray
    offsets: np.ndarray
    """Offsets of this rank's shards in the arena."""
    ends: list[int]
    """For each job, the number of blocks of this job and all jobs before it."""


class CudaCopier:
    """See `undercroft.device.api.DeviceCopier`."""

    def __init__(
        self,
        layout: DeviceLayout,
        arena: Arena,
        lanes: Lanes,
        pinner: Pinner | None,
        *,
        strategy: str = "auto",
        gather_below: int = GATHER_BELOW,
        pin_chunk: int | None = None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """``lanes``: used by this copier alone until it calls ``on_close``. ``pinner``: pins the arena; None if all of
        the arena is pinned already. ``gather_below``: see `undercroft.device.api`; used by the strategy "auto"."""
        if strategy not in STRATEGIES:
            raise ValueError(f"strategy {strategy!r}: not one of {', '.join(STRATEGIES)}")
        self._layout = layout
        self._arena = arena
        self._streams = lanes.save.streams
        self._pinner = pinner
        self._pin_chunk = pin_chunk or chunk_bytes(arena.size)
        below = {lanes.save: gather_below, lanes.load: gather_below, lanes.unpinned: UNPINNED_GATHER_BELOW}
        self._pages = {index: group.pages() for index, group in layout.groups.items()}
        self._gathers = {
            lane: {
                index: self._pages[index].aligned and _gathers(group, strategy, border)
                for index, group in layout.groups.items()
            }
            for lane, border in below.items()
        }
        self._pinned = {True: CopyStream(lanes.save), False: CopyStream(lanes.load)}
        self._unpinned = CopyStream(lanes.unpinned)
        self._on_close = on_close
        self._closed = False

    def submit(self, to_arena: bool, jobs: Sequence[Job]) -> list[int]:
        """Queue jobs behind all work that the calling thread has queued on the device so far; see `DeviceCopier`.

        After `close` it raises RuntimeError.
        """
        if self._closed:
            raise RuntimeError("the copier is closed")
        blocks = self._merged(jobs)
        ready = self._streams.record(self._streams.compute())
        if self._fits(blocks):
            self._start(self._pinned[to_arena], to_arena, jobs, blocks, ready)
        else:
            alone = [(job, self._fits(self._merged([job]))) for job in jobs]
            parts = [[job for job, fits in alone if fits], [job for job, fits in alone if not fits]]
            # An error must occur before the first part is queued.
            merged = [self._merged(part) for part in parts]
            for stream, part, own in zip((self._pinned[to_arena], self._unpinned), parts, merged, strict=True):
                if part:
                    self._start(stream, to_arena, part, own, ready)
        return _bytes(blocks, len(jobs))

    def select(self) -> None:
        """Select the device; see `DeviceCopier`. Without this a query of an event fails a graph's capture."""
        self._streams.select()

    def poll(self) -> list[Ended]:
        """Jobs that have ended since the last call. Jobs of one direction are in their order."""
        return [ended for stream in self._copy_streams() for ended in stream.poll()]

    def drain(self) -> None:
        """Wait until every job has ended."""
        for stream in self._copy_streams():
            stream.drain()

    def close(self) -> None:
        """Wait until every job has ended, and return the lanes. Idempotent."""
        if not self._closed:
            self.drain()
            self._closed = True
            self._on_close()

    def _copy_streams(self) -> tuple[CopyStream, ...]:
        return (*self._pinned.values(), self._unpinned)

    def _merged(self, jobs: Sequence[Job]) -> list[_Blocks]:
        """The blocks of all jobs, group after group. Raises ValueError if a block or a slot is out of range."""
        groups = sorted({copy.group for job in jobs for copy in job.groups})
        return [self._blocks(group, jobs) for group in groups]

    def _blocks(self, group: int, jobs: Sequence[Job]) -> _Blocks:
        known = self._layout.group(group)
        ids: list[np.ndarray] = []
        starts: list[np.ndarray] = []
        ends: list[int] = []
        total = 0
        for job in jobs:
            for copy in job.groups:
                if copy.group == group:
                    _check_lengths(copy)
                    ids.append(copy.block_ids)
                    starts.append(copy.offsets)
                    total += len(copy.block_ids)
            ends.append(total)
        block_ids = np.concatenate(ids, dtype=np.int64)
        offsets = np.concatenate(starts, dtype=np.int64) + known.begin
        check_blocks(known, block_ids, offsets)
        last = self._arena.size - known.span
        if total and (offsets.min() < 0 or offsets.max() > last):
            wrong = offsets[(offsets < 0) | (offsets > last)]
            raise ValueError(
                f"group {group}: a shard of {known.shard_bytes} bytes at {int(wrong[0])} lies outside "
                f"the arena of {self._arena.size} bytes"
            )
        return _Blocks(known, block_ids, offsets, ends)

    def _fits(self, blocks: Sequence[_Blocks]) -> bool:
        """Whether all slots lie in pinned memory."""
        if self._pinner is None:
            return True
        ends = [int(some.offsets.max()) + some.layout.span for some in blocks if some.offsets.size]
        return max(ends, default=0) <= self._pinner.pinned_bytes

    def _start(
        self, stream: CopyStream, to_arena: bool, jobs: Sequence[Job], blocks: Sequence[_Blocks], ready: object
    ) -> None:
        stream.start([job.ticket for job in jobs], ready, lambda lane: self._queue(lane, to_arena, blocks))

    def _queue(self, lane: Lane, to_arena: bool, blocks: Sequence[_Blocks]) -> Iterator[int]:
        for some in blocks:
            group, shard = some.layout.group, some.layout.shard_bytes
            staged = self._gathers[lane][group] and lane.stages(shard)
            for begin, end in runs(some.ends, max(1, lane.staging_bytes // shard)):
                ids, offsets = some.block_ids[begin:end], some.offsets[begin:end]
                pieces = self._pages[group].pieces(ids, offsets, self._pin_chunk)
                lane.copy(to_arena, pieces, self._arena.address, staged=staged)
                if some is blocks[-1]:
                    yield bisect_right(some.ends, end)


def _bytes(blocks: Sequence[_Blocks], jobs: int) -> list[int]:
    """The bytes of each job."""
    sizes = [0] * jobs
    for some in blocks:
        before = 0
        for nth, end in enumerate(some.ends):
            sizes[nth] += (end - before) * some.layout.shard_bytes
            before = end
    return sizes


def _check_lengths(copy: GroupCopy) -> None:
    if copy.block_ids.shape != copy.offsets.shape:
        raise ValueError(
            f"group {copy.group}: {copy.block_ids.shape} block ids for {copy.offsets.shape} slots; both must be as long"
        )


def runs(ends: Sequence[int], least: int) -> Iterator[tuple[int, int]]:
    """Cut the blocks of jobs, which end at ``ends``, into runs of whole jobs.

    Small jobs share runs of at least ``least`` blocks, but not with a larger job behind them: they would end with it.
    """
    begin = last = 0
    for end in ends:
        if end - last > least and last > begin:
            yield begin, last
            begin = last
        if end - begin >= least:
            yield begin, end
            begin = end
        last = end
    if last > begin:
        yield begin, last


def _gathers(group: GroupLayout, strategy: str, below: int) -> bool:
    """Whether the pages of a group are gathered. ``below``: border in bytes."""
    if group.span > group.shard_bytes:
        # Other ranks have bytes in between: a gathered shard needs as many copies as its pages.
        return False
    if strategy != "auto":
        return strategy == "gather"
    return group.sizes.size > 1 and int(group.sizes.max()) < below
