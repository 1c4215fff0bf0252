"""Clients of `undercroft serve` that ask for too much, or for much: for `server_attacks.py`."""

from __future__ import annotations

import array
import contextlib
import dataclasses
import fcntl
import os
import random
import re
import signal
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path

PAYLOAD = 4096
BLOCKS = 60_000
_SOURCE = Path(__file__).resolve().parent.parent / "rust/ipc/src/frame.rs"
VERSION = int(re.findall(r"VERSION: u16 = (\d+)", _SOURCE.read_text())[0])
REGISTERED, ANSWER = 0, 2
"""Numbers of messages of the server."""
NOTHING = b"\0\1\0"


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
    return frame(b"\0" + text(model) + varint(16) + varint(16) + b"\1" + group + b"\0\0\0")


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


def begin_load(request: int, transfer: int, blocks: int) -> bytes:
    return frame(b"\5" + varint(request) + varint(transfer) + b"\0" + varint(16 * blocks))


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


def lingering() -> tuple[socket.socket, socket.socket]:
    """A socket whose last close waits for ten seconds, and the one that does not read from it."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        sender = socket.create_connection(listener.getsockname())
        receiver, _ = listener.accept()
    sender.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            sender.send(bytes(1 << 16))
    sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 10))
    return sender, receiver


def descriptors(path: str, _: bytes) -> None:
    """Passes descriptors whose last close waits, while the server reads nothing: it waits for this client to read its
    answers. When it reads again, it is the last that has the descriptors. Linux 6.16 and later refuse the message."""
    kept = []
    while True:
        client = Client(path)
        sender, receiver = lingering()
        kept.append(receiver)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [sender.fileno()]))]
        client.socket.setblocking(False)
        quiet = 0
        while quiet < 5:
            with contextlib.suppress(BlockingIOError):
                client.send(STATUS * 20)
            unread = struct.unpack("i", fcntl.ioctl(client.socket, termios.TIOCOUTQ, bytes(4)))[0]
            time.sleep(0.005)
            quiet = quiet + 1 if unread else 0
        client.socket.settimeout(1)
        with contextlib.suppress(OSError):
            client.socket.sendmsg([STATUS], rights)
        os.close(sender.detach())
        with contextlib.suppress(OSError):
            while client.socket.recv(1 << 20):
                pass
        client.socket.close()


def held(path: str, loads: bool) -> None:
    """Never ends a hit, or a load."""
    client, blocks = Client.registered(path), 256
    for number in range(1, 1000):
        run = hashes(0, 32, os.urandom(32 * blocks))
        client.call(save(2 * number, number, blocks, run))
        client.send(end_transfer(number) + finish(2 * number))
        client.call(lookup(2 * number + 1, run))
        answer = client.call(lookup(2 * number + 1, hashes(blocks, 1, b""), 2))
        if loads and len(answer) > 1000:
            client.send(begin_load(2 * number + 1, 1_000_000 + number, blocks))
    while True:
        client.call(PING)
        time.sleep(0.01)


def held_loads(path: str, _: bytes) -> None:
    held(path, loads=True)


def held_hits(path: str, _: bytes) -> None:
    held(path, loads=False)


def crowd(path: str, _: bytes) -> None:
    """Connections that never read, that never end requests and saves, and that send half frames."""
    seed, prompt = os.getpid(), os.urandom(32 * 2000)
    clients = []
    for number in range(32):
        with contextlib.suppress(OSError):
            client = Client.registered(path, b"crowd %d %d" % (seed, number))
            client.socket.setblocking(False)
            clients.append(client)
    number = 0
    while True:
        for at in range(32):
            number += 1
            run = hashes(0, 32, prompt)
            data = (
                PING * 50,
                lookup(number, run),
                save(number, number, 2000, run),
                b"UCFT" + struct.pack("<HBBI", VERSION, 3, 0, 16 << 20) + b"12345678",
            )[at % 4]
            if at < len(clients):
                with contextlib.suppress(OSError):
                    clients[at].socket.send(data)
        time.sleep(0.02)


def fuzzed(chance: random.Random) -> bytes:
    """A frame that is possible, or nearly."""
    number = chance.choice([0, 1, 2, 127, 128, 2**16, 2**32 - 1, 2**63, 2**64 - 1, chance.randrange(30)])
    run = hashes(chance.choice([0, 0, 0, 5]), 32, chance.randbytes(32 * chance.choice([0, 1, 8, 50])))
    data = chance.choice(
        [
            lookup(chance.randrange(30), run, chance.randrange(100)),
            save(chance.randrange(30), number, chance.choice([0, 8, 50, 2**20]), run),
            begin_load(chance.randrange(30), number, chance.choice([1, 50, 2**20])),
            end_transfer(number),
            finish(chance.randrange(30)),
            RESET,
            PING,
            STATUS,
            frame(chance.randbytes(chance.randrange(1, 60))),
        ]
    )
    if chance.random() < 0.01:
        at = chance.randrange(len(data))
        data = data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
    return data


def fuzz(path: str, _: bytes) -> None:
    """Sessions of messages that lie."""
    chance = random.Random(os.getpid())
    while True:
        frames = [fuzzed(chance) for _ in range(chance.choice([5, 50, 300]))]
        with contextlib.suppress(OSError):
            client = Client(path, 3)
            client.call(register(b"fuzz %d" % chance.randrange(8)))
            for data in frames:
                client.send(data)
                if chance.random() < 0.5:
                    client.socket.setblocking(False)
                    with contextlib.suppress(BlockingIOError):
                        client.socket.recv(1 << 20)
                    client.socket.settimeout(3)
            client.socket.close()


def pauses(path: str, _: bytes) -> None:
    """Stops the server for 0.2 s now and then, as a machine does that is shared."""
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    server = struct.unpack("3i", credentials)[0]
    try:
        while True:
            time.sleep(random.uniform(0.1, 0.4))
            os.kill(server, signal.SIGSTOP)
            time.sleep(0.2)
            os.kill(server, signal.SIGCONT)
    except ProcessLookupError:
        pass


def some_pings(path: str, _: bytes) -> None:
    """Always has work for the server, and takes little time for it."""
    flood(Client.registered(path, b"busy"), PING * 2000)


@dataclasses.dataclass(frozen=True)
class Attack:
    """Processes of an attack, and those of its control: without them, the attack is made on another server."""

    processes: list[Callable[[str, bytes], None]]
    control: list[Callable[[str, bytes], None]] | None = None


def compute(_path: str, _prompt: bytes) -> None:
    while True:
        pass


SINGLE: dict[str, Callable[[str, bytes], None]] = {
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
    "hits that never end": held_hits,
    "loads that never end": held_loads,
    "passed descriptors": descriptors,
    "legitimate: saves of 60,000 blocks": long_saves,
    "legitimate: lookups of 60,000 blocks": long_lookups,
    "legitimate: resets of 60,000 blocks": resets,
}
ATTACKS = {name: Attack([process], [compute, compute]) for name, process in SINGLE.items()} | {
    "crowd: 768 connections of 24 processes": Attack([crowd] * 24),
    "fuzzed messages of 4 processes": Attack([fuzz] * 4),
    "8 busy clients, and pauses of 0.2 s": Attack([some_pings] * 8 + [pauses], [compute] * 8 + [pauses]),
}
