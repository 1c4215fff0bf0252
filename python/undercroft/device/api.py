"""The contract of a device copier: how jobs are submitted and how their ends are reported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from undercroft.device.layout import GroupCopy

GATHER_BELOW = 32 << 10
"""Pages smaller than this many bytes are gathered by default: each copy costs the device, beyond its bytes, the time in
which the bus transfers some KiB, and a kernel that gathers waits for the model's kernels."""


class Job(NamedTuple):
    """The load or save of one request."""

    ticket: int
    """A number that the caller chooses, and that `Ended` repeats."""
    groups: Sequence[GroupCopy]


class Ended(NamedTuple):
    """A job that has ended: none of its copies reads or writes memory any more."""

    ticket: int
    ok: bool
    seconds: float
    """Seconds from the first copied byte to the last. For jobs submitted together, the time that each job added."""


class DeviceCopier(Protocol):
    """Copies the shards of one rank in the background. Only one thread at a time uses a copier.

    A save reads the output of the work that the device has got so far. So a copier with streams records an event of the
    compute stream in `submit`, and lets the save wait for this event. A load waits for the same event, since the work
    may still zero or read the load's destination. `submit` itself never waits.
    """

    def submit(self, to_arena: bool, jobs: Sequence[Job]) -> list[int]:
        """Queue all jobs of one direction in a step, in their order. Returns the bytes of each job.

        Raises an exception, and queues nothing, if a block or a slot of any job lies outside its range.
        """

    def select(self) -> None:
        """Prepare the calling thread, which is not the model runner's, for `poll`."""

    def poll(self) -> list[Ended]:
        """Jobs that have ended since the last call."""

    def drain(self) -> None:
        """Wait until every job has ended. `poll` still returns these jobs."""

    def close(self) -> None:
        """Wait until every job has ended. No job may be submitted afterwards."""
