"""Logs when a disk directory, the remote store or the engine of another process stops working or works again, and when
namespaces have no entry on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from undercroft.log import logger

if TYPE_CHECKING:
    from undercroft._core import Engine

_MEANING = {
    "no_writes": "takes no writes; its blocks are still read, and writes are retried",
    "stalled": "does not answer; its blocks are neither read nor written until it does",
    "failed": "has failed and its blocks are dropped; the directory is retried later",
    "unavailable": "cannot be used; it is tried again later, and is empty then",
    "file_missing": "is still used, but its blocks are lost when the engine ends; empty it and restart the engine",
}


class DiskHealth:
    """Logs each change of a directory's health once, and at the start the notes about the opening of each directory.

    After the start it asks the engine nothing while all directories are healthy.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._said: dict[str, str] = {}
        for disk in engine.info().get("disks", ()):
            for note in disk.get("notes", ()):
                logger.warning("undercroft: %s", note)
        self.check(1)

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
            logger.error("undercroft: disk %s %s (%s). Host memory is not affected.", path, meaning, disk["fault"])


class RemoteHealth:
    """Logs when the remote store cannot be used, and when it can be used again."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._said = False

    def check(self, degraded: int) -> None:
        """``degraded``: the engine's gauge ``remote_degraded``; called about once a second."""
        if bool(degraded) == self._said:
            return
        remote = self._engine.info().get("remote") or {}
        health = remote.get("health")
        if health == "failed" and not self._said:
            self._said = True
            logger.error(
                "undercroft: remote %s cannot be used: %s. To do: %s. Host memory and disk are not affected; the store "
                "is tried again.",
                remote["url"],
                remote["fault"],
                remote["advice"],
            )
        elif health == "good" and self._said:
            self._said = False
            logger.warning("undercroft: remote %s works again", remote["url"])


class NamespaceHealth:
    """Logs when namespaces have no entry in a directory. A reset removes the entry for a moment; this is no loss."""

    def __init__(self) -> None:
        self._said = 0
        self._last = 0

    def check(self, volatile: int) -> None:
        """``volatile``: the engine's gauge ``volatile_namespaces``; called about once a second."""
        lasting = min(volatile, self._last)
        self._last = volatile
        if lasting > self._said:
            logger.warning(
                "undercroft: a restart will not find the blocks of %d namespaces: a directory's table has no entry for "
                "them, because it takes no writes, or because sessions use all of its 128 entries. They get one when "
                "they are opened again after other sessions have ended.",
                lasting,
            )
        self._said = max(lasting, min(self._said, volatile))


class ConnectionHealth:
    """Logs when the connection to another process's engine is lost and restored. One late reply is not a loss."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._said = "up"
        self._last = "up"
        self._took_over = False

    def check(self) -> None:
        """Check the connection; called about once a second."""
        state, why = self._engine.connection()
        lasting = state == self._last or state in ("up", "refused")
        self._last = state
        if state != self._said and lasting:
            self._said = state
            if state == "up":
                logger.warning("undercroft: connected to the engine at %s", self._engine.arena.socket)
            else:
                logger.warning(
                    "undercroft: no connection to the engine (%s: %s). vLLM serves without the cache until it is back.",
                    state,
                    why,
                )
        if self._engine.took_over != self._took_over:
            self._took_over = True
            logger.warning(
                "undercroft: the process that owned disk_path has ended; this process now owns the directory."
            )
