"""Attaches the arena without delaying the step that needs it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from undercroft._core import Arena


class AttachAttempt:
    """One attempt to get the arena, on a thread of its own: an attempt at a frozen engine takes seconds to fail.

    The engine must learn when nobody uses an arena that it has handed out: without that it counts this process as a
    worker until the process ends. So each attempt ends with `arena` or with `abandon`.
    """

    def __init__(self, attach: Callable[[str, int], Arena], socket: str, session: int) -> None:
        self._lock = threading.Lock()
        self._is_wanted = True
        self._ended = threading.Event()
        self._arena: Arena | None = None
        self._error: Exception | None = None
        thread = threading.Thread(
            target=self._run, args=(attach, socket, session), name="undercroft-attach", daemon=True
        )
        thread.start()

    def _run(self, attach: Callable[[str, int], Arena], socket: str, session: int) -> None:
        try:
            arena = attach(socket, session)
            with self._lock:
                if self._is_wanted:
                    self._keep(arena)
                else:
                    arena.let_go()
        except Exception as error:
            self._error = error
        finally:
            self._ended.set()

    def _keep(self, arena: Arena) -> None:
        self._arena = arena

    @property
    def has_ended(self) -> bool:
        """Whether the engine has answered, or the attempt has failed."""
        return self._ended.is_set()

    @property
    def is_served(self) -> bool:
        """Whether the engine still runs, as far as the attempt shows it."""
        with self._lock:
            return self._arena is None or self._arena.is_served

    def arena(self, timeout_s: float) -> Arena | None:
        """Hand the arena over to the caller; None if the engine has not answered within the timeout.

        Raises the attempt's error.
        """
        if not self._ended.wait(timeout_s):
            return None
        if self._error is not None:
            raise self._error
        with self._lock:
            arena, self._arena = self._arena, None
            return arena

    def abandon(self) -> None:
        """Detach from the arena at once, or when the engine hands it out. Idempotent."""
        with self._lock:
            self._is_wanted = False
            arena, self._arena = self._arena, None
        if arena is not None:
            arena.let_go()
