"""A small file tells the workers of the engine before the first step, while vLLM starts.

A step's metadata names the arena, but pinning the arena takes seconds. The first requests should not wait for these
seconds. vLLM asks the workers for handshake metadata after it has made the scheduler's half, which writes the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from undercroft.log import logger

if TYPE_CHECKING:
    from undercroft._core import ArenaAddress
    from undercroft.config import UndercroftConfig


class Announced(NamedTuple):
    """The address from which a worker gets the arena; see `undercroft._core.ArenaAddress`."""

    socket: str
    arena_id: int
    session: int


class Announcement:
    """The file of one vLLM. Both halves of its connector find the file by the id that vLLM gives the engine."""

    def __init__(self, config: UndercroftConfig, engine_id: str) -> None:
        from undercroft import _core

        directory = Path(config.socket_dir) if config.socket_dir else Path(_core.default_server_socket()).parent
        name = hashlib.sha256(engine_id.encode()).hexdigest()[:32]
        self._path = directory / f"{name}.arena"

    def announce(self, address: ArenaAddress) -> None:
        """Like `write`, but log an error."""
        try:
            self.write(address)
        except OSError as error:
            logger.warning("undercroft: host memory is pinned only from the first request on: %s", error)

    def write(self, address: ArenaAddress) -> None:
        """Write the address to the file. Writes nothing while there is no engine to attach to. Raises OSError."""
        if not address.socket:
            return
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        text = json.dumps(Announced(address.socket, address.arena_id, address.session)._asdict())
        new = self._path.with_suffix(f".{os.getpid()}")
        try:
            file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(file, "w", encoding="utf-8") as writing:
                writing.write(text)
            new.replace(self._path)
        finally:
            new.unlink(missing_ok=True)

    def read(self) -> Announced | None:
        """The announcement of this user's scheduler; None if there is none."""
        try:
            file = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        with os.fdopen(file, encoding="utf-8") as reading:
            if os.fstat(reading.fileno()).st_uid != os.geteuid():
                return None
            try:
                told: dict[str, Any] = json.load(reading)
                return Announced(str(told["socket"]), int(told["arena_id"]), int(told["session"]))
            except (ValueError, KeyError, TypeError):
                return None

    def withdraw(self) -> None:
        """Remove the file. Idempotent."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
