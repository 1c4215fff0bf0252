"""The package's loggers, all at or below ``vllm.undercroft``, so that vLLM's logging configuration applies to them.

vLLM's ``init_logger`` returns the same logger. This module does not call it, because an import of vLLM takes seconds
and ``undercroft serve`` needs no vLLM.
"""

from __future__ import annotations

import logging
import math
import time

logger = logging.getLogger("vllm.undercroft")


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
