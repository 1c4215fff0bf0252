"""The pages of one of SGLang's pools in a namespace of undercroft."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from undercroft.embed import Blocks, Cache, Group

if TYPE_CHECKING:
    import torch

    from undercroft._core import Engine
    from undercroft.sglang_hicache.pools import Pool
    from undercroft.sglang_hicache.writes import Writes

_STAGED_BYTES = 64 << 20
"""Memory for pages of a pool that gives and takes whole pages only, or one page if it is larger."""


_OPERATION_S = 5.0
"""Most seconds for which the saves of one operation of SGLang wait for the disk, in calls of 128 pages. SGLang gives
its threads ten seconds to end their operations before it drops its caches, and does not survive more."""
_ASKED_TOGETHER = 256
"""Pages about which an engine of another process is asked at once."""
_CHAINS = 4
"""Prompts whose hashes are remembered: SGLang asks about a prompt and loads it in pieces, each with its prefix."""
_FIRST = np.zeros(1, dtype=np.int64)


class PoolStore:
    """The pages of one pool. All methods may be called from any thread.

    A page of a window or a state needs no page before it, and is a chain of one block. Other pages are the chain of
    their prompt.
    """

    def __init__(
        self, engine: Engine, description: str, pool: Pool, key_tokens: int, *, writes: Writes | None, owns_engine: bool
    ) -> None:
        """``key_tokens``: tokens of a key. ``writes``: for saves that wait for the disk. ``owns_engine``: the engine is
        closed with the cache. Raises ConfigError for pages that do not fit host memory."""
        self.pool = pool
        self.page_bytes = sum(pool.parts)
        self._tokens = key_tokens
        self._names = (f"?{number}" for number in itertools.count())
        self._remote: bool | None = None
        """Whether the engine has a remote store. A server tells this with its first session."""
        self._writes = writes
        self._operation: tuple[str, float] = ("", 0.0)
        """The last key of SGLang's operation of saves, and when it began."""
        self._chains: list[tuple[list[str], list[bytes]]] = []
        """Keys and hashes of the last prompts, the latest first."""
        self._staging_lock = threading.Lock()
        self._description = description
        self.cache = Cache.of(engine, description, [Group(pool.parts)], key_tokens, owns_engine=owns_engine)
        self._staging: npt.NDArray[np.uint8] | None = None
        self._most = 1 << 30
        """Pages that can be moved together."""
        if pool.is_direct:
            for region in pool.regions():
                self.cache.add_region(region)
        else:
            self._most = max(1, _STAGED_BYTES // self.page_bytes)
            if writes is not None:
                self._most = min(self._most, max(1, writes.piece // self.page_bytes))
            self._staging = np.empty((self._most, self.page_bytes), np.uint8)
            self.cache.add_region(self._staging)

    def stop_saves(self) -> None:
        """Keep nothing more of the saves under way."""
        self.cache.give_up("weights")

    def reset(self, until: float) -> bool:
        """Drop all pages. Returns False if this is not durable by ``until`` (`time.monotonic`)."""
        is_durable = self.cache.reset(_left(until))
        if is_durable:
            # After a reset a session is private, but the weights are the same.
            self.cache.session.change_weights(self._description)
        return is_durable

    # Questions, with the time (`time.monotonic`) at which an answer is due

    def leading(self, prefix: list[str], keys: list[str], until: float) -> int:
        """How many pages from the first key on can be loaded."""
        chain = self._chain([*prefix, *keys])
        end = self.cache.exists(chain, timeout_s=_left(until))
        if end < len(chain) * self._tokens and self._has_remote():
            end = max(end, self._located(chain, len(prefix) * self._tokens, until))
        return max(0, end // self._tokens - len(prefix))

    def _has_remote(self) -> bool:
        if self._remote is None and (info := self.cache.engine.info()):
            self._remote = bool(info.get("remote"))
        return bool(self._remote)

    def _located(self, chain: list[bytes], begin: int, until: float) -> int:
        """Where a hit ends that may lie in a remote store. The question starts the reads."""
        name = next(self._names)
        try:
            found = self.cache.find(name, chain, begin=begin, wait_s=_left(until))
            if found.pending and self.cache.wait(name, _left(until)):
                found = self.cache.find(name, chain, begin=begin, wait_s=_left(until))
            return 0 if found.pending else found.tokens
        finally:
            self.cache.forget(name)

    def held(self, keys: list[str], until: float) -> set[int]:
        """The numbers of the keys whose pages can be loaded, for pages that need none before them: those that were
        found in time, the last first."""
        chain = self._chain(keys)
        held: list[int] = []
        for end in range(len(chain), 0, -_ASKED_TOGETHER):
            first = max(0, end - _ASKED_TOGETHER)
            found = self.cache.exists_each([[page] for page in chain[first:end]], timeout_s=_left(until))
            held += [first + at for at, tokens in enumerate(found) if tokens]
            if time.monotonic() > until:
                break
        return {*held}

    # Loads and saves, with the time by which they have to end

    def get(self, prefix: list[str], keys: list[str], host_indices: torch.Tensor, until: float) -> list[bool]:
        """Load pages. Returns for each whether it is there."""
        return self._in_pieces(prefix, keys, host_indices, until, is_load=True)

    def set(self, prefix: list[str], keys: list[str], host_indices: torch.Tensor, until: float) -> list[bool]:
        """Keep pages. Returns for each whether it is kept."""
        return self._in_pieces(prefix, keys, host_indices, until, is_load=False)

    def _in_pieces(
        self, prefix: list[str], keys: list[str], host_indices: torch.Tensor, until: float, *, is_load: bool
    ) -> list[bool]:
        if self.pool.is_trailing:
            prefix = []
        chain, done = self._chain([*prefix, *keys]), []
        writes = None if is_load else self._writes
        patient_until = self._patient_until(prefix, keys, until) if writes is not None else until
        piece = self._most if self._writes is None else min(self._most, max(1, self._writes.piece // self.page_bytes))
        for at in range(0, len(keys), piece):
            indices = host_indices[at * self.pool.page_tokens : (at + piece) * self.pool.page_tokens]
            first, end = len(prefix) + at, min(len(prefix) + at + piece, len(chain))
            if writes is not None:
                writes.wait((end - first) * self.page_bytes, patient_until)
            done += self._move(chain[:end], first, indices, until, is_load=is_load)
            if not done[-1] and not self.pool.is_trailing:
                break
        return done + [False] * (len(keys) - len(done))

    def _patient_until(self, prefix: list[str], keys: list[str], until: float) -> float:
        """Until when a save may wait for the disk."""
        now = time.monotonic()
        last, began = self._operation
        if prefix[-1:] != [last] or now - began > 2 * _OPERATION_S:
            began = now
        self._operation = (keys[-1], began)
        return min(until, began + _OPERATION_S)

    def _move(
        self, chain: list[bytes], first: int, host_indices: torch.Tensor, until: float, *, is_load: bool
    ) -> list[bool]:
        """Move the pages of a chain from number ``first`` on."""
        move = self._load if is_load else self._save
        if self._staging is None:
            return move(chain, first, self.pool.addresses(host_indices), until)
        pages = self.pool.pages(host_indices)
        with self._staged_until(until) as is_mine:
            if not is_mine:
                return [False] * len(pages)
            rows = self._staging[: len(pages)]
            if not is_load:
                for row, page in zip(rows, pages, strict=True):
                    self.pool.take(page, row)
            addresses = int(rows.ctypes.data) + np.arange(len(rows), dtype=np.int64)[:, None] * self.page_bytes
            done = move(chain, first, addresses, until)
            for row, page, ok in zip(rows, pages, done, strict=True):
                if is_load and ok:
                    self.pool.put(page, row)
            return done

    @contextlib.contextmanager
    def _staged_until(self, until: float) -> Iterator[bool]:
        """The memory for whole pages, which one call has at a time. Whether it could be had by then."""
        is_mine = self._staging_lock.acquire(timeout=_left(until))
        try:
            yield is_mine
        finally:
            if is_mine:
                self._staging_lock.release()

    def _save(self, chain: list[bytes], first: int, addresses: npt.NDArray[np.int64], until: float) -> list[bool]:
        if self.pool.is_trailing:
            saves = [([page], [Blocks(0, _FIRST, at[None])]) for page, at in zip(chain[first:], addresses, strict=True)]
            return [job.complete for job in self.cache.save_each(saves, timeout_s=_left(until))]
        numbers = np.arange(first, len(chain))
        [job] = self.cache.save_each([(chain, [Blocks(0, numbers, addresses)])], timeout_s=_left(until))
        return [int(number) in job.done.get(0, ()) for number in numbers]

    def _load(self, chain: list[bytes], first: int, addresses: npt.NDArray[np.int64], until: float) -> list[bool]:
        if not self.pool.is_trailing:
            numbers = np.arange(first, len(chain))
            blocks = [Blocks(0, numbers, addresses)]
            job = self.cache.load(chain, blocks, begin=first * self._tokens, timeout_s=_left(until))
            return [int(number) in job.done.get(0, ()) for number in numbers]
        # All reads begin at once.
        pages = [(next(self._names), [page]) for page in chain[first:]]
        try:
            for name, page in pages:
                self.cache.prefetch(name, page)
            return [
                self.cache.load(page, [Blocks(0, _FIRST, at[None])], timeout_s=_left(until)).complete
                for (_, page), at in zip(pages, addresses, strict=True)
            ]
        finally:
            for name, _ in pages:
                self.cache.forget(name)

    def _chain(self, keys: list[str]) -> list[bytes]:
        """The hashes of pages: SGLang's keys are SHA-256 digests, hexadecimal, each of its page and all pages before
        it."""
        chains = self._chains
        hit = next((one for one in chains if one[0][: len(keys)] == keys[: len(one[0])]), None)
        known = hit[1] if hit is not None else []
        if hit is None or len(known) < len(keys):
            first = ([*keys], [*known, *map(bytes.fromhex, keys[len(known) :])])
        else:
            first = hit
        self._chains = [first, *(one for one in chains if one is not hit)][:_CHAINS]
        return first[1][: len(keys)]


def _left(until: float) -> float:
    """Seconds until then."""
    return max(0.0, until - time.monotonic())
