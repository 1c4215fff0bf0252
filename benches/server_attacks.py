"""A well-behaved client of `undercroft serve` beside others that ask for too much, or for much.

Each attack is a process of its own. Printed for each: the good client's p50, p99 and longest wait in milliseconds with
no other client and during the attack, and the server's memory beyond its host memory at its peak. The clients speak
the protocol byte by byte, so that they can send messages that no client of ours sends.

An abusive process keeps up to two cores busy beside the server's. With fewer than four, the good client also waits for a
core. With `--first` the kernel gives cores to the server and the good client first (needs root).

    python benches/server_attacks.py [--seconds 3] [--first] [--json] [ATTACK ...]
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


def nobody(_path: str, _prompt: bytes) -> None:
    time.sleep(60)


def measure(name: str, seconds: float, first: bool) -> dict[str, object]:
    """One attack on a server of its own."""
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/run/serve.sock"
        command = ["nice", "-n", str(FIRST)] if first else []
        command += [sys.executable, "-m", "undercroft.cli.main", "serve", "--socket", path]
        size = f"{HOST_MEMORY >> 20}MiB"
        with subprocess.Popen([*command, "--host-memory", size], stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            assert any("ready" in line for line in server.stdout)
            prompt = os.urandom(32 * BLOCKS)
            long_prompt(path, prompt)
            good = GoodClient(path, first)
            good.start()
            time.sleep(0.5)
            good.figures()
            attack = multiprocessing.Process(target=nobody, args=(path, prompt))
            attack.start()
            time.sleep(seconds)
            before = {**good.figures(), "refused": good.refused}
            attack.kill()
            attack = multiprocessing.Process(target=ATTACKS[name], args=(path, prompt))
            base, peak = memory_mib(server.pid), 0.0
            attack.start()
            end = time.monotonic() + seconds
            good.figures()
            while time.monotonic() < end:
                peak = max(peak, memory_mib(server.pid))
                time.sleep(0.01)
            during = {**good.figures(), "refused": good.refused}
            good.ends = True
            lost, ended = good.lost, attack.exitcode is not None
            attack.kill()
            attack.join()
            server.kill()
        if lost or ended:
            # The figures would be those of a client that nobody answers, or whom nobody disturbs.
            who = "the server closed the good client's connection" if lost else "the abusive process ended"
            raise SystemExit(f"server_attacks: error: {name}: {who} before the measurement did")
        return {"attack": name, "before": before, "during": during, "memory_mib": [base, peak]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("attacks", nargs="*", metavar="ATTACK", help="parts of their names; all without")
    parser.add_argument("--seconds", type=float, default=3.0, help="how long each part is measured")
    parser.add_argument("--first", action="store_true", help="the server and the good client get a core before others")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    multiprocessing.set_start_method("fork")
    chosen = [name for name in ATTACKS if not args.attacks or any(part in name for part in args.attacks)]
    if not args.json:
        print(f"{'attack':<38} {'p50':>7} {'p99':>7} | {'p50':>8} {'p99':>8} {'max':>8} {'MiB':>6} refused")
    for name in chosen:
        result = measure(name, args.seconds, args.first)
        if args.json:
            print(json.dumps(result), flush=True)
            continue
        before, during, (base, peak) = result["before"], result["during"], result["memory_mib"]
        print(
            f"{name:<38} {before['p50']:7.2f} {before['p99']:7.2f} | {during['p50']:8.2f} {during['p99']:8.2f} "
            f"{during['max']:8.1f} {peak - base:+6.0f} {during['refused']}",
            flush=True,
        )


if __name__ == "__main__":
    main()
