"""A vLLM server that is forked from a process which has imported vLLM, as are its engine and its workers.

Imports are most of a server's start: 12 s of a core in each of its three processes.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from real_engine import fork_server
from undercroft.demo.server import MODULE, Server


class ForkedServer(Server):
    """As `Server`; its process has what the tests use of a `subprocess.Popen`."""

    def _launch(self, arguments: Sequence[str], environment: Mapping[str, str]) -> ForkedProcess:
        return ForkedProcess(arguments, environment, self.log)


class ForkedProcess:
    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        log.write_bytes(b"")
        self._process = fork_server().Process(target=_serve, args=(list(arguments), dict(environment), str(log)))
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("server", timeout or 0)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)


def _serve(arguments: list[str], environment: dict[str, str], log: str) -> None:
    """In the new process: what a new interpreter would find, then what `python -m` runs.

    Shared memory that a killed server leaves is removed at the end of the tests.
    """
    os.setsid()
    sink = os.open(log, os.O_WRONLY | os.O_APPEND)
    for target, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, sink), (2, sink)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [MODULE, *arguments]
    _fork_from_here_on()
    from vllm import logger

    logger._configure_vllm_root_logger()
    runpy.run_module(MODULE, run_name="__main__")


def _fork_from_here_on() -> None:
    """vLLM forks its processes by default, but for its CPU build, which sets the variable as it checks its options."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def checked(config: object) -> None:
        check(config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = staticmethod(checked)
