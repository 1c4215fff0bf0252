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

_STAGED_BYTES = 64 << 20
"""Memory for pages of a pool that gives and takes whole pages only, or one page if it is larger."""


class PoolStore:
    """The pages of one pool. All methods may be called from any thread."""

    def __init__(self, engine: Engine, description: str, pool: Pool, key_tokens: int, *, owns_engine: bool) -> None:
        """``key_tokens``: tokens of a key. ``owns_engine``: the engine is closed with the cache. Raises ConfigError for
        pages that do not fit host memory."""
        self.pool = pool
        self.page_bytes = sum(pool.parts)
        self._tokens = key_tokens
        self._names = (f"?{number}" for number in itertools.count())
        self._has_remote = bool(engine.info().get("remote"))
        self._staging_lock = threading.Lock()
        # A page that needs none before it is like a state; a hit of several of them is asked for page by page.
        group = Group(pool.parts, kind="state" if pool.is_trailing else "full")
        self._description = description
        self.cache = Cache.of(engine, description, [group], key_tokens, owns_engine=owns_engine)
        self._staging: npt.NDArray[np.uint8] | None = None
        if pool.is_direct:
            for region in pool.regions():
                self.cache.add_region(region)
        else:
            self._staging = np.empty((max(1, _STAGED_BYTES // self.page_bytes), self.page_bytes), np.uint8)
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
        chain = _chain(prefix, keys)
        end = self.cache.exists(chain, timeout_s=_left(until))
        if self._has_remote and end < len(chain) * self._tokens:
            end = max(end, self._located(chain, len(prefix) * self._tokens, until))
        return max(0, end // self._tokens - len(prefix))

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

    def held(self, prefix: list[str], keys: list[str], until: float) -> set[int]:
        """The numbers of the keys whose pages can be loaded, for pages that need none before them: those that were
        found in time, the last first."""
        chain, held = _chain(prefix, keys), set()
        while len(chain) > len(prefix) and time.monotonic() < until:
            end = self.cache.exists(chain, timeout_s=_left(until)) // self._tokens
            if end <= len(prefix):
                break
            held.add(end - 1 - len(prefix))
            del chain[end - 1 :]
        return held

    # Loads and saves, with the time by which they have to end

    def get(self, prefix: list[str], keys: list[str], host_indices: torch.Tensor, until: float) -> list[bool]:
        """Load pages. Returns for each whether it is there."""
        if self._staging is None:
            return self._load(_chain(prefix, keys), len(prefix), self.pool.addresses(host_indices), until)
        done: list[bool] = []
        pages = self.pool.pages(host_indices)
        with self._staged_until(until) as is_mine:
            for at in range(0, len(keys) if is_mine else 0, len(self._staging)):
                count = min(len(self._staging), len(keys) - at)
                chain = _chain(prefix, keys[: at + count])
                loaded = self._load(chain, len(prefix) + at, self._staged(count), until)
                for row, page, ok in zip(self._staging, pages[at:], loaded, strict=False):
                    if ok:
                        self.pool.put(page, row)
                done += loaded
        return done + [False] * (len(keys) - len(done))

    def set(self, prefix: list[str], keys: list[str], host_indices: torch.Tensor, until: float) -> list[bool]:
        """Keep pages. Returns for each whether it is kept."""
        if self._staging is None:
            return self._save(_chain(prefix, keys), len(prefix), self.pool.addresses(host_indices), until)
        done: list[bool] = []
        pages = self.pool.pages(host_indices)
        with self._staged_until(until) as is_mine:
            for at in range(0, len(keys) if is_mine else 0, len(self._staging)):
                count = min(len(self._staging), len(keys) - at)
                for row, page in zip(self._staging, pages[at : at + count], strict=False):
                    self.pool.take(page, row)
                done += self._save(_chain(prefix, keys[: at + count]), len(prefix) + at, self._staged(count), until)
        return done + [False] * (len(keys) - len(done))

    @contextlib.contextmanager
    def _staged_until(self, until: float) -> Iterator[bool]:
        """The memory for whole pages, which one call has at a time. Whether it could be had by then."""
        is_mine = self._staging_lock.acquire(timeout=_left(until))
        try:
            yield is_mine
        finally:
            if is_mine:
                self._staging_lock.release()

    def _staged(self, count: int) -> npt.NDArray[np.int64]:
        assert self._staging is not None
        return int(self._staging.ctypes.data) + np.arange(count, dtype=np.int64)[:, None] * self.page_bytes

    def _save(self, chain: list[bytes], first: int, addresses: npt.NDArray[np.int64], until: float) -> list[bool]:
        numbers = np.arange(first, len(chain))
        job = self.cache.save(chain, [Blocks(0, numbers, addresses)], timeout_s=_left(until))
        return [int(number) in job.done.get(0, ()) for number in numbers]

    def _load(self, chain: list[bytes], first: int, addresses: npt.NDArray[np.int64], until: float) -> list[bool]:
        numbers = np.arange(first, len(chain))
        if not self.pool.is_trailing:
            return self._loaded(chain, numbers, addresses, until)
        # All reads begin at once. Each page is then a hit of its own.
        names = [next(self._names) for _ in numbers]
        try:
            for name, number in zip(names, numbers, strict=True):
                self.cache.prefetch(name, chain[: number + 1], begin=int(number) * self._tokens)
            return [
                self._loaded(chain[: number + 1], numbers[at : at + 1], addresses[at : at + 1], until)[0]
                for at, number in enumerate(numbers)
            ]
        finally:
            for name in names:
                self.cache.forget(name)

    def _loaded(
        self, chain: list[bytes], numbers: npt.NDArray[np.int64], addresses: npt.NDArray[np.int64], until: float
    ) -> list[bool]:
        job = self.cache.load(
            chain,
            [Blocks(0, numbers, addresses)],
            begin=int(numbers[0]) * self._tokens,
            timeout_s=_left(until),
        )
        return [int(number) in job.done.get(0, ()) for number in numbers]


def _chain(prefix: list[str], keys: list[str]) -> list[bytes]:
    """The hashes of pages: SGLang's keys are SHA-256 digests, hexadecimal, each of its page and all pages before it."""
    return [bytes.fromhex(key) for key in (*prefix, *keys)]


def _left(until: float) -> float:
    """Seconds until then."""
    return max(0.0, until - time.monotonic())
