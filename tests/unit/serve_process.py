"""A real `undercroft serve` as a child process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from undercroft import _core

COMMAND = [sys.executable, "-m", "undercroft.cli.main"]
STOP_TIMEOUT_S = 30
START_TIMEOUT_S = 60


class ServeProcess:
    """Running and ready once constructed; a context manager that leaves no process behind."""

    def __init__(self, socket: Path, *arguments: str, prefix: Sequence[str] = (), **environment: str) -> None:
        """``prefix``: a command that runs it."""
        self.socket = socket
        self.process = subprocess.Popen(
            [*prefix, *COMMAND, "serve", "--socket", str(socket), "--host-memory", "64MiB", *arguments],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.printed: list[str] = []
        # A server with a wrong level or file may never say that it is ready.
        limit = threading.Timer(START_TIMEOUT_S, self.process.kill)
        limit.start()
        try:
            for line in self.process.stdout:
                self.printed.append(line.rstrip())
                if "ready" in line:
                    break
            else:
                code, message = self.process.wait(STOP_TIMEOUT_S), self.process.stderr.read()
                self.close()
                raise AssertionError(f"exit code {code}: {message}")
        finally:
            limit.cancel()

    def __enter__(self) -> ServeProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill it, if it still runs."""
        self.process.kill()
        self.process.wait(STOP_TIMEOUT_S)
        self.process.stdout.close()
        self.process.stderr.close()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """The server's exit code after a signal."""
        self.process.send_signal(number)
        return self.process.wait(STOP_TIMEOUT_S)

    def status(self) -> dict:
        """The server's status."""
        return _core.server_status(str(self.socket), STOP_TIMEOUT_S)


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command, to its end."""
    return subprocess.run(
        [*COMMAND, *arguments],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
