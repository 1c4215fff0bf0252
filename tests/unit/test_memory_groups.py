"""The memory limits of real control groups: the default fits into them, more is refused, and who pays for pages."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from memory_groups import MemoryGroup, nested
from served_client import until
from undercroft.units import parse_size

MIB = 1 << 20
LIMIT = 320 * MIB

ENGINE = """
import json, sys, time
from undercroft import _core
from undercroft.config import UndercroftConfig
from undercroft.engine import engine_options, open_engine

config = UndercroftConfig.parse({"socket_dir": sys.argv[1]} | json.loads(sys.argv[2]))
available = _core.available_memory()
engine = open_engine(config)
arena = _core.Arena.attach(engine.arena.socket, engine.arena.session)
while (populated := __import__("os").lseek(arena.fileno(), 0, 4)) < arena.size:
    time.sleep(0.01)
print(json.dumps({"available": available, "arena": arena.size, "group": _core.limiting_group()}))
"""


def command(group: MemoryGroup, *argv: str) -> subprocess.CompletedProcess[str]:
    """The result of a process in the group."""
    return subprocess.run(
        [sys.executable, *argv], preexec_fn=group.join, capture_output=True, text=True, timeout=120, check=False
    )


def test_the_limit_of_a_group_above_the_processs_own_counts(tmp_path: Path) -> None:
    with nested(f"undercroft-{os.getpid()}", "step") as (job, step):
        job.limit(LIMIT)
        # The default: a quarter of what the group leaves. The engine populates it, and nothing is killed.
        done = command(step, "-c", ENGINE, str(tmp_path), "{}")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["group"] == str(job.directory)
        assert LIMIT // 2 < found["available"] < LIMIT
        assert 0.2 * found["available"] < found["arena"] <= 0.25 * found["available"]

        done = command(step, "-c", ENGINE, str(tmp_path), '{"host_memory": "600MiB"}')
        refusal = re.search(r"host_memory = 600 MiB is more than the ([0-9.]+ MiB) of memory available", done.stderr)
        assert done.returncode == 1 and refusal is not None, done.stderr
        assert LIMIT // 2 < parse_size(refusal[1]) < LIMIT

        for argv in (["check-config", '{"host_memory": "600MiB"}'], ["serve", "--host-memory", "600MiB"]):
            done = command(step, "-m", "undercroft.cli.main", *argv)
            assert (done.returncode, "600 MiB is more than the" in done.stderr) == (2, True), done.stderr


PIN = """
import sys
from undercroft._core import Arena
from undercroft.device.pinning import ArenaPinner, EnginePages, Turns
print("ready", flush=True)
socket, session = sys.stdin.readline().split()
arena = Arena.attach(socket, int(session))
pinner = ArenaPinner(arena.address, arena.size, lambda *_: None, lambda _: None, populate=arena.prefault,
                     turns=Turns(arena.fileno()), pages=EnginePages(arena.fileno()))
pinner.wait()
print(pinner.pinned_bytes, flush=True)
sys.stdin.read()
"""
SERVE = """
import sys
from core_values import Group
from undercroft._core import Engine
from undercroft.config import UndercroftConfig
from undercroft.engine import engine_options
options = engine_options(UndercroftConfig.parse({"host_memory": "256MiB", "socket_dir": sys.argv[1]}))
engine = Engine(options)
session = engine.register("{}", [Group("full", 16, 4096, 0)], 16)
print(engine.arena.socket, engine.arena.session, flush=True)
sys.stdin.read()
"""


def test_the_memory_of_a_server_is_charged_to_the_server_although_a_worker_pins_it(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}

    def start(group: MemoryGroup, *argv: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", *argv],
            env=environment,
            preexec_fn=group.join,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    with (
        nested(f"undercroft-server-{os.getpid()}") as (of_server,),
        nested(f"undercroft-vllm-{os.getpid()}") as (of_vllm,),
        # The worker runs already: it can begin to pin as soon as the server is there.
        start(of_vllm, PIN) as worker,
        start(of_server, SERVE, str(tmp_path)) as server,
    ):
        assert worker.stdout.readline() == "ready\n"
        worker.stdin.write(server.stdout.readline())
        worker.stdin.flush()
        assert worker.stdout.readline() == f"{256 * MIB}\n"
        # Statistics of groups are some pages late.
        until("the statistics", lambda: of_server.shared_bytes > 250 * MIB)
        assert of_vllm.shared_bytes < 6 * MIB
        for process in (worker, server):
            process.stdin.close()
