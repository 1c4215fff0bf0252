"""The socket of an engine, as an argument of commands."""

from __future__ import annotations

from pathlib import Path

DEFAULT_SOCKET = "default: serve.sock in $XDG_RUNTIME_DIR/undercroft, or in /tmp/undercroft-<uid>"


def default_socket() -> str:
    """The socket at which the server listens by default."""
    from undercroft import _core

    return _core.default_server_socket()


def absolute_path(path: str) -> str:
    """A path as given on the command line, from the root on; also in the form that vLLM takes, ``unix://PATH``."""
    return str(Path(path.removeprefix("unix://")).expanduser().absolute())
