"""The class that vLLM loads as a tier of its offloading. vLLM calls each method under one lock, and waits for it."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, Medium, OffloadKey, ReqContext, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from undercroft import capacity, compat, vllm_patches
from undercroft.connector.groups import why_prefixes_are_not_reusable, why_ranks_are_apart
from undercroft.connector.kv_origin import KvOrigin
from undercroft.connector.observe.stats import EngineStats
from undercroft.connector.resets import Resets, drop_namespace
from undercroft.connector.scheduler.shareable import Shareable
from undercroft.embed import Blocks, Cache, Job
from undercroft.engine import open_engine, start_line, whose
from undercroft.errors import ConfigError
from undercroft.fail_open import fail_open, nothing
from undercroft.identity import start as identity
from undercroft.identity.adapters import ADAPTERS
from undercroft.identity.namespace import Naming, random_seed
from undercroft.identity.weights import Digests, digests_file
from undercroft.log import LogOnce, logger
from undercroft.vllm_tier import stats
from undercroft.vllm_tier.chunks import Chunks, KeyRun, Place, canonical_shards, why_unsupported
from undercroft.vllm_tier.events import TierEvents
from undercroft.vllm_tier.identity import describe_tier
from undercroft.vllm_tier.options import parse
from undercroft.vllm_tier.prompts import Prompt, Prompts

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.base import OffloadingEvent, OffloadingMetricMetadata, ScheduleEndContext
    from vllm.v1.kv_offload.tiering.base import ParentManager, TransferJob
    from vllm.v1.request import Request

    from undercroft._core import Engine
    from undercroft.config import UndercroftConfig
    from undercroft.connector.groups import Groups

_AGAIN_CHUNKS = 1024
"""Most chunks that one step looks up for such saves, beside those of the last one: a step serves one long prompt."""
_AGAIN_LEAST = 8
"""Lookups of chunks that cost as much as a save that goes on waiting."""
_LACKING_MAX = 256
"""Most saves that wait to be tried again with their prefixes."""
_SAVE_S = 5.0
"""Longest time for which vLLM's host memory keeps chunks for a save that finds no room in undercroft's."""
_BEYOND = 1 << 62
"""More tokens than any prompt has."""
_SAVES_SHARE = 0.25
"""Share of vLLM's host memory that saves may keep while they wait."""


class _Begun(NamedTuple):
    """A job of vLLM that runs."""

    job: TransferJob
    begun: Job
    prompt: Prompt
    keys: list[OffloadKey]
    runs: list[KeyRun]
    """Those of the keys that are blocks of the engine."""

    def good(self) -> list[OffloadKey]:
        """The keys of the blocks that are done."""
        if self.begun.complete:
            return [key for run in self.runs for key in self.keys[run.at : run.at + run.length]]
        found = []
        for run in self.runs:
            done = self.begun.done.get(run.engine_group, frozenset())
            found += [self.keys[run.at + one] for one in range(run.length) if run.number + one in done]
        return found


class _Lacking(NamedTuple):
    """A save that lacked its prefix."""

    prompt: Prompt
    places: set[Place]
    """Its own blocks."""
    lacks: dict[int, frozenset[int]]
    """Numbers of the missing blocks, by engine group."""
    ends: set[Place]
    """The first missing block, which is the likeliest to be gone, and the last one, which arrives last."""
    until: float
    """Time until which vLLM may still copy the missing blocks from the device, as long as the request runs."""


class UndercroftTier(SecondaryTierManager):
    """undercroft's disk, server and remote store below vLLM's own host memory."""

    medium: ClassVar[Medium] = Medium.STORAGE
    is_undercroft = True
    """Marks the class for `undercroft.registration.tiers_in`."""

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **options: Any,
    ) -> None:
        """Open the cache. ``options``: see `undercroft.vllm_tier.options`. Raises ConfigError or StoreError."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._log_once = LogOnce()
        self._prompts: Prompts | None = None
        self._resets: Resets | None = None
        self._cache: Cache | None = None
        self._stats: EngineStats | None = None
        self._events: TierEvents | None = None
        self._jobs: dict[int, _Begun] = {}
        """By identity of the cache's job."""
        self._ended: list[JobResult] = []
        self._lacking: deque[_Lacking] = deque(maxlen=_LACKING_MAX)
        """Saves that lacked blocks of their prefixes: the prompt, the chunks of the save, and the missing blocks."""
        self._again = itertools.count()
        self._hears_of_resets = False
        """Whether `TierEvents.forgotten` is called."""
        self.origin = KvOrigin()
        """See `Resets`."""
        config = parse(options, self.block_size_bytes)
        made = vllm_patches.configuration_of_tier()
        if made is None:
            why = vllm_patches.problem(vllm_patches.OFFLOADING_TIERS) or "vLLM's factory has not made the connector"
            raise ConfigError(
                f"undercroft: the tier cannot see vLLM's configuration, on which the identity of its blocks depends: "
                f"{why}. vLLM must load undercroft's plug-in: leave VLLM_PLUGINS unset, or add undercroft to it."
            )
        vllm_config, kv_cache_config = made
        offloading_config = offloading_spec.config
        # No buffer is kept: vLLM releases the view before it unmaps the memory.
        rows = np.frombuffer(primary_kv_view, dtype=np.uint8)
        self._region = int(rows.ctypes.data), rows.nbytes
        del rows  # also if the rest raises
        self._rows_count = len(primary_kv_view)
        shards = canonical_shards(vllm_config, kv_cache_config, offloading_config)
        self._chunks = Chunks(offloading_config, kv_cache_config, self.block_size_bytes, shards)
        reason = self._why_off(vllm_config, kv_cache_config, offloading_config)
        if reason is not None:
            logger.warning("undercroft is off, vLLM serves without it: %s.", reason)
            return
        self._start(config, vllm_config, kv_cache_config, offloading_config)

    def _why_off(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, offloading_config: Any) -> str | None:
        # vLLM has a memory of its own on each host, or with external_launcher for each rank, and does not check this.
        reason = why_ranks_are_apart(vllm_config.parallel_config)
        reason = reason or why_prefixes_are_not_reusable(vllm_config, kv_cache_config)
        if reason is not None:
            return reason
        has_adapters = getattr(vllm_config, "lora_config", None) is not None
        if has_adapters and not vllm_patches.tell_adapters_apart(ADAPTERS.of_request, ADAPTERS.key):
            return "this vLLM's block hashes cannot be made to tell LoRA adapters apart"
        return why_unsupported(kv_cache_config, [group.group_id for group in offloading_config.groups])

    def _start(
        self, config: Any, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, offloading_config: Any
    ) -> None:
        naming = Naming(config.namespace_salt, config.weights, config.model_id, Digests(digests_file(config.disk_path)))
        try:
            description = describe_tier(vllm_config, kv_cache_config, naming, offloading_config, self._chunks)
        except Exception as error:  # a weight file that cannot be read, or a setting that cannot be described
            logger.warning("undercroft is off, vLLM serves without it: %s.", error)
            return
        ADAPTERS.weights = config.weights
        ADAPTERS.look_again()
        vllm_patches.evict_uncomputed()
        seed_reason = random_seed(vllm_config)
        not_reused = identity.why_not_reused(description, config, naming.digests)
        identity.warn_of_names(description)
        engine = open_engine(config, ranks=vllm_patches.ranks_of(vllm_config))
        if seed_reason:
            try:
                identity.check_seed(seed_reason, config, is_shared=bool(config.server) or engine.is_shared)
            except BaseException:
                engine.close()
                raise
        groups = self._chunks.groups
        cache = Cache.of(
            engine,
            description,
            self._chunks.registration(),
            groups.engine_block_size,
            alignment_tokens=groups.alignment,
        )
        try:
            naming.digests.save()
            cache.add_region(self._region)
            self._use(cache, engine, config, groups, has_events=offloading_config.enable_kv_cache_events)
            if not_reused:
                logger.info("undercroft: cache not reused: %s (docs/identity.md)", not_reused)
        except BaseException:
            # vLLM shuts down only tiers that it has.
            cache.close()
            raise
        self._cache = cache

    def _use(self, cache: Cache, engine: Engine, config: UndercroftConfig, groups: Groups, *, has_events: bool) -> None:
        """Make the parts that use a cache, and say in the log how it runs."""
        self._shareable = Shareable(groups, unique_uuids=config.unique_media_uuids)
        most_tokens = self._chunks.most_tokens(self._rows_count)
        self._prompts = Prompts(cache, self._chunks, self._shareable, config, most_tokens)
        self._resets = Resets(self, config.reset_with_prefix_cache)
        registered = groups.registration([self._chunks.chunk_bytes] * len(groups.kinds))
        tokens_in, index_bytes = (
            partial(sizes, groups=registered) for sizes in (capacity.tokens_in, capacity.index_bytes)
        )
        if has_events:
            self._events = TierEvents(cache.session, self._chunks)
        logger.info(start_line(engine.info(), cache.session.namespace, whose(engine, config), tokens_in, index_bytes))
        self._stats = EngineStats(engine, tokens_in=tokens_in)

    def _report(self, method: str, error: Exception) -> None:
        """Log the first error of its kind that was caught in a method."""
        self._log_once(
            logging.ERROR,
            (method, type(error)),
            "undercroft: caught %s in %s of the tier; vLLM goes on as after a miss. Further errors of this kind are "
            "not logged.",
            type(error).__name__,
            method,
            error=error,
        )

    # The connector's calls (`vllm_patches.show_to_tiers`)

    def bind(self, connector: Any) -> None:
        """The connector that has this tier."""
        self._connector = connector
        if self._prompts is not None:
            self._prompts.host = compat.host_tier(connector)

    def arrives(self, request: Request) -> None:
        """A request arrives; `on_new_request` follows."""
        manager = getattr(self._connector, "_kv_cache_manager", None)
        if self._events is not None and manager is not None and not self._hears_of_resets:
            self._hears_of_resets = True
            vllm_patches.after_prefix_cache_reset(manager.block_pool, self._events.forgotten)
        if self._prompts is not None:
            self._prompts.add(request)

    def is_asked(self, request: Request, num_computed_tokens: int) -> bool:
        """vLLM's scheduler asks how much of a prompt can be loaded. Returns whether it must ask later in any case, so
        that vLLM need not ask for each chunk."""
        prompt = self._prompts.known.get(request.request_id) if self._prompts is not None else None
        if self._prompts is None or prompt is None:
            return False
        if prompt.computed == num_computed_tokens:
            return self._prompts.is_later(prompt)
        prompt.computed = num_computed_tokens
        self._prompts.steps.computed(prompt, num_computed_tokens)
        return False

    def is_scheduled(self, scheduler_output: SchedulerOutput) -> None:
        """A step is scheduled."""
        if self._prompts is None:
            return
        scheduled = scheduler_output.num_scheduled_tokens
        self._prompts.steps.scheduled(scheduled)
        if scheduled:
            self.origin.has_kv = True
        for request_id in (*scheduled, *(scheduler_output.preempted_req_ids or ())):
            self._prompts.runs(request_id)

    def step_ends(self) -> None:
        """A step has run."""
        if self._prompts is not None:
            self._prompts.steps.ended()

    @property
    def resets(self) -> Resets | None:
        """The effect of resets and of changes of the weights on this tier."""
        return self._resets

    def is_reset(self) -> bool:
        """vLLM has emptied its host memory. Returns whether the cache is as empty as the caller may believe."""
        return self._resets is None or self._resets.reset_cache()

    # Calls of `Resets`

    def forget_device(self) -> None:
        """No load and no save under way is used: vLLM has ended them all."""
        self._lacking.clear()
        if self._prompts is not None:
            self._prompts.forget_all()

    def reset_cache(self) -> bool:
        """Drop everything of this namespace: `drop_namespace`."""
        assert self._cache is not None
        self.forget_device()
        self.origin.is_private = True
        drop_namespace(self._cache.session)
        return True

    def use_namespace(self, description: str | None) -> None:
        """Use the namespace of ``description`` from now on, or with None a private one.

        Saves under way are dropped: it is not certain which weights have computed their blocks.
        """
        assert self._cache is not None
        self.forget_device()
        self._cache.give_up("weights")
        self._cache.session.change_weights(description)
        self.origin.is_private = description is None

    # Requests

    @fail_open(RequestOffloadingContext)
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Start the reads for a request that has arrived."""
        prompt = self._prompts.known.get(req_context.req_id) if self._prompts is not None else None
        if self._prompts is None or prompt is None:
            return RequestOffloadingContext()
        if req_context.load_tier_filter.allows(self.medium, self.locality):
            manager = getattr(self._connector, "_kv_cache_manager", None)
            local = compat.device_hit_tokens(manager, prompt.request) if manager is not None else 0
            self._prompts.prefetch(prompt, local, req_context)
        return RequestOffloadingContext()

    @fail_open(nothing)
    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget a request."""
        if self._prompts is not None:
            self._prompts.finished(req_context.req_id)

    @fail_open(lambda: LookupResult.MISS)
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Whether a chunk can be loaded. "Later" while its bytes are read."""
        # vLLM asks for each chunk of a prompt, so this does little but at the first one of a step.
        prompts = self._prompts
        prompt = prompts.known.get(req_context.req_id) if prompts is not None else None
        if prompts is None or prompt is None:
            return LookupResult.MISS
        if prompt.step != prompts.step and not self._looks(prompt, key, req_context):
            return LookupResult.MISS
        if prompt.is_pending:
            return LookupResult.RETRY
        if key not in prompt.served:
            reaches_back = prompt.hit.begin > prompt.computed and self._reaches_back(prompt, key, req_context)
            return LookupResult.RETRY if reaches_back else LookupResult.MISS
        if prompt.has_room or prompts.finds_room(1):
            return LookupResult.HIT
        # After this answer vLLM would have no place for the chunk, and would take it for a miss.
        return LookupResult.RETRY if prompts.may_wait(prompt) else LookupResult.MISS

    @fail_open(bool)
    def _looks(self, prompt: Prompt, key: OffloadKey, req_context: ReqContext) -> bool:
        """Let a prompt have its answer for this step. Returns False if the chunk of the question is in no answer."""
        assert self._prompts is not None
        place = self._chunks.place(key, req_context.get_offload_key_position(key), prompt.request.block_hashes)
        if place is None or place.end > prompt.known_end:
            return False
        prompt.context = req_context
        self._prompts.look(prompt, place)
        return True

    @fail_open(bool)
    def _reaches_back(self, prompt: Prompt, key: OffloadKey, req_context: ReqContext) -> bool:
        """Whether a later answer may have a chunk that this step's lacks."""
        assert self._prompts is not None
        place = self._chunks.place(key, req_context.get_offload_key_position(key), prompt.request.block_hashes)
        return place is not None and self._prompts.reaches_back(prompt, place)

    # Jobs

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Start to copy chunks into vLLM's host memory."""
        self._submit(job_metadata, self._prompt(job_metadata), self._begin_load)

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Start to save chunks of vLLM's host memory."""
        self._submit(job_metadata, self._prompt(job_metadata), self._begin_save)

    def _prompt(self, job: TransferJob) -> Prompt | None:
        return self._prompts.known.get(job.req_context.req_id) if self._prompts is not None else None

    def _submit(self, job: TransferJob, prompt: Prompt | None, begin: Callable[[Prompt, list[Blocks]], Job]) -> None:
        try:
            if self._cache is None or prompt is None:
                self._ended.append(JobResult(job.job_id, False))
                return
            most = _BEYOND if job.is_promotion else self._shareable.tokens(prompt.request)
            keys, rows = list(job.keys), job.chunk_ids.astype(np.int64)
            if len(keys) != len(rows):
                raise ValueError(f"a job of {len(keys)} chunks has {len(rows)} rows")
            if not job.is_promotion:
                order = self._chunks.in_order(keys, job.req_context)
                keys, rows = [keys[at] for at in order], rows[order]
            runs = self._chunks.runs(keys, job.req_context, prompt.request.block_hashes, most)
            blocks = Chunks.blocks(runs, self._region[0] + rows * self.block_size_bytes)
            begun = begin(prompt, blocks)
            self._jobs[id(begun)] = _Begun(job, begun, prompt, keys, runs)
        except Exception as error:
            self._report("submit", error)
            self._ended.append(JobResult(job.job_id, False))

    def _begin_load(self, prompt: Prompt, blocks: list[Blocks]) -> Job:
        assert self._cache is not None and self._prompts is not None
        begin, end = prompt.hit.begin, prompt.hit.end if prompt.is_held else 0
        self._prompts.loads(prompt)
        self.origin.loads()
        return self._cache.begin_load(prompt.request.request_id, blocks, begin=begin, end=end)

    def _begin_save(self, prompt: Prompt, blocks: list[Blocks]) -> Job:
        assert self._cache is not None and self._prompts is not None
        saving = sum(len(one.job.keys) for one in self._jobs.values() if not one.begun.is_load)
        may_wait = saving <= self._rows_count * _SAVES_SHARE
        return self._cache.begin_save(self._prompts.chain(prompt), blocks, timeout_s=_SAVE_S if may_wait else 0.0)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """The jobs that have ended since the last call."""
        if self._cache is not None:
            try:
                for job in self._cache.poll():
                    if (begun := self._jobs.pop(id(job), None)) is not None:
                        self._ended.append(self._result(begun))
            except Exception as error:
                self._report("get_finished_jobs", error)
        ended, self._ended = self._ended, []
        return ended

    def _result(self, begun: _Begun) -> JobResult:
        try:
            return self._counted(begun)
        except Exception as error:
            # The ends of the other jobs of this call must not be lost: vLLM waits for each.
            self._report("get_finished_jobs", error)
            return JobResult(begun.job.job_id, False)

    def _counted(self, begun: _Begun) -> JobResult:
        job, ended, prompt, good = begun.job, begun.begun, begun.prompt, begun.good()
        whole = len(good) == (len(job.keys) if ended.is_load else sum(run.length for run in begun.runs))
        if ended.is_load and self._prompts is not None:
            self._prompts.has_loaded(prompt, len(good), whole=whole)
        elif ended.lacks and job.req_context.req_id == prompt.request.request_id:
            at = self._chunks.at
            own = {at(run.engine_group, run.number + one) for run in begun.runs for one in range(run.length)}
            self._save_again(prompt, own, ended.lacks)
        partly = tuple(good) if ended.is_load and good and not whole else None
        return JobResult(job.job_id, whole, partly, ended.seconds, ended.copied_bytes)

    def _save_again(self, prompt: Prompt, places: set[Place], lacks: dict[int, frozenset[int]]) -> None:
        # Noted once: each step until the chunks arrive looks these two up, however long the prompt is.
        ends = [self._chunks.at(group, pick(numbers)) for group, numbers in lacks.items() for pick in (min, max)]
        extremes = {pick(ends, key=lambda place: place.end) for pick in (min, max)}
        # vLLM copies a prompt's states at once, and tries its chunks again in each step until its memory has room.
        kinds = {self._chunks.engine_groups[place.engine_group].kind for place in places}
        until = time.monotonic() + _SAVE_S if kinds == {"state"} else 0.0
        self._lacking.append(_Lacking(prompt, places, lacks, extremes, until))

    def _may_arrive(self, again: _Lacking) -> bool:
        """Whether vLLM may still copy blocks that its host memory lacks for a save."""
        if self._prompts is None or time.monotonic() >= again.until:
            return False
        return self._prompts.known.get(again.prompt.request.request_id) is again.prompt

    def has_pending_work(self) -> bool:
        """Whether vLLM must go on stepping, so that jobs end."""
        has_events = self._events is not None and self._events.more
        return bool(self._jobs or self._ended or self._lacking or has_events)

    def drain_jobs(self) -> None:
        """Wait for the copies that run, and give up saves that wait for memory."""
        if self._cache is None:
            return
        try:
            self._cache.drain()
        except Exception as error:
            self._report("drain_jobs", error)
            # No copy runs now, none may begin, and vLLM expects that no job is left.
            self._ended += [JobResult(one.job.job_id, False) for one in self._jobs.values()]
            self._jobs.clear()
            with contextlib.suppress(Exception):
                self._cache.give_up("retry")

    # Steps

    @fail_open(nothing)
    def serve_external_requests(self, parent: ParentManager) -> None:
        """Save chunks again that lacked their prefixes, with the prefixes, as far as vLLM's host memory has them.

        vLLM itself hands over a chunk only once, but the tier may have lost it, or have found no memory for it. And it
        copies a prompt's states from the device before the chunks that lie before them.
        """
        if not self._lacking:
            return
        looked, arriving = 0, []
        while self._lacking and looked < _AGAIN_CHUNKS:
            again = self._lacking.popleft()
            prompt = again.prompt
            context = ReqContext(req_id=f"{prompt.request.request_id} again {next(self._again)}")
            parent.on_new_request(context)
            try:
                found, keys = self._keys(prompt, again.ends, context, parent)
                looked += _AGAIN_LEAST
                if found is LookupResult.HIT:
                    lacks = again.lacks.items()
                    all_of_it = again.places | {self._chunks.at(group, one) for group, some in lacks for one in some}
                    looked += len(all_of_it)
                    found, keys = self._keys(prompt, all_of_it, context, parent)
                if found is LookupResult.HIT:
                    self._submit(parent.create_store_job(keys, context), prompt, self._begin_save)
                elif found is LookupResult.HIT_PENDING or self._may_arrive(again):
                    arriving.append(again)
            finally:
                parent.on_request_finished(context)
        # In turn: a state may wait for seconds, and must not hold up the saves behind it.
        self._lacking.extend(arriving)

    def _keys(
        self, prompt: Prompt, places: set[Place], context: ReqContext, parent: ParentManager
    ) -> tuple[LookupResult, list[OffloadKey]]:
        """The keys of blocks, whose ends are noted in the context, if vLLM's host memory has all (a hit).

        A pending hit: some of them are being copied there. A miss: it lacks some, or the prompt has no hash of one.
        """
        found, keys = LookupResult.HIT, []
        for place in sorted(places, key=lambda place: place.end):
            key = self._chunks.key(place, prompt.request.block_hashes)
            if key is None:
                return LookupResult.MISS, []
            keys.append(OffloadKey(key))
            context.set_offload_key_position(keys[-1], place.end)
            answer = parent.lookup(keys[-1], context)
            if answer is LookupResult.HIT_PENDING:
                found = answer
            elif answer is not LookupResult.HIT:
                return LookupResult.MISS, []
        return found, keys

    @fail_open(nothing)
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """The scheduler's pass has ended."""
        if self._prompts is not None:
            self._prompts.step_ends()

    @fail_open(tuple)
    def take_events(self) -> Iterable[OffloadingEvent]:
        """The chunks that have come to the disk and the remote store, or left them, if vLLM publishes events."""
        return self._events.take() if self._events is not None else ()

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """undercroft's metrics, for vLLM's frontend."""
        return stats.definitions()

    @fail_open(nothing)
    def get_stats(self) -> OffloadingConnectorStats | None:
        """The engine's counters since the last call. vLLM counts lookups, jobs and bytes itself."""
        if self._stats is None:
            return None
        return stats.of_engine(self._stats.collect(time.monotonic()))

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Nothing: a lookup counts as a use."""

    @fail_open(nothing)
    def shutdown(self) -> None:
        """End the copies, finish the writes in flight (bounded) and release directories and memory."""
        with contextlib.ExitStack() as all_closed:
            if self._cache is not None:
                all_closed.callback(self._cache.close)
            if self._stats is not None:
                all_closed.callback(self._stats.close)
