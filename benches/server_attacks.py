"""A well-behaved client of `undercroft serve` beside others that ask for too much, or for much.

Each attack is a process of its own. Printed for each, in milliseconds that the good client waits: its p50 and p99 with
no other client; its p99 beside the control, two processes that only compute and never speak to the server, as many as
an attack and the server that it keeps busy; its p50, p99 and longest wait during the attack. Then the server's memory
beyond its host memory at its peak, and the processor time of the abusive process and of the server, in cores.

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
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

HOST_MEMORY = 256 << 20
PAYLOAD = 4096
BLOCKS = 60_000
SOURCE = Path(__file__).resolve().parent.parent / "rust/ipc/src/frame.rs"
VERSION = int(re.findall(r"VERSION: u16 = (\d+)", SOURCE.read_text())[0])
REGISTERED, ANSWER = 0, 2
"""Numbers of messages of the server."""
NOTHING = b"\0\1\0"
FIRST = -19
"""Nice value of processes that get a core before others."""
Figures = dict[str, float]


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def text(data: bytes) -> bytes:
    return varint(len(data)) + data


def frame(body: bytes, kind: int = 3) -> bytes:
    return b"UCFT" + struct.pack("<HBBI", VERSION, kind, 0, len(body)) + body


def register(model: bytes = b"a model", kind: int = 0) -> bytes:
    group = bytes([kind]) + varint(16) + varint(PAYLOAD)
    return frame(b"\0" + text(model) + varint(16) + varint(16) + b"\1" + group + b"\0\0")


def hashes(known: int, length: int, data: bytes) -> bytes:
    return varint(known) + bytes([length]) + text(data)


def lookup(request: int, run: bytes, version: int = 1) -> bytes:
    most = varint(2**32 - 1)
    label, computed, least, priority, wait, queued = b"\0", b"\0", b"\0", b"\0", b"\0", b"\0"
    head = varint(request) + varint(version) + label
    return frame(b"\1" + head + computed + most + least + priority + wait + queued + run)


def finish(request: int) -> bytes:
    return frame(b"\4" + varint(request))


def save(request: int, transfer: int, blocks: int, run: bytes, offers: bytes = b"\0") -> bytes:
    return frame(b"\6" + varint(request) + varint(transfer) + varint(16 * blocks) + offers + run)


def end_transfer(transfer: int, ok: bool = True) -> bytes:
    return frame(b"\7" + varint(transfer) + bytes([ok]))


RESET, PING, STATUS = frame(b"\x08\1"), frame(b"\x0a"), frame(b"\x0b")


class Client:
    """A connection that may send any bytes."""

    def __init__(self, path: str, timeout: float = 60.0) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(timeout)
        self.socket.connect(path)
        self.inbox = b""

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def hear(self) -> bytes:
        """The body of the next reply. Raises ConnectionError."""
        while True:
            if len(self.inbox) >= 12:
                end = 12 + struct.unpack("<I", self.inbox[8:12])[0]
                if len(self.inbox) >= end:
                    body, self.inbox = self.inbox[12:end], self.inbox[end:]
                    return body
            data = self.socket.recv(1 << 20)
            if not data:
                raise ConnectionError("closed")
            self.inbox += data

    def call(self, data: bytes) -> bytes:
        self.send(data)
        return self.hear()

    @classmethod
    def registered(cls, path: str, model: bytes = b"a model", kind: int = 0) -> Client:
        client = cls(path)
        reply = client.call(register(model, kind))
        if reply[0] != REGISTERED:
            raise RuntimeError(f"the server refuses to register: {reply!r}")
        return client


def long_prompt(path: str, prompt: bytes) -> None:
    """Saves the prompt that others look up."""
    client = Client.registered(path)
    client.call(save(1, 1, BLOCKS, hashes(0, 32, prompt)))
    client.send(end_transfer(1))
    client.call(PING)


def flood(client: Client, data: bytes) -> None:
    """Sends without end, and reads the replies."""

    def read() -> None:
        with contextlib.suppress(OSError):
            while client.socket.recv(1 << 20):
                pass

    threading.Thread(target=read, daemon=True).start()
    while True:
        client.send(data)


def pings(path: str, _: bytes) -> None:
    flood(Client.registered(path), PING * 80_000)


def statuses(path: str, _: bytes) -> None:
    flood(Client(path), STATUS * 80_000)


def overlapping_offers(path: str, _: bytes) -> None:
    client, blocks = Client.registered(path), 4000
    client.call(save(1, 1, blocks, hashes(0, 32, os.urandom(32 * blocks))))
    client.send(end_transfer(1))
    offers = varint(4000) + (b"\0\0" + varint(blocks)) * 4000
    flood(client, b"".join(save(1, number, blocks, hashes(blocks, 1, b""), offers) for number in range(2, 12)))


def repeated_lookups(path: str, prompt: bytes) -> None:
    client = Client.registered(path)
    client.call(lookup(1, hashes(0, 32, prompt)))
    flood(client, lookup(1, hashes(BLOCKS, 1, b""), 2) * 3000)


def unread_answers(path: str, prompt: bytes) -> None:
    client = Client.registered(path)
    client.call(lookup(1, hashes(0, 32, prompt)))
    while True:
        client.send(lookup(1, hashes(BLOCKS, 1, b""), 2) * 100)


def slow_reader(path: str, prompt: bytes) -> None:
    client = Client.registered(path)
    client.call(lookup(1, hashes(0, 32, prompt)))
    again = lookup(1, hashes(BLOCKS, 1, b""), 2) * 130
    threading.Thread(target=client.send, args=(again,), daemon=True).start()
    while True:
        client.socket.recv(8192)
        time.sleep(0.0005)


def short_hashes(path: str, _: bytes) -> None:
    client = Client.registered(path)
    for request in range(1, 100):
        client.call(lookup(request, hashes(0, 1, os.urandom(500_000))))
    time.sleep(60)


def half_frames(path: str, _: bytes) -> None:
    head = b"UCFT" + struct.pack("<HBBI", VERSION, 3, 0, 16 << 20)
    held = []
    for _ in range(30):
        with contextlib.suppress(OSError):
            client = Client.registered(path)
            held.append(client)
            client.socket.settimeout(0.2)
            client.send(head + bytes((16 << 20) - 1))
    time.sleep(60)


def colliding_hashes(path: str, _: bytes) -> None:
    client, request = Client.registered(path, b"another model"), 0
    while True:
        request += 1
        prefix = os.urandom(8)
        run = hashes(0, 32, b"".join(prefix + os.urandom(24) for _ in range(12_000)))
        client.call(save(request, request, 12_000, run))
        client.send(end_transfer(request, ok=False) + finish(request))


def connections(path: str, _: bytes) -> None:
    held = []
    while len(held) < 1010:
        try:
            held.append(Client(path))
        except OSError:
            time.sleep(0.001)
    time.sleep(60)


def connects(path: str, _: bytes) -> None:
    while True:
        with contextlib.suppress(OSError):
            Client(path).socket.close()


def registrations(path: str, _: bytes) -> None:
    while True:
        with contextlib.suppress(OSError):
            Client(path).call(register(os.urandom(8).hex().encode() * 10_000))


def all_slots(path: str, _: bytes) -> None:
    client = Client.registered(path)
    client.call(save(1, 1, BLOCKS, hashes(0, 32, os.urandom(32 * BLOCKS))))
    time.sleep(60)


def long_saves(path: str, _: bytes) -> None:
    client, request = Client.registered(path, b"another model"), 0
    while True:
        request += 1
        client.call(save(request, request, BLOCKS, hashes(0, 32, os.urandom(32 * BLOCKS))))
        client.send(end_transfer(request) + finish(request))


def long_lookups(path: str, prompt: bytes) -> None:
    client, request = Client.registered(path), 0
    while True:
        request += 1
        client.call(lookup(request, hashes(0, 32, prompt)))
        client.send(finish(request))
        time.sleep(0.005)


def resets(path: str, _: bytes) -> None:
    request = 0
    while True:
        request += 1
        client = Client.registered(path, b"model %d" % request)
        client.call(save(1, 1, BLOCKS, hashes(0, 32, os.urandom(32 * BLOCKS))))
        client.send(end_transfer(1) + RESET)
        client.hear()
        client.socket.close()


ATTACKS: dict[str, Callable[[str, bytes], None]] = {
    "pings": pings,
    "statuses before registering": statuses,
    "offers that overlap": overlapping_offers,
    "one long lookup again and again": repeated_lookups,
    "answers that are not read": unread_answers,
    "answers that are read slowly": slow_reader,
    "hashes of one byte": short_hashes,
    "half frames": half_frames,
    "hashes that collide": colliding_hashes,
    "1,010 connections": connections,
    "connects without end": connects,
    "registrations of long descriptions": registrations,
    "a client that stops in its saves": all_slots,
    "legitimate: saves of 60,000 blocks": long_saves,
    "legitimate: lookups of 60,000 blocks": long_lookups,
    "legitimate: resets of 60,000 blocks": resets,
}


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


def compute(_path: str, _prompt: bytes) -> None:
    while True:
        pass


class Server:
    """A server, and the good client that waits for it."""

    def __init__(self, directory: str, first: bool) -> None:
        self.path = f"{directory}/run/serve.sock"
        command = ["nice", "-n", str(FIRST)] if first else []
        command += [sys.executable, "-m", "undercroft.cli.main", "serve", "--socket", self.path]
        command += ["--host-memory", f"{HOST_MEMORY >> 20}MiB"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert any("ready" in line for line in self.process.stdout)
        self.prompt = os.urandom(32 * BLOCKS)
        long_prompt(self.path, self.prompt)
        self.good = GoodClient(self.path, first)
        self.good.start()
        time.sleep(0.5)

    def beside(self, others: list[Callable[[str, bytes], None]], seconds: float) -> Figures:
        """The good client's waits beside other processes, and what these and the server take."""
        processes = [multiprocessing.Process(target=other, args=(self.path, self.prompt)) for other in others]
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
        if self.good.lost or ended:
            # The figures would be those of a client that nobody answers, or whom nobody disturbs.
            who = "the server closed the good client's connection" if self.good.lost else "the abusive process ended"
            raise SystemExit(f"server_attacks: error: {who} before the measurement did")
        return {**figures, "peak_mib": peak, "cores": took[0] / seconds, "server_cores": took[1] / seconds}

    def end(self) -> None:
        self.good.ends = True
        self.process.kill()
        self.process.wait()


def measure(name: str, seconds: float, rounds: int, first: bool) -> dict[str, object]:
    """One attack on a server of its own."""
    parts = {"alone": [], "control": [compute, compute], "during": [ATTACKS[name]]}
    with tempfile.TemporaryDirectory() as directory:
        server = Server(directory, first)
        base = memory_mib(server.process.pid)
        try:
            figures = [{part: server.beside(parts[part], seconds) for part in parts} for _ in range(rounds)]
        finally:
            server.end()
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
