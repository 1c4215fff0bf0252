"""The messages between the scheduler's half of the connector and the workers' halves: one each way in a step.

Both are pickled once per step between vLLM's processes, so they hold plain numbers and numpy arrays only, and are
empty when there is nothing to do.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from undercroft.compat import KVConnectorMetadata, KVConnectorWorkerMetadata
from undercroft.device.layout import GroupCopy

__all__ = ["GroupCopy", "TransferJob", "UndercroftMetadata", "UndercroftWorkerMetadata"]


@dataclass(slots=True)
class TransferJob:
    """One load (arena to device) or save (device to arena) of one request."""

    transfer_id: int
    request_id: str
    session: int
    """Token of the session that the slots are kept for (0: the engine is the scheduler's own). For any other session
    the slots may already hold other data."""
    groups: list[GroupCopy]


@dataclass(slots=True)
class UndercroftMetadata(KVConnectorMetadata):
    """Scheduler to workers, one per step."""

    arena_socket: str = ""
    """Path of the engine's Unix socket, from which a worker gets the arena's descriptor. Always set."""
    arena_id: int = 0
    """Changes when the arena is another one (server restarted); the worker then attaches anew."""
    arena_session: int = 0
    """Token of the session that the worker attaches for; 0 where the engine is the scheduler's own."""
    loads: list[TransferJob] = field(default_factory=list)
    saves: list[TransferJob] = field(default_factory=list)
    failed_loads: list[str] = field(default_factory=list)
    """Requests whose load cannot even begin: every worker reports them as received and failed."""


@dataclass(slots=True)
class UndercroftWorkerMetadata(KVConnectorWorkerMetadata):
    """Workers to scheduler: how many ranks have ended each save, and which saves failed on any rank."""

    saves_ended: dict[int, int] = field(default_factory=dict)
    saves_failed: set[int] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Add another rank's answer to this one (vLLM calls it once per rank)."""
        assert isinstance(other, UndercroftWorkerMetadata)
        ended = dict(self.saves_ended)
        for transfer_id, ranks in other.saves_ended.items():
            ended[transfer_id] = ended.get(transfer_id, 0) + ranks
        return UndercroftWorkerMetadata(ended, self.saves_failed | other.saves_failed)
