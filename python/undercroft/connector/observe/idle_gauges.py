"""Gauges on vLLM's metrics page while vLLM is idle.

vLLM's engine reports statistics only in its steps. While no report comes, the frontend itself asks the engine of the
tiers over its socket: the metrics must show a disk that fails at night before the morning's first request.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from undercroft.errors import UndercroftError

IDLE_S = 5.0
"""Seconds without a report after which the frontend asks an engine, and seconds between two such questions."""
_TIMEOUT_S = 1.0


class IdleGauges:
    """A thread of a frontend that asks the engines without recent reports."""

    def __init__(self, show: Callable[[dict[str, Any], int], None], idle_s: float = IDLE_S) -> None:
        """``show`` takes an engine's counters and the index of its vLLM engine, and sets the gauges that users see."""
        self._show = show
        self._idle_s = idle_s
        self._sockets: dict[int, tuple[str, float]] = {}
        """By engine of vLLM: the socket of its tiers' engine, and the time of the last report."""
        self._thread: threading.Thread | None = None

    def reported(self, engine: int, socket: str) -> None:
        """An engine of vLLM has reported its statistics; ``socket``: the socket of its tiers' engine."""
        self._sockets[engine] = socket, time.monotonic()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="undercroft-gauges", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            time.sleep(self._idle_s)
            for engine, (socket, reported) in list(self._sockets.items()):
                if time.monotonic() - reported >= self._idle_s:
                    self._ask(engine, socket)

    def _ask(self, engine: int, socket: str) -> None:
        from undercroft import _core

        try:
            stats = _core.server_status(socket, _TIMEOUT_S)["stats"]
        except UndercroftError:
            # The engine has ended or is on another machine. The gauges keep their last values, like vLLM's own gauges.
            return
        self._show(stats, engine)
