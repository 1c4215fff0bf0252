"""``undercroft bench lookup --mode served``: lookups of an all-hit prefix through a server, a process of its own."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from undercroft.cli.output import CommandError
from undercroft_bench.lookup import GROUPS, PAYLOAD_BYTES, TOKENS_PER_BLOCK, block_hashes, fill, percentile

if TYPE_CHECKING:
    from multiprocessing.synchronize import Barrier

    from undercroft._core import Engine, Session

START_S = 60.0
"""Longest wait for the server to start, and for one answer."""
IN_FLIGHT = 8
"""Lookups that each client has under way at once, where there are several: requests arrive in bursts."""
PATIENCE_MS = 30_000.0
"""A server that is late on a busy machine is measured, not given up."""


def measure(keys: int, rounds: int, clients: int) -> dict[str, Any]:
    """Times of ``rounds`` lookups of ``keys`` blocks by one client, or lookups a second by several processes."""
    with _server(keys) as socket:
        hashes = block_hashes(keys)
        engine, session = _connect(socket)
        try:
            fill(session, hashes)
            if clients == 1:
                return {
                    "mode": "served",
                    "keys": keys,
                    "clients": 1,
                    "rounds": rounds,
                    **_times(session, hashes, rounds),
                }
            rate = _rate(socket, keys, rounds, clients)
            return {"mode": "served", "keys": keys, "clients": clients, "rounds": rounds, "lookups_per_s": rate}
        finally:
            engine.close()


@contextmanager
def _server(keys: int) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="undercroft-bench-") as directory:
        socket = str(Path(directory) / "run" / "serve.sock")
        memory = keys * PAYLOAD_BYTES * 2 + (64 << 20)
        command = [
            sys.executable,
            "-m",
            "undercroft.cli.main",
            "serve",
            "--socket",
            socket,
            "--host-memory",
            str(memory),
        ]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            end = time.monotonic() + START_S
            while not Path(socket).exists():
                if server.poll() is not None or time.monotonic() > end:
                    raise CommandError("the server did not start")
                time.sleep(0.01)
            yield socket
        finally:
            server.terminate()
            server.wait()


def _connect(socket: str) -> tuple[Engine, Session]:
    from undercroft import _core

    engine = _core.Engine({"server": f"unix://{socket}", "server_timeout_ms": PATIENCE_MS})
    session = engine.register("undercroft bench lookup", GROUPS, TOKENS_PER_BLOCK)
    state, why = engine.connection()
    if state != "up":
        raise CommandError(f"the server cannot be used ({state}: {why})")
    return engine, session


def _times(session: Session, hashes: list[bytes], rounds: int) -> dict[str, float]:
    clock = time.perf_counter_ns
    tokens = len(hashes) * TOKENS_PER_BLOCK
    scheduler, ready = [], []
    # A tenth more at the start warms the caches and is not counted.
    for index in range(-(rounds // 10), rounds):
        name = f"request-{index}"
        start = clock()
        session.prefetch(name, hashes)
        submitted = clock()
        session.wait(name, START_S)
        answered = clock()
        answer = session.lookup(name, hashes)
        end = clock()
        if answer.tokens != tokens:
            raise CommandError(f"the lookup answered {answer.tokens} tokens where {tokens} are in host memory")
        session.finish_request(name)
        if index >= 0:
            scheduler.append(float(submitted - start + end - answered))
            ready.append(float(answered - start))
    return {
        "scheduler_p50_us": percentile(scheduler, 50) / 1e3,
        "scheduler_p99_us": percentile(scheduler, 99) / 1e3,
        "ready_p50_us": percentile(ready, 50) / 1e3,
        "ready_p99_us": percentile(ready, 99) / 1e3,
    }


def _rate(socket: str, keys: int, rounds: int, clients: int) -> float:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(clients + 1)
    processes = [context.Process(target=_client, args=(socket, keys, rounds, barrier)) for _ in range(clients)]
    for process in processes:
        process.start()
    barrier.wait(START_S)
    start = time.perf_counter()
    for process in processes:
        process.join()
    seconds = time.perf_counter() - start
    if any(process.exitcode for process in processes):
        raise CommandError("a client failed")
    return clients * (rounds // IN_FLIGHT * IN_FLIGHT) / seconds


def _client(socket: str, keys: int, rounds: int, barrier: Barrier) -> None:
    engine, session = _connect(socket)
    hashes = block_hashes(keys)
    tokens = keys * TOKENS_PER_BLOCK
    names = [f"request-{index}" for index in range(IN_FLIGHT)]
    barrier.wait(START_S)
    for _ in range(rounds // IN_FLIGHT):
        for name in names:
            session.prefetch(name, hashes)
        for name in names:
            session.wait(name, START_S)
            if session.lookup(name, hashes).tokens != tokens:
                raise CommandError("a lookup missed blocks in host memory")
            session.finish_request(name)
    engine.close()
