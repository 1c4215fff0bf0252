"""What copies between the device's pages and the arena."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from undercroft._core import Arena, Copier
from undercroft.device.layout import Copies, DeviceLayout, GroupCopy, block_copies


class Ended(NamedTuple):
    """A job that has ended: nothing of it reads or writes memory any more."""

    ticket: int
    ok: bool
    seconds: float
    """From the first byte copied to the last."""


class DeviceCopier(Protocol):
    """Copies the shards of one rank, in the background. Used by one thread, the model runner's.

    A save reads what the device's work submitted so far writes: a copier with streams records an event of the compute
    stream in `submit` and lets the save wait for it. A load writes only after that work too, since it may still zero or
    read the destination. `submit` never waits itself.
    """

    def submit(self, ticket: int, to_arena: bool, groups: Sequence[GroupCopy]) -> int:
        """Queue a job under a number of the caller's choice; the bytes that it will copy.

        Raises an exception, and queues nothing, if a block or a slot lies outside its range.
        """

    def poll(self) -> list[Ended]:
        """Jobs that have ended since the last call."""

    def drain(self) -> None:
        """Wait until every job has ended; they are still returned by `poll`."""

    def close(self) -> None:
        """Wait until every job has ended, and let go of threads and pinned memory. Nothing is submitted any more."""


class CpuCopier:
    """Copies by memcpy, for vLLM's CPU platform, where device pages are host memory."""

    def __init__(self, layout: DeviceLayout, arena: Arena, rank: int, threads: int = 1) -> None:
        self._layout = layout
        self._rank = rank
        self._copier = Copier(arena, threads)

    def submit(self, ticket: int, to_arena: bool, groups: Sequence[GroupCopy]) -> int:
        """Queue a job; see `DeviceCopier`."""
        copies = job_copies(self._layout, groups, self._rank)
        self._copier.submit(
            ticket, to_arena, copies.addresses.tobytes(), copies.offsets.tobytes(), copies.sizes.tobytes()
        )
        return copies.bytes

    def poll(self) -> list[Ended]:
        """Jobs that have ended since the last call."""
        return [Ended(ticket, True, seconds) for ticket, seconds in self._copier.poll()]

    def drain(self) -> None:
        """Wait until every job has ended."""
        self._copier.drain()

    def close(self) -> None:
        """See `DeviceCopier`."""
        self.drain()


def job_copies(layout: DeviceLayout, groups: Sequence[GroupCopy], rank: int) -> Copies:
    """The pieces of all groups of a job. Raises ValueError for a group or block that cannot be copied."""
    parts = []
    for part in groups:
        known = layout.groups.get(part.group)
        if known is None:
            raise ValueError(f"KV cache group {part.group} cannot be copied; groups {sorted(layout.groups)} can")
        parts.append(block_copies(known, part.block_ids, part.slots, rank))
    if len(parts) == 1:
        return parts[0]
    empty = np.empty(0, dtype=np.int64)
    return Copies(
        addresses=np.concatenate([empty, *(part.addresses for part in parts)]),
        offsets=np.concatenate([empty, *(part.offsets for part in parts)]),
        sizes=np.concatenate([empty, *(part.sizes for part in parts)]),
    )


def make_copier(layout: DeviceLayout, arena: Arena, rank: int) -> DeviceCopier:
    """The copier for the device that the KV cache is on.

    Raises ValueError if there is none for this kind of device, RuntimeError if the device's driver lacks what it needs.
    """
    if layout.device.type == "cpu":
        return CpuCopier(layout, arena, rank)
    if layout.device.type == "cuda":
        from undercroft.device.cuda import CudaCopier
        from undercroft.device.cuda_streams import CudaStreams, pin

        streams = CudaStreams(layout.device)
        return CudaCopier(layout, arena, rank, streams, pin(layout.device, arena.address, arena.size))
    raise ValueError(f"no copier for a KV cache on {layout.device}; CUDA devices and vLLM's CPU platform are supported")
