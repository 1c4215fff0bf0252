"""Says in the log when a disk directory or a server stops or starts to work."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from undercroft._core import Client, Engine

logger = logging.getLogger(__name__)

_MEANING = {
    "no_writes": "takes no writes; what it holds is still read, and writes are tried again",
    "failed": "is given up and its blocks are dropped; it is tried again later",
    "file_missing": "is used on, but what it holds is lost when the engine ends: restart it with the directory emptied",
}


class DiskHealth:
    """Logs each change once. Costs nothing while all is well."""

    def __init__(self, engine: Engine | Client) -> None:
        self._engine = engine
        self._said: dict[str, str] = {}

    def check(self, degraded: int) -> None:
        """``degraded``: the engine's gauge ``disk_degraded``."""
        if not degraded and not self._said:
            return
        for disk in self._engine.info().get("disks", ()):
            path, health = disk["path"], disk["health"]
            if health == self._said.get(path, "good"):
                continue
            if health == "good":
                del self._said[path]
                logger.warning("undercroft: disk %s works again", path)
                continue
            self._said[path] = health
            meaning = _MEANING.get(health, health)
            logger.error("undercroft: disk %s %s (%s). Host memory goes on.", path, meaning, disk["fault"])


class LinkHealth:
    """Logs when the engine of another process is lost and found. A server that is late once is not lost."""

    def __init__(self, engine: Engine | Client) -> None:
        self._engine = engine
        self._said = "up"
        self._last = "up"
        self._took_over = False

    def check(self) -> None:
        """Look at the connection; called about once a second."""
        state, why = self._engine.link()
        lasting = state == self._last or state in ("up", "refused")
        self._last = state
        if state != self._said and lasting:
            self._said = state
            if state == "up":
                logger.warning("undercroft: the engine at %s is there (again)", self._engine.arena[0])
            else:
                logger.warning("undercroft: no engine (%s: %s). Serving without it until it is back.", state, why)
        if self._engine.took_over != self._took_over:
            self._took_over = True
            logger.warning("undercroft: the owner of disk_path has ended; this process has taken it over.")
