"""Copies between device pages in host memory (vLLM's CPU platform) and the arena."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from undercroft._core import Arena, Copier
from undercroft.device.api import Ended, Job
from undercroft.device.layout import Copies, DeviceLayout, GroupCopy, block_copies


class CpuCopier:
    """Copies for vLLM's CPU platform, where device pages are host memory."""

    def __init__(self, layout: DeviceLayout, arena: Arena, rank: int, threads: int = 1) -> None:
        self._layout = layout
        self._rank = rank
        self._copier = Copier(arena, threads)

    def submit(self, to_arena: bool, jobs: Sequence[Job]) -> list[int]:
        """Queue jobs in one call of the core; see `DeviceCopier`."""
        copies = [job_copies(self._layout, job.groups, self._rank) for job in jobs]
        counts = [(job.ticket, own.sizes.size) for job, own in zip(jobs, copies, strict=True)]
        arrays = (
            b"".join(getattr(own, name).tobytes() for own in copies) for name in ("addresses", "offsets", "sizes")
        )
        self._copier.submit(to_arena, counts, *arrays)
        return [own.bytes for own in copies]

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


def job_copies(layout: DeviceLayout, groups: Sequence[GroupCopy], rank: int) -> Copies:
    """The pieces of all groups of a job. Raises ValueError for a group or block that cannot be copied."""
    copies = []
    for copy in groups:
        known = layout.groups.get(copy.group)
        if known is None:
            raise ValueError(f"KV cache group {copy.group} cannot be copied; groups {sorted(layout.groups)} can")
        copies.append(block_copies(known, copy.block_ids, copy.offsets, rank))
    if len(copies) == 1:
        return copies[0]
    empty = np.empty(0, dtype=np.int64)
    return Copies(
        addresses=np.concatenate([empty, *(pieces.addresses for pieces in copies)]),
        offsets=np.concatenate([empty, *(pieces.offsets for pieces in copies)]),
        sizes=np.concatenate([empty, *(pieces.sizes for pieces in copies)]),
    )
