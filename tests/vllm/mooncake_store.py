"""A Mooncake store of a test's own: a master, and a process that lends memory to the store."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from undercroft import _core

PATIENCE_S = 60.0
FOUND = "import mooncake, site; print(list(mooncake.__path__)[0]); print(site.getsitepackages()[0])"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


@contextlib.contextmanager
def running(program: Path, *arguments: str) -> Iterator[None]:
    # The processes listen nowhere else.
    env = {**os.environ, "MC_TCP_BIND_ADDRESS": "127.0.0.1", "MC_LOG_LEVEL": "ERROR"}
    silent = subprocess.DEVNULL
    with subprocess.Popen([str(program), *arguments], env=env, stdout=silent, stderr=silent) as process:
        try:
            yield
        finally:
            process.kill()


@contextlib.contextmanager
def mooncake_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of the store. Skips the test without a Python that has Mooncake's wheel."""
    python = os.environ.get("UNDERCROFT_TEST_MOONCAKE")
    if python is None:
        pytest.skip("UNDERCROFT_TEST_MOONCAKE names no Python with Mooncake's wheel; make test-remote has one")
    found = subprocess.run([python, "-c", FOUND], capture_output=True, text=True, check=True)
    programs, packages = (Path(line) for line in found.stdout.splitlines()[-2:])
    # The process of Mooncake's client is one of this Python, which has no wheel of Mooncake.
    monkeypatch.setenv("PYTHONPATH", f"{packages}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep))
    port, admin = free_port(), free_port()
    master = running(
        programs / "mooncake_master",
        "--rpc_address=127.0.0.1",
        f"--rpc_port={port}",
        "--metrics_host=127.0.0.1",
        f"--metrics_port={admin}",
    )
    client = running(
        programs / "mooncake_client",
        "--host=127.0.0.1",
        f"--port={free_port()}",
        f"--master_server_address=127.0.0.1:{port}",
        "--metadata_server=P2PHANDSHAKE",
        "--global_segment_size=256 MB",
        "--protocol=tcp",
    )
    with master:
        _until_it_listens(port)
        with client:
            url = f"mooncake://127.0.0.1:{port}/start?admin=127.0.0.1:{admin}"
            end = time.monotonic() + PATIENCE_S
            while (first := _core.remote_check(url)[0])["status"] != "ok":
                assert time.monotonic() < end, first
                time.sleep(0.05)
            yield url


def _until_it_listens(port: int) -> None:
    end = time.monotonic() + PATIENCE_S
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        assert time.monotonic() < end, "mooncake_master does not start"
        time.sleep(0.02)
