"""A command as a process of its own, and its end by an interrupt."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence


def ends_at_once(arguments: Sequence[str], ready: str) -> None:
    """Interrupt a Python with these arguments once it has printed the line ``ready``; it must end, and say nothing."""
    command = [sys.executable, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            assert process.stdout.readline() == f"{ready}\n"
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130
            assert process.stderr.read() == ""
        finally:
            process.kill()
