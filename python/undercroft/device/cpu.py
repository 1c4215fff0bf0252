"""Copies between device pages in host memory (vLLM's CPU platform) and the arena."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from undercroft._core import Arena, BlockPieces, Copier
from undercroft.device.api import Ended, Job
from undercroft.device.layout import DeviceLayout, GroupCopy, check_blocks


class CpuCopier:
    """Copies for vLLM's CPU platform, where device pages are host memory."""

    def __init__(self, layout: DeviceLayout, arena: Arena, threads: int = 1) -> None:
        self._layout = layout
        self._pages = {index: group.pages() for index, group in layout.groups.items()}
        self._copier = Copier(arena, threads)

    def submit(self, to_arena: bool, jobs: Sequence[Job]) -> list[int]:
        """Queue jobs in one call of the core; see `DeviceCopier`."""
        self._copier.submit(to_arena, [(job.ticket, [self._pieces(copy) for copy in job.groups]) for job in jobs])
        return [sum(self._bytes(copy) for copy in job.groups) for job in jobs]

    def _pieces(self, copy: GroupCopy) -> BlockPieces:
        """Raises ValueError for a group or a block that cannot be copied."""
        group = self._layout.group(copy.group)
        ids, offsets = (np.asarray(array, dtype=np.int64) for array in (copy.block_ids, copy.offsets))
        shards = offsets + group.begin
        check_blocks(group, ids, shards)
        return self._pages[copy.group].pieces(ids, shards)

    def _bytes(self, copy: GroupCopy) -> int:
        return len(copy.block_ids) * self._layout.groups[copy.group].shard_bytes

    @property
    def routine(self) -> str:
        """Name of the routine that copies bytes: the fastest in a measurement on this processor."""
        return self._copier.routine

    def select(self) -> None:
        """See `DeviceCopier`."""

    def poll(self) -> list[Ended]:
        """Jobs that have ended since the last call."""
        return [Ended(ticket, True, seconds) for ticket, seconds in self._copier.poll()]

    def drain(self) -> None:
        """Wait until every job has ended."""
        self._copier.drain()

    def close(self) -> None:
        """See `DeviceCopier`."""
        self.drain()
