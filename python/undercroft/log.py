"""The package's loggers, all at or below ``vllm.undercroft``, so that vLLM's logging configuration applies to them.

vLLM's ``init_logger`` returns the same logger. It is not called here, because importing vLLM takes seconds and
``undercroft serve`` does without it.
"""

from __future__ import annotations

import logging

logger = logging.getLogger("vllm.undercroft")


class LogOnce:
    """Logs the first message of each kind and drops the later ones: a lasting error must not flood the log."""

    def __init__(self, to: logging.Logger = logger) -> None:
        self._logger = to
        self._logged: set[object] = set()

    def __call__(
        self, level: int, kind: object, message: str, *args: object, error: BaseException | None = None
    ) -> None:
        """Log ``message % args`` at ``level``, with the traceback of ``error``, unless ``kind`` was logged before."""
        if kind in self._logged:
            return
        self._logged.add(kind)
        self._logger.log(level, message, *args, exc_info=error, stacklevel=2)
