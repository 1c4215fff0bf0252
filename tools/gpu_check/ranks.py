"""Two ranks, each a process with a device of its own, that share an arena as tensor parallelism does."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gpu_check.correctness import ranks_round_trip
from gpu_check.report import Row, right
from gpu_check.rig import Rig
from undercroft._core import Arena, Engine
from undercroft.config import UndercroftConfig
from undercroft.device import driver
from undercroft.device.factory import pin_arena
from undercroft.engine import engine_options

RANKS = 2
BLOCKS = 48
TIMEOUT_S = 100.0


class _Group(NamedTuple):
    """As `Engine.register` takes it."""

    kind: str
    block_tokens: int
    payload_bytes: int
    window_tokens: int = 0


def check(rig: Rig) -> list[Row]:
    """Both ranks copy and verify at once, and pin the arena in turns."""
    rig.say(f"{RANKS} ranks on {RANKS} devices")
    with tempfile.TemporaryDirectory(prefix="ugc") as directory:
        config = UndercroftConfig.parse({"host_memory": rig.pick(2 << 30, 16 << 20), "socket_dir": directory})
        engine = Engine(engine_options(config))
        try:
            # A process gets the arena for an open session only.
            _session = engine.register("{}", [_Group("full", 16, 4096)], 16)
            found = _run(rig, engine.arena.socket, engine.arena.session)
        finally:
            engine.close()
    rows = []
    for rank, (answer, error) in enumerate(found):
        if answer is None:
            rows.append(right(f"rank {rank}", False, error))
            continue
        rows.append(right(f"rank {rank}: bytes", not answer["wrong"], answer["wrong"]))
        foreign = answer["foreign_contexts"]
        rows.append(
            right(f"rank {rank}: contexts on its own device only", not foreign, f"also on {foreign}" if foreign else "")
        )
        rows.append(Row(f"rank {rank}: pinning beside the other rank", answer["pin_s_per_gib"], "s/GiB"))
    return rows


def _run(rig: Rig, socket: str, session: int) -> list[tuple[dict[str, Any] | None, str]]:
    """Each rank's answer, or why there is none."""
    kind = rig.device.type
    path = str(Path(__file__).resolve().parent)
    started = []
    for rank in range(RANKS):
        options = ["--small"] if rig.small else []
        command = [sys.executable, path, "--rank", str(rank), "--socket", socket, "--session", str(session)]
        command += ["--device", kind, *options]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    deadline = time.monotonic() + TIMEOUT_S
    found: list[tuple[dict[str, Any] | None, str]] = []
    for process in started:
        try:
            out, err = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            found.append((None, f"did not end within {TIMEOUT_S:g} s"))
            continue
        if process.returncode:
            found.append(
                (None, f"ended with {process.returncode}: {(err.strip().splitlines() or ['nothing said'])[-1]}")
            )
        else:
            found.append((json.loads(out), ""))
    return found


def be_rank(rank: int, socket: str, session: int, kind: str, *, small: bool) -> int:
    """One rank's process: print its answer."""
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    rig = Rig(device, small)
    arena = Arena.attach(socket, session)
    begin = time.perf_counter()
    pinner = pin_arena(device, arena)
    if pinner is not None:
        pinner.wait()
        pinned = time.perf_counter() - begin
        pinner.close()
    else:
        pinned = 0.0
    wrong = ranks_round_trip(rig, arena, rank, RANKS, rig.pick(BLOCKS, 12))
    answer = {
        "wrong": wrong,
        "foreign_contexts": foreign_contexts(rank) if kind == "cuda" else [],
        "pin_s_per_gib": round(pinned / arena.size * (1 << 30), 3),
    }
    arena.let_go()
    print(json.dumps(answer))
    return 0


def foreign_contexts(own: int) -> Sequence[int]:
    """Other devices on which this process has made a context, each of which costs some hundred MiB there."""
    library = driver.load()
    found = []
    for device in range(torch.cuda.device_count()):
        flags, active = ctypes.c_uint(), ctypes.c_int()
        library.cuDevicePrimaryCtxGetState(ctypes.c_int(device), ctypes.byref(flags), ctypes.byref(active))
        if active.value and device != own:
            found.append(device)
    return found
