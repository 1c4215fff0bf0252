"""Requests whose lookups are pending. vLLM asks about each of them in each step, so the core is asked once for all."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from undercroft._core import Session
    from undercroft.connector.scheduler.steps import Steps


@dataclass(slots=True)
class _Wait:
    request: Request
    num_computed_tokens: int
    """The tokens after which the request was last looked up."""
    look: int
    """The number of the look that gave the request its last answer."""


class WaitingLookups:
    """The requests whose last lookup was pending.

    They get the answer "later" without another lookup, until the core says that their wait has ended. It is asked for
    the ends of waits at the first question of a step, and when a request is asked about twice in a step.
    """

    def __init__(self, session: Session, steps: Steps) -> None:
        self._session = session
        self._steps = steps
        self._waiting: dict[str, _Wait] = {}
        self.known: dict[str, _Wait] = {}
        """The requests that are known to wait in this step. Whoever ends the step empties it."""
        self._looks = 0
        self._deadline = math.inf

    def begin(self, request: Request, num_computed_tokens: int, deadline: float) -> None:
        """The lookup of a request, after ``num_computed_tokens``, is pending. After the ``deadline`` (seconds of a
        monotonic clock) its next question needs a lookup."""
        self._waiting[request.request_id] = _Wait(request, num_computed_tokens, self._looks)
        self._deadline = min(self._deadline, deadline)

    def end(self, request_id: str) -> None:
        """The next question about a request needs a lookup. Idempotent."""
        self._waiting.pop(request_id, None)

    def contains(self, request: Request, num_computed_tokens: int) -> bool:
        """Whether a request's lookup after ``num_computed_tokens`` is still pending."""
        wait = self.known.get(request.request_id)
        if wait is None:
            if self.known is self._waiting:
                return False
            if not self._waiting:
                # There is nothing to ask the core for.
                self.known = self._waiting
                return False
            self._look()
            wait = self._waiting.get(request.request_id)
        elif wait.look == self._looks:
            self._look()
            wait = self._waiting.get(request.request_id)
        if wait is None or wait.num_computed_tokens != num_computed_tokens or wait.request is not request:
            return False
        wait.look = self._looks
        return True

    def _look(self) -> None:
        self._looks += 1
        # The core weighs the waits against the steps so far.
        self._steps.report()
        waiting = self._waiting
        for request_id in self._session.ended_waits():
            waiting.pop(request_id, None)
        if time.perf_counter() >= self._deadline:
            # Questions find out who has waited for too long. The others wait on.
            waiting.clear()
            self._deadline = math.inf
        self.known = waiting
