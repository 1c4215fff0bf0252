"""Copies between a CUDA device and the arena, in the background of the model's own work.

Saves and loads have a stream each. A job is queued by `CudaCopier.submit` in a fixed number of calls, whatever the
number of layers: either one batch of copies straight between pages and slots, or, where pages are small, through a
staging buffer on the device. Jobs on memory that is not pinned go a way of their own, since the driver blocks whoever
queues such copies: another stream, queued by another thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import NamedTuple, Protocol

import numpy as np
import torch

from undercroft._core import Arena
from undercroft.device.api import Ended
from undercroft.device.copy_stream import CopyStream
from undercroft.device.gather import Gather
from undercroft.device.layout import DeviceLayout, GroupCopy, GroupLayout, block_copies, check_blocks
from undercroft.device.pinning import chunk_bytes
from undercroft.device.streams import Streams

GATHER_BELOW = 128 << 10
"""Pages smaller than this many bytes are gathered: a copy of its own costs the device as much time as the bus needs for
some tens of KiB."""
STAGING_BYTES = 64 << 20
"""Device memory of each direction's staging buffer."""
UNPINNED_STAGING_BYTES = 16 << 20
"""The same for copies of memory that is not pinned, which take longer anyway."""

STRATEGIES = ("auto", "direct", "gather")
"""How pages are copied: straight, through the staging buffer, or as their size suggests."""


class Pinner(Protocol):
    """See `undercroft.device.pinning.ArenaPinner`."""

    @property
    def pinned_bytes(self) -> int:
        """How much of the arena is pinned, counted from its start."""

    def close(self) -> None:
        """Unpin everything."""


class _CheckedCopy(NamedTuple):
    """A `GroupCopy` within the bounds of device and arena: blocks, and the arena offsets of this rank's shards."""

    layout: GroupLayout
    block_ids: np.ndarray
    offsets: np.ndarray


class CudaCopier:
    """See `undercroft.device.api.DeviceCopier`."""

    def __init__(
        self,
        layout: DeviceLayout,
        arena: Arena,
        rank: int,
        streams: Streams,
        pinner: Pinner | None,
        *,
        strategy: str = "auto",
        staging_bytes: int = STAGING_BYTES,
        pin_chunk: int | None = None,
        background: Executor | None = None,
    ) -> None:
        """``pinner``: pins the arena and is closed with the copier; None if all of it is pinned already.

        ``background``: one thread that queues copies of unpinned memory; its own if None.
        """
        if strategy not in STRATEGIES:
            raise ValueError(f"strategy {strategy!r}: not one of {', '.join(STRATEGIES)}")
        self._layout = layout
        self._arena = arena
        self._rank = rank
        self._streams = streams
        self._pinner = pinner
        self._pin_chunk = pin_chunk or chunk_bytes(arena.size)
        self._gathers = {index: _gather(group, layout, strategy) for index, group in layout.groups.items()}
        self._pinned = {to_arena: CopyStream(streams, staging_bytes) for to_arena in (True, False)}
        self._background = background or ThreadPoolExecutor(1, thread_name_prefix="undercroft-unpinned")
        self._closed = False
        self._unpinned = CopyStream(streams, min(staging_bytes, UNPINNED_STAGING_BYTES), self._background)

    def submit(self, ticket: int, to_arena: bool, groups: Sequence[GroupCopy]) -> int:
        """Queue a job behind all that the calling thread has queued on the device so far; see `DeviceCopier`.

        After `close` it raises RuntimeError.
        """
        if self._closed:
            raise RuntimeError("the copier is closed")
        copies = [self._checked(group) for group in groups]
        ends = [int(copy.offsets.max()) + copy.layout.shard_bytes for copy in copies if copy.offsets.size]
        pinned = self._pinner is None or max(ends, default=0) <= self._pinner.pinned_bytes
        stream = self._pinned[to_arena] if pinned else self._unpinned
        ready = self._streams.record(self._streams.compute())
        stream.start(ticket, ready, lambda stream: self._queue(stream, to_arena, copies))
        return sum(copy.offsets.size * copy.layout.shard_bytes for copy in copies)

    def poll(self) -> list[Ended]:
        """Jobs that have ended since the last call, those of one direction in their order."""
        return [ended for stream in self._copy_streams() for ended in stream.poll()]

    def drain(self) -> None:
        """Wait until every job has ended."""
        if self._closed:
            return
        for stream in self._copy_streams():
            stream.drain()

    def close(self) -> None:
        """End every job, unpin the arena, end the threads. Idempotent."""
        if self._closed:
            return
        self.drain()
        self._closed = True
        self._background.shutdown()
        if self._pinner is not None:
            self._pinner.close()

    def _copy_streams(self) -> tuple[CopyStream, ...]:
        return (*self._pinned.values(), self._unpinned)

    def _checked(self, copy: GroupCopy) -> _CheckedCopy:
        known = self._layout.groups.get(copy.group)
        if known is None:
            raise ValueError(f"KV cache group {copy.group} cannot be copied; groups {sorted(self._layout.groups)} can")
        block_ids = np.asarray(copy.block_ids, dtype=np.int64)
        offsets = np.asarray(copy.offsets, dtype=np.int64) + self._rank * known.shard_bytes
        check_blocks(known, block_ids, offsets)
        outside = (offsets < 0) | (offsets > self._arena.size - known.shard_bytes)
        if outside.any():
            raise ValueError(
                f"group {copy.group}: a shard of {known.shard_bytes} bytes at {int(offsets[outside][0])} lies outside "
                f"the arena of {self._arena.size} bytes"
            )
        return _CheckedCopy(known, block_ids, offsets)

    def _queue(self, stream: CopyStream, to_arena: bool, copies: Sequence[_CheckedCopy]) -> None:
        for copy in copies:
            gather = self._gathers[copy.layout.group]
            staging = None if gather is None else stream.staging(copy.layout.shard_bytes)
            if gather is None or staging is None:
                pieces = block_copies(copy.layout, copy.block_ids, copy.offsets, rank=0)
                self._copy(stream, to_arena, pieces.addresses, pieces.offsets, pieces.sizes)
            else:
                self._staged(stream, to_arena, copy, gather, staging)

    def _staged(
        self, stream: CopyStream, to_arena: bool, copy: _CheckedCopy, gather: Gather, staging: torch.Tensor
    ) -> None:
        shard = copy.layout.shard_bytes
        for begin in range(0, copy.block_ids.size, len(staging)):
            block_ids = copy.block_ids[begin : begin + len(staging)]
            offsets = copy.offsets[begin : begin + len(staging)]
            rows = staging[: block_ids.size]
            addresses = rows.data_ptr() + np.arange(block_ids.size, dtype=np.int64) * shard
            sizes = np.full(block_ids.size, shard, dtype=np.int64)
            if to_arena:
                self._streams.run(stream.handle, self._on_device(gather.gather, block_ids, rows))
            self._copy(stream, to_arena, addresses, offsets, sizes)
            if not to_arena:
                self._streams.run(stream.handle, self._on_device(gather.scatter, block_ids, rows))

    def _on_device(self, move: Callable[..., None], block_ids: np.ndarray, rows: torch.Tensor) -> Callable[[], None]:
        return lambda: move(self._streams.upload(block_ids), rows)

    def _copy(
        self, stream: CopyStream, to_arena: bool, addresses: np.ndarray, offsets: np.ndarray, sizes: np.ndarray
    ) -> None:
        if sizes.size == 0:
            return
        addresses, offsets, sizes = split(*join(addresses, offsets, sizes), self._pin_chunk)
        hosts = offsets + self._arena.address
        destinations, sources = (hosts, addresses) if to_arena else (addresses, hosts)
        self._streams.copy(stream.handle, destinations, sources, sizes)


def join(addresses: np.ndarray, offsets: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Make one piece of those that follow each other on both sides."""
    apart = (addresses[1:] != addresses[:-1] + sizes[:-1]) | (offsets[1:] != offsets[:-1] + sizes[:-1])
    first = np.concatenate([[0], np.flatnonzero(apart) + 1])
    if first.size == sizes.size:
        return addresses, offsets, sizes
    return addresses[first], offsets[first], np.add.reduceat(sizes, first)


def split(
    addresses: np.ndarray, offsets: np.ndarray, sizes: np.ndarray, every: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut pieces at the multiples of ``every`` bytes of their offsets."""
    pieces = (offsets + sizes - 1) // every - offsets // every + 1
    if (pieces == 1).all():
        return addresses, offsets, sizes
    index = np.repeat(np.arange(sizes.size), pieces)
    nth = np.arange(index.size) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    begin = np.maximum(offsets[index], (offsets[index] // every + nth) * every)
    end = np.minimum((offsets + sizes)[index], (offsets[index] // every + nth + 1) * every)
    return addresses[index] + begin - offsets[index], begin, end - begin


def _gather(group: GroupLayout, layout: DeviceLayout, strategy: str) -> Gather | None:
    """How the pages of a group are gathered; None if they are copied straight."""
    if strategy == "direct" or group.sizes.size == 0:
        return None
    if strategy == "auto" and (group.sizes.size == 1 or int(group.sizes.max()) >= GATHER_BELOW):
        return None
    return Gather.of(group, layout.tensors)
