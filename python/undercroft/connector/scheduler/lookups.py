"""Lookups: what of a prompt the tiers hold, asked before its arrival in a step and then until the answer is there."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from undercroft import compat, request_params, vllm_patches
from undercroft.connector.scheduler.blocking import BlockingWaits
from undercroft.connector.scheduler.prompt_tokens import PromptTokens
from undercroft.connector.scheduler.tails import Tails, tail_name
from undercroft.connector.scheduler.waiting_lookups import WaitingLookups

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

    from undercroft._core import Lookup, Session
    from undercroft.config import UndercroftConfig
    from undercroft.connector.groups import Groups
    from undercroft.connector.observe.stats import Counts
    from undercroft.connector.scheduler.request_state import RequestState
    from undercroft.connector.scheduler.shareable import Shareable
    from undercroft.connector.scheduler.single_flight import SingleFlight
    from undercroft.connector.scheduler.steps import Steps

LOOKUP_DEADLINE_S = 60.0
"""Longest time of the answer "later". Then the request computes its prompt, so that no defect can starve requests."""
LOAD_WAIT_S = 10.0
"""Longest wait of a request for another request's load of the same blocks. Then the request loads them itself."""


class Lookups:
    """The questions of one vLLM scheduler. A question is open from its first call until its answer."""

    def __init__(
        self,
        session: Session,
        groups: Groups,
        config: UndercroftConfig,
        shareable: Shareable,
        steps: Steps,
        single_flight: SingleFlight,
        counts: Counts,
        needed_tokens: Callable[[Request], int],
    ) -> None:
        """``needed_tokens`` returns the number of tokens that a request's hit threshold needs in a cache."""
        self._session = session
        self._groups = groups
        self._shareable = shareable
        self._steps = steps
        self._single_flight = single_flight
        self._counts = counts
        self._needed_tokens = needed_tokens
        self._config = config
        self._least = max(1, config.min_load_tokens or 0)
        self._device_tokens: Callable[[Request], int] = lambda request: 0
        self.has_siblings = False
        """Whether other connectors may bring the tokens that a request needs."""
        self.waiting = WaitingLookups(session, steps)
        self.blocking = BlockingWaits(session, request_params.of_request(None, config).timeout_s)
        self.tails = Tails(session, groups, shareable)
        self.prompt_tokens = PromptTokens(session, groups, counts)

    def bind(self, manager: KVCacheManager) -> None:
        """Take vLLM's prefix cache."""
        if self._config.disk_path or self._config.server:
            # A prefetch reads no blocks from disk that the device holds. Without a disk nothing needs their number.
            self._device_tokens = lambda request: compat.device_hit_tokens(manager, request)

    def begin(self, state: RequestState) -> None:
        """A request has arrived: start its lookup, and the reads from disk, before the scheduler asks about it."""
        request, question = state.request, state.question
        if not self._config.early_prefetch or request.resumable or request.skip_reading_prefix_cache:
            return
        if request_params.is_brought(request.kv_transfer_params):
            return
        limit = self._shareable.limit(request)
        if not limit and not self.tails.limit(request):
            return
        local = self._device_tokens(request)
        if limit:
            hashes, lookup = self._groups.hashes(request.block_hashes), state.lookup
            least, queued = self._least_boundary(self._min_tokens(request), local), self._steps.queued(state)
            question.shared_tokens = self._session.prefetch(
                request.request_id, hashes, local, limit, lookup.wait_ms, least, lookup.planned, queued
            )
            if least > question.shared_tokens:
                return
        if self._groups.tail_step:
            # 0 shared tokens: a server may not have answered yet. The tails are then looked up after its answer.
            base = min(question.shared_tokens, limit)
            if base or not limit:
                self.tails.begin(state, max(base, self._groups.align(local)))

    def answer(self, state: RequestState, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See `SchedulerConnector.get_num_new_matched_tokens`."""
        request, question = state.request, state.question
        self.waiting.end(request.request_id)
        found, question.found = question.found, None
        if state.lookup_failed or request.skip_reading_prefix_cache:
            return 0, False
        if self.has_siblings and request_params.is_brought(request.kv_transfer_params):
            return 0, False
        if question.asked_at is None:
            question.limit = limit = self._shareable.limit(request)
            if max(limit, self.tails.limit(request)) <= num_computed_tokens:
                if limit and question.counts(request):
                    self._counts.add("lookups_on_device")
                return 0, False
            question.asked_at = time.perf_counter()
            self._steps.computed(state, num_computed_tokens)
            question.min_tokens = self._min_tokens(request)
        known = found[1] if found is not None and found[0] == num_computed_tokens else None
        boundary = self._boundary(state, num_computed_tokens, known)
        if boundary is None:
            if time.perf_counter() - question.asked_at < LOOKUP_DEADLINE_S:
                question.deferred = True
                return None, False
            return self._give_up(state), False
        gain = boundary - num_computed_tokens
        if gain < self._least:
            gain = 0
        elif self._waits_for_load(state, num_computed_tokens, boundary):
            question.waits_for_load = True
            return None, False
        if not state.lookup_failed and question.counts(request):
            outcome = question.outcome(num_computed_tokens, gain)
            self._counts.lookup(time.perf_counter() - question.asked_at, outcome, question.deferred)
        question.asked_at = question.load_wait_since = question.waits_until = None
        question.deferred = question.timed_out = False
        return gain, gain > 0

    def completes(self, state: RequestState, local_tokens: int) -> bool:
        """Whether a load can extend a local hit of full attention whose states are not all on the device.

        The answer is kept for vLLM's next question.
        """
        question = state.question
        question.found = None
        # vLLM then asks from the block in which the local hit ends.
        asked = local_tokens - local_tokens % self._groups.engine_block_size
        limit = self._shareable.limit(state.request) if question.asked_at is None else question.limit
        if state.lookup_failed or limit <= local_tokens or state.is_read_below(asked):
            return False
        question.min_tokens = self._min_tokens(state.request)
        # This lookup may get the answer for which the request waits.
        self.waiting.end(state.request.request_id)
        answer = self._look_up(state, asked, limit)
        if not answer.pending and answer.tokens - local_tokens < self._least:
            return False
        question.found = asked, answer
        return True

    def _boundary(self, state: RequestState, num_computed_tokens: int, known: Lookup | None) -> int | None:
        """End of the tokens that can be loaded; ``num_computed_tokens`` if there are none; None while it is pending.

        ``known``: the answer, if no question is needed.
        """
        request, question, lookup = state.request, state.question, state.lookup
        limit = question.limit
        answer = self._look_up(state, num_computed_tokens, limit) if known is None else known
        if answer.pending:
            if not lookup.blocking:
                assert question.asked_at is not None
                self.waiting.begin(request, num_computed_tokens, question.asked_at + LOOKUP_DEADLINE_S)
                return None
            answer = self._wait(state, num_computed_tokens, limit)
            if answer.pending:
                return None
        question.shared_tokens = answer.shared_tokens
        least = self._least_boundary(question.min_tokens, num_computed_tokens)
        if least and not answer.tokens and answer.shared_tokens < least:
            question.unread_tokens = max(0, min(answer.shared_tokens, limit) - num_computed_tokens)
            return num_computed_tokens
        self._note_shared_boundary(state, max(answer.tokens, num_computed_tokens), limit)
        # The limit dates from the first call of this question. The request may have fewer tokens now.
        base = max(min(answer.tokens, limit, self._shareable.limit(request)), num_computed_tokens)
        end = self.tails.find(state, base)
        if end is None and lookup.blocking:
            question.deferred = True
            is_over = self.blocking.wait(question, lookup.timeout_s, tail_name(request.request_id, state.tails[0]))
            end = self.tails.find(state, base)
            if end is None and is_over:
                self.tails.drop(state)
                return base
        return end

    def _look_up(self, state: RequestState, num_computed_tokens: int, limit: int) -> Lookup:
        request, lookup, queued = state.request, state.lookup, self._steps.queued(state)
        hashes = self._groups.hashes(request.block_hashes)
        min_tokens = state.question.min_tokens
        least = self._least_boundary(min_tokens, num_computed_tokens) if min_tokens else 0
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
        is_over = self.blocking.wait(state.question, state.lookup.timeout_s, state.request.request_id)
        state.question.deferred = True
        answer = self._look_up(state, num_computed_tokens, limit)
        if not (answer.pending and is_over):
            return answer
        state.question.timed_out = True
        state.lookup = state.lookup.at_once()
        return self._look_up(state, num_computed_tokens, limit)

    def _waits_for_load(self, state: RequestState, begin: int, end: int) -> bool:
        """Whether a hit of the tokens ``[begin, end)`` must wait because another request loads its first block."""
        size = self._groups.engine_block_size
        hashes = self._groups.hashes(state.request.block_hashes)
        if not self._single_flight.fills(state.request.request_id, hashes, begin // size, end // size):
            return False
        now = time.perf_counter()
        question = state.question
        if question.load_wait_since is None:
            question.load_wait_since = now
        return now - question.load_wait_since < LOAD_WAIT_S

    def end(self, request_id: str) -> None:
        """The lookup of a request is not needed any more. Idempotent."""
        self.waiting.end(request_id)
        self._session.end_lookup(request_id)

    def _give_up(self, state: RequestState) -> int:
        state.lookup_failed = state.question.timed_out = True
        self._counts.add("lookups_timed_out")
        self.end(state.request.request_id)
        self.tails.drop(state)
        return 0

    def _note_shared_boundary(self, state: RequestState, hit: int, limit: int) -> None:
        """Note where a prefix ends that other prompts share beyond the hit: its windows and states must be saved."""
        if not (self._groups.has_windows or self._groups.has_states):
            return
        saving = state.saving
        shared = self._groups.align(min(state.question.shared_tokens, limit))
        saving.shared_boundary = shared if shared > hit else 0
        if saving.shared_boundary and self._groups.has_states:
            # vLLM then ends a step at this boundary, so that its state exists and can be saved.
            vllm_patches.end_step_at(state.request, saving.shared_boundary)
