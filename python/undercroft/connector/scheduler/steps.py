"""Reports vLLM's steps to the planner: their tokens, their times, and the tokens that wait to be computed."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.v1.request import Request

    from undercroft._core import Session

_UNREPORTED = 16
"""Number of steps without a prefill that are reported together. A lookup reports them earlier."""
_IN_FLIGHT = 8
"""Most steps in flight. If there are more, vLLM does not report the ends of steps as this class expects."""


class Prompt(Protocol):
    """A request whose steps are counted."""

    request: Request
    queued_behind: int
    """Tokens of all prompts that arrived before this request."""
    uncomputed: int
    """Tokens of the prompt that are neither computed nor loaded."""


class Steps:
    """The steps of one vLLM."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._prefilling: dict[str, Prompt] = {}
        """Requests with prompt tokens that are neither computed nor loaded yet."""
        self._arrived = 0
        """Prompt tokens of all requests so far."""
        self._done = 0
        """Prompt tokens of all requests that are computed, loaded or not needed any more."""
        self._scheduled: deque[tuple[float, int, int, int]] = deque()
        """Steps in flight: time of scheduling, prompt tokens, the sum of these tokens' positions, decodes."""
        self._ended_at = 0.0
        self._unreported: list[tuple[int, int, int, float]] = []
        self._running = 0
        """Requests of the step that was scheduled last, without the requests that have finished since."""
        self._last_decodes = 0
        """Decodes of the step that ended last."""

    # Prompts

    def arrived(self, state: Prompt) -> None:
        """A request has arrived."""
        request = state.request
        state.queued_behind, state.uncomputed = self._arrived, request.num_tokens
        self._arrived += request.num_tokens
        self._prefilling[request.request_id] = state

    def computed(self, state: Prompt, tokens: int) -> None:
        """The device holds the first ``tokens`` tokens of a prompt, or will hold them at the end of the step."""
        left = max(0, state.request.num_tokens - tokens)
        if left < state.uncomputed:
            self._done += state.uncomputed - left
            state.uncomputed = left
            if not left:
                self._prefilling.pop(state.request.request_id, None)

    def gone(self, state: Prompt) -> None:
        """A request has finished."""
        self._done += state.uncomputed
        state.uncomputed = 0
        self._running = max(0, self._running - 1)
        self._prefilling.pop(state.request.request_id, None)

    def queued(self, state: Prompt) -> int:
        """Prompt tokens of earlier requests that are not computed yet. Reports the steps so far, since a question to
        the planner follows."""
        self.report()
        return max(0, state.queued_behind - self._done)

    # Times

    def scheduled(self, tokens: Mapping[str, int]) -> None:
        """A step was scheduled. ``tokens``: the number of tokens that the step computes, by request."""
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
        """The oldest step in flight has ended."""
        if not self._scheduled:
            return
        scheduled_at, tokens, positions, decodes = self._scheduled.popleft()
        now = time.perf_counter()
        # A step that is scheduled while an earlier step runs begins when the earlier step ends.
        began_at, self._ended_at = max(scheduled_at, self._ended_at), now
        if not tokens and not decodes:
            return
        self._unreported.append((tokens, positions, decodes, now - began_at))
        self._last_decodes = decodes
        if tokens or len(self._unreported) == _UNREPORTED:
            self._report()

    def report(self) -> None:
        """Report the steps so far."""
        if self._last_decodes and not self._running:
            self._unreported.append((0, 0, 0, 0.0))
            self._last_decodes = 0
        if self._unreported:
            self._report()

    def _report(self) -> None:
        steps, self._unreported = self._unreported, []
        self._session.report_steps(steps)
