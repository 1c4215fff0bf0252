"""Waiting: for an order that a running engine carries out in steps, or for long work outside Python."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from undercroft.cli import engines, output

Result = TypeVar("Result")

_INTERVAL_S = 0.1


def until(
    socket: str,
    question: dict[str, Any],
    is_over: Callable[[dict[str, Any]], bool],
    line: Callable[[dict[str, Any]], str],
    timeout_s: float,
) -> tuple[dict[str, Any], bool]:
    """Repeat the question until ``is_over`` accepts the answer or the time is over. Returns the last answer, and
    whether it was accepted. On a terminal, ``line`` shows the progress."""
    deadline = time.monotonic() + timeout_s
    shows = sys.stderr.isatty()
    while True:
        said = engines.operate(socket, question)
        over = is_over(said)
        if over or time.monotonic() >= deadline:
            if shows:
                output.show_progress("")
            return said, over
        if shows:
            output.show_progress(line(said))
        time.sleep(_INTERVAL_S)


def until_interrupted(work: Callable[[], Result]) -> Result:
    """The result of work that runs long outside Python. An interrupt ends the process at once, without a result."""
    found: queue.SimpleQueue[Result | BaseException] = queue.SimpleQueue()

    def run() -> None:
        try:
            found.put(work())
        except BaseException as error:
            found.put(error)

    threading.Thread(target=run, name="work", daemon=True).start()
    result = found.get()
    if isinstance(result, BaseException):
        raise result
    return result
