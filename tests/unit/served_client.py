"""A scheduler and its worker in one: a session on an engine elsewhere, with the arena mapped."""

from __future__ import annotations

import ctypes
import hashlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from undercroft import _core

BLOCK = 16
PAYLOAD = 4096
PATIENCE_S = 60.0


def prompt(name: str, blocks: int = 8) -> list[bytes]:
    """Block hashes of a prompt."""
    return [hashlib.sha256(f"{name} {block}".encode()).digest() for block in range(blocks)]


def content(block_hash: bytes) -> np.ndarray:
    """The bytes that belong to a block."""
    return np.frombuffer(block_hash * (PAYLOAD // 32), dtype=np.uint8)


def until(what: str, condition: Callable[[], Any]) -> None:
    """Wait for something that another process does."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.001)


class Peer:
    """One client. Every call of the session is timed: `worst_s` is the longest."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.session = engine.register('{"model": "m"}', [("full", BLOCK, PAYLOAD, 0)], BLOCK)
        self.worst_s = 0.0
        self._arenas: dict[int, tuple[Any, np.ndarray]] = {}

    def call(self, name: str, *args: Any) -> Any:
        start = time.perf_counter()
        try:
            return getattr(self.session, name)(*args)
        finally:
            self.worst_s = max(self.worst_s, time.perf_counter() - start)

    def is_up(self) -> bool:
        return self.engine.link()[0] == "up"

    def memory(self, session: int) -> np.ndarray:
        """The arena of this session; it stays mapped, whatever becomes of its server."""
        if session not in self._arenas:
            socket, generation, now = self.engine.arena
            assert now == session
            arena = _core.Arena.attach(socket, session)
            assert arena.generation == generation
            view = np.ctypeslib.as_array((ctypes.c_uint8 * arena.size).from_address(arena.address))
            self._arenas[session] = arena, view
        return self._arenas[session][1]

    def begin_save(self, request: str, hashes: list[bytes]) -> tuple[int, int, list[tuple[int, bytes]]]:
        """Job, session, and (slot, hash) of what is to be copied."""
        until("a server", lambda: self.call("begin_save", request, hashes, len(hashes) * BLOCK) is not None)
        granted: list[Any] = []
        until("the slots", lambda: granted.extend(self.call("grants")) or granted)
        _, job, session, extents, _ = granted[-1]
        places = []
        for _, first, offsets in extents:
            slots = np.frombuffer(offsets, dtype="<i8").tolist()
            places += [(slot, hashes[first + at]) for at, slot in enumerate(slots) if slot >= 0]
        return job, session, places

    def fill(self, session: int, places: list[tuple[int, bytes]]) -> None:
        memory = self.memory(session)
        for slot, block_hash in places:
            memory[slot : slot + PAYLOAD] = content(block_hash)

    def save(self, hashes: list[bytes]) -> None:
        job, session, places = self.begin_save("save", hashes)
        if job:
            self.fill(session, places)
            self.call("end_save", job, True)
        self.call("finish", "save")

    def answer(self, request: str, hashes: list[bytes]) -> int:
        """Ask until there is an answer, as the scheduler does."""
        found: list[int] = []

        def poll() -> bool:
            answer = self.call("poll", request, hashes, 0)
            found.extend([] if answer is None else [answer])
            return bool(found)

        until("an answer", poll)
        return found[0]

    def begin_load(
        self, request: str, hashes: list[bytes], tokens: int
    ) -> tuple[int, int, list[tuple[int, bytes]]] | None:
        plan = self.call("begin_load", request, 0, tokens)
        if plan is None:
            return None
        job, session, extents = plan
        places = []
        for _, first, offsets in extents:
            slots = np.frombuffer(offsets, dtype="<i8").tolist()
            places += [(slot, hashes[first + at]) for at, slot in enumerate(slots)]
        assert len(places) == tokens // BLOCK
        return job, session, places

    def check(self, session: int, places: list[tuple[int, bytes]]) -> None:
        memory = self.memory(session)
        for slot, block_hash in places:
            assert (memory[slot : slot + PAYLOAD] == content(block_hash)).all()

    def load(self, hashes: list[bytes], request: str = "load") -> int:
        """Look up, load, and check every byte. Tokens that were hit."""
        try:
            tokens = self.answer(request, hashes)
            begun = self.begin_load(request, hashes, tokens) if tokens else None
            if begun is None:
                return 0
            job, session, places = begun
            self.check(session, places)
            self.call("end_load", job, True)
            return tokens
        finally:
            self.call("finish", request)

    def close(self) -> None:
        self.engine.close()
