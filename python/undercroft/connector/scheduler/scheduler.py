"""The scheduler's half: looks prompts up in the engine, and tells the workers which blocks to copy.

Every call here runs on the scheduler's thread and waits for no IO: the engine answers from memory. Where it needs IO
first, its answer is "later".
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from undercroft import compat, request_params, vllm_patches
from undercroft.connector.kv_origin import KvOrigin
from undercroft.connector.metadata import UndercroftMetadata, UndercroftWorkerMetadata
from undercroft.connector.resets import drop_namespace
from undercroft.connector.scheduler.blocking import BlockingWaits
from undercroft.connector.scheduler.kept_boundaries import kept_boundaries
from undercroft.connector.scheduler.loads import plan_load
from undercroft.connector.scheduler.request_state import RequestState
from undercroft.connector.scheduler.running_loads import RunningLoads, end_transfer
from undercroft.connector.scheduler.saves import Saves
from undercroft.connector.scheduler.shareable import Shareable
from undercroft.connector.scheduler.single_flight import SingleFlight
from undercroft.connector.scheduler.steps import Steps
from undercroft.connector.scheduler.tails import Tails, tail_name
from undercroft.connector.scheduler.waiting_loads import WaitingLoads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from undercroft._core import ArenaAddress, Lookup, Session
    from undercroft.config import UndercroftConfig
    from undercroft.connector.groups import Groups
    from undercroft.connector.observe.stats import Counts
    from undercroft.connector.scheduler.offers import BoundaryState
    from undercroft.connector.scheduler.saves import SaveResult

LOOKUP_DEADLINE_S = 60.0
"""Longest time of the answer "later". Then the request computes its prompt, so that no defect can starve requests."""
LOAD_WAIT_S = 10.0
"""Longest wait of a request for another request's load of the same blocks. Then the request loads them itself."""
_RETRY_STEPS = 8
"""A refused save is retried after at most this many steps. Each further refusal doubles this number."""
_DOUBLINGS = 5
"""Most doublings of the number of steps."""


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
        self._needed_tokens = needed_tokens
        self._report = report
        self._session = session
        self._groups = groups
        self._config = config
        self._arena = arena
        self._lookup = request_params.of_request(None, config)
        self._blocking = BlockingWaits(session, self._lookup.timeout_s)
        self._saves = Saves(session, groups, world_size, report, config.server_timeout_ms / 1e3)
        self._shareable = Shareable(groups, unique_uuids=config.unique_media_uuids)
        self._tails, self.steps = Tails(session, groups, self._shareable), Steps(session)
        self._least = max(1, config.min_load_tokens or 0)
        self._requests: dict[str, RequestState] = {}
        self._loading = RunningLoads(session, self._requests, counts, report)
        self._single_flight = SingleFlight(
            any_part=not (groups.has_windows or groups.has_states), whole_blocks=groups.window_blocks
        )
        self._metadata = UndercroftMetadata()
        """The content of the next step's metadata so far."""
        self._device_tokens: Callable[[Request], int] = lambda request: 0
        self.completes_local_hits = False
        """Whether vLLM may offer a local hit without states: a load then brings the state at its own boundary."""
        self.has_siblings = False
        """Whether other connectors may bring the tokens that a request needs."""
        self.saves_sessions = True
        """Whether sessions with streaming input are saved. With drafts, vLLM also counts accepted tokens after the end
        of a turn as computed, and takes their KV for that of the next turn's first tokens."""
        self._waiting_loads = WaitingLoads(self._requests)
        self._provisional_tokens = 0
        """Number of a step's last tokens whose KV in draft layers the next step may compute again."""
        self._step = self._refused = self._epoch = 0
        self.origin = KvOrigin()
        self._counts = counts

    def bind_gpu_block_pool(self, pool: BlockPool) -> None:
        """vLLM calls this once, when it has built its block pool."""
        self._saves.bind(pool)
        # The last one acts first: when saves and loads have released their blocks, only requests hold blocks.
        vllm_patches.before_prefix_cache_reset(pool, self._waiting_loads.make_way_for_reset)
        if self._waiting_loads.may_requeue:
            lent = self._waiting_loads.blocks_of
            vllm_patches.lend_to_prefix_cache_reset(pool, lambda: lent(self._loading), self._loading.give_up)
        vllm_patches.before_prefix_cache_reset(pool, self._saves.abandon)

    def bind_kv_cache_manager(self, manager: KVCacheManager) -> None:
        """vLLM calls this once, when it has built its own prefix cache."""
        self._waiting_loads.bind(manager)
        self._provisional_tokens = compat.provisional_tokens(manager)
        if self._groups.has_states and set(self._groups.kinds) <= {"full", "state", "ignored"}:
            self.completes_local_hits = vllm_patches.reconcile_local_hits(manager, self._completes)
            self._single_flight.any_part = self.completes_local_hits
        if self._config.disk_path or self._config.server:
            # A prefetch reads no blocks from disk that the device holds. Without a disk nothing needs their number.
            self._device_tokens = lambda request: compat.device_hit_tokens(manager, request)

    # Lookup

    def on_new_request(self, request: Request) -> None:
        """A request has arrived: start its lookup, and the reads from disk, before the scheduler asks about it."""
        state = self._state(request)
        if not self._config.early_prefetch or request.resumable or request.skip_reading_prefix_cache:
            return
        if request_params.is_brought(request.kv_transfer_params):
            return
        limit = self._shareable.limit(request)
        if not limit and not self._tails.limit(request):
            return
        local = self._device_tokens(request)
        if limit:
            hashes, lookup = self._groups.hashes(request.block_hashes), state.lookup
            least, queued = self._least_boundary(self._min_tokens(request), local), self.steps.queued(state)
            state.shared_tokens = self._session.prefetch(
                request.request_id, hashes, local, limit, lookup.wait_ms, least, lookup.planned, queued
            )
            if least > state.shared_tokens:
                return
        if self._groups.tail_step:
            # 0 shared tokens: a server may not have answered yet. The tails are then looked up after its answer.
            base = min(state.shared_tokens, limit)
            if base or not limit:
                self._tails.begin(state, max(base, self._groups.align(local)))

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """The number of tokens after ``num_computed_tokens`` that can be loaded; None while the answer is pending.

        vLLM may ask any number of times for the same request, so a call does nothing irrevocable.
        """
        state = self._state(request)
        found = state.take_found(num_computed_tokens)
        if state.ask(num_computed_tokens, self._epoch) and self._waiting_loads.may_requeue:
            return None, False
        if state.lookup_failed or request.skip_reading_prefix_cache:
            return 0, False
        if self.has_siblings and request_params.is_brought(request.kv_transfer_params):
            return 0, False
        if state.asked_at is None:
            limit = self._shareable.limit(request)
            if max(limit, self._tails.limit(request)) <= num_computed_tokens:
                return 0, False
            state.asked_at, state.limit = time.perf_counter(), limit
            self.steps.computed(state, num_computed_tokens)
            state.min_tokens = self._min_tokens(request)
        boundary = self._boundary(state, num_computed_tokens, found)
        if boundary is None:
            if time.perf_counter() - state.asked_at < LOOKUP_DEADLINE_S:
                state.deferred = True
                return None, False
            return self._give_up(state), False
        gain = boundary - num_computed_tokens
        if gain < self._least:
            gain = 0
        elif self._waits_for_load(state, num_computed_tokens, boundary):
            state.waits_for_load = True
            return None, False
        if state.counted_for != request.num_preemptions and not state.lookup_failed:
            state.counted_for = request.num_preemptions
            self._counts.lookup(time.perf_counter() - state.asked_at, state.outcome(gain), state.deferred)
        state.asked_at = state.load_wait_since = state.waits_until = None
        state.deferred = state.timed_out = False
        return gain, gain > 0

    def unread_tokens(self, request: Request) -> int:
        """Tokens that the last lookup of a request found beyond the device's tokens but did not read."""
        state = self._requests.get(request.request_id)
        return 0 if state is None else state.unread_tokens

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """The request got its device blocks: load ``num_external_tokens`` into them, or nothing if that is 0."""
        request_id = request.request_id
        if num_external_tokens == 0:
            # vLLM loads nothing from undercroft, or the load has ended: the lookup and its lease are not needed.
            if request_id not in self._loading:
                self._session.end_lookup(request_id)
                if (known := self._requests.get(request_id)) is not None:
                    self._tails.drop(known)
            return
        state = self._state(request)
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
        state.saved_tokens = state.num_computed_tokens + num_external_tokens
        self._metadata.loads.append(plan.job)
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
        sources = {compat.CacheHitSource.HOST: plan.host_tokens, compat.CacheHitSource.DISK: plan.disk_tokens}
        return {source: tokens for source, tokens in sources.items() if tokens}

    # Steps

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> UndercroftMetadata:
        """The workers' copies in this step: loads that begin, and saves of blocks that the step fills."""
        self._step += 1
        self._blocking.pass_ended()
        # If this call fails, the loads stay in `_metadata` for the next step: vLLM waits for them.
        arena = self._arena()
        metadata, self._metadata = self._metadata, UndercroftMetadata()
        metadata.arena_socket, metadata.arena_id = arena.socket, arena.arena_id
        metadata.arena_session = arena.session
        try:
            self.steps.scheduled(scheduler_output.num_scheduled_tokens)
            self._hand_over(self._saves.poll(), metadata)
            self._collect_saves(scheduler_output, metadata)
            runs = bool(scheduler_output.num_scheduled_tokens)
            if runs:
                self.origin.computes()
            self._waiting_loads.after_schedule(runs=runs, transfers=self.has_pending_push_work())
        except Exception as error:
            self._report("build_connector_meta", error)
        return metadata

    def _collect_saves(self, scheduler_output: SchedulerOutput, metadata: UndercroftMetadata) -> None:
        tables_of = scheduler_output.kv_connector_block_state
        states_of = getattr(tables_of, "boundary_state_offloads", None) or {}
        scheduled = scheduler_output.num_scheduled_tokens
        for request_id in {**scheduled, **states_of} if states_of else scheduled:
            state = self._requests.get(request_id)
            if state is None:
                continue
            state.ran |= request_id in scheduled
            if state.epoch != self._epoch:
                continue
            computed = state.request.num_computed_tokens + scheduled.get(request_id, 0)
            # A request that decodes fills a block once in many steps, and costs a comparison in the others.
            if computed in state.settled and not state.save_refused and request_id not in states_of:
                continue
            states = self._shareable.states(state.request, states_of.get(request_id, ()))
            num_hashes = self.complete_hashes(state.request, computed)
            # Each request for slots costs time in proportion to the prompt's length, even for one more block.
            due = self._step >= state.retry_at if state.save_refused else num_hashes != state.saved_hashes
            if due or states:
                if (tables := tables_of.get_block_ids(request_id)) is None:
                    continue
                self._save(state, num_hashes, tables, metadata, states=states)
            state.settle(num_hashes, self._groups.engine_block_size, computed, self._provisional_tokens)

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """The workers' reports of a step."""
        if output.invalid_block_ids:
            # Another connector's load into these blocks failed, and undercroft had counted them as computed.
            self._saves.invalidate(output.invalid_block_ids)
            self._save_again()
        # Each result is reported here only once, so an error at one result must not lose the others.
        failed = output.failed_recving or ()
        for request_id in output.finished_recving or ():
            if request_id in self._loading:
                self._single_flight.end(request_id)
                self._loading.ended(request_id, ok=request_id not in failed)
        answer = output.kv_connector_worker_meta
        if answer is not None and isinstance(answer, UndercroftWorkerMetadata):
            for save in self._saves.acknowledge(answer):
                end_transfer(self._session, self._report, save.transfer_id, save.ok, save.given_up)

    def request_finished(self, request: Request, tables: tuple[list[int], ...]) -> None:
        """The request has finished or was aborted. Its blocks may be freed: blocks that are being saved are pinned."""
        request_id = request.request_id
        state = self._requests.pop(request_id, None)
        if state is not None:
            self.steps.gone(state)
        # If the request was aborted during its load, vLLM frees the load's blocks and caches none of them.
        self._single_flight.end(request_id)
        try:
            # Save the last blocks: with asynchronous scheduling their hashes appear after the step that filled them. A
            # request that is aborted during its load counts tokens as computed that the device does not hold yet.
            if state is not None and state.epoch == self._epoch and state.ran:
                num_hashes = self.complete_hashes(request, request.num_computed_tokens)
                worth_it = num_hashes > state.saved_hashes or state.save_refused or self._groups.has_windows
                if (num_hashes and worth_it) or state.partial_tails:
                    self._save(state, num_hashes, tables, self._metadata, states=state.partial_tails, finished=True)
        finally:
            self._session.finish_request(request_id)
            if state is not None:
                self._tails.drop(state)

    def register_finished_partial_tail(self, request: Request, offered: list[tuple[int, int, int]]) -> None:
        """States (group, device block, boundary) at the end of a request whose `request_finished` follows."""
        state = self._requests.get(request.request_id)
        if state is not None:
            state.partial_tails = self._shareable.states(request, offered)

    def has_pending_push_work(self) -> bool:
        """Whether a transfer is pending, so that the engine must go on stepping to learn of its end."""
        return bool(self._saves or self._loading)

    def loading(self, request_ids: Iterable[str]) -> set[str]:
        """The requests among ``request_ids`` that have a pending load."""
        return {request_id for request_id in request_ids if request_id in self._loading}

    def idle(self) -> bool:
        """Whether no request and no transfer is known, so that the engine may stop stepping."""
        return not (self._requests or self._saves or self._loading)

    def has_pending_block_frees(self) -> bool:
        """Whether the end of a save will free device blocks, so that vLLM can wait instead of preempting a request."""
        return self._saves.blocks_to_free()

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
        self._saves.give_up("weights")
        self._save_again()
        self._session.change_weights(description)
        self.origin.is_private = description is None

    def forget_device(self) -> None:
        """Save none of the blocks that the device holds now, drop the references to them, and use no load under way."""
        self._epoch += 1
        try:
            self._loading.give_up()
            self._saves.abandon()
        except Exception as error:
            self._report("reset_cache", error)

    def close(self) -> None:
        """End the session: its lookups, loads and saves are dropped."""
        self._session.close()

    # Parts

    def _save_again(self) -> None:
        """Offer all blocks of all requests to the tiers again."""
        for state in self._requests.values():
            state.save_again()

    def _state(self, request: Request) -> RequestState:
        state = self._requests.get(request.request_id)
        if state is None or state.request is not request:
            if state is not None:
                self._tails.drop(state)
                self.steps.gone(state)
            lookup = self._lookup
            if request.kv_transfer_params:
                try:
                    lookup = request_params.of_request(request.kv_transfer_params, self._config)
                except request_params.InvalidParameterError as error:
                    # The frontend refuses such requests. One that still reaches the scheduler uses the configuration.
                    self._report("on_new_request", error)
            state = self._requests[request.request_id] = RequestState(request, lookup, epoch=self._epoch)
            self.steps.arrived(state)
        return state

    def _boundary(self, state: RequestState, num_computed_tokens: int, found: Lookup | None) -> int | None:
        """End of the tokens that can be loaded; ``num_computed_tokens`` if there are none; None while it is pending.

        ``found``: the answer, if it is known.
        """
        request, limit, lookup = state.request, state.limit, state.lookup
        answer = self._look_up(state, num_computed_tokens, limit) if found is None else found
        if answer.pending:
            if not lookup.blocking:
                return None
            answer = self._wait(state, num_computed_tokens, limit)
            if answer.pending:
                return None
        state.shared_tokens = answer.shared_tokens
        least = self._least_boundary(state.min_tokens, num_computed_tokens)
        if least and not answer.tokens and answer.shared_tokens < least:
            state.unread_tokens = max(0, min(answer.shared_tokens, limit) - num_computed_tokens)
            return num_computed_tokens
        self._note_shared_boundary(state, max(answer.tokens, num_computed_tokens), limit)
        # The limit dates from the first call of this question. The request may have fewer tokens now.
        base = max(min(answer.tokens, limit, self._shareable.limit(request)), num_computed_tokens)
        end = self._tails.find(state, base)
        if end is None and lookup.blocking:
            state.deferred = True
            is_over = self._blocking.wait(state, tail_name(request.request_id, state.tails[0]))
            end = self._tails.find(state, base)
            if end is None and is_over:
                self._tails.drop(state)
                return base
        return end

    def _look_up(self, state: RequestState, num_computed_tokens: int, limit: int) -> Lookup:
        request, lookup, queued = state.request, state.lookup, self.steps.queued(state)
        hashes = self._groups.hashes(request.block_hashes)
        least = self._least_boundary(state.min_tokens, num_computed_tokens) if state.min_tokens else 0
        return self._session.lookup(
            request.request_id, hashes, num_computed_tokens, limit, lookup.wait_ms, least, lookup.planned, queued
        )

    def _min_tokens(self, request: Request) -> int:
        # Other connectors may bring the missing tokens.
        return 0 if self.has_siblings else self._needed_tokens(request)

    def _least_boundary(self, min_tokens: int, num_computed_tokens: int) -> int:
        """The least boundary at which a hit has ``min_tokens``; 0 if the device holds enough."""
        # A tail may follow the last whole block, and add less than a block.
        least = min_tokens - (self._groups.engine_block_size if self._groups.tail_step else 0)
        return least if least > num_computed_tokens else 0

    def _wait(self, state: RequestState, num_computed_tokens: int, limit: int) -> Lookup:
        """Wait for the answer. After the timeout the hit is the part that is in host memory."""
        is_over = self._blocking.wait(state, state.request.request_id)
        state.deferred = True
        answer = self._look_up(state, num_computed_tokens, limit)
        if not (answer.pending and is_over):
            return answer
        state.timed_out = True
        state.lookup = state.lookup.at_once()
        return self._look_up(state, num_computed_tokens, limit)

    def _waits_for_load(self, state: RequestState, begin: int, end: int) -> bool:
        """Whether a hit of the tokens ``[begin, end)`` must wait because another request loads its first block."""
        size = self._groups.engine_block_size
        hashes = self._groups.hashes(state.request.block_hashes)
        if not self._single_flight.fills(state.request.request_id, hashes, begin // size, end // size):
            return False
        now = time.perf_counter()
        if state.load_wait_since is None:
            state.load_wait_since = now
        return now - state.load_wait_since < LOAD_WAIT_S

    def _give_up(self, state: RequestState) -> int:
        state.lookup_failed = True
        self._counts.add("lookups_timed_out")
        self._session.end_lookup(state.request.request_id)
        self._tails.drop(state)
        return 0

    def _load_impossible(self, state: RequestState) -> None:
        """vLLM already waits for this load: the workers must report it as failed."""
        state.lookup_failed = True
        self._loading.begin(state.request.request_id, None)
        self._metadata.failed_loads.append(state.request.request_id)

    def _completes(self, request: Request, local_tokens: int) -> bool:
        """Whether a load can extend a local hit of full attention whose states are not all on the device."""
        try:
            state = self._state(request)
            state.found = None
            # vLLM then asks from the block in which the local hit ends.
            asked = local_tokens - local_tokens % self._groups.engine_block_size
            limit = self._shareable.limit(request) if state.asked_at is None else state.limit
            if state.lookup_failed or limit <= local_tokens or state.is_read_below(asked):
                return False
            state.min_tokens = self._min_tokens(request)
            answer = self._look_up(state, asked, limit)
            if not answer.pending and answer.tokens - local_tokens < self._least:
                return False
            state.found = asked, answer
            return True
        except Exception as error:
            self._report("get_computed_blocks_for_connector", error)
            return False

    def _note_shared_boundary(self, state: RequestState, hit: int, limit: int) -> None:
        """Note where a prefix ends that other prompts share beyond the hit: its windows and states must be saved."""
        if not (self._groups.has_windows or self._groups.has_states):
            return
        request = state.request
        shared = self._groups.align(min(state.shared_tokens, limit))
        state.shared_boundary = shared if shared > hit else 0
        if state.shared_boundary and self._groups.has_states:
            # vLLM then ends a step at this boundary, so that its state exists and can be saved.
            vllm_patches.end_step_at(request, state.shared_boundary)

    def complete_hashes(self, request: Request, computed_tokens: int) -> int:
        """Number of the engine's blocks that are complete on the device after ``computed_tokens``.

        Tokens of rejected drafts are beyond ``num_tokens``. Hashes that include later tokens appear late.
        """
        if request.resumable and not self.saves_sessions:
            return 0
        computed_tokens -= self._provisional_tokens
        tokens: int = max(0, min(computed_tokens, request.num_tokens, self._shareable.tokens(request)))
        if self._config.save == "prompt":
            tokens = min(tokens, request.num_prompt_tokens)
        whole: int = len(request.block_hashes) * self._groups.hash_block_size
        return min(tokens, whole) // self._groups.engine_block_size

    def _save(
        self,
        state: RequestState,
        num_hashes: int,
        tables: tuple[list[int], ...],
        metadata: UndercroftMetadata,
        *,
        states: Sequence[BoundaryState] = (),
        finished: bool = False,
    ) -> None:
        state.saved_hashes = num_hashes
        state.save_refused = False
        request = state.request
        num_tokens = num_hashes * self._groups.engine_block_size
        try:
            if num_hashes:
                boundaries = kept_boundaries(
                    state, self._groups, num_tokens, self._config.state_interval_tokens, finished=finished
                )
                results = self._saves.begin(
                    request.request_id, request.block_hashes, num_tokens, tables, boundaries, states, state.saved_tokens
                )
                self._hand_over(results, metadata)
            if self._groups.tail_step and states:
                results = self._saves.begin_tails(request.request_id, request.block_hashes, tables, states)
                self._hand_over(results, metadata)
        except Exception as error:
            # An error of one request must not lose the other requests' copies of this step.
            self._report("build_connector_meta", error)

    def _hand_over(self, results: Iterable[SaveResult], metadata: UndercroftMetadata) -> None:
        """Pass the saves that have their slots to the workers."""
        for result in results:
            if result.job is not None:
                metadata.saves.append(result.job)
            state = self._requests.get(result.request_id)
            if state is None:
                continue
            state.save_refused = result.refused
            if result.refused:
                state.saved_tokens = 0
                # A full memory refuses many saves at once. Their retries are spread over several steps.
                half = _RETRY_STEPS // 2 << min(state.refusals, _DOUBLINGS)
                state.refusals += 1
                self._refused += 1
                state.retry_at = self._step + half + 1 + self._refused % half
            else:
                state.refusals = 0
                state.saved_tokens = max(state.saved_tokens, result.num_tokens)
                state.windows_kept = max(state.windows_kept, result.num_tokens)
