"""Attaches the arena without delaying the step that needs it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from undercroft._core import Arena


class AttachAttempt:
    """One attempt to get the arena, on a thread of its own: an attempt at a frozen engine takes seconds to fail."""

    def __init__(self, attach: Callable[[str, int], Arena], socket: str, session: int) -> None:
        self._ended = threading.Event()
        self._arena: Arena | None = None
        self._error: Exception | None = None
        thread = threading.Thread(
            target=self._run, args=(attach, socket, session), name="undercroft-attach", daemon=True
        )
        thread.start()

    def _run(self, attach: Callable[[str, int], Arena], socket: str, session: int) -> None:
        try:
            self._arena = attach(socket, session)
        except Exception as error:
            self._error = error
        finally:
            self._ended.set()

    def arena(self, timeout_s: float) -> Arena | None:
        """The arena; None if the engine has not answered within the timeout. Raises the attempt's error."""
        if not self._ended.wait(timeout_s):
            return None
        if self._error is not None:
            raise self._error
        return self._arena
