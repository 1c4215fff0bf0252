"""The worker's half of the connector: it copies between device blocks and arena slots as the scheduler's half orders.

The worker knows no index and no hashes. Every load ends in exactly one ``finished_recving`` of its request, every save
in exactly one acknowledgement, whatever fails: the scheduler's half holds blocks and slots until then.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from undercroft._core import Arena
from undercroft.compat import KVConnectorTransferResults
from undercroft.connector.attaching import AttachAttempt
from undercroft.connector.metadata import TransferJob, UndercroftMetadata, UndercroftWorkerMetadata
from undercroft.device.api import DeviceCopier
from undercroft.device.factory import make_copier
from undercroft.device.layout import DeviceLayout, GroupCopy, device_layout, kv_replicas
from undercroft.log import LogOnce

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

ATTACH_RETRY_S = 1.0
"""Pause after a failed attempt to attach the arena; every failure doubles the pause, up to the next constant."""
ATTACH_RETRY_MAX_S = 60.0


ATTACH_TIMEOUT_S = 1.0
"""How long a step waits for the arena of an engine of this host's vLLM."""


class WorkerError(Exception):
    """Copies are impossible now; the message says why."""


class _AttachPendingError(WorkerError):
    """The attempt to attach is under way."""


@dataclass(frozen=True, slots=True)
class _Running:
    """A job that the copier has."""

    job: TransferJob
    to_arena: bool
    bytes: int


class WorkerConnector:
    """One rank's copies. All methods are called by the model runner's thread, in the order of vLLM's hooks."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        *,
        attach: Callable[[str, int], Arena] = Arena.attach,
        clock: Callable[[], float] = time.monotonic,
        attach_timeout_s: float = ATTACH_TIMEOUT_S,
    ) -> None:
        """``attach``: gets the arena from a socket for a session. ``clock``: seconds, for waiting between attempts.

        ``attach_timeout_s``: how long a step waits for the arena; its jobs fail without it.
        """
        parallel = vllm_config.parallel_config
        # Ranks in a row that hold the same KV have one shard together; there is only one pipeline stage.
        self._replicas = kv_replicas(kv_cache_config)
        self._shard, self._replica = divmod(parallel.rank % parallel.tensor_parallel_size, self._replicas)
        self._config = kv_cache_config
        self._attach = attach
        self._clock = clock
        self._kv_caches: dict[str, torch.Tensor] = {}
        self._layout: DeviceLayout | None = None
        self._copier: DeviceCopier | None = None
        self._arena: Arena | None = None
        self._arena_key: tuple[str, int, int] | None = None
        self._attach_timeout_s = attach_timeout_s
        self._attempt: AttachAttempt | None = None
        self._attach_failures = 0
        self._attach_after = 0.0
        self._running: dict[int, _Running] = {}
        self._next_ticket = 1
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._answer = UndercroftWorkerMetadata()
        self._counters: defaultdict[str, float] = defaultdict(float)
        self._log_once = LogOnce()

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Find the pages of the KV cache. Raises LayoutError if they cannot be copied; every job then fails."""
        self._kv_caches = dict(kv_caches)
        self._layout = device_layout(self._config, kv_caches)

    def unregister_kv_caches(self) -> None:
        """The device memory is about to go (sleep): end all copies and forget where the pages lie."""
        self._release_copier()
        self._layout = None

    def restore_kv_caches(self) -> None:
        """The device memory is back. Raises LayoutError as `register_kv_caches` does."""
        if self._layout is None and self._kv_caches:
            self._layout = device_layout(self._config, self._kv_caches)

    def handle_preemptions(self, metadata: UndercroftMetadata) -> None:
        """Nothing: blocks that are being saved stay referenced, so no preemption lets others write them."""

    def start_load_kv(self, metadata: UndercroftMetadata) -> None:
        """Start the loads of this step. Raises nothing: a load that cannot start is reported as failed."""
        if self._arena is not None and (_arena_key(metadata) != self._arena_key or not self._arena.is_served):
            # The next engine may need the arena's memory, and a lost session ends once no worker maps the arena.
            try:
                self._release_copier()
            except Exception as error:
                # vLLM waits for the loads of this step whatever becomes of the old arena.
                self._report(error)
        for request_id in metadata.failed_loads:
            self._end_load(request_id, ok=False)
        for job in metadata.loads:
            self._start(job, metadata, to_arena=False)

    def wait_for_save(self, metadata: UndercroftMetadata) -> None:
        """Start the saves of this step, whose blocks its forward pass has computed or will, in stream order.

        Raises nothing: a save that cannot start is acknowledged as failed.
        """
        for job in metadata.saves:
            self._start(job, metadata, to_arena=True)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Requests whose loads have ended since the last call, and those of them that failed."""
        self._collect()
        results = KVConnectorTransferResults(finished_recving=self._received, failed_recving=self._failed)
        self._received, self._failed = set(), set()
        return results

    def build_connector_worker_meta(self) -> UndercroftWorkerMetadata | None:
        """The saves that have ended since the last call; None if there are none."""
        self._collect()
        if not self._answer.saves_ended:
            return None
        answer, self._answer = self._answer, UndercroftWorkerMetadata()
        return answer

    def get_kv_connector_stats(self) -> dict[str, float] | None:
        """Counters since the last call (`undercroft.connector.stats.WORKER_KEYS`); None if nothing happened."""
        if not self._counters:
            return None
        counters, self._counters = dict(self._counters), defaultdict(float)
        return counters

    def shutdown(self) -> None:
        """Wait for running copies and release the arena. Idempotent."""
        self._release_copier()
        self._kv_caches.clear()
        self._layout = None

    def _start(self, job: TransferJob, metadata: UndercroftMetadata, *, to_arena: bool) -> None:
        groups = self._saved_here(job.groups) if to_arena else job.groups
        if not groups:
            self._end(job, to_arena, ok=True)
            return
        ticket = self._next_ticket
        self._next_ticket += 1
        try:
            if job.session != metadata.arena_session:
                raise WorkerError("the session with the engine's server was lost, and with it the slots of this job")
            queued = self._current_copier(metadata).submit(ticket, to_arena, groups)
        except Exception as error:
            # Nothing was queued, so nothing will copy; the engine must hear that the job is over.
            self._report(error)
            self._end(job, to_arena, ok=False)
        else:
            self._running[ticket] = _Running(job, to_arena, queued)

    def _saved_here(self, groups: list[GroupCopy]) -> list[GroupCopy]:
        """The part of a save that this rank copies: ranks with the same KV take turns by block."""
        if self._replicas == 1:
            return groups
        turns = [group.turn(self._replica, self._replicas) for group in groups]
        return [turn for turn in turns if turn.block_ids.size]

    def _current_copier(self, metadata: UndercroftMetadata) -> DeviceCopier:
        """The copier for the arena that the metadata names; attached at its first use."""
        if self._layout is None:
            raise WorkerError("the KV cache is not registered, or its layout was declined")
        key = _arena_key(metadata)
        if key != self._arena_key:
            self._release_copier()
            self._arena_key = key
            self._attempt = None
            self._attach_failures = 0
            self._attach_after = 0.0
        if self._copier is None:
            self._copier = self._attached_copier(key, self._layout)
        return self._copier

    def _attached_copier(self, key: tuple[str, int, int], layout: DeviceLayout) -> DeviceCopier:
        """Attach the arena, but not soon after a failure: a frozen engine must not cost a wait in every step."""
        socket, arena_id, session = key
        if self._clock() < self._attach_after:
            raise WorkerError(f"the arena at {socket} could not be attached; the next attempt follows later")
        # A step waits once for each attempt.
        timeout_s = self._attach_timeout_s if self._attempt is None else 0.0
        attempt = self._attempt or AttachAttempt(self._attach, socket, session)
        self._attempt = attempt
        try:
            arena = attempt.arena(timeout_s)
            if arena is None:
                raise _AttachPendingError(f"the engine at {socket} has not handed out its arena yet")
            if arena.arena_id != arena_id:
                raise WorkerError(f"{socket} hands out arena {arena.arena_id}, expected {arena_id}")
            copier = make_copier(layout, arena, self._shard)
        except _AttachPendingError:
            raise
        except Exception:
            wait = min(ATTACH_RETRY_S * 2**self._attach_failures, ATTACH_RETRY_MAX_S)
            self._attempt = None
            self._attach_failures += 1
            self._attach_after = self._clock() + wait
            raise
        self._attempt = None
        self._arena = arena
        return copier

    def _release_copier(self) -> None:
        """End all copies, and keep their results for the next report."""
        if self._copier is not None:
            copier, arena = self._copier, self._arena
            copier.drain()
            self._collect()
            self._copier = self._arena = None
            copier.close()
            if arena is not None:
                arena.let_go()

    def _collect(self) -> None:
        if self._copier is None:
            return
        for ticket, ok, seconds in self._copier.poll():
            ended = self._running.pop(ticket)
            direction = "save" if ended.to_arena else "load"
            self._counters[f"{direction}_bytes"] += ended.bytes
            self._counters[f"{direction}_seconds"] += seconds
            self._end(ended.job, ended.to_arena, ok=ok)

    def _end(self, job: TransferJob, to_arena: bool, *, ok: bool) -> None:
        if not to_arena:
            self._end_load(job.request_id, ok=ok)
            return
        self._counters["saves_done"] += 1
        self._answer.saves_ended[job.transfer_id] = self._answer.saves_ended.get(job.transfer_id, 0) + 1
        if not ok:
            self._answer.saves_failed.add(job.transfer_id)

    def _end_load(self, request_id: str, *, ok: bool) -> None:
        self._counters["loads_done"] += 1
        self._received.add(request_id)
        if not ok:
            self._failed.add(request_id)

    def _report(self, error: Exception) -> None:
        """Log an error once per kind; a broken cache must not flood the log."""
        kind = str(error) if isinstance(error, WorkerError) else type(error).__name__
        message = "undercroft: a copy job cannot start and is skipped (%s: %s)"
        self._log_once(logging.WARNING, kind, message, type(error).__name__, error)


def _arena_key(metadata: UndercroftMetadata) -> tuple[str, int, int]:
    return metadata.arena_socket, metadata.arena_id, metadata.arena_session
