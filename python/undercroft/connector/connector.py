"""The class that vLLM loads. It hands each hook to the scheduler's or the worker's half and lets no error out.

Errors at the start are an exception: vLLM does not start with a configuration that undercroft cannot serve as asked.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from undercroft import vllm_patches
from undercroft.compat import (
    KVConnectorBase_V1,
    KVConnectorPromMetrics,
    KVConnectorRole,
    KVConnectorStats,
    KVConnectorTransferResults,
    SupportsHMA,
)
from undercroft.config import UndercroftConfig, unknown_environment
from undercroft.connector.announcement import Announcement
from undercroft.connector.groups import why_unsupported
from undercroft.connector.metadata import UndercroftMetadata
from undercroft.connector.observe.events import NO_EVENTS, Events, NoEvents
from undercroft.connector.observe.recording import Recorder
from undercroft.connector.observe.shadow import Shadow
from undercroft.connector.observe.stats import Counts, EngineStats, UndercroftStats
from undercroft.connector.requests.client_fields import ClientFields
from undercroft.connector.requests.explanations import Explanations
from undercroft.connector.requests.hints import NO_HINTS, HintsOnly, NoHints, RequestHints
from undercroft.connector.resets import Resets
from undercroft.connector.scheduler.scheduler import SchedulerConnector
from undercroft.connector.wiring import start_scheduler
from undercroft.engine import close_engine
from undercroft.fail_open import fail_open, nothing
from undercroft.identity.adapters import ADAPTERS
from undercroft.log import LogOnce, logger
from undercroft.registration import ours_in, register_name
from undercroft.threshold import for_connector

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from undercroft._core import Engine
    from undercroft.connector.requests.spans import Spans
    from undercroft.connector.worker.worker import WorkerConnector
    from undercroft.threshold import HitThreshold, Rejection


class UndercroftConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM's KV connector over undercroft's tiers: one instance in the scheduler's process, one in each worker's."""

    is_undercroft = True
    """Marks the class for `undercroft.registration.ours_in`."""
    _events: Events | NoEvents = NO_EVENTS
    _hints: RequestHints | NoHints = NO_HINTS

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._counts = Counts()
        self._log_once = LogOnce()
        self._engine: Engine | None = None
        self._engine_stats: EngineStats | None = None
        self._scheduler: SchedulerConnector | None = None
        self._worker: WorkerConnector | None = None
        self._resets: Resets | None = None
        self._recorder: Recorder | None = None
        self._explanations: Explanations | None = None
        self._spans: Spans | None = None
        self._shadow: Shadow | None = None
        self._threshold: HitThreshold | None = None
        self._is_child = False
        """Whether this connector is inside a MultiConnector, which calls `judge` with its answers."""
        config = UndercroftConfig.parse(self._kv_transfer_config.kv_connector_extra_config)
        self._announcement = Announcement(config, str(self._kv_transfer_config.engine_id))
        reason = why_unsupported(vllm_config, kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            for message in unknown_environment():
                logger.warning(message)
            vllm_patches.reject_requests()
            self._threshold = for_connector(
                config.cache_hit_threshold, vllm_patches.problem(vllm_patches.HIT_THRESHOLD), config.client_fields
            )
            self._client_fields = ClientFields(config, self._counts)
            has_adapters = getattr(vllm_config, "lora_config", None) is not None
            if has_adapters and not vllm_patches.tell_adapters_apart(ADAPTERS.of_request, ADAPTERS.key):
                reason = reason or "this vLLM's block hashes cannot be made to tell LoRA adapters apart"
            if reason is None:
                self._start_scheduler(config)
            else:
                logger.warning("undercroft is off, vLLM serves without it: %s.", reason)
        else:
            from undercroft.connector.worker.worker import ATTACH_TIMEOUT_S, WorkerConnector

            # A server may be frozen or may have ended; an engine in vLLM's process runs as long as vLLM.
            timeout_s = config.server_timeout_ms / 1e3 if config.server else ATTACH_TIMEOUT_S
            if reason is None:
                vllm_patches.end_copies_before_sleep(ours_in)
                vllm_patches.leave_device_before_checkpoint(ours_in)
            # vLLM tells the scheduler's half less of the model, so this half may be the only one that declines.
            self._worker = WorkerConnector(
                vllm_config,
                kv_cache_config,
                attach_timeout_s=timeout_s,
                declined=reason,
                gather_below=config.gather_below,
            )

    def _start_scheduler(self, config: UndercroftConfig) -> None:
        assert self._threshold is not None
        started = start_scheduler(
            self._vllm_config,
            self._kv_cache_config,
            config,
            self._announcement,
            counts=self._counts,
            report=self._report,
            needed_tokens=self._threshold.needed_tokens,
        )
        if started is not None:
            self._engine, self._scheduler, self._resets = started.engine, started.scheduler, started.resets
            self._events, self._hints, self._explanations = started.events, started.hints, started.explanations
            self._engine_stats, self._recorder, self._shadow = started.stats, started.recorder, started.shadow
            self._spans = started.explanations.spans

    def _report(self, hook: str, error: Exception) -> None:
        """Count an error that was caught in a hook, and log the first of its kind."""
        self._counts.add("hook_errors")
        self._log_once(
            logging.ERROR,
            (hook, type(error)),
            "undercroft: caught %s in %s; the hook answers as for a cache miss. Further errors of this kind are only "
            "counted (metric hook_errors).",
            type(error).__name__,
            hook,
            error=error,
        )

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a lost save is only a later miss."""
        return False

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """See `SchedulerConnector.completes_local_hits`."""
        return self._scheduler is not None and self._scheduler.completes_local_hits

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """The preferred layout. vLLM drops it, with a warning, where an attention backend does not support it.

        By default there is no preference. Small pages are gathered on the device, so every layout copies fast. The
        speed of attention, which reads the layout, matters more.
        """
        transfer = vllm_config.kv_transfer_config
        if transfer is None:
            return None
        config = UndercroftConfig.parse(transfer.kv_connector_extra_config)
        return "BLHNC" if config.kv_layout == "cross_layer" else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Make the statistics from ``data``, in the frontend's process."""
        return UndercroftStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """The metrics, in the frontend's process."""
        from undercroft.connector.observe.prometheus import UndercroftPromMetrics

        return UndercroftPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # Both halves

    # vLLM calls the hooks with a try of their own in every step, in which most of them have nothing to do.

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """The counters' increase since the last call; None if there is none, or if requests run and the last call was
        less than a second ago."""
        try:
            if (worker := self._worker) is not None:
                if worker.rest.message is not None and not self._counts.counters:
                    return None
            elif (stats := self._engine_stats) is not None and (scheduler := self._scheduler) is not None:
                # vLLM asks at the end of each step.
                scheduler.steps.ended()
                if scheduler.requests and time.monotonic() < stats.due:
                    return None
            return self._collect_stats()
        except Exception as error:
            self._report("get_kv_connector_stats", error)
            return None

    def _collect_stats(self) -> KVConnectorStats | None:
        parts: list[dict[str, Any]] = []
        if self._engine_stats is not None and self._scheduler is not None:
            parts.append(self._engine_stats.collect(time.monotonic(), force=self._scheduler.idle()))
        if self._worker is not None and (counters := self._worker.get_kv_connector_stats()):
            parts.append({"counters": counters})
        if self._shadow is not None:
            parts.append(self._shadow.collect())
        # These counts come last: once taken, they are forgotten.
        if counted := self._counts.collect():
            parts.append(counted)
        # Most steps count nothing.
        stats = UndercroftStats.of(*parts) if parts else None
        return None if stats is None or stats.is_empty() else stats

    @fail_open(nothing)
    def shutdown(self) -> None:
        """Finish the work in progress (bounded) and release memory, disks and threads."""
        with contextlib.ExitStack() as closing:
            # Last in, first out; each runs even if another one fails.
            if self._engine is not None:
                closing.callback(close_engine, self._engine)
                closing.callback(self._announcement.withdraw)
            if self._engine_stats is not None:
                closing.callback(self._engine_stats.close)
            if self._scheduler is not None:
                closing.callback(self._scheduler.close)
            if self._recorder is not None:
                closing.callback(self._recorder.close)
            if self._shadow is not None:
                closing.callback(self._shadow.close)
            if self._worker is not None:
                closing.callback(self._worker.shutdown)

    # The scheduler's half

    @fail_open(nothing)
    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """See `SchedulerConnector.bind_kv_cache_manager`."""
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._scheduler is not None:
            self._scheduler.bind_kv_cache_manager(kv_cache_manager)

    @fail_open(nothing)
    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """See `SchedulerConnector.bind_gpu_block_pool`."""
        if self._scheduler is not None:
            self._scheduler.bind_gpu_block_pool(gpu_block_pool)
        if isinstance(self._events, Events):
            vllm_patches.after_prefix_cache_reset(gpu_block_pool, self._events.forgotten)
        if self._resets is not None:
            vllm_patches.after_prefix_cache_reset(gpu_block_pool, self._resets.device_is_reset)

    @fail_open(nothing)
    def on_new_request(self, request: Request) -> None:
        """See `SchedulerConnector.on_new_request`."""
        if self._scheduler is not None:
            self._scheduler.on_new_request(request)
        if (spans := self._spans) is not None:
            spans.arrived(request)
        self._events.arrived(request)
        self._client_fields.arrived(request)
        self._hints.arrived(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See `SchedulerConnector.get_num_new_matched_tokens`. The answer for a request below its
        threshold is "later"; the scheduler rejects this request at the end of the step."""
        # Errors are caught here: vLLM asks for each waiting request in each step, and a wrapper would double the cost.
        answer: tuple[int | None, bool] = 0, False
        unread_tokens = 0
        scheduler = self._scheduler
        try:
            if scheduler is not None and scheduler.lookups.waiting.contains(request, num_computed_tokens):
                return None, False
            if self._hints.holds_back(request):
                return None, False
            if scheduler is not None:
                answer = scheduler.get_num_new_matched_tokens(request, num_computed_tokens)
                if answer[0] == 0:
                    unread_tokens = scheduler.unread_tokens(request)
            if self._explanations is not None:
                self._explanations.asked(request, num_computed_tokens)
                if (spans := self._explanations.spans) is not None and scheduler is not None:
                    spans.asked(request.request_id, is_reading=scheduler.is_reading(request))
            if self._recorder is not None and answer[0] is not None:
                self._recorder.looked_up(request.request_id, num_computed_tokens + answer[0])
        except Exception as error:
            self._report("get_num_new_matched_tokens", error)
        if answer[0] is None or self._threshold is None or self._is_child:
            return answer
        return self.judge(request, num_computed_tokens, answer, unread_tokens)

    def judge(
        self, request: Request, local_tokens: int, answer: tuple[int | None, bool], unread_tokens: int = 0
    ) -> tuple[int | None, bool]:
        """The final answer of the scheduler's connector, or "later" for a request below its threshold.

        ``unread_tokens``: see `SchedulerConnector.unread_tokens`.
        """
        # Without a cache (off, or failed) only the tokens of the device and of other connectors count.
        gain, _ = answer
        assert self._threshold is not None and gain is not None
        try:
            rejected = self._threshold.check(request, local_tokens, gain or unread_tokens)
        except Exception as error:
            self._report("get_num_new_matched_tokens", error)
            return answer
        return (None, False) if rejected else answer

    def enter_multi_connector(self) -> bool:
        """A MultiConnector calls this before its first lookup: from now on it calls `judge` with its answers.

        False if an outer MultiConnector has called before.
        """
        if self._is_child:
            return False
        self._is_child = True
        if self._scheduler is not None:
            self._scheduler.lookups.has_siblings = self._scheduler.lookups.prompt_tokens.has_siblings = True
        return True

    @fail_open(set)
    def own_loads(self, request_ids: Iterable[str]) -> set[str]:
        """The requests among ``request_ids`` that this connector loads."""
        return set() if self._scheduler is None else self._scheduler.loading(request_ids)

    def take_threshold_rejects(self) -> list[Rejection | HintsOnly]:
        """Requests that the hit threshold has rejected since the last call, and requests that had only hints to give.
        The caller finishes them."""
        try:
            if self._hints.ended or (self._threshold is not None and self._threshold.rejected):
                return self._take_rejects()
        except Exception as error:
            self._report("take_threshold_rejects", error)
        return []

    def _take_rejects(self) -> list[Rejection | HintsOnly]:
        only = self._hints.collect()
        if self._threshold is None:
            return [*only]
        rejections = self._threshold.collect()
        for rejection in rejections:
            self._counts.add(f"rejected_{rejection.source}")
        return [*rejections, *only]

    @fail_open(nothing)
    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """See `SchedulerConnector.update_state_after_alloc`."""
        try:
            if self._recorder is not None:
                self._recorder.admitted(request.request_id)
            if self._explanations is not None:
                self._explanations.admitted(request, num_external_tokens)
        finally:
            # vLLM waits for the load, so the load begins even if the request cannot be recorded or explained.
            if self._scheduler is not None:
                self._scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    @fail_open(tuple)
    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """See `SchedulerConnector.get_loaded_kv_cache_group_ids`."""
        return () if self._scheduler is None else self._scheduler.get_loaded_kv_cache_group_ids(request)

    @fail_open(dict)
    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[Any, int]:
        """See `SchedulerConnector.get_external_cache_hit_sources`."""
        if self._scheduler is None:
            return {}
        return self._scheduler.get_external_cache_hit_sources(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> UndercroftMetadata:
        """See `SchedulerConnector.build_connector_meta`."""
        metadata: UndercroftMetadata | None = None
        try:
            if self._scheduler is not None:
                metadata = self._scheduler.build_connector_meta(scheduler_output)
            if metadata is not None and self._spans is not None:
                self._spans.scheduled(metadata)
        except Exception as error:
            # After an error in the spans, the loads in the metadata reach the workers: vLLM waits for them.
            self._report("build_connector_meta", error)
        return UndercroftMetadata() if metadata is None else metadata

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """See `SchedulerConnector.update_connector_output`."""
        output = connector_output
        try:
            if output.finished_recving or output.invalid_block_ids or output.kv_connector_worker_meta is not None:
                if self._scheduler is not None:
                    self._scheduler.update_connector_output(output)
                if self._spans is not None:
                    self._spans.reported(output)
        except Exception as error:
            self._report("update_connector_output", error)

    @fail_open(bool)
    def register_finished_partial_tail(
        self,
        request: Request,
        block_ids: tuple[list[int], ...],
        partial_tail_offloads: list[tuple[int, int, int]],
    ) -> bool:
        """See `SchedulerConnector.register_finished_partial_tail`. Never keeps blocks from being freed."""
        if self._scheduler is not None:
            self._scheduler.register_finished_partial_tail(request, partial_tail_offloads)
        return False

    @fail_open(lambda: (False, None))
    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Calls `request_finished_all_groups`, for a vLLM without the hybrid memory allocator."""
        return self.request_finished_all_groups(request, (block_ids,))

    @fail_open(lambda: (False, None))
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """vLLM may free the request's blocks at once: the connector holds references on blocks that it saves."""
        answers: dict[str, Any] = {}
        with contextlib.ExitStack() as ending:
            # Last in, first out; each runs even if another one fails.
            if (explanations := self._explanations) is not None:
                ending.callback(lambda: answers.update(explanations.finished(request.request_id) or {}))
            ending.callback(lambda: answers.update(self._hints.finished(request) or {}))
            ending.callback(lambda: answers.update(self._client_fields.finished(request.request_id) or {}))
            ending.callback(lambda: self._events.finished(request))
            if self._scheduler is not None:
                ending.callback(self._scheduler.request_finished, request, block_ids)
            if self._shadow is not None:
                ending.callback(self._shadow.finished, request)
            if self._recorder is not None:
                ending.callback(self._recorder.finished, request)
            if self._threshold is not None:
                ending.callback(self._threshold.discard, request.request_id)
        # MultiConnector accepts response parameters of one connector at most, and P/D connectors return some.
        return False, None if self._is_child else answers or None

    def take_events(self) -> Iterable[KVCacheEvent]:
        """The changes in the tiers, where vLLM publishes events."""
        try:
            return () if self._events is NO_EVENTS else self._events.take()
        except Exception as error:
            self._report("take_events", error)
            return ()

    @fail_open(bool)
    def has_pending_block_frees(self) -> bool:
        """See `SchedulerConnector.has_pending_block_frees`."""
        return self._scheduler is not None and self._scheduler.has_pending_block_frees()

    @fail_open(bool)
    def has_pending_push_work(self) -> bool:
        """See `SchedulerConnector.has_pending_push_work`. True also while the engine has more events."""
        return self._events.more or (self._scheduler is not None and self._scheduler.has_pending_push_work())

    @fail_open(bool)
    def reset_cache(self) -> bool:
        """See `Resets.reset_cache`. After an error: False, the cache was not reset."""
        return self._resets is None or self._resets.reset_cache()

    @property
    def resets(self) -> Resets | None:
        """The part that vLLM's patches tell of resets and changes of the weights; None in a worker, or if it is off."""
        return self._resets

    @fail_open(nothing)
    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """vLLM calls this after every worker has returned its metadata, and so has read the announcement."""
        self._announcement.withdraw()

    # The worker's half

    @fail_open(nothing)
    def get_handshake_metadata(self) -> None:
        """vLLM calls this before the first step, after it has made the scheduler's half. Returns nothing."""
        if self._worker is not None and (announced := self._announcement.read()) is not None:
            self._worker.attach_early(announced)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the device's KV caches. An error for a layout that cannot be copied ends vLLM's start."""
        if self._worker is not None:
            self._worker.register_kv_caches(kv_caches)

    @fail_open(nothing)
    def unregister_kv_caches(self) -> None:
        """vLLM is about to free the device's memory (sleep)."""
        if self._worker is not None:
            self._worker.unregister_kv_caches()

    @fail_open(nothing)
    def release_pinned_memory(self) -> None:
        """vLLM is about to let a tool suspend the device (checkpoint)."""
        if self._worker is not None:
            self._worker.release_arena()

    @fail_open(nothing)
    def restore_kv_caches(self) -> None:
        """vLLM has allocated the device's memory again, perhaps at other addresses (wake-up)."""
        if self._worker is not None:
            self._worker.restore_kv_caches()

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Does nothing: saves hold references on their blocks, so no other request writes these after a preemption."""

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """See `WorkerConnector.start_load_kv`."""
        try:
            worker, metadata = self._worker, self._connector_metadata
            if worker is None or metadata is None or metadata is worker.rest.message:
                return
            # A worker process gets another, equal object in every step.
            if metadata != worker.rest.message:
                worker.start_load_kv(metadata)
        except Exception as error:
            self._report("start_load_kv", error)

    # vLLM calls the next two methods for each layer.

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request runs only after its load has ended."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to do: blocks are saved whole, in `wait_for_save`."""

    def wait_for_save(self) -> None:
        """See `WorkerConnector.wait_for_save`."""
        try:
            metadata = self._connector_metadata
            if self._worker is not None and metadata is not None and metadata.saves:
                self._worker.wait_for_save(metadata)
        except Exception as error:
            self._report("wait_for_save", error)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """See `WorkerConnector.get_transfer_results`."""
        try:
            if self._worker is not None and self._worker.rest.message is None:
                return self._worker.get_transfer_results(finished_req_ids)
        except Exception as error:
            self._report("get_transfer_results", error)
        return KVConnectorTransferResults()

    def build_connector_worker_meta(self) -> Any:
        """See `WorkerConnector.build_connector_worker_meta`."""
        try:
            if self._worker is not None and self._worker.rest.message is None:
                return self._worker.build_connector_worker_meta()
        except Exception as error:
            self._report("build_connector_worker_meta", error)
        return None


# Needed where vLLM found this file by kv_connector_module_path and its configuration excludes the plugin.
register_name()
