"""The scheduler's half: looks prompts up in the engine, and tells the workers which blocks to copy.

Every call here runs on the scheduler's thread and waits for no IO, except blocking lookups (`blocking.py`): the
engine answers from memory. Where it needs IO first, its answer is "later".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from undercroft import compat, vllm_patches
from undercroft.connector.kv_origin import KvOrigin
from undercroft.connector.metadata import UndercroftMetadata, UndercroftWorkerMetadata
from undercroft.connector.resets import drop_namespace
from undercroft.connector.scheduler.due_saves import DueSaves
from undercroft.connector.scheduler.loads import plan_load
from undercroft.connector.scheduler.lookups import Lookups
from undercroft.connector.scheduler.next_metadata import NextMetadata
from undercroft.connector.scheduler.request_table import Requests
from undercroft.connector.scheduler.running_loads import RunningLoads, end_transfer
from undercroft.connector.scheduler.saves import Saves
from undercroft.connector.scheduler.shareable import Shareable
from undercroft.connector.scheduler.single_flight import SingleFlight
from undercroft.connector.scheduler.steps import Steps
from undercroft.connector.scheduler.turn_end import turn_end
from undercroft.connector.scheduler.waiting_loads import WaitingLoads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from undercroft._core import ArenaAddress, Session
    from undercroft.config import UndercroftConfig
    from undercroft.connector.groups import Groups
    from undercroft.connector.observe.stats import Counts
    from undercroft.connector.scheduler.request_state import RequestState


class SchedulerConnector:
    """One vLLM scheduler's use of the cache, over one session of the engine."""

    def __init__(
        self,
        session: Session,
        groups: Groups,
        config: UndercroftConfig,
        world_size: int,
        arena: Callable[[], ArenaAddress],
        counts: Counts,
        report: Callable[[str, Exception], None],
        needed_tokens: Callable[[Request], int] = lambda request: 0,
    ) -> None:
        """Make the half of one scheduler.

        ``arena`` returns the address where the workers attach. ``report`` takes a hook's name and an error in it.
        ``needed_tokens`` returns the number of tokens that a request's hit threshold needs in a cache.
        """
        self._report = report
        self._session = session
        self._groups = groups
        shareable = Shareable(groups, unique_uuids=config.unique_media_uuids)
        self.steps = Steps(session)
        self._single_flight = SingleFlight(
            any_part=not (groups.has_windows or groups.has_states), whole_blocks=groups.window_blocks
        )
        self.lookups = Lookups(
            session, groups, config, shareable, self.steps, self._single_flight, counts, needed_tokens
        )
        self.requests = Requests(config, self.lookups.tails, self.steps, report)
        self._loading = RunningLoads(session, self.requests, counts, self.lookups.prompt_tokens, report)
        self._waiting_loads = WaitingLoads(self.requests)
        self.saves = Saves(session, groups, world_size, report, config.server_timeout_ms / 1e3)
        self.due_saves = DueSaves(self.saves, self.requests, groups, config, shareable, report)
        self._next = NextMetadata(arena)
        self.completes_local_hits = False
        """Whether vLLM may offer a local hit without states: a load then brings the state at its own boundary."""
        self.origin = KvOrigin()

    def bind_gpu_block_pool(self, pool: BlockPool) -> None:
        """vLLM calls this once, when it has built its block pool."""
        self.saves.bind(pool)
        # The last one acts first: when saves and loads have released their blocks, only requests hold blocks.
        vllm_patches.before_prefix_cache_reset(pool, self._waiting_loads.make_way_for_reset)
        if self._waiting_loads.may_requeue:
            lent = self._waiting_loads.blocks_of
            vllm_patches.lend_to_prefix_cache_reset(pool, lambda: lent(self._loading), self._loading.give_up)
        vllm_patches.before_prefix_cache_reset(pool, self.saves.abandon)

    def bind_kv_cache_manager(self, manager: KVCacheManager) -> None:
        """vLLM calls this once, when it has built its own prefix cache."""
        self._waiting_loads.bind(manager)
        self.lookups.bind(manager)
        self.due_saves.provisional_tokens = compat.provisional_tokens(manager)
        if self._groups.has_states and set(self._groups.kinds) <= {"full", "state", "ignored"}:
            self.completes_local_hits = vllm_patches.reconcile_local_hits(manager, self._completes)
            self._single_flight.any_part = self.completes_local_hits

    def _completes(self, request: Request, local_tokens: int) -> bool:
        try:
            return self.lookups.completes(self.requests.of(request), local_tokens)
        except Exception as error:
            self._report("get_computed_blocks_for_connector", error)
            return False

    # Lookup

    def on_new_request(self, request: Request) -> None:
        """A request has arrived: start its lookup, and the reads from disk, before the scheduler asks about it."""
        self.lookups.begin(self.requests.of(request))

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """The number of tokens after ``num_computed_tokens`` that can be loaded; None while the answer is pending.

        vLLM may ask any number of times for the same request, so a call does nothing irrevocable.
        """
        state = self.requests.of(request)
        if state.ask(num_computed_tokens, self.requests.epoch) and self._waiting_loads.may_requeue:
            state.question.found = None
            return None, False
        return self.lookups.answer(state, num_computed_tokens)

    def unread_tokens(self, request: Request) -> int:
        """Tokens that the last lookup of a request found beyond the device's tokens but did not read."""
        state = self.requests.get(request.request_id)
        return 0 if state is None else state.question.unread_tokens

    def is_reading(self, request: Request) -> bool:
        """Whether a request waits for reads into host memory, or has waited in its open question."""
        state = self.requests.get(request.request_id)
        return state is not None and state.question.deferred

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """The request got its device blocks: load ``num_external_tokens`` into them, or nothing if that is 0."""
        request_id = request.request_id
        try:
            if (known := self.requests.get(request_id)) is not None:
                self.lookups.prompt_tokens.admitted(known)
        except Exception as error:
            self._report("update_state_after_alloc", error)
        if num_external_tokens == 0:
            # vLLM loads nothing from undercroft, or the load has ended: the lookup and its lease are not needed.
            if request_id not in self._loading:
                self.lookups.end(request_id)
                if known is not None:
                    self.lookups.tails.drop(known)
            return
        state = self.requests.of(request)
        try:
            plan = plan_load(
                self._session,
                request_id,
                state.num_computed_tokens,
                num_external_tokens,
                blocks.get_block_ids(),
                self._groups,
            )
        except BaseException:
            self._load_impossible(state)
            raise
        if plan is None:
            self._load_impossible(state)
            return
        self._loading.begin(request_id, plan)
        self.origin.loads()
        state.saving.saved_tokens = state.num_computed_tokens + num_external_tokens
        self._next.jobs.loads.append(plan.job)
        self.steps.computed(state, state.num_computed_tokens + num_external_tokens)
        begin = state.num_computed_tokens
        size = self._groups.engine_block_size
        hashes = self._groups.hashes(request.block_hashes)
        self._single_flight.begin(request_id, hashes, begin // size, (begin + num_external_tokens) // size)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """Groups whose blocks a load fills."""
        return self._groups.loaded

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[Any, int]:
        """The tokens of a load, by the tier that held them."""
        if compat.CacheHitSource is None or num_external_tokens == 0:
            return {}
        plan = self._loading.plan(request.request_id)
        if plan is None:
            return {}
        # vLLM has no name for a remote store.
        names = {"remote": compat.CacheHitSource.EXTERNAL_UNSPECIFIED}
        return {
            names.get(tier) or compat.CacheHitSource(tier): tokens for tier, tokens in plan.tokens.items() if tokens
        }

    # Steps

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> UndercroftMetadata:
        """The workers' copies in this step: loads that begin, and saves of blocks that the step fills."""
        self.lookups.blocking.pass_ends, self.lookups.waiting.known = None, {}
        try:
            scheduled = scheduler_output.num_scheduled_tokens
            self.steps.scheduled(scheduled)
            # In most steps no prompt begins.
            if (prompts := self.lookups.prompt_tokens).waiting:
                prompts.scheduled(scheduled)
            self.due_saves.collect(scheduler_output, self._next.jobs)
            if scheduled:
                self.origin.has_kv = True
                self._waiting_loads.idle_steps = 0
            else:
                self._waiting_loads.after_idle_step(transfers=self.has_pending_push_work())
        except Exception as error:
            self._report("build_connector_meta", error)
        return self._next.take()

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """The workers' reports of a step."""
        if output.invalid_block_ids:
            # Another connector's load into these blocks failed, and undercroft had counted them as computed.
            self.saves.invalidate(output.invalid_block_ids)
            self.requests.save_again()
        # Each result is reported here only once, so an error at one result must not lose the others.
        failed = output.failed_recving or ()
        for request_id in output.finished_recving or ():
            if request_id in self._loading:
                self._single_flight.end(request_id)
                self._loading.ended(request_id, ok=request_id not in failed)
        answer = output.kv_connector_worker_meta
        if answer is not None and isinstance(answer, UndercroftWorkerMetadata):
            for save in self.saves.acknowledge(answer):
                end_transfer(self._session, self._report, save.transfer_id, save.ok, save.given_up)

    def request_finished(self, request: Request, tables: tuple[list[int], ...]) -> None:
        """The request has finished or was aborted. Its blocks may be freed: blocks that are being saved are pinned."""
        request_id = request.request_id
        state = self.requests.pop(request_id, None)
        if state is not None:
            self.steps.gone(state)
        # If the request was aborted during its load, vLLM frees the load's blocks and caches none of them.
        self._single_flight.end(request_id)
        self.lookups.waiting.end(request_id)
        self.lookups.prompt_tokens.gone(request_id)
        end = 0
        try:
            if state is not None:
                self.due_saves.finish(state, tables, self._next.jobs)
            end = turn_end(request)
        finally:
            self._session.finish_request(request_id, end)
            if state is not None:
                self.lookups.tails.drop(state)

    def register_finished_partial_tail(self, request: Request, offered: list[tuple[int, int, int]]) -> None:
        """States (group, device block, boundary) at the end of a request whose `request_finished` follows."""
        state = self.requests.get(request.request_id)
        if state is not None:
            self.due_saves.take_partial_tails(state, offered)

    def has_pending_push_work(self) -> bool:
        """Whether a transfer is pending, so that the engine must go on stepping to learn of its end."""
        return bool(self.saves or self._loading)

    def loading(self, request_ids: Iterable[str]) -> set[str]:
        """The requests among ``request_ids`` that have a pending load."""
        return {request_id for request_id in request_ids if request_id in self._loading}

    def idle(self) -> bool:
        """Whether no request and no transfer is known, so that the engine may stop stepping."""
        return not (self.requests or self.saves or self._loading)

    def has_pending_block_frees(self) -> bool:
        """Whether the end of a save will free device blocks, so that vLLM can wait instead of preempting a request."""
        return self.saves.blocks_to_free()

    def reset_cache(self) -> bool:
        """Drop everything of this namespace (`drop_namespace`). Blocks that the device holds now are not saved."""
        self.forget_device()
        self.origin.is_private = True
        drop_namespace(self._session)
        return True

    def use_namespace(self, description: str | None) -> None:
        """Use the namespace of ``description`` from now on, or with None one that is shared with nobody.

        Saves under way are dropped: it is not certain which weights have computed their blocks.
        """
        self.saves.give_up("weights")
        self.requests.save_again()
        self._session.change_weights(description)
        self.origin.is_private = description is None

    def forget_device(self) -> None:
        """Save none of the blocks that the device holds now, drop the references to them, and use no load under way."""
        self.requests.epoch += 1
        try:
            self._loading.give_up()
            self.saves.abandon()
        except Exception as error:
            self._report("reset_cache", error)

    def close(self) -> None:
        """End the session: its lookups, loads and saves are dropped."""
        self._session.close()

    def _load_impossible(self, state: RequestState) -> None:
        """vLLM already waits for this load: the workers must report it as failed."""
        state.lookup_failed = True
        self._loading.begin(state.request.request_id, None)
        self._next.jobs.failed_loads.append(state.request.request_id)
