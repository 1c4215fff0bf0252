"""The workers' message of the next step: its jobs so far, and the arena for which they are meant."""

from __future__ import annotations

from typing import TYPE_CHECKING

from undercroft.connector.metadata import UndercroftMetadata

if TYPE_CHECKING:
    from collections.abc import Callable

    from undercroft._core import ArenaAddress

LOOK_STEPS = 16
"""Successive steps without jobs after which workers learn at the latest that the engine has another arena."""


class NextMetadata:
    """Collects jobs until a step takes them."""

    def __init__(self, arena: Callable[[], ArenaAddress]) -> None:
        """``arena`` returns the address where the workers attach."""
        self._arena = arena
        self.jobs = UndercroftMetadata()
        """What the next step's message has so far, without an address."""
        self._jobless = UndercroftMetadata()
        """The message of steps without jobs. Workers may still read it in later steps, so it is never changed."""
        self._steps_to_look = 0

    def take(self) -> UndercroftMetadata:
        """The message of a step. If this call fails, the next one returns the same jobs: vLLM waits for the loads."""
        jobs = self.jobs
        has_jobs = jobs.loads or jobs.saves or jobs.failed_loads
        self._steps_to_look -= 1
        if not has_jobs and self._steps_to_look > 0:
            return self._jobless
        arena, known = self._arena(), self._jobless
        address = arena.socket, arena.arena_id, arena.session
        self._steps_to_look = LOOK_STEPS
        if (known.arena_socket, known.arena_id, known.arena_session) != address:
            self._jobless = UndercroftMetadata(*address)
        if not has_jobs:
            return self._jobless
        jobs.arena_socket, jobs.arena_id, jobs.arena_session = address
        self.jobs = UndercroftMetadata()
        return jobs
