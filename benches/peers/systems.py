"""The systems that are compared: what each claims to hold, with which options, and the server that some need."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HOST_MIB = 512
"""Host memory of every system."""
DISK_MIB = 4096
"""Of those whose disk has a bound."""
START_S = 60.0

DEVICE, HOST, DISK, RESTART = "device", "host", "disk", "restart"
TIERS = (DEVICE, HOST, DISK, RESTART)


@dataclass(frozen=True, slots=True)
class System:
    """One of the rows."""

    name: str
    title: str
    tiers: tuple[str, ...]
    """Where it claims to hold the KV cache of earlier prompts."""
    environment: str = ""
    """The folder of `.venv-peers` with its packages; none for the project's own."""
    plugins: str = ""
    """Plug-ins that vLLM loads."""

    @property
    def python(self) -> Path:
        """The interpreter that runs it."""
        if self.environment:
            return ROOT / ".venv-peers" / self.environment / "bin" / "python"
        return Path(sys.executable)


ALONE = System("vllm", "vLLM alone", (DEVICE,))
SYSTEMS = (
    ALONE,
    System("offloading", "vLLM's offloading, host memory", (DEVICE, HOST)),
    System("files", "vLLM's offloading with its file tier", TIERS),
    System("lmcache", "LMCache, server process", TIERS, environment="lmcache"),
    System("embedded", "undercroft embedded", TIERS, plugins="undercroft"),
    System("served", "undercroft served", TIERS, plugins="undercroft"),
)


@dataclass(frozen=True, slots=True)
class Server:
    """The process beside vLLM that some systems need, and how vLLM's connector finds it."""

    process: subprocess.Popen[bytes] | None
    options: dict[str, Any]


def connector(name: str, directory: Path, server: Server) -> dict[str, Any]:
    """Arguments of `real_engine.Engine`."""
    if name == "vllm":
        return {}
    if name == "lmcache":
        # Shared memory, which on a CPU is not what it takes by itself, and the mode that its server offers.
        options = {"lmcache.mp.mp_transfer_mode": "lmcache_driven", "lmcache.mp.save_decode_cache": True}
        options |= server.options
        return {"connector": "LMCacheMPConnector", "undercroft": options}
    if name in ("offloading", "files"):
        options = {
            "spec_module_path": "cpu_tier_spec",
            "cpu_bytes_to_use": HOST_MIB << 20,
            "offload_prompt_only": False,
        }
        if name == "offloading":
            return {"connector": "OffloadingConnector", "undercroft": options | {"spec_name": "CpuOffloadingSpec"}}
        tiers = [{"type": "fs", "root_dir": str(directory)}]
        options |= {"spec_name": "CpuTieringSpec", "secondary_tiers": tiers}
        return {"connector": "OffloadingConnector", "undercroft": options}
    # The defaults, in place of those of the tests' engines.
    options = {"promotion_wait": "planned", "min_load_tokens": None, **server.options}
    if name == "embedded":
        options |= {"host_memory": HOST_MIB << 20, "disk_path": str(directory), "disk_capacity": DISK_MIB << 20}
    return {"undercroft": options}


@contextmanager
def serving(name: str, directory: Path, log: Path) -> Iterator[Server]:
    """The system's server while the block runs. ``log``: the file for what it prints."""
    if name not in ("lmcache", "served"):
        yield Server(None, {})
        return
    ports = free_ports(3)
    command, options = lmcache_server(directory, ports) if name == "lmcache" else undercroft_server(directory)
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_S
        while not is_ready(name, directory, ports):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"its server did not start: {last_line(log)}")
            time.sleep(0.1)
        yield Server(process, options)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def lmcache_server(directory: Path, ports: list[int]) -> tuple[list[str], dict[str, Any]]:
    """LMCache's server with the faster of its two file adapters, and the options of its connector."""
    adapter = {
        "type": "fs_native",
        "base_path": str(directory),
        "use_odirect": True,
        "max_capacity_gb": DISK_MIB / 1024,
        "eviction": {"eviction_policy": "LRU"},
    }
    command = [str(Path(sys.executable).with_name("lmcache")), "server", "--l1-size-gb", str(HOST_MIB / 1024)]
    command += ["--eviction-policy", "LRU"]
    command += ["--port", str(ports[0]), "--http-port", str(ports[1]), "--prometheus-port", str(ports[2])]
    command += ["--host", "127.0.0.1", "--http-host", "127.0.0.1", "--l2-adapter", json.dumps(adapter)]
    return command, {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": ports[0]}


def undercroft_server(directory: Path) -> tuple[list[str], dict[str, Any]]:
    """undercroft's server, and the options of its connector."""
    path = socket_of(directory)
    command = [sys.executable, "-m", "undercroft.cli.main", "serve", "--socket", str(path)]
    command += ["--host-memory", f"{HOST_MIB}MiB", "--disk-path", str(directory), "--disk-capacity", f"{DISK_MIB}MiB"]
    return command, {"server": f"unix://{path}"}


def socket_of(directory: Path) -> Path:
    """In a folder that only this user reads, as the server demands it."""
    folder = directory.parent / "s"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder / "s"


def is_ready(name: str, directory: Path, ports: list[int]) -> bool:
    """Whether the server answers."""
    if name == "served":
        return socket_of(directory).exists()
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{ports[1]}/healthcheck", timeout=1) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def last_line(log: Path) -> str:
    """The last line of a log that says something."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()] if log.exists() else []
    return next((line for line in reversed(lines) if any(map(str.isalnum, line))), "it printed nothing")


def environment_of(system: System) -> dict[str, str]:
    """Of the process that runs it: this checkout, no plug-in but its own, and no report to anybody."""
    paths = [ROOT / name for name in ("benches", "tests/vllm", *(() if system.environment else ("python",)))]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "VLLM_PLUGINS": system.plugins,
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_DISABLE_BANNER": "1",
        "LMCACHE_LOG_LEVEL": "WARNING",
        "PYTHONWARNINGS": "ignore",
    }
