"""The worker's half of the connector: it copies between device blocks and arena slots as the scheduler's half orders.

The worker knows no index and no hashes. Every load ends in exactly one ``finished_recving`` of its request, every save
in exactly one acknowledgement, even after a failure: the scheduler's half holds blocks and slots until then.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from undercroft._core import Arena
from undercroft.compat import KVConnectorTransferResults
from undercroft.connector.announcement import Announced
from undercroft.connector.metadata import GroupCopy, TransferJob, UndercroftMetadata, UndercroftWorkerMetadata
from undercroft.connector.ranks import division
from undercroft.connector.stages import in_stage
from undercroft.connector.worker.attachment import Attachment, AttachPendingError, WorkerError
from undercroft.connector.worker.outcomes import Outcomes
from undercroft.connector.worker.watching import WATCH_S, Watcher
from undercroft.device.api import GATHER_BELOW, DeviceCopier, Job
from undercroft.device.factory import make_copier, uses_pinned
from undercroft.device.layout import DeviceLayout, device_layout
from undercroft.log import LogOnce

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_Method = TypeVar("_Method", bound=Callable[..., Any])

ATTACH_TIMEOUT_S = 1.0
"""Longest wait of a step for the arena of an engine in a vLLM process of this host."""


class _DeclinedError(WorkerError):
    """This half is off, but the scheduler's half is not."""


class _Share(NamedTuple):
    """The blocks that this rank saves, of those that neighbouring ranks with the same KV save for each other."""

    replica: int
    replicas: int

    def of(self, job: TransferJob) -> list[GroupCopy]:
        """This rank's part of a save: the replicas of a shard take turns by block."""
        turns = [group.turn(self.replica, self.replicas) for group in job.groups]
        return [turn for turn in turns if turn.block_ids.size]


class _Running(NamedTuple):
    """A job whose copies are queued."""

    job: TransferJob
    to_arena: bool
    bytes: int


def _exclusive(method: _Method) -> _Method:
    """Let the method hold the worker's lock, and note before the lock is free again whether steps need this half.

    Nothing else takes the lock, so no change can leave the note wrong.
    """

    @functools.wraps(method)
    def locked(self: WorkerConnector, *args: Any, **kwargs: Any) -> Any:
        with self.rest.lock:
            try:
                return method(self, *args, **kwargs)
            finally:
                self.rest.message = self.rest.jobless if self._has_nothing_left() else None

    return cast("_Method", locked)


@dataclass(slots=True)
class _Rest:
    """Whether steps need nothing of the worker's half. In most steps the hooks read `message` alone, unlocked."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    """Held by each method (`_exclusive`), for a moment: no method but `shutdown`, `release_arena` and those for sleep
    waits for the device."""
    jobless: UndercroftMetadata | None = None
    """The message of the last step that has taken the lock, if it has no jobs."""
    message: UndercroftMetadata | None = None
    """The message with which a step needs nothing, since nothing runs and nothing is left to report; None if any step
    may need something."""


class WorkerConnector:
    """One rank's copies. The model runner's thread calls all methods, in the order of vLLM's hooks.

    Only `release_unserved` is called by a thread of its own, since vLLM may have no step for hours.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        *,
        attach: Callable[[str, int], Arena] = Arena.attach,
        clock: Callable[[], float] = time.monotonic,
        attach_timeout_s: float = ATTACH_TIMEOUT_S,
        declined: str | None = None,
        gather_below: int = GATHER_BELOW,
    ) -> None:
        """``attach``: gets the arena from a socket for a session. ``clock``: seconds, for the pauses between attempts.

        ``attach_timeout_s``: longest wait of a step for the arena. After that the step's jobs fail. ``declined``: the
        reason why nothing may be copied. Every job then fails. ``gather_below``: see `undercroft.device.api`.
        """
        self._declined = declined
        parallel = vllm_config.parallel_config
        divided = division(vllm_config, kv_cache_config)
        stage, rank = divmod(parallel.rank, parallel.tensor_parallel_size)
        part = divided.part(rank)
        self._part = part if declined else in_stage(part, kv_cache_config, stage)
        self._share = _Share(rank % divided.replicas, divided.replicas)
        self._config = kv_cache_config
        self._gather_below = gather_below
        self._kv_caches: dict[str, torch.Tensor] = {}
        self._layout: DeviceLayout | None = None
        self._arena = Attachment(attach, clock, attach_timeout_s)
        self._copier: DeviceCopier | None = None
        """Copies to and from the attached arena, or from one that is leaving: never both."""
        self._running: dict[int, _Running] = {}
        self._next_ticket = 1
        self._outcomes = Outcomes()
        self._watcher: Watcher | None = None
        self.rest = _Rest()
        self._log_once = LogOnce()

    @_exclusive
    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Find the pages of the KV cache, after all copies of an earlier registration have ended.

        Raises LayoutError if the pages cannot be copied, which ends vLLM's start. Nothing is found, and nothing raised,
        for a model that this half declines.
        """
        if self._declined is not None:
            return
        # A second registration moves the pages, and a copier knows only one layout.
        self._end_copies()
        self._layout = None
        self._kv_caches = dict(kv_caches)
        self._layout = device_layout(self._config, kv_caches, self._part)

    @_exclusive
    def attach_early(self, announced: Announced) -> None:
        """Attach and pin the arena in the background before the first step, if this device uses pinned memory."""
        if self._layout is not None and uses_pinned(self._layout.device) and self._arena.key is None:
            self._watch()
            self._arena.attach_early(self._layout.device, announced)

    @_exclusive
    def unregister_kv_caches(self) -> None:
        """vLLM is about to free the device memory (sleep): end all copies and forget where the pages lie.

        The arena stays attached and pinned.
        """
        self._end_copies()
        self._layout = None

    @_exclusive
    def restore_kv_caches(self) -> None:
        """vLLM has allocated the device memory again: find the pages. Raises LayoutError like `register_kv_caches`."""
        if self._layout is None and self._kv_caches:
            self._layout = device_layout(self._config, self._kv_caches, self._part)

    @_exclusive
    def start_load_kv(self, metadata: UndercroftMetadata) -> None:
        """Start the loads of this step. Raises nothing: a load that cannot start is reported as failed."""
        self.rest.jobless = None
        try:
            if self._arena.leave_old(metadata):
                self._collect()
            if not (metadata.loads or metadata.saves or metadata.failed_loads):
                self.rest.jobless = metadata
        except Exception as error:
            # vLLM waits for the loads of this step even if the old arena cannot be released.
            self._report(error)
        for request_id in metadata.failed_loads:
            self._outcomes.end_load(request_id, ok=False)
        self._start(metadata.loads, metadata, to_arena=False)

    @_exclusive
    def wait_for_save(self, metadata: UndercroftMetadata) -> None:
        """Start the saves of this step. In stream order they follow the forward pass that computes their blocks.

        Raises nothing: a save that cannot start is acknowledged as failed.
        """
        self._start(metadata.saves, metadata, to_arena=True)

    @_exclusive
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Requests whose loads have ended since the last call, and the requests among them whose loads failed."""
        self._collect()
        return self._outcomes.take_loads()

    @_exclusive
    def build_connector_worker_meta(self) -> UndercroftWorkerMetadata | None:
        """The saves that have ended since the last call; None if there are none."""
        self._collect()
        return self._outcomes.take_saves()

    @_exclusive
    def get_kv_connector_stats(self) -> dict[str, float] | None:
        """Counters since the last call (`undercroft.connector.observe.stats.WORKER_KEYS`); None if nothing happened."""
        return self._outcomes.take_counters()

    def _has_nothing_left(self) -> bool:
        return not (self._running or self._arena.is_turning or self._outcomes.is_anything)

    def shutdown(self) -> None:
        """Wait for running copies and release the arena. Idempotent."""
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.stop()
        self.release_arena()
        self._kv_caches.clear()
        self._layout = None

    def release_arena(self) -> None:
        """Wait for running copies, and release and unpin the arena. The next job attaches it again."""
        self._release()
        self._arena.wait_for_unpinning()

    @_exclusive
    def _release(self) -> None:
        self._arena.end_attempts()
        self._end_copies()
        self._set_aside()

    @_exclusive
    def release_unserved(self) -> None:
        """Release the arena of an engine that has ended, if no copy runs, and count what is pinned. The watcher calls
        this between steps.

        An idle or sleeping vLLM has no steps, and its host may lack the memory for a new engine's arena meanwhile.
        """
        self._arena.poll_attempts()
        attached = self._arena.attached
        if attached is not None:
            self._outcomes.registered(attached.newly_registered())
        if self._running and (attached is None or not attached.is_held or not attached.is_served):
            self._collect_late()
        if not self._running and self._arena.is_over():
            self._set_aside()

    def _watch(self) -> None:
        if self._watcher is None:
            self._watcher = Watcher(self.release_unserved, WATCH_S)

    def _start(self, jobs: Sequence[TransferJob], metadata: UndercroftMetadata, *, to_arena: bool) -> None:
        """Start all jobs of one direction in a step with one call of the copier, or report them as failed."""
        if not jobs:
            return
        if to_arena and self._share.replicas > 1:
            jobs = self._saved_here(jobs)
        current = [job for job in jobs if job.session == metadata.arena_session]
        if len(current) < len(jobs):
            lost = WorkerError("the session with the engine's server was lost, and with it the slots of this job")
            self._fail([job for job in jobs if job.session != metadata.arena_session], lost, to_arena=to_arena)
        if not current:
            return
        try:
            copier = self._current_copier(metadata)
        except Exception as error:
            self._fail(current, error, to_arena=to_arena)
            return
        try:
            self._submit(copier, current, to_arena=to_arena)
        except Exception:
            # The call queued nothing. With a call for each job, only a job that cannot be copied fails.
            for job in current:
                try:
                    self._submit(copier, [job], to_arena=to_arena)
                except Exception as error:
                    self._fail([job], error, to_arena=to_arena)

    def _submit(self, copier: DeviceCopier, jobs: Sequence[TransferJob], *, to_arena: bool) -> None:
        first = self._next_ticket
        self._next_ticket += len(jobs)
        queued = copier.submit(to_arena, [Job(first + nth, job.groups) for nth, job in enumerate(jobs)])
        for nth, (job, size) in enumerate(zip(jobs, queued, strict=True)):
            self._running[first + nth] = _Running(job, to_arena, size)

    def _fail(self, jobs: Sequence[TransferJob], error: Exception, *, to_arena: bool) -> None:
        """End jobs without a queued copy as failed: the engine must learn that they have ended."""
        self._report(error)
        for job in jobs:
            self._outcomes.end(job, to_arena, ok=False)

    def _saved_here(self, jobs: Sequence[TransferJob]) -> list[TransferJob]:
        """The part of each save that this rank copies. A save without a part for this rank ends at once."""
        mine = []
        for job in jobs:
            if groups := self._share.of(job):
                mine.append(replace(job, groups=groups))
            else:
                self._outcomes.end(job, True, ok=True)
        return mine

    def _current_copier(self, metadata: UndercroftMetadata) -> DeviceCopier:
        """The copier for the arena that the metadata names. The first call attaches the arena."""
        if self._declined is not None:
            raise _DeclinedError(self._declined)
        if self._layout is None:
            raise WorkerError("the KV cache is not registered, or its layout was declined")
        if not self._arena.is_named_by(metadata):
            if self._arena.leave_old(metadata):
                self._collect()
            self._arena.turn_to(metadata)
        if self._arena.leaving is not None:
            # Another copier would need device memory of its own, beyond the memory that vLLM leaves free.
            raise WorkerError("copies on the arena of another engine still run; until they end, all new copies fail")
        attached = self._arena.attached
        if self._copier is None or attached is None or not attached.is_held:
            self._copier = self._attached_copier(self._layout)
        return self._copier

    def _attached_copier(self, layout: DeviceLayout) -> DeviceCopier:
        """Attach the arena, with a pause after a failure: a frozen engine must not delay every step."""
        self._arena.refuse_in_pause()
        try:
            self._watch()
            attached = self._arena.attach(layout.device)
            return self._copier or make_copier(layout, attached.mapping, attached.pinner, self._gather_below)
        except AttachPendingError:
            raise
        except Exception:
            self._arena.pause()
            self._set_aside()
            raise

    def _set_aside(self) -> None:
        """Use the arena for no new job, and release it when no copy runs. Waits for nothing."""
        self._arena.set_aside()
        self._collect()

    def _end_copies(self) -> None:
        """Wait until all copies have ended, and keep their results for the next report."""
        if self._copier is not None:
            self._copier.drain()
            self._collect()
        self._close_copier()

    def _close_copier(self) -> None:
        copier, self._copier = self._copier, None
        if copier is not None:
            copier.close()

    def _collect(self) -> None:
        """Report the jobs that have ended. Then let the engine reuse the slots of sessions that are over."""
        if self._copier is not None and self._running:
            for ticket, ok, seconds in self._copier.poll():
                ended = self._running.pop(ticket, None)
                if ended is None:
                    # An exception here would lose the ends of all jobs that this call of `poll` has returned.
                    self._report(WorkerError(f"the copier reports job {ticket}, which is unknown"))
                    continue
                self._outcomes.copied(ended.to_arena, ended.bytes, seconds)
                is_over = self._arena.is_session_over(ended.job.session)
                self._outcomes.end(ended.job, ended.to_arena, ok=ok and not is_over)
        if self._arena.leaving is None:
            attached = self._arena.attached
            if attached is not None and attached.ended:
                attached.let_go_of_ended(one.job.session for one in self._running.values())
        elif not self._running:
            self._close_copier()
            self._arena.release_leaving()

    def _collect_late(self) -> None:
        """Collect without a step: copies may end after the last step, since vLLM makes no step for a late save."""
        if self._copier is not None:
            self._copier.select()
        self._collect()

    def _report(self, error: Exception) -> None:
        """Log an error once per kind; a broken cache must not flood the log."""
        if isinstance(error, _DeclinedError):
            message = (
                "undercroft can serve nothing, vLLM computes every prompt: %s. Only the workers can see this. Remove "
                "undercroft from --kv-transfer-config."
            )
            self._log_once(logging.ERROR, "declined", message, error)
            return
        kind = str(error) if isinstance(error, WorkerError) else type(error).__name__
        message = "undercroft: a copy job cannot start and is skipped (%s: %s)"
        self._log_once(logging.WARNING, kind, message, type(error).__name__, error)
