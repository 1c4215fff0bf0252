"""Decides which blocks of which requests are saved in a step, and when a refused save is tried again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from undercroft.connector.scheduler.kept_boundaries import kept_boundaries

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from undercroft.config import UndercroftConfig
    from undercroft.connector.groups import Groups
    from undercroft.connector.metadata import UndercroftMetadata
    from undercroft.connector.scheduler.offers import BoundaryState
    from undercroft.connector.scheduler.request_state import RequestState
    from undercroft.connector.scheduler.request_table import Requests
    from undercroft.connector.scheduler.saves import SaveResult, Saves
    from undercroft.connector.scheduler.shareable import Shareable

_RETRY_STEPS = 8
"""A refused save is retried after at most this many steps. Each further refusal doubles this number."""
_DOUBLINGS = 5
"""Most doublings of the number of steps."""


class DueSaves:
    """The saves that are due, of all requests of one vLLM scheduler."""

    def __init__(
        self,
        saves: Saves,
        requests: Requests,
        groups: Groups,
        config: UndercroftConfig,
        shareable: Shareable,
        report: Callable[[str, Exception], None],
    ) -> None:
        """``report`` takes a hook's name and an error in it."""
        self._saves = saves
        self._requests = requests
        self._groups = groups
        self._config = config
        self._shareable = shareable
        self._report = report
        self.saves_sessions = True
        """Whether sessions with streaming input are saved. With drafts, vLLM also counts accepted tokens after the end
        of a turn as computed, and takes their KV for that of the next turn's first tokens."""
        self.provisional_tokens = 0
        """Number of a step's last tokens whose KV in draft layers the next step may compute again."""
        self._step = self._refused = 0

    def collect(self, scheduler_output: SchedulerOutput, metadata: UndercroftMetadata) -> None:
        """Add the saves to the metadata whose slots are granted now, and begin those of the blocks of this step."""
        self._step += 1
        if granted := self._saves.poll():
            self._hand_over(granted, metadata)
        tables_of = scheduler_output.kv_connector_block_state
        states_of = getattr(tables_of, "boundary_state_offloads", None) or {}
        scheduled = scheduler_output.num_scheduled_tokens
        requests, epoch = self._requests, self._requests.epoch
        for request_id in {**scheduled, **states_of} if states_of else scheduled:
            state = requests.get(request_id)
            if state is None:
                continue
            count, saving = scheduled.get(request_id), state.saving
            if count is not None:
                state.ran = True
            if saving.epoch != epoch:
                continue
            computed = state.request.num_computed_tokens + (count or 0)
            # A request that decodes fills a block once in many steps, and costs a comparison in the others.
            if computed in saving.settled and not (states_of and request_id in states_of):
                continue
            states = self._shareable.states(state.request, states_of.get(request_id, ()))
            num_hashes = self.complete_hashes(state.request, computed)
            # Each request for slots costs time in proportion to the prompt's length, even for one more block.
            due = self._step >= saving.retry_at if saving.refused else num_hashes != saving.saved_hashes
            if due or states:
                if (tables := tables_of.get_block_ids(request_id)) is None:
                    continue
                self._save(state, num_hashes, tables, metadata, states=states)
            if not saving.refused:
                saving.settle(num_hashes, self._groups.engine_block_size, computed, self.provisional_tokens)

    def finish(self, state: RequestState, tables: tuple[list[int], ...], metadata: UndercroftMetadata) -> None:
        """Save the last blocks of a request that has finished: with asynchronous scheduling their hashes appear after
        the step that filled them."""
        saving = state.saving
        # A request that is aborted during its load counts tokens as computed that the device does not hold yet.
        if saving.epoch != self._requests.epoch or not state.ran:
            return
        num_hashes = self.complete_hashes(state.request, state.request.num_computed_tokens)
        worth_it = num_hashes > saving.saved_hashes or saving.refused or self._groups.has_windows
        if (num_hashes and worth_it) or saving.partial_tails:
            self._save(state, num_hashes, tables, metadata, states=saving.partial_tails, finished=True)

    def take_partial_tails(self, state: RequestState, offered: list[tuple[int, int, int]]) -> None:
        """Keep the states (group, device block, boundary) that vLLM offers at the end of a request, for `finish`."""
        state.saving.partial_tails = self._shareable.states(state.request, offered)

    def complete_hashes(self, request: Request, computed_tokens: int) -> int:
        """Number of the engine's blocks that are complete on the device after ``computed_tokens``.

        Tokens of rejected drafts are beyond ``num_tokens``. Hashes that include later tokens appear late.
        """
        if request.resumable and not self.saves_sessions:
            return 0
        computed_tokens -= self.provisional_tokens
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
        request, saving = state.request, state.saving
        saving.saved_hashes = num_hashes
        saving.refused = False
        num_tokens = num_hashes * self._groups.engine_block_size
        try:
            if num_hashes:
                boundaries = kept_boundaries(
                    state, self._groups, num_tokens, self._config.state_interval_tokens, finished=finished
                )
                results = self._saves.begin(
                    request.request_id,
                    request.block_hashes,
                    num_tokens,
                    tables,
                    boundaries,
                    states,
                    saving.saved_tokens,
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
            saving = state.saving
            saving.refused = result.refused
            if result.refused:
                saving.saved_tokens = 0
                saving.settled = range(0)
                # A full memory refuses many saves at once. Their retries are spread over several steps.
                half = _RETRY_STEPS // 2 << min(saving.refusals, _DOUBLINGS)
                saving.refusals += 1
                self._refused += 1
                saving.retry_at = self._step + half + 1 + self._refused % half
            else:
                saving.refusals = 0
                saving.saved_tokens = max(saving.saved_tokens, result.num_tokens)
                saving.windows_kept = max(saving.windows_kept, result.num_tokens)
