"""The package's loggers, all at or below ``vllm.undercroft``, so that vLLM's logging configuration applies to them.

vLLM's ``init_logger`` returns the same logger. This module does not call it, because an import of vLLM takes seconds
and ``undercroft serve`` needs no vLLM.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
import traceback
from datetime import UTC, datetime

from undercroft.printable import printable


class Printable(logging.Filter):
    """Makes each record one line of printable characters, and its traceback lines of them."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Change the record, and let it pass."""
        message = record.getMessage()
        if not message.isprintable():
            record.msg, record.args = printable(message), ()
        if record.exc_info and record.exc_info[0] is not None and not record.exc_text:
            record.exc_text = "\n".join(map(_entry, traceback.format_exception(*record.exc_info)))
        return True


def _entry(entry: str) -> str:
    """An entry of a traceback: a frame has several lines of this program, and an error's message has one."""
    entry = entry.rstrip("\n")
    return "\n".join(map(printable, entry.split("\n"))) if entry.startswith("  File ") else printable(entry)


class JsonFormatter(logging.Formatter):
    """Each record as one JSON object in one line."""

    def format(self, record: logging.LogRecord) -> str:
        """The record's time, level, logger and message, and its traceback if it has one."""
        shown = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_text or record.exc_info:
            shown["traceback"] = record.exc_text or self.formatException(record.exc_info or (None, None, None))
        return json.dumps(shown)


def child(name: str) -> logging.Logger:
    """The logger below `logger` with this name. Records of a logger do not pass the filters of the one above it."""
    below = logger.getChild(name)
    below.addFilter(_PRINTABLE)
    return below


_PRINTABLE = Printable()
logger = logging.getLogger("vllm.undercroft")
logger.addFilter(_PRINTABLE)
_LEVELS = {"info": logging.INFO, "warning": logging.WARNING}
_follower: threading.Thread | None = None
_taking = threading.Lock()


def follow_core() -> None:
    """Log the lines of this process's engines from now on, on a thread of its own. Idempotent."""
    global _follower
    # The thread does not exist in a forked child.
    if _follower is None or not _follower.is_alive():
        _follower = threading.Thread(target=_follow, name="undercroft-log", daemon=True)
        _follower.start()


def _follow() -> None:
    from undercroft import _core

    while True:
        _core.wait_log(3600.0)
        log_core_lines()


def log_core_lines() -> None:
    """Log the lines that wait, and wait for those that another thread is logging."""
    from undercroft import _core

    with _taking:
        for level, line in _core.take_log():
            logger.log(_LEVELS[level], line)


def _renew() -> None:
    global _taking
    _taking = threading.Lock()


os.register_at_fork(after_in_child=_renew)


class LogOnce:
    """Logs the first message of each kind and drops the later ones: a lasting error must not flood the log."""

    def __init__(self, to: logging.Logger = logger, again_after_s: float = math.inf) -> None:
        """``again_after_s``: seconds after which a kind is logged again."""
        self._logger = to
        self._again_after_s = again_after_s
        self._logged_at: dict[object, float] = {}

    def __call__(
        self, level: int, kind: object, message: str, *args: object, error: BaseException | None = None
    ) -> None:
        """Log ``message % args`` at ``level``, with the traceback of ``error``, unless ``kind`` was logged before."""
        now = time.monotonic()
        if now - self._logged_at.get(kind, -math.inf) < self._again_after_s:
            return
        self._logged_at[kind] = now
        self._logger.log(level, message, *args, exc_info=error, stacklevel=2)
