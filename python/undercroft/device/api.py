"""The contract of a device copier: how jobs are submitted and how their ends are reported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from undercroft.device.layout import GroupCopy


class Job(NamedTuple):
    """The load or save of one request."""

    ticket: int
    """A number of the caller's choice."""
    groups: Sequence[GroupCopy]


class Ended(NamedTuple):
    """A job that has ended: none of its copies reads or writes memory any more."""

    ticket: int
    ok: bool
    seconds: float
    """From the first byte copied to the last. Of jobs submitted together: the time that each one added."""


class DeviceCopier(Protocol):
    """Copies the shards of one rank, in the background. Used by one thread, the model runner's.

    A save reads the output of the device's work submitted so far: a copier with streams records an event of the compute
    stream in `submit` and lets the save wait for it. A load writes only after that work too, since it may still zero or
    read the destination. `submit` never waits itself.
    """

    def submit(self, to_arena: bool, jobs: Sequence[Job]) -> list[int]:
        """Queue all jobs of a step and direction at once, to be carried out in their order; the bytes of each.

        Raises an exception, and queues nothing, if a block or a slot of any of them lies outside its range.
        """

    def poll(self) -> list[Ended]:
        """Jobs that have ended since the last call."""

    def drain(self) -> None:
        """Wait until every job has ended; they are still returned by `poll`."""

    def close(self) -> None:
        """Wait until every job has ended. No job may be submitted afterwards."""
