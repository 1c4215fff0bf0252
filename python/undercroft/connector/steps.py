"""Reports to the planner about vLLM: the tokens and times of its steps, and the tokens that wait to be computed."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from undercroft._core import Session
    from undercroft.connector.request_state import RequestState

_UNREPORTED = 16
"""Steps without a prefill that are reported together, unless a lookup comes."""
_IN_FLIGHT = 8
"""Most steps that vLLM has scheduled and not ended. With more, vLLM does not report the ends as this class expects."""


class Steps:
    """The steps of one vLLM."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._prefilling: dict[str, RequestState] = {}
        """Requests with prompt tokens that are neither computed nor loaded."""
        self._arrived = 0
        """Prompt tokens of all requests so far."""
        self._done = 0
        """Prompt tokens of all requests that are computed, loaded or not needed any more."""
        self._scheduled: deque[tuple[float, int, int, int]] = deque()
        """Steps that have not ended: when they were scheduled, tokens, the sum of their positions, decodes."""
        self._ended_at = 0.0
        self._unreported: list[tuple[int, int, int, float]] = []
        self._running = 0
        """Requests of the step that was scheduled last, less those that have finished."""
        self._last_decodes = 0
        """Decodes of the step that ended last."""

    # Prompts

    def arrived(self, state: RequestState) -> None:
        """A request has arrived."""
        request = state.request
        state.queued_behind, state.uncomputed = self._arrived, request.num_tokens
        self._arrived += request.num_tokens
        self._prefilling[request.request_id] = state

    def computed(self, state: RequestState, tokens: int) -> None:
        """The device holds the first ``tokens`` tokens of a prompt, or will when the step has ended."""
        left = max(0, state.request.num_tokens - tokens)
        if left < state.uncomputed:
            self._done += state.uncomputed - left
            state.uncomputed = left
            if not left:
                self._prefilling.pop(state.request.request_id, None)

    def gone(self, state: RequestState) -> None:
        """A request has finished."""
        self._done += state.uncomputed
        state.uncomputed = 0
        self._running = max(0, self._running - 1)
        self._prefilling.pop(state.request.request_id, None)

    def queued(self, state: RequestState) -> int:
        """Prompt tokens of requests that came before one, which are not computed. The planner is about to be asked: it
        learns of the steps so far."""
        if self._last_decodes and not self._running:
            self._unreported.append((0, 0, 0, 0.0))
            self._last_decodes = 0
        # Asked for each waiting request in each step: no call without need.
        if self._unreported:
            self._report()
        queued = state.queued_behind - self._done
        return queued if queued > 0 else 0

    # Times

    def scheduled(self, tokens: Mapping[str, int]) -> None:
        """A step was scheduled, with the number of tokens that it computes of each request."""
        prefilled = positions = prefills = 0
        prefilling = self._prefilling
        for request_id in tokens if prefilling else ():
            state = prefilling.get(request_id)
            if state is None:
                continue
            count, computed = tokens[request_id], state.request.num_computed_tokens
            prefills += 1
            prefilled += count
            positions += count * computed + count * count // 2
            self.computed(state, computed + count)
        self._running = len(tokens)
        if len(self._scheduled) == _IN_FLIGHT:
            self._scheduled.clear()
        self._scheduled.append((time.perf_counter(), prefilled, positions, len(tokens) - prefills))

    def ended(self) -> None:
        """The step that was scheduled first of those under way has ended."""
        if not self._scheduled:
            return
        scheduled_at, tokens, positions, decodes = self._scheduled.popleft()
        now = time.perf_counter()
        # A step that was scheduled while another step ran began when that step ended.
        began_at, self._ended_at = max(scheduled_at, self._ended_at), now
        if not tokens and not decodes:
            return
        self._unreported.append((tokens, positions, decodes, now - began_at))
        self._last_decodes = decodes
        if tokens or len(self._unreported) == _UNREPORTED:
            self._report()

    def _report(self) -> None:
        steps, self._unreported = self._unreported, []
        self._session.report_steps(steps)
