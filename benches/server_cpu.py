"""Processor time of `undercroft serve` at so many requests a second: `python benches/server_cpu.py`.

A request has the calls of the scheduler of a vLLM: a lookup of a prompt that is in host memory, its load, and the save
of some new blocks, which evict older ones once host memory is full. The copies are left out: workers make them, not the
server. Without requests (0), the server has clients that are connected.

    python benches/server_cpu.py [--blocks 512] [--new 8] [--clients 4] [--seconds 10] [--json] [RATE ...]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path

from undercroft import _core
from undercroft_bench.lookup import GROUPS, TOKENS_PER_BLOCK, block_hashes, fill

START_S = 60.0
SETTLE_S = 3.0
RATES = (0, 100, 1_000, 10_000)
PROCESS = 2
"""The clock of a process among those that Linux names by its id: CPUCLOCK_SCHED."""


def connect(socket: str) -> tuple[_core.Engine, _core.Session]:
    """A client of the server, as a scheduler is one."""
    engine = _core.Engine({"server": f"unix://{socket}", "server_timeout_ms": 30_000, "min_load_tokens": 0})
    end = time.monotonic() + START_S
    session = engine.register("benches/server_cpu.py", GROUPS, TOKENS_PER_BLOCK)
    while engine.connection()[0] != "up":
        assert time.monotonic() < end, engine.connection()
        time.sleep(0.01)
    return engine, session


def client(place: int, socket: str, rate: float, options: argparse.Namespace, start: Barrier, ended: Queue) -> None:
    """Send requests at a steady rate; tell how many, and how many found their whole prompt."""
    engine, session = connect(socket)
    prompt = block_hashes(options.blocks)
    count, hits = int(rate * options.seconds), 0
    start.wait(START_S)
    begin_s = time.monotonic()
    for index in range(count):
        time.sleep(max(0.0, begin_s + index / rate - time.monotonic()))
        name = f"{place}-{rate}-{index}"
        session.prefetch(name, prompt)
        session.wait(name, START_S)
        tokens = session.lookup(name, prompt).tokens
        load = session.begin_load(name, 0, tokens) if tokens else None
        if load is not None:
            hits += tokens == len(prompt) * TOKENS_PER_BLOCK
            session.end_transfer(load.transfer_id, True)
        new = [hashlib.sha256(f"{name} {block}".encode()).digest() for block in range(options.new)]
        grants = session.poll_saves()
        if new:
            grants.append(session.begin_save(name, prompt + new, (len(prompt) + len(new)) * TOKENS_PER_BLOCK))
        for grant in grants:
            if grant is not None and not grant.pending:
                session.end_transfer(grant.transfer_id, True)
        session.finish_request(name)
    time.sleep(max(0.0, begin_s + options.seconds - time.monotonic()))
    ended.put((count, hits))
    start.wait(START_S)
    engine.close()


def processor_s(pid: int) -> float:
    """The time that the threads of a process have run, those that have ended included."""
    return time.clock_gettime(~pid << 3 | PROCESS)


def measure(socket: str, pid: int, rate: float, options: argparse.Namespace) -> dict[str, float]:
    """The server's cores at a rate, and its processor time for each request."""
    context = multiprocessing.get_context("spawn")
    start, ended = context.Barrier(options.clients + 1), context.Queue()
    given = (socket, rate / options.clients, options, start, ended)
    clients = [context.Process(target=client, args=(place, *given)) for place in range(options.clients)]
    for one in clients:
        one.start()
    start.wait(START_S)
    began, before = time.monotonic(), processor_s(pid)
    answers = [ended.get(timeout=options.seconds * 10 + START_S) for _ in clients]
    took, used = time.monotonic() - began, processor_s(pid) - before
    start.wait(START_S)
    for one in clients:
        one.join()
    count, hits = (sum(column) for column in zip(*answers, strict=True))
    figures = {"rate": rate, "reached": count / took, "hits": hits / count if count else 1.0, "cores": used / took}
    return figures | ({"us_a_request": used / count * 1e6} if count else {})


def main() -> None:
    """Print a row for each rate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rates", nargs="*", type=float, default=RATES, metavar="RATE", help="requests a second")
    parser.add_argument("--blocks", type=int, default=512, help="blocks of a prompt that is cached (%(default)s)")
    parser.add_argument("--new", type=int, default=8, help="blocks that each request saves (%(default)s)")
    parser.add_argument("--clients", type=int, default=4, help="vLLMs (%(default)s)")
    parser.add_argument("--seconds", type=float, default=10, help="of each rate (%(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="server-cpu-") as place:
        socket = f"{place}/serve.sock"
        command = [sys.executable, "-m", "undercroft.cli.main", "serve", "--socket", socket, "--host-memory", "256MiB"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
            try:
                while not Path(socket).exists():
                    assert server.poll() is None, "the server did not start"
                    time.sleep(0.01)
                engine, session = connect(socket)
                fill(session, block_hashes(options.blocks))
                # The server is still touching its memory.
                time.sleep(SETTLE_S)
                for rate in options.rates:
                    row = measure(socket, server.pid, rate, options)
                    print(
                        json.dumps(row) if options.json else "  ".join(f"{key} {row[key]:,.4g}" for key in row),
                        flush=True,
                    )
                engine.close()
            finally:
                server.terminate()


if __name__ == "__main__":
    main()
