"""A scheduler and its worker in one: a session on an engine elsewhere, with the arena mapped."""

from __future__ import annotations

import ctypes
import hashlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from core_values import Group, granted, places
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
        self.session = engine.register('{"model": "m"}', [Group("full", BLOCK, PAYLOAD)], BLOCK)
        self.worst_s = 0.0
        self._arenas: dict[int, tuple[Any, np.ndarray]] = {}

    def call(self, name: str, *args: Any) -> Any:
        start = time.perf_counter()
        try:
            return getattr(self.session, name)(*args)
        finally:
            self.worst_s = max(self.worst_s, time.perf_counter() - start)

    def is_up(self) -> bool:
        return self.engine.connection()[0] == "up"

    def memory(self, session: int) -> np.ndarray:
        """The arena of this session; it stays mapped, even if its server ends."""
        if session not in self._arenas:
            address = self.engine.arena
            assert address.session == session
            arena = _core.Arena.attach(address.socket, session)
            assert arena.arena_id == address.arena_id
            view = np.ctypeslib.as_array((ctypes.c_uint8 * arena.size).from_address(arena.address))
            self._arenas[session] = arena, view
        return self._arenas[session][1]

    def begin_save(self, request: str, hashes: list[bytes]) -> tuple[_core.SaveGrant, list[tuple[int, bytes]]]:
        """The grant, and (slot, hash) of the blocks to copy."""
        asked: list[Any] = []

        def ask() -> bool:
            asked.append(self.call("begin_save", request, hashes, len(hashes) * BLOCK))
            return asked[-1] is not None

        until("a server", ask)
        grant = granted(self.session, asked[-1])
        return grant, places(grant.extents, hashes)

    def fill(self, session: int, places: list[tuple[int, bytes]]) -> None:
        memory = self.memory(session)
        for slot, block_hash in places:
            memory[slot : slot + PAYLOAD] = content(block_hash)

    def save(self, hashes: list[bytes]) -> None:
        grant, places = self.begin_save("save", hashes)
        if places:
            self.fill(grant.session, places)
            self.call("end_transfer", grant.transfer_id, True)
        self.call("finish_request", "save")

    def answer(self, request: str, hashes: list[bytes]) -> int:
        """Ask until there is an answer, as the scheduler does."""
        found: list[int] = []

        def ask() -> bool:
            answer = self.call("lookup", request, hashes)
            found.extend([] if answer.pending else [answer.tokens])
            return bool(found)

        until("an answer", ask)
        return found[0]

    def begin_load(
        self, request: str, hashes: list[bytes], tokens: int
    ) -> tuple[_core.Load, list[tuple[int, bytes]]] | None:
        load = self.call("begin_load", request, 0, tokens)
        if load is None:
            return None
        found = places(load.extents, hashes)
        assert len(found) == tokens // BLOCK
        return load, found

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
            load, places = begun
            self.check(load.session, places)
            self.call("end_transfer", load.transfer_id, True)
            return tokens
        finally:
            self.call("finish_request", request)

    def close(self) -> None:
        self.engine.close()
