"""The messages between the scheduler's half of the connector and the workers' halves: one in each direction per step.

vLLM pickles both messages in every step. So they hold plain numbers and numpy arrays only, and are empty when there is
nothing to do.
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
    """Token of the session that holds the slots; 0 if the engine is in the scheduler's process. For any other session
    the slots may already hold other data."""
    groups: list[GroupCopy]


@dataclass(slots=True)
class UndercroftMetadata(KVConnectorMetadata):
    """Scheduler to workers, one per step."""

    arena_socket: str = ""
    """Path of the engine's Unix socket. A worker gets the arena's descriptor from there. Always set."""
    arena_id: int = 0
    """The id of the arena. It changes when a restarted server has another arena; the worker then attaches anew."""
    arena_session: int = 0
    """Token of the session for which the worker attaches; 0 if the engine is in the scheduler's process."""
    loads: list[TransferJob] = field(default_factory=list)
    saves: list[TransferJob] = field(default_factory=list)
    failed_loads: list[str] = field(default_factory=list)
    """Requests whose load cannot begin: every worker reports them as received and failed."""


@dataclass(slots=True)
class UndercroftWorkerMetadata(KVConnectorWorkerMetadata):
    """Workers to scheduler: the number of ranks that have ended each save, and the saves that failed on any rank."""

    saves_ended: dict[int, int] = field(default_factory=dict)
    saves_failed: set[int] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Add another rank's answer to this one (vLLM calls it once per rank)."""
        assert isinstance(other, UndercroftWorkerMetadata)
        ended = dict(self.saves_ended)
        for transfer_id, ranks in other.saves_ended.items():
            ended[transfer_id] = ended.get(transfer_id, 0) + ranks
        return UndercroftWorkerMetadata(ended, self.saves_failed | other.saves_failed)
