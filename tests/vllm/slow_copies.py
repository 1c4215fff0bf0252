"""undercroft, whose workers hear of the end of a copy late, as from a busy device. For servers, which are processes."""

from __future__ import annotations

import time
from typing import Any

from undercroft.connector.connector import UndercroftConnector

DELAY_S = 1.0
"""From the end of a copy to its report."""


class SlowCopier:
    """A copier that keeps the ends of copies to itself for a while, unless somebody waits for all of them."""

    def __init__(self, copier: Any) -> None:
        self._copier = copier
        self._ends: list[tuple[float, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._copier, name)

    def poll(self) -> list[Any]:
        """The copies that ended some time ago."""
        now = time.monotonic()
        self._ends += [(now + DELAY_S, end) for end in self._copier.poll()]
        told = [end for at, end in self._ends if at <= now]
        self._ends = [(at, end) for at, end in self._ends if at > now]
        return told

    def drain(self) -> None:
        """Wait for all copies: all ends are told next."""
        self._copier.drain()
        self._ends = [(0.0, end) for end in [*(end for _, end in self._ends), *self._copier.poll()]]


class SlowCopies(UndercroftConnector):
    """undercroft's connector with such a copier in the workers."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        if self._worker is not None:
            half = self._worker
            attached = half._attached_copier
            half._attached_copier = lambda *args: SlowCopier(attached(*args))  # type: ignore[method-assign]
