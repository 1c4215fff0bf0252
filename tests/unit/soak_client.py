"""One client of the soak, as a process: random lookups, loads, saves and disconnects until its input ends.

``soak_client.py SOCKET SEED``. Prints the count of each operation. Every byte that it loads is checked.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import json
import random
import select
import sys
import time
from collections import Counter

from core_values import Group, places
from undercroft import _core

BLOCK = 16
PAYLOAD = 10_000
CHAINS = 64
CHAIN_BLOCKS = 64
# So that each client has something of its own to register again, and something that all share.
DESCRIPTIONS = [f'{{"model": "soak {index}"}}' for index in range(3)]


def chain(seed: int) -> list[bytes]:
    """A prompt's block hashes; half of it is shared with its neighbours."""
    hashes, last = [], b""
    for block in range(CHAIN_BLOCKS):
        part = seed if block >= CHAIN_BLOCKS // 2 else seed // 4
        last = hashlib.sha256(last + part.to_bytes(4, "little")).digest()
        hashes.append(last)
    return hashes


def payload(description: str, block_hash: bytes) -> bytes:
    """The bytes that belong to a block: another namespace has others."""
    digest = hashlib.sha256(description.encode() + block_hash).digest()
    return (digest * (PAYLOAD // len(digest) + 1))[:PAYLOAD]


class SoakClient:
    """One connection at a time, with a mapping of the arena as a worker has it."""

    def __init__(self, socket: str, seed: int) -> None:
        self.socket = socket
        self.random = random.Random(seed)
        self.chains = [chain(index) for index in range(CHAINS)]
        self.names = itertools.count()
        self.done: Counter[str] = Counter()
        self.connect()

    def connect(self) -> None:
        """A new session, of one namespace or another."""
        self.description = self.random.choice(DESCRIPTIONS)
        # A machine that is shared by so many is late now and then.
        self.engine = _core.Engine({"server": f"unix://{self.socket}", "server_timeout_ms": 30_000})
        self.session = self.engine.register(self.description, [Group("full", BLOCK, PAYLOAD)], BLOCK)
        end = time.monotonic() + 30
        while self.engine.connection() != ("up", ""):
            assert time.monotonic() < end, self.engine.connection()
            time.sleep(0.001)
        self.token = self.engine.arena.session
        self.arena = _core.Arena.attach(self.engine.arena.socket, self.token)
        self.requests: dict[str, list[bytes]] = {}
        self.asked: dict[int, list[bytes]] = {}
        self.loads: dict[int, tuple[str, list[tuple[int, bytes]]]] = {}
        self.saves: dict[int, list[tuple[int, bytes]]] = {}
        self.done["connect"] += 1

    def step(self) -> None:
        """One thing that an engine does."""
        actions = {
            self.prefetch: 10, self.lookup: 20, self.save: 5, self.end_load: 15, self.poll_saves: 5, self.end_save: 10,
            self.end_lookup: 2, self.finish: 8, self.wait: 1, self.disconnect: 0.1,
        }  # fmt: skip
        self.random.choices(list(actions), list(actions.values()))[0]()

    def prefetch(self) -> None:
        if len(self.requests) < 30:
            name = f"request-{next(self.names)}"
            hashes = self.random.choice(self.chains)
            self.requests[name] = hashes[: self.random.randint(1, CHAIN_BLOCKS)]
            self.session.prefetch(name, self.requests[name])
            self.done["prefetch"] += 1

    def lookup(self) -> None:
        loading = {name for name, _ in self.loads.values()}
        waiting = [name for name in self.requests if name not in loading]
        if not waiting:
            return
        name = self.random.choice(waiting)
        hashes = self.requests[name]
        local = BLOCK * self.random.choice((0, 0, 0, 1, len(hashes) // 2))
        answer = self.session.lookup(name, hashes, local).tokens
        self.done["lookup"] += 1
        if answer <= local:
            return
        assert answer % BLOCK == 0
        assert answer <= len(hashes) * BLOCK
        self.done["hit"] += 1
        load = self.session.begin_load(name, local, answer - local)
        if load is not None:
            assert load.session == self.token
            slots = places(load.extents, hashes)
            self.loads[load.transfer_id] = (name, slots)
            self.check(slots)

    def wait(self) -> None:
        if self.requests:
            self.session.wait(self.random.choice(list(self.requests)), 0.01)

    def save(self) -> None:
        if not self.requests:
            return
        name, hashes = self.random.choice(list(self.requests.items()))
        grant = self.session.begin_save(name, hashes, len(hashes) * BLOCK)
        if grant is not None:
            assert grant.pending
            self.asked[grant.transfer_id] = hashes

    def poll_saves(self) -> None:
        for grant in self.session.poll_saves():
            hashes = self.asked.pop(grant.transfer_id)
            if grant.extents:
                assert grant.session == self.token
                self.saves[grant.transfer_id] = places(grant.extents, hashes)
                self.done["save"] += 1

    def end_load(self) -> None:
        """No other client may write a load's slots before the load ends."""
        if self.loads:
            job, (_, slots) = self.loads.popitem()
            self.check(slots)
            self.session.end_transfer(job, self.random.random() < 0.95)
            self.done["load"] += 1

    def end_save(self) -> None:
        if self.saves:
            job, slots = self.saves.popitem()
            for slot, block_hash in slots:
                ctypes.memmove(self.arena.address + slot, payload(self.description, block_hash), PAYLOAD)
            self.session.end_transfer(job, self.random.random() < 0.95)

    def end_lookup(self) -> None:
        """A lookup that is not needed now may be asked for again."""
        if self.requests:
            self.session.end_lookup(self.random.choice(list(self.requests)))

    def finish(self) -> None:
        if self.requests:
            name = self.random.choice(list(self.requests))
            del self.requests[name]
            self.session.finish_request(name)

    def disconnect(self) -> None:
        """Ends everything at once, or as an engine does that shuts down."""
        if self.random.random() < 0.5:
            self.session.close()
        self.engine.close()
        self.arena.let_go()
        self.connect()

    def check(self, slots: list[tuple[int, bytes]]) -> None:
        for slot, block_hash in slots:
            found = ctypes.string_at(self.arena.address + slot, PAYLOAD)
            assert found == payload(self.description, block_hash), f"wrong bytes for {block_hash.hex()}"
            self.done["checked"] += 1


def main() -> None:
    """Until the parent closes this process's input, or kills it."""
    client = SoakClient(sys.argv[1], int(sys.argv[2]))
    while not select.select([sys.stdin], [], [], 0)[0]:
        client.step()
    client.engine.close()
    print(json.dumps(client.done))


if __name__ == "__main__":
    main()
