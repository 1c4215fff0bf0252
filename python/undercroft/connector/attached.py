"""An engine's arena in a worker: mapped, pinned for the device, and held for one session."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from undercroft._core import Arena
from undercroft.connector.attaching import AttachAttempt
from undercroft.device.factory import pin_arena

if TYPE_CHECKING:
    import torch

    from undercroft.connector.announcement import Announced


class AttachedArena:
    """One mapping of an arena. The mapping stays while sessions begin and end, as long as the arena is the same."""

    def __init__(self, device: torch.device, mapping: Arena) -> None:
        self.mapping = mapping
        self.pinner = pin_arena(device, mapping)
        self._held = mapping

    @property
    def arena_id(self) -> int:
        """The engine's number of this arena."""
        return self.mapping.arena_id

    @property
    def is_served(self) -> bool:
        """Whether the arena's engine still runs."""
        return self._held.is_served

    def hold_for(self, attachment: Arena) -> None:
        """From now on hold the arena for the session of another attachment. The mapping stays."""
        self._held = attachment

    def let_go(self) -> None:
        """Tell the engine that the session's copies are over. The engine reuses the slots of these copies."""
        self._held.let_go()

    def discard(self) -> threading.Thread:
        """Unpin and unmap the arena, in a thread of its own: the driver needs seconds to unpin 64 GiB.

        No caller may use the arena any more. Returns the thread; a process may end before the thread ends.
        """
        thread = threading.Thread(target=self._unpin, name="undercroft-unpin", daemon=True)
        thread.start()
        return thread

    def _unpin(self) -> None:
        if self.pinner is not None:
            self.pinner.close()


class EarlyAttempt(AttachAttempt):
    """Attaches the arena before any job needs it, and then begins to pin it."""

    def __init__(self, attach: Callable[[str, int], Arena], device: torch.device, announced: Announced) -> None:
        self.announced = announced
        self._lock = threading.Lock()
        self._is_wanted = True
        self._attached: AttachedArena | None = None

        def attach_and_pin(socket: str, session: int) -> Arena:
            arena = attach(socket, session)
            with self._lock:
                if not self._is_wanted or arena.arena_id != announced.arena_id:
                    arena.let_go()
                else:
                    self._attached = AttachedArena(device, arena)
            return arena

        super().__init__(attach_and_pin, announced.socket, announced.session)

    def take(self) -> AttachedArena | None:
        """Hand the arena over to the caller, who owns it from now on. None if the arena is not attached."""
        with self._lock:
            self._is_wanted = False
            attached, self._attached = self._attached, None
            return attached
