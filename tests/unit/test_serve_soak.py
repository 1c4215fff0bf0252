"""A soak of the server: clients that look up, load, save, hang up and are killed leave nothing behind.

`SOAK_SECONDS` says how long; `make soak` takes a minute.
"""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

import soak_client
from serve_process import ServeProcess

SECONDS = float(os.environ.get("SOAK_SECONDS", "10"))
CLIENTS = 8
# Generous: nothing but a leak outlasts it.
SETTLE_TIMEOUT_S = 30
LEFT_OVER = ("sessions", "active_lookups", "loads", "saves", "host_pinned_bytes", "promotion_queue_bytes")

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(SECONDS + 120)]


def start_client(socket_path: Path, seed: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, soak_client.__file__, str(socket_path), str(seed)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def end_client(client: subprocess.Popen[str]) -> Counter[str]:
    """Counts of the client's operations, after it has ended by itself."""
    printed, _ = client.communicate(timeout=60)
    assert client.returncode == 0, "the client says why above"
    return Counter(json.loads(printed))


def send_rubbish(socket_path: Path, rubbish: bytes) -> None:
    """A connection that sends no valid frame, and is closed."""
    with socket.socket(socket.AF_UNIX) as other:
        other.settimeout(30)
        other.connect(str(socket_path))
        try:
            other.sendall(rubbish)
            other.shutdown(socket.SHUT_WR)
            while other.recv(1 << 16):
                pass
        except (BrokenPipeError, ConnectionResetError):
            pass


def test_nothing_is_left_of_clients_that_end_hang_up_or_are_killed(tmp_path: Path) -> None:
    chance = random.Random(4)
    disk = ["--disk-path", str(tmp_path / "disk"), "--disk-capacity", "64MiB", "--host-memory", "32MiB"]
    seeds = iter(range(1_000_000))
    clients: list[subprocess.Popen[str]] = []
    killed = 0
    with ServeProcess(tmp_path / "serve.sock", *disk) as server:
        before = server.status()
        try:
            clients += [start_client(server.socket, next(seeds)) for _ in range(CLIENTS)]
            end = time.monotonic() + SECONDS
            while time.monotonic() < end:
                victim = chance.randrange(CLIENTS)
                try:
                    clients[victim].wait(chance.uniform(0.1, 1.0))
                    end_client(clients[victim])
                    pytest.fail("a client ended by itself")
                except subprocess.TimeoutExpired:
                    clients[victim].kill()
                clients[victim].communicate(timeout=60)
                killed += 1
                clients[victim] = start_client(server.socket, next(seeds))
                send_rubbish(server.socket, chance.randbytes(chance.randrange(1, 100)))
            done = sum(map(end_client, clients), Counter())
        finally:
            for client in clients:
                client.kill()
                client.wait()
        after = server.status()
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        # The connections of killed clients, and of the calls before, end in their own time.
        most = before["server"]["descriptors"]
        while time.monotonic() < deadline and (
            any(after["stats"][name] for name in LEFT_OVER) or after["server"]["descriptors"] > most
        ):
            after = server.status()
        print(f"{killed} clients killed; the last ones: {dict(done)}; server: {after['server']}")
        assert {name: after["stats"][name] for name in LEFT_OVER} == dict.fromkeys(LEFT_OVER, 0)
        assert after["sessions"] == []
        assert after["server"]["connections"] == before["server"]["connections"]
        assert after["server"]["descriptors"] <= most
        assert after["server"]["malformed"] > 0
        assert after["stats"]["checksum_failures"] == 0
        assert all(done[name] for name in ("prefetch", "lookup", "hit", "load", "save", "checked")), "it was no soak"
        assert killed > 0
        assert server.stop() == 0
