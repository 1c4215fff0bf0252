"""An engine's arena in a worker: mapped, pinned for the device, and held for one session."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from undercroft._core import Arena
from undercroft.connector.worker.attaching import AttachAttempt
from undercroft.device.factory import pin_arena

if TYPE_CHECKING:
    import torch

    from undercroft.connector.announcement import Announced


class AttachedArena:
    """One mapping of an arena. The mapping stays while sessions begin and end, as long as the arena is the same."""

    def __init__(self, device: torch.device, mapping: Arena) -> None:
        """Raises the error of `pin_arena`, after it has told the engine that this process does not use the arena."""
        self.mapping = mapping
        try:
            self.pinner = pin_arena(device, mapping)
        except Exception:
            mapping.let_go()
            raise
        self._registered = 0
        self._held: Arena | None = mapping
        self.ended: dict[int, Arena] = {}
        """For each session that is over and may still have copies, the attachment that holds its slots."""

    @property
    def arena_id(self) -> int:
        """The engine's number of this arena."""
        return self.mapping.arena_id

    @property
    def is_held(self) -> bool:
        """Whether the arena is attached for a session that is not over."""
        return self._held is not None

    @property
    def is_served(self) -> bool:
        """Whether the arena's engine still runs, as far as an attachment shows it."""
        return self._held is None or self._held.is_served

    def newly_registered(self) -> int:
        """Bytes that the device has registered since the last call."""
        before, self._registered = self._registered, self.pinner.pinned_bytes if self.pinner is not None else 0
        return self._registered - before

    def hold_for(self, attachment: Arena) -> None:
        """From now on hold the arena for the session of another attachment. The mapping stays."""
        self._held = attachment

    def end_session(self, session: int) -> None:
        """The session for which the arena is held is over. Its slots stay held until `let_go_of_ended`."""
        assert self._held is not None
        self.ended[session], self._held = self._held, None

    def is_over(self, session: int) -> bool:
        """Whether the session is over and its slots are still held."""
        return session in self.ended

    def let_go_of_ended(self, running: Iterable[int]) -> None:
        """Tell the engine that the copies of ended sessions are over, except for the sessions in ``running``."""
        for session in self.ended.keys() - set(running):
            self.ended.pop(session).let_go()

    def let_go(self) -> None:
        """Tell the engine that the copies of all sessions are over. The engine reuses the slots of these copies."""
        self.let_go_of_ended(())
        held, self._held = self._held, None
        if held is not None:
            held.let_go()

    def discard(self) -> threading.Thread | None:
        """Unpin and unmap the arena, in a thread of its own: the driver needs seconds to unpin 64 GiB.

        No caller may use the arena any more. Returns the thread; a process may end before the thread ends. None if no
        thread can start: the pinner's own thread then unpins the arena.
        """
        thread = threading.Thread(target=self._unpin, name="undercroft-unpin", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            if self.pinner is not None:
                self.pinner.stop()
            return None
        return thread

    def _unpin(self) -> None:
        if self.pinner is not None:
            self.pinner.close()


class EarlyAttempt(AttachAttempt):
    """Attaches the arena before any job needs it, and then begins to pin it."""

    def __init__(self, attach: Callable[[str, int], Arena], device: torch.device, announced: Announced) -> None:
        self.announced = announced
        self._device = device
        self._attached: AttachedArena | None = None
        super().__init__(attach, announced.socket, announced.session)

    def _keep(self, arena: Arena) -> None:
        if arena.arena_id == self.announced.arena_id:
            self._attached = AttachedArena(self._device, arena)
        else:
            arena.let_go()

    def take(self) -> AttachedArena | None:
        """Hand the arena over to the caller, who owns it from now on. None if the arena is not attached."""
        with self._lock:
            self._is_wanted = False
            attached, self._attached = self._attached, None
            return attached
