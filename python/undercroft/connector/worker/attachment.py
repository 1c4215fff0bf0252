"""Which arena a worker uses: for one session after another, from the attempt to attach it until its end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from undercroft._core import Arena
from undercroft.connector.worker.attached import AttachedArena, EarlyAttempt
from undercroft.connector.worker.attaching import AttachAttempt

if TYPE_CHECKING:
    import torch

    from undercroft.connector.announcement import Announced
    from undercroft.connector.metadata import UndercroftMetadata

ATTACH_RETRY_S = 1.0
"""Pause after a failed attempt to attach the arena. Every failure doubles it, up to ATTACH_RETRY_MAX_S."""
ATTACH_RETRY_MAX_S = 60.0
UNHELD_S = 60.0
"""How long an arena stays attached for the next session after the end of a session."""


class WorkerError(Exception):
    """Copies are impossible now; the message says why."""


class AttachPendingError(WorkerError):
    """The attempt to attach is under way."""


class Attachment:
    """One worker's arena. It knows no copies: the worker says when they have ended. The worker's lock guards it."""

    def __init__(self, attach: Callable[[str, int], Arena], clock: Callable[[], float], timeout_s: float) -> None:
        """``attach``: gets the arena from a socket for a session. ``clock``: seconds, for the pauses between attempts.

        ``timeout_s``: longest wait for the arena in the first step of an attempt.
        """
        self._attach = attach
        self._clock = clock
        self._timeout_s = timeout_s
        self.key: tuple[str, int, int] | None = None
        """Socket, arena and session of the arena that is attached or being attached."""
        self.attached: AttachedArena | None = None
        self.leaving: AttachedArena | None = None
        """An arena that no new job uses. All running copies use it, and it is released after them."""
        self._unheld_at = 0.0
        self._early: EarlyAttempt | None = None
        """The attempt to attach the arena before the first step, which takes over the result."""
        self._attempt: AttachAttempt | None = None
        self._failures = 0
        self._retry_at = 0.0
        self._unpinning: list[threading.Thread] = []

    def is_named_by(self, metadata: UndercroftMetadata) -> bool:
        """Whether the metadata names the arena and session that are attached or being attached."""
        return self.key == _key(metadata)

    @property
    def is_turning(self) -> bool:
        """Whether the next step may bring an arena or its end: one was attached early, or one is leaving."""
        return self._early is not None or self.leaving is not None

    def is_session_over(self, session: int) -> bool:
        """Whether the results of this session's copies count for nothing."""
        return self.leaving is not None or (self.attached is not None and self.attached.is_over(session))

    def is_over(self) -> bool:
        """Whether no session will use the attached arena any more: its engine has ended, or none came for it."""
        attached = self.attached
        if attached is None:
            return False
        # Without an attachment the end of the engine cannot be seen.
        is_expired = not attached.is_held and self._clock() - self._unheld_at > UNHELD_S
        return is_expired or not attached.is_served

    # Attach

    def attach_early(self, device: torch.device, announced: Announced) -> None:
        """Attach and pin the arena in the background."""
        self._early = EarlyAttempt(self._attach, device, announced)

    def turn_to(self, metadata: UndercroftMetadata) -> None:
        """Attach the metadata's arena from now on, without a pause for failures at another one."""
        self.key = _key(metadata)
        self._failures = 0
        self._retry_at = 0.0

    def refuse_in_pause(self) -> None:
        """Raise WorkerError in the pause after a failure."""
        if self._clock() < self._retry_at:
            socket = self.key[0] if self.key is not None else ""
            raise WorkerError(f"the arena at {socket} cannot be attached now; undercroft tries again later")

    def pause(self) -> None:
        """The arena could not be attached or used: make a pause before the next attempt."""
        wait = min(ATTACH_RETRY_S * 2**self._failures, ATTACH_RETRY_MAX_S)
        self._abandon_attempt()
        self._failures += 1
        self._retry_at = self._clock() + wait

    def attach(self, device: torch.device) -> AttachedArena:
        """The arena, attached for the session. If the lost session's arena is the same, its mapping and pinned memory
        are used again. Raises AttachPendingError while the engine has not answered."""
        if self.attached is not None and self.attached.is_held:
            return self.attached
        assert self.key is not None
        socket, arena_id, session = self.key
        # Only the first step of an attempt waits.
        timeout_s = self._timeout_s if self._attempt is None else 0.0
        self._attempt = self._attempt or AttachAttempt(self._attach, socket, session)
        arena = self._attempt.arena(timeout_s)
        if arena is None:
            raise AttachPendingError(f"the engine at {socket} has not handed out its arena yet")
        self._attempt = None
        if arena.arena_id != arena_id:
            arena.let_go()
            raise WorkerError(f"{socket} hands out arena {arena.arena_id}, expected {arena_id}")
        if self.attached is None:
            self.attached = AttachedArena(device, arena)
        else:
            self.attached.hold_for(arena)
        return self.attached

    def poll_attempts(self) -> None:
        """Take over an early attempt that has ended, and abandon one at an engine that has ended."""
        if self._early is not None and self._early.has_ended:
            self._take_over_early()
        if self._attempt is not None and not self._attempt.is_served:
            self._abandon_attempt()

    def end_attempts(self) -> None:
        """Attach nothing: neither early nor for a step."""
        self._take_over_early()
        self._abandon_attempt()

    def _take_over_early(self) -> None:
        """Use the arena that was attached before the first step as if a step had attached it."""
        early, self._early = self._early, None
        if early is not None and (attached := early.take()) is not None:
            told = early.announced
            self.attached, self.key = attached, (told.socket, told.arena_id, told.session)

    def _abandon_attempt(self) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.abandon()

    # Leave

    def leave_old(self, metadata: UndercroftMetadata) -> bool:
        """End the use of the arena for a session that is over. Its mapping stays if the next session may have it.

        Returns whether a session's use has ended.
        """
        if self._early is not None:
            self._take_over_early()
        is_named = self.key == _key(metadata)
        if not is_named:
            self._abandon_attempt()
        attached = self.attached
        if attached is None:
            return False
        if not attached.is_held:
            is_same = attached.arena_id == metadata.arena_id
        elif is_named and attached.is_served:
            return False
        else:
            is_same = (metadata.arena_socket, metadata.arena_id) == (self.key or ("", 0))[:2]
        if not is_same or not attached.is_served:
            # Another engine follows, which may need the memory of this arena.
            self.set_aside()
            return True
        if not attached.is_held:
            return False
        # A lost session ends when no worker copies for it any more. Its server may still run, with the same arena.
        assert self.key is not None
        attached.end_session(self.key[2])
        self._unheld_at = self._clock()
        return True

    def set_aside(self) -> None:
        """Let no new job use the arena. `release_leaving` follows when no copy runs."""
        attached, self.attached = self.attached, None
        if attached is not None:
            assert self.leaving is None, "no arena is attached while another one is leaving"
            self.leaving = attached

    def release_leaving(self) -> None:
        """No copy uses the arena that is leaving: let the engine reuse its slots, and unpin it in the background."""
        leaving, self.leaving = self.leaving, None
        if leaving is None:
            return
        leaving.let_go()
        self._unpinning = [thread for thread in self._unpinning if thread.is_alive()]
        if (thread := leaving.discard()) is not None:
            self._unpinning.append(thread)

    def wait_for_unpinning(self) -> None:
        """Wait until released arenas are unpinned. Needs no lock."""
        while self._unpinning:
            self._unpinning.pop().join()


def _key(metadata: UndercroftMetadata) -> tuple[str, int, int]:
    return metadata.arena_socket, metadata.arena_id, metadata.arena_session
