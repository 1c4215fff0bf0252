"""Finds the sockets of this user's engines, in servers and in vLLM processes."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import Any

from undercroft.cli.output import CommandError
from undercroft.cli.sockets import default_socket
from undercroft.errors import ConfigError, UndercroftError, cause

# An engine answers within milliseconds. Without an answer in this time it is frozen.
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
    """The socket of the engine that a command's arguments select. Raises ConfigError and CommandError."""
    if args.disk_path is not None:
        return of_directory(args.disk_path)
    if args.socket is not None:
        return str(args.socket)
    return only_one(all_of_user())


def only_one(found: list[dict[str, Any]]) -> str:
    """The socket of this user's only engine. Raises ConfigError if there are several, CommandError if there is none."""
    if len(found) > 1:
        places = ", ".join(f"--socket {one['socket']} (pid {one['pid']})" for one in found)
        raise ConfigError(f"{len(found)} engines run; say which: {places}")
    if not found:
        raise CommandError(
            f"no engine answers in {Path(default_socket()).parent}; start vLLM with undercroft or `undercroft serve`, "
            "or say where it listens: --socket PATH, or --disk-path DIR of an engine inside a vLLM"
        )
    return str(found[0]["socket"])


def of_directory(path: str) -> str:
    """The socket of the engine that has a directory open. Raises ConfigError, and CommandError if there is none."""
    lock = Path(path) / "lock"
    try:
        lines = lock.read_text(encoding="utf-8").splitlines()
    except PermissionError as error:
        raise CommandError(
            f"--disk-path {path}: {lock}: {cause(error)}; run the command as the user of the engine"
        ) from None
    except (FileNotFoundError, NotADirectoryError):
        if not Path(path).is_dir():
            raise ConfigError(
                f"--disk-path {path}: there is no such directory; give the disk_path of a running engine"
            ) from None
        raise CommandError(f"--disk-path {path}: no engine has ever used this directory") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"--disk-path {path}: {lock} cannot be read ({cause(error)})") from None
    if len(lines) < 2:
        raise CommandError(f"--disk-path {path}: no engine has this directory open now")
    try:
        Path(lines[1]).stat()
    except (FileNotFoundError, NotADirectoryError):
        raise CommandError(
            f"--disk-path {path}: the last engine in this directory listens at {lines[1]}, which does not exist here: "
            "that engine has ended, or runs in a container with a directory of its own for sockets"
        ) from None
    except OSError:
        pass  # The attempt to connect tells more.
    return lines[1]


def all_of_user() -> list[dict[str, Any]]:
    """The status of each engine in the usual directory for sockets. Engines that do not answer are left out."""
    found = []
    for path in sorted(Path(default_socket()).parent.glob("*.sock")):
        # A process that has ended may have left its socket.
        with contextlib.suppress(UndercroftError):
            found.append(ask(str(path)))
    return found
