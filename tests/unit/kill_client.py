"""One client of the kill soak, as a process: its engine, its server or itself may be killed or stopped at any time.

``kill_client.py OPTIONS SEED``: the options of an engine as JSON. Runs until its input ends, and prints its counts.
Every byte that it loads is compared while the session that promised it lives.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import random
import select
import sys
import time
from collections import Counter

from core_values import Group, places
from soak_client import BLOCK, CHAIN_BLOCKS, CHAINS, PAYLOAD, chain, payload
from undercroft import _core

DESCRIPTION = '{"model": "kill soak"}'
# Longest wait for an answer or a grant: then the request goes on without.
PATIENCE_S = 20.0


class KillClient:
    """A scheduler and its worker in one."""

    def __init__(self, options: dict, seed: int) -> None:
        self.random = random.Random(seed)
        self.engine = _core.Engine(options)
        self.session = self.engine.register(DESCRIPTION, [Group("full", BLOCK, PAYLOAD)], BLOCK)
        self.chains = [chain(index) for index in range(CHAINS)]
        self.arenas: dict[int, _core.Arena] = {}
        self.done: Counter[str] = Counter()
        self.longest_s = 0.0

    def address(self, session: int) -> int | None:
        """Where the arena of a session is mapped; `None` if the session is over."""
        arena = self.engine.arena
        if arena.session not in self.arenas:
            self.arenas = {arena.session: _core.Arena.attach(arena.socket, arena.session)}
        return self.arenas[session].address if session in self.arenas else None

    def lives(self, session: int) -> bool:
        """Whether a session lives: the engine keeps its promises until then."""
        return self.engine.connection()[0] == "up" and self.engine.arena.session == session

    def request(self, name: str) -> None:
        """Look a prompt up, load what is cached, save the rest."""
        hashes = self.random.choice(self.chains)[: self.random.randint(1, CHAIN_BLOCKS)]
        start = time.monotonic()
        answer = self.session.lookup(name, hashes)
        while answer.pending and time.monotonic() - start < PATIENCE_S:
            self.session.wait(name, 0.05)
            answer = self.session.lookup(name, hashes)
        self.longest_s = max(self.longest_s, time.monotonic() - start)
        self.done["lookups"] += 1
        if answer.tokens and not answer.pending:
            self.load(name, hashes, answer.tokens)
        if self.random.random() < 0.5:
            self.save(name, hashes)

    def load(self, name: str, hashes: list[bytes], tokens: int) -> None:
        load = self.session.begin_load(name, 0, tokens)
        if load is None:
            return
        address = self.address(load.session)
        if address is not None:
            for slot, block_hash in places(load.extents, hashes):
                is_same = ctypes.string_at(address + slot, PAYLOAD) == payload(DESCRIPTION, block_hash)
                # The end of the session ends its leases, and another may write there.
                self.done["wrong"] += not is_same and self.lives(load.session)
                self.done["compared"] += 1
            self.done["loads"] += 1
            self.done["from_disk"] += load.disk_tokens // BLOCK
        self.session.end_transfer(load.transfer_id, address is not None)

    def save(self, name: str, hashes: list[bytes]) -> None:
        grant = self.session.begin_save(name, hashes, len(hashes) * BLOCK)
        start = time.monotonic()
        while grant is not None and grant.pending and time.monotonic() - start < PATIENCE_S:
            if self.engine.connection()[0] == "down":
                # The grant does not come.
                return
            grant = next((of for of in self.session.poll_saves() if of.transfer_id == grant.transfer_id), grant)
            time.sleep(0.0005)
        if grant is None or grant.pending or not grant.extents:
            return
        address = self.address(grant.session)
        if address is not None:
            for slot, block_hash in places(grant.extents, hashes):
                ctypes.memmove(address + slot, payload(DESCRIPTION, block_hash), PAYLOAD)
            self.done["saves"] += 1
        self.session.end_transfer(grant.transfer_id, address is not None)

    def run(self) -> None:
        for number in itertools.count():
            if select.select([sys.stdin], [], [], 0)[0]:
                return
            name = f"request-{number}"
            try:
                self.request(name)
            except _core.ServerError:
                # Its socket is gone: the arena cannot be mapped.
                self.done["not attached"] += 1
            self.session.finish_request(name)
            time.sleep(0.002)


def main() -> None:
    """Until the parent closes this process's input, or kills it."""
    client = KillClient(json.loads(sys.argv[1]), int(sys.argv[2]))
    client.run()
    client.done["took_over"] = int(client.engine.took_over)
    client.done["longest_ms"] = int(client.longest_s * 1000)
    client.engine.close()
    print(json.dumps(client.done), flush=True)


if __name__ == "__main__":
    main()
