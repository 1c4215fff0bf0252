"""A soak of kills: whoever is killed or stopped, no block that is loaded has a wrong byte.

SIGKILL and SIGSTOP hit a server and its clients, and the engines that share a directory: the owner, and those that
take it over. `SOAK_SECONDS` says how long each of the four parts takes, and `SOAK_SEED` which faults come;
`make soak-kill` divides `SOAK_SECONDS` among the parts.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

import kill_client
from serve_process import ServeProcess

SECONDS = float(os.environ.get("SOAK_SECONDS", "6"))
SEED = int(os.environ.get("SOAK_SEED", "7"))
CLIENTS = 4
DISK = 96 << 20
HOST_MEMORY = 24 << 20

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(SECONDS + 300)]


class Soak:
    """Clients of one engine, with or without a server."""

    def __init__(self, directory: Path, shares: bool, key_file: Path | None, seed: int) -> None:
        self.random = random.Random(seed)
        self.directory = directory
        self.socket = directory / "s" / "serve.sock"
        self.key_file = key_file
        self.shares = shares
        self.faults: Counter[str] = Counter()
        self.done: Counter[str] = Counter()
        self.longest_ms = 0
        self.seeds = iter(range(seed * 1_000_000, (seed + 1) * 1_000_000))
        self.server = None if shares else self.serve()
        self.clients = [self.start() for _ in range(CLIENTS)]

    def serve(self) -> ServeProcess:
        key = ["--key-file", str(self.key_file)] if self.key_file else []
        disk = ["--disk-path", str(self.directory / "disk"), "--disk-capacity", str(DISK)]
        return ServeProcess(self.socket, *disk, *key, "--host-memory", str(HOST_MEMORY))

    def start(self) -> subprocess.Popen[str]:
        """A client of the server, or one that opens the directory or attaches to its owner."""
        options: dict = {"server": f"unix://{self.socket}"}
        if self.shares:
            disk = {"path": str(self.directory / "disk"), "capacity": DISK}
            options = {"host_memory": HOST_MEMORY, "disks": [disk], "share": True}
            options["socket_dir"] = str(self.directory / "s")
            options |= {"key_file": str(self.key_file)} if self.key_file else {}
        command = [sys.executable, kill_client.__file__, json.dumps(options), str(next(self.seeds))]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def end(self, at: int) -> None:
        """Let a client end by itself, and take its counts."""
        printed, _ = self.clients[at].communicate(timeout=120)
        assert self.clients[at].returncode == 0, "the client says why above"
        counts = Counter(json.loads(printed))
        self.longest_ms = max(self.longest_ms, counts.pop("longest_ms"))
        self.done += counts
        assert not self.done["wrong"], self.done

    def pause(self, process: subprocess.Popen[str]) -> None:
        process.send_signal(signal.SIGSTOP)
        time.sleep(self.random.uniform(0.02, 1.0))
        process.send_signal(signal.SIGCONT)

    def fault(self) -> None:
        """One fault, or the ordinary end of a client."""
        at = self.random.randrange(CLIENTS)
        kinds = {"kill client": 30, "stop client": 10, "end client": 30}
        if self.server is not None:
            kinds |= {"kill server": 25, "stop server": 5}
        (kind,) = self.random.choices(list(kinds), list(kinds.values()))
        self.faults[kind] += 1
        if kind == "stop client":
            self.pause(self.clients[at])
        elif kind == "stop server":
            self.pause(self.server.process)
        elif kind == "kill server":
            self.server.close()
            time.sleep(self.random.uniform(0, 0.5))
            self.server = self.serve()
        else:
            if kind == "kill client":
                self.clients[at].kill()
                self.clients[at].communicate(timeout=60)
            else:
                self.end(at)
            self.clients[at] = self.start()

    def run(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(self.random.uniform(0.1, 0.6))
            assert all(client.poll() is None for client in self.clients), "a client ended by itself"
            assert self.server is None or self.server.process.poll() is None, "the server ended by itself"
            self.fault()
        for at in range(CLIENTS):
            self.end(at)
        if self.server is not None:
            assert self.server.stop() == 0

    def close(self) -> None:
        for client in self.clients:
            client.kill()
            client.wait()
        if self.server is not None:
            self.server.close()


@pytest.mark.parametrize("encrypts", [False, True], ids=["plain", "key_file"])
@pytest.mark.parametrize("shares", [False, True], ids=["server", "shared directory"])
def test_no_byte_is_wrong_after_any_process_is_killed_or_stopped(tmp_path: Path, shares: bool, encrypts: bool) -> None:
    key_file = None
    if encrypts:
        key_file = tmp_path / "key"
        key_file.write_text(secrets.token_hex(32))
        key_file.chmod(0o600)
    soak = Soak(tmp_path, shares, key_file, SEED)
    try:
        soak.run(SECONDS)
    finally:
        soak.close()
    part = f"{'shared directory' if shares else 'server'}, {'key_file' if encrypts else 'plain'}, seed {SEED}"
    done, faults = dict(sorted(soak.done.items())), dict(sorted(soak.faults.items()))
    print(f"{part}: {faults}; {done}; longest lookup {soak.longest_ms} ms; wrong {soak.done['wrong']}")
    assert soak.done["wrong"] == 0
    assert soak.done["compared"] > 0 and soak.done["saves"] > 0, "it was no soak"
