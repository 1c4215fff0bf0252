"""Copies between a CUDA device and the arena, in the background of the model's own work.

The model runner's thread records one event and passes the jobs of a step to a lane's thread, which queues all copies.
Large pages are copied directly between pages and slots, those of a whole job in one call. For each chunk of small
pages it queues one kernel that gathers or scatters the pages, and one batch of copies of whole shards, which run while
the kernel of the next chunk runs. Jobs on memory that is not pinned have a lane of their own, since the driver blocks
the thread that queues such copies.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle
from typing import NamedTuple, Protocol

import numpy as np
import torch

from undercroft._core import Arena, BlockPages
from undercroft.device.api import GATHER_BELOW, Ended, Job
from undercroft.device.copy_stream import CopyStream
from undercroft.device.gather import Gather
from undercroft.device.lane import Half, Lane, Lanes
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
        rank: int,
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
        self._rank = rank
        self._streams = lanes.save.streams
        self._pinner = pinner
        self._pin_chunk = pin_chunk or chunk_bytes(arena.size)
        below = {lanes.save: gather_below, lanes.load: gather_below, lanes.unpinned: UNPINNED_GATHER_BELOW}
        self._gathers = {
            lane: {index: _gather(group, layout, strategy, border) for index, group in layout.groups.items()}
            for lane, border in below.items()
        }
        self._pages = {index: group.pages() for index, group in layout.groups.items()}
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
        offsets = np.concatenate(starts, dtype=np.int64) + self._rank * known.shard_bytes
        check_blocks(known, block_ids, offsets)
        last = self._arena.size - known.shard_bytes
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
        ends = [int(some.offsets.max()) + some.layout.shard_bytes for some in blocks if some.offsets.size]
        return max(ends, default=0) <= self._pinner.pinned_bytes

    def _start(
        self, stream: CopyStream, to_arena: bool, jobs: Sequence[Job], blocks: Sequence[_Blocks], ready: object
    ) -> None:
        stream.start([job.ticket for job in jobs], ready, lambda lane: self._queue(lane, to_arena, blocks))

    def _queue(self, lane: Lane, to_arena: bool, blocks: Sequence[_Blocks]) -> Iterator[int]:
        for some in blocks:
            last = some is blocks[-1]
            for queued in self._chunks(lane, to_arena, some):
                if last:
                    yield bisect_right(some.ends, queued)

    def _chunks(self, lane: Lane, to_arena: bool, blocks: _Blocks) -> Iterator[int]:
        """Queue the blocks of a group. Yields the number of queued blocks after each chunk."""
        gather = self._gathers[lane][blocks.layout.group]
        staging = None
        if gather is not None and gather.rows_per_block <= lane.row_numbers:
            staging = lane.staging(blocks.layout.shard_bytes)
        if gather is None or staging is None:
            yield from self._direct(lane, to_arena, blocks)
        else:
            yield from self._staged(lane, to_arena, blocks, gather, staging)

    def _direct(self, lane: Lane, to_arena: bool, blocks: _Blocks) -> Iterator[int]:
        pages = self._pages[blocks.layout.group]
        for begin, end in runs(blocks.ends, max(1, lane.staging_bytes // blocks.layout.shard_bytes)):
            self._copy(lane, to_arena, pages, blocks.block_ids[begin:end], blocks.offsets[begin:end])
            yield end

    def _staged(
        self, lane: Lane, to_arena: bool, blocks: _Blocks, gather: Gather, staging: list[Half]
    ) -> Iterator[int]:
        shard, width = blocks.layout.shard_bytes, gather.rows_per_block
        most = len(staging[0].shards)
        halves = cycle([(half, side_by_side(half.shards.data_ptr(), shard)) for half in staging])
        shards = np.arange(most, dtype=np.int64)
        # The numbers of all rows are uploaded in one copy, unless the job is larger than any prompt.
        for first in range(0, blocks.block_ids.size, lane.row_numbers // width):
            some = blocks.block_ids[first : first + lane.row_numbers // width]
            numbers = lane.upload(gather.rows(some))
            for begin in range(0, some.size, most):
                count, (half, pages) = min(most, some.size - begin), next(halves)
                move = _moving(gather, to_arena, numbers[begin * width : (begin + count) * width], half.shards[:count])
                offsets = blocks.offsets[first + begin : first + begin + count]
                copy = partial(self._copy, lane, to_arena, pages, shards[:count], offsets)
                (lane.gathers if to_arena else lane.scatters)(half, move, copy)
                yield first + begin + count

    def _copy(self, lane: Lane, to_arena: bool, pages: BlockPages, ids: np.ndarray, offsets: np.ndarray) -> None:
        """``ids`` and ``offsets``: of blocks, int64."""
        pieces = pages.pieces(ids, offsets, self._pin_chunk)
        self._streams.copy(lane.handle, pieces, self._arena.address, to_arena=to_arena)


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


def side_by_side(address: int, size: int) -> BlockPages:
    """Blocks of ``size`` bytes, one after the other from ``address`` on."""
    return BlockPages(*(np.array([value], dtype=np.int64) for value in (address, size, size, 0)))


def _moving(gather: Gather, to_arena: bool, rows: torch.Tensor, shards: torch.Tensor) -> Callable[[], None]:
    return lambda: (gather.gather if to_arena else gather.scatter)(rows, shards)


def _gather(group: GroupLayout, layout: DeviceLayout, strategy: str, below: int) -> Gather | None:
    """The `Gather` of a group; None if its pages are copied directly. ``below``: border in bytes."""
    if strategy == "direct" or group.sizes.size == 0:
        return None
    if strategy == "auto" and (group.sizes.size == 1 or int(group.sizes.max()) >= below):
        return None
    return Gather.of(group, layout.tensors)
