"""Work on files whose filesystem may hang, as a frozen one does, or NFS without its server."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from undercroft.log import logger

_Result = TypeVar("_Result")
LIMIT_S = 5.0
"""Longest wait for work on a small file at the start."""


def within(limit_s: float, path: str | Path, work: Callable[[], _Result]) -> _Result:
    """The result of ``work`` on ``path``, on a thread of its own. Raises its error, or TimeoutError after ``limit_s``
    seconds, with a warning: the thread then goes on alone."""
    ended: queue.SimpleQueue[tuple[_Result | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            ended.put((work(), None))
        except BaseException as error:
            # A panic of the core is no Exception.
            ended.put((None, error))

    threading.Thread(target=run, name="undercroft-file", daemon=True).start()
    try:
        result, error = ended.get(timeout=limit_s)
    except queue.Empty:
        logger.warning(
            "undercroft: the filesystem of %s has not answered for %g s; the start goes on without it. Is it frozen, "
            "or its server gone?",
            path,
            limit_s,
        )
        raise TimeoutError(f"{path}: no answer") from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]  # None only where work returns it
