"""Where the engines of this user listen: servers, and those inside a vLLM."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import Any

from undercroft.cli.output import CommandError
from undercroft.cli.sockets import default_socket
from undercroft.errors import ConfigError, UndercroftError

# An engine answers within milliseconds; one that does not is frozen.
TIMEOUT_S = 2.0


def ask(socket: str) -> dict[str, Any]:
    """The status of the engine at a socket. Raises ServerError."""
    from undercroft import _core

    return _core.server_status(socket, TIMEOUT_S)


def operate(socket: str, operation: dict[str, Any], timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """Have the engine at a socket carry out an operation. Raises ServerError, and CommandError if it refuses."""
    from undercroft import _core

    said = _core.operate(socket, operation, timeout_s)
    if "error" in said:
        raise CommandError(said["error"])
    return said


def socket_of(args: argparse.Namespace) -> str:
    """The socket of the one engine that a command is for. Raises CommandError."""
    if args.disk_path is not None:
        return of_directory(args.disk_path)
    if args.socket is not None:
        return str(args.socket)
    found = all_of_user()
    if len(found) > 1:
        places = ", ".join(f"--socket {one['socket']} (pid {one['pid']})" for one in found)
        raise ConfigError(f"{len(found)} engines run; say which: {places}")
    return str(found[0]["socket"]) if found else default_socket()


def of_directory(path: str) -> str:
    """The socket of the engine that has a directory open. Raises ConfigError, and CommandError if there is none."""
    lock = Path(path) / "lock"
    try:
        lines = lock.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        if not Path(path).is_dir():
            raise ConfigError(
                f"--disk-path {path}: there is no such directory; give that of a running engine"
            ) from None
        raise CommandError(f"--disk-path {path}: no engine has used this directory; is one running?") from None
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
