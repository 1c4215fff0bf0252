"""Calls a worker again and again while vLLM has no steps."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable

from undercroft.log import LogOnce

WATCH_S = 1.0
"""Pause between two calls. It limits how long an idle worker keeps the memory of an engine that has ended."""


class Watcher:
    """A thread that calls a bound method until `stop`, or until the method's object has no other reference."""

    def __init__(self, method: Callable[[], None], pause_s: float) -> None:
        """Raises RuntimeError if no thread can start."""
        self._stopped = threading.Event()
        # Daemon: a process that ends without `stop` must not wait for this thread.
        self._thread = threading.Thread(
            target=_watch,
            args=(weakref.WeakMethod(method), self._stopped, pause_s),
            name="undercroft-watch",
            daemon=True,
        )
        self._thread.start()

    def stop(self) -> None:
        """Wait for the end of a running call. There is no call afterwards."""
        self._stopped.set()
        self._thread.join()


def _watch(method: weakref.WeakMethod[Callable[[], None]], stopped: threading.Event, pause_s: float) -> None:
    log_once = LogOnce()
    while not stopped.wait(pause_s):
        call = method()
        if call is None:
            return
        try:
            call()
        except Exception as error:
            message = "undercroft: the memory of an engine that has ended cannot be released between steps: %s"
            log_once(logging.WARNING, type(error).__name__, message, error, error=error)
        del call
