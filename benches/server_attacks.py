"""A well-behaved client of `undercroft serve` beside others that ask for too much, or for much.

Each attack is a process of its own, or several. Printed for each, in milliseconds that the good client waits: its p50
and p99 with no other client; its p99 beside the control; its p50, p99 and longest wait during the attack. Then the
server's memory beyond its host memory at its peak, and the processor time of the abusive processes and of the server,
in cores; and how many saves of the good client the server has refused for lack of memory.

The control is the same load without the attack: two processes that only compute and never speak to the server, as many
as an attack and the server that it keeps busy. The control of an attack of several processes is the same attack on
another server, since the kernel divides the cores among all of them and the serving thread.

The three take turns, and the round with the least p99 counts for each: other work on the machine only adds to the
waits. With `--first` the kernel gives cores to the server and the good client before others (needs root).

    python benches/server_attacks.py [--seconds 2] [--rounds 3] [--first] [--json] [ATTACK ...]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from attacks import (
    ANSWER,
    ATTACKS,
    BLOCKS,
    STATUS,
    Client,
    end_transfer,
    finish,
    hashes,
    long_prompt,
    lookup,
    save,
    varint,
)

HOST_MEMORY = 256 << 20
FIRST = -19
"""Nice value of processes that get a core before others."""
Figures = dict[str, float]


class GoodClient(threading.Thread):
    """Looks 64 hashes up every 2 ms, and saves 4 blocks now and then."""

    def __init__(self, path: str, first: bool) -> None:
        super().__init__(daemon=True)
        self.path = path
        self.first = first
        self.waits: list[float] = []
        self.asked_at: float | None = None
        self.refused = 0
        self.lost = False
        self.ends = False

    def run(self) -> None:
        if self.first:
            # Of this thread alone.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), FIRST)
        client, request, prompt = Client.registered(self.path, b"good"), 0, os.urandom(32 * 64)
        while not self.ends:
            request += 1
            start = self.asked_at = time.perf_counter()
            try:
                if client.call(lookup(request, hashes(0, 32, prompt)))[0] != ANSWER:
                    raise RuntimeError("the server gives no answer")
                self.asked_at = None
                self.waits.append(time.perf_counter() - start)
                client.send(finish(request))
                if request % 16 == 0:
                    answer = client.call(save(request, request, 4, hashes(0, 32, os.urandom(128))))
                    self.refused += answer[1 + len(varint(request))]
                    client.send(end_transfer(request, ok=False) + finish(request))
            except OSError:
                self.lost = True
                return
            time.sleep(0.002)

    def figures(self) -> dict[str, float]:
        waits, self.waits = self.waits, []
        asked_at = self.asked_at
        if asked_at is not None:
            # An answer that has not come.
            waits.append(time.perf_counter() - asked_at)
        waits = sorted(waits) or [float("inf")]
        at = lambda share: 1e3 * waits[min(len(waits) - 1, int(len(waits) * share))]  # noqa: E731
        return {"p50": at(0.5), "p99": at(0.99), "max": at(1.0)}


def memory_mib(pid: int) -> float:
    """The process's own memory: its host memory is shared."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                return int(line.split()[1]) / 1024
    return 0.0


def processor_s(pid: int | None) -> float:
    """The processor time of a process, in seconds."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


class Server:
    """A server with a long prompt."""

    def __init__(self, directory: str, first: bool) -> None:
        self.path = f"{directory}/serve.sock"
        command = ["nice", "-n", str(FIRST)] if first else []
        command += [sys.executable, "-m", "undercroft.cli.main", "serve", "--socket", self.path]
        command += ["--host-memory", f"{HOST_MEMORY >> 20}MiB"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert any("ready" in line for line in self.process.stdout)
        self.prompt = os.urandom(32 * BLOCKS)
        long_prompt(self.path, self.prompt)

    def rest(self) -> None:
        """Waits until the sessions of processes that have ended are gone: the server ends them in steps."""
        until = time.monotonic() + 10
        while sessions(self.path) > 1 and time.monotonic() < until:
            time.sleep(0.05)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def sessions(path: str) -> int:
    """Open sessions of a server."""
    client = Client(path)
    with client.socket:
        found = re.search(rb'"sessions":(\d+)', client.call(STATUS))
    assert found is not None
    return int(found[1])


class Attacked(Server):
    """A server, and the good client that waits for it."""

    def __init__(self, directory: str, first: bool) -> None:
        super().__init__(directory, first)
        self.good = GoodClient(self.path, first)
        self.good.start()
        time.sleep(0.5)

    def beside(self, others: list[Callable[[str, bytes], None]], seconds: float, at: Server) -> Figures:
        """The good client's waits beside processes that speak to the server ``at``, and what these and the good
        client's server take."""
        processes = [multiprocessing.Process(target=other, args=(at.path, at.prompt)) for other in others]
        peak, used = 0.0, processor_s(self.process.pid)
        for process in processes:
            process.start()
        end = time.monotonic() + seconds
        self.good.figures()
        while time.monotonic() < end:
            peak = max(peak, memory_mib(self.process.pid))
            time.sleep(0.01)
        figures = self.good.figures()
        took = sum(processor_s(process.pid) for process in processes), processor_s(self.process.pid) - used
        ended = any(process.exitcode is not None for process in processes)
        for process in processes:
            process.kill()
            process.join()
        # An attack may have stopped it.
        at.process.send_signal(signal.SIGCONT)
        at.rest()
        if self.good.lost or ended:
            # The figures would be those of a client that nobody answers, or whom nobody disturbs.
            who = "the server closed the good client's connection" if self.good.lost else "the abusive process ended"
            raise SystemExit(f"server_attacks: error: {who} before the measurement did")
        return {**figures, "peak_mib": peak, "cores": took[0] / seconds, "server_cores": took[1] / seconds}

    def end(self) -> None:
        self.good.ends = True
        super().end()


def measure(name: str, seconds: float, rounds: int, first: bool) -> dict[str, object]:
    """One attack on a server of its own."""
    attack = ATTACKS[name]
    with tempfile.TemporaryDirectory() as directory:
        server = Attacked(f"{directory}/run", first)
        elsewhere = server if attack.control is not None else Server(f"{directory}/other", first)
        control = attack.processes if attack.control is None else attack.control
        parts = {"alone": ([], server), "control": (control, elsewhere), "during": (attack.processes, server)}
        base = memory_mib(server.process.pid)
        try:
            figures = [
                {part: server.beside(others, seconds, at) for part, (others, at) in parts.items()}
                for _ in range(rounds)
            ]
        finally:
            server.end()
            elsewhere.end()
        least = {part: min((of[part] for of in figures), key=lambda one: one["p99"]) for part in parts}
        peak = max(of["during"]["peak_mib"] for of in figures)
        return {"attack": name, **least, "added_mib": peak - base, "refused": server.good.refused}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("attacks", nargs="*", metavar="ATTACK", help="parts of their names; all without")
    parser.add_argument("--seconds", type=float, default=2.0, help="how long each part of a round is measured")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--first", action="store_true", help="the server and the good client get a core before others")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    multiprocessing.set_start_method("fork")
    chosen = [name for name in ATTACKS if not args.attacks or any(part in name for part in args.attacks)]
    if not args.json:
        print(
            f"{'attack':<38} {'p50':>6} {'p99':>6} | {'control':>7} | {'p50':>6} {'p99':>6} {'max':>6} | {'MiB':>5} "
            f"{'cores':>9} refused"
        )
    for name in chosen:
        result = measure(name, args.seconds, args.rounds, args.first)
        if args.json:
            print(json.dumps(result), flush=True)
            continue
        alone, control, during = result["alone"], result["control"], result["during"]
        print(
            f"{name:<38} {alone['p50']:6.2f} {alone['p99']:6.2f} | {control['p99']:7.2f} | {during['p50']:6.2f} "
            f"{during['p99']:6.2f} {during['max']:6.1f} | {result['added_mib']:+5.0f} {during['cores']:4.2f} "
            f"{during['server_cores']:4.2f} {result['refused']}",
            flush=True,
        )


if __name__ == "__main__":
    main()
