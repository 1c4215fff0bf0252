"""Where the engines of this user listen: servers, and those inside a vLLM."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from undercroft.cli.output import CommandError
from undercroft.errors import UndercroftError

# An engine answers within milliseconds; one that does not is frozen.
TIMEOUT_S = 2.0


def ask(socket: str) -> dict[str, Any]:
    """The status of the engine at a socket. Raises ServerError."""
    from undercroft import _core

    return _core.server_status(socket, TIMEOUT_S)


def of_directory(path: str) -> str:
    """The socket of the engine that has a directory open. Raises CommandError."""
    lock = Path(path) / "lock"
    try:
        lines = lock.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"--disk-path {path}: it is no directory of a disk tier ({error})") from None
    if len(lines) < 2:
        raise CommandError(f"--disk-path {path}: no engine has told where it listens; is one running?")
    return lines[1]


def all_of_user() -> list[dict[str, Any]]:
    """The status of each engine in the usual directory for sockets; those that do not answer are left out."""
    from undercroft import _core

    directory = Path(_core.default_server_socket()).parent
    found = []
    for path in sorted(directory.glob("*.sock")):
        # A socket that a dead process left behind.
        with contextlib.suppress(UndercroftError):
            found.append(ask(str(path)))
    return found
