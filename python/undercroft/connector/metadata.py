"""What the scheduler's half of the connector tells the workers' halves in a step, and what they answer.

Both are pickled once per step between vLLM's processes, so they hold plain numbers and numpy arrays only, and are
empty when there is nothing to do.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from undercroft.device.layout import GroupCopy

__all__ = ["CopyJob", "GroupCopy", "UndercroftMetadata", "UndercroftWorkerMetadata"]


@dataclass(slots=True)
class CopyJob:
    """One load (arena to device) or save (device to arena) of one request."""

    job_id: int
    request_id: str
    session: int
    """Token of the session that the slots are kept for (0: the engine is the scheduler's own). For a worker of another
    session they may be other bytes by now."""
    groups: list[GroupCopy]


@dataclass(slots=True)
class UndercroftMetadata(KVConnectorMetadata):
    """Scheduler to workers, one per step."""

    arena_socket: str = ""
    """Path of the engine's Unix socket, from which a worker gets the arena's descriptor. Always set."""
    arena_generation: int = 0
    """Changes when the arena is another one (server restarted); the worker then attaches anew."""
    arena_session: int = 0
    """Token of the session that the worker attaches for; 0 where the engine is the scheduler's own."""
    loads: list[CopyJob] = field(default_factory=list)
    saves: list[CopyJob] = field(default_factory=list)
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
        for job_id, ranks in other.saves_ended.items():
            ended[job_id] = ended.get(job_id, 0) + ranks
        return UndercroftWorkerMetadata(ended, self.saves_failed | other.saves_failed)
