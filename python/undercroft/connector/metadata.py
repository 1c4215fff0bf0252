"""What the scheduler's half of the connector tells the workers' halves in a step, and what they answer.

Both are pickled once per step between vLLM's processes, so they hold plain numbers and numpy arrays only, and are
empty when there is nothing to do.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata


@dataclass(slots=True)
class GroupCopy:
    """Blocks of one KV cache group to copy between the device and the arena.

    ``block_ids[i]`` (int64) is the device block, ``slots[i]`` (int64) the offset in bytes of its payload's slot from
    the start of the arena. A payload holds the shards of all ranks side by side: rank r's begins at
    ``slot + r * shard_bytes``, and a shard is the page of each layer of the group, in the group's layer order.
    """

    group: int
    block_ids: np.ndarray
    slots: np.ndarray


@dataclass(slots=True)
class CopyJob:
    """One load (arena to device) or save (device to arena) of one request."""

    job_id: int
    request_id: str
    groups: list[GroupCopy]


@dataclass(slots=True)
class UndercroftMetadata(KVConnectorMetadata):
    """Scheduler to workers, one per step."""

    arena_socket: str = ""
    """Path of the engine's Unix socket, from which a worker gets the arena's descriptor. Always set."""
    arena_generation: int = 0
    """Changes when the arena is another one (server restarted); the worker then attaches anew."""
    loads: list[CopyJob] = field(default_factory=list)
    saves: list[CopyJob] = field(default_factory=list)


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
