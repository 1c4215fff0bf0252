"""The waits of blocking lookups, which hold the scheduler's thread and with it all requests of the engine.

The lookups of one pass of the scheduler share one deadline: the disk reads for all of them at the same time, so waits
one after the other would add up to nothing but a longer pause. A request whose own time is not over by then is asked
again in the next pass.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from undercroft.log import LogOnce

if TYPE_CHECKING:
    from undercroft._core import Session
    from undercroft.connector.scheduler.request_state import Question

_WARN_AGAIN_S = 60.0


class BlockingWaits:
    """The waits of one scheduler. ``timeout_s``: longest wait of one pass. ``clock``: seconds of a monotonic clock."""

    def __init__(self, session: Session, timeout_s: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._session = session
        self._timeout_s = timeout_s
        self._clock = clock
        self._log_rarely = LogOnce(again_after_s=_WARN_AGAIN_S)
        self.pass_ends: float | None = None
        """Deadline of this pass of the scheduler; None before its first wait. Whoever ends the pass sets it to None."""

    def wait(self, question: Question, timeout_s: float, name: str) -> bool:
        """Wait for the answer to the lookup ``name`` of a request. Returns whether the request's own time is over.

        False: the lookup is answered, or this pass has waited long enough.
        """
        now = self._clock()
        if question.waits_until is None:
            question.waits_until = now + timeout_s
        if self.pass_ends is None:
            self.pass_ends = now + self._timeout_s
        rest = min(question.waits_until, self.pass_ends) - now
        if rest > 0 and self._session.wait(name, rest):
            return False
        if question.waits_until > self.pass_ends:
            return False
        self._log_rarely(
            logging.WARNING,
            "timed_out",
            "undercroft: a blocking lookup reached lookup_timeout_ms (%g): the hit ends with the part in host memory",
            timeout_s * 1e3,
        )
        return True
