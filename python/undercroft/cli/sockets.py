"""The socket of an engine, as an argument of commands."""

from __future__ import annotations

from pathlib import Path

DEFAULT_SOCKET = "default: serve.sock in $XDG_RUNTIME_DIR/undercroft, or in /tmp/undercroft-<uid>"


def default_socket() -> str:
    """The socket at which the server listens by default."""
    from undercroft import _core

    return _core.default_server_socket()


def absolute_path(path: str) -> str:
    """The absolute path for a path on the command line, which may have vLLM's form ``unix://PATH``."""
    return str(Path(path.removeprefix("unix://")).expanduser().absolute())
