"""The option ``shadow``: counts the hits that caches of other sizes would have had, while vLLM serves.

For each size there is an index without bytes, like the index of `undercroft estimate`. The scheduler passes the hashes
of a request that has ended to a thread, which does the rest. So nothing here can delay a request or change an answer.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from undercroft.log import logger

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from undercroft.connector.groups import Groups

PENDING_MAX = 10_000
"""Most requests that wait for the thread; further requests are left out."""
_BLOCKS_MIN = 64
"""Least blocks of an index: the index has pages, and each page holds some blocks."""
_HASHES_AT_ONCE = 256
"""Hashes without a pause. Then the interpreter switches to the scheduler's thread if it waits."""


class Shadow:
    """Indexes of the sizes in ``capacities``. No method raises or waits, but for `close`."""

    def __init__(self, capacities: Sequence[int], groups: Groups, tokens_in: Callable[[int], int]) -> None:
        """``capacities``: bytes. ``tokens_in``: returns the tokens that a tier with a capacity in bytes holds."""
        self._capacities = capacities
        self._groups = groups
        self._tokens_in = tokens_in
        self._pending: queue.SimpleQueue[tuple[int, Sequence[bytes]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._counters: dict[str, int] = {}
        self._thread = threading.Thread(target=self._run, name="undercroft-shadow", daemon=True)
        self._thread.start()

    def finished(self, request: Request) -> None:
        """A request has ended; its block hashes do not change any more."""
        if self._thread.is_alive() and self._pending.qsize() < PENDING_MAX:
            # The last token has no KV yet.
            blocks = max(0, request.num_tokens - 1) // self._groups.hash_block_size
            self._pending.put((request.num_prompt_tokens, request.block_hashes[:blocks]))

    def collect(self) -> dict[str, Any]:
        """The counts since the last call, as the data of `UndercroftStats`."""
        with self._lock:
            counters, self._counters = self._counters, {}
        if not counters:
            return {}
        sizes = {f"shadow_capacity_bytes_{number}": size for number, size in enumerate(self._capacities, 1)}
        return {"counters": counters, "gauges": sizes}

    def close(self, timeout_s: float = 2.0) -> None:
        """Process the pending requests, and end."""
        self._pending.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        from undercroft import _core

        try:
            size = self._groups.engine_block_size
            blocks = [max(_BLOCKS_MIN, self._tokens_in(capacity) // size) for capacity in self._capacities]
            engines = [_core.Replay(count) for count in blocks]
            while (one := self._pending.get()) is not None:
                prompt_tokens, hashes = one
                numbers = self._numbers(hashes)
                prompt = max(0, prompt_tokens - (not self._groups.hits_whole_prompts)) // size
                hits = [sum(engine.request(prompt, numbers)) * size for engine in engines]
                self._count(prompt_tokens, hits)
        except Exception as error:
            logger.error("undercroft: shadow: %r; hits of other sizes are not counted any more", error)

    def _count(self, prompt_tokens: int, hits: Sequence[int]) -> None:
        counted = {"shadow_prompt_tokens": prompt_tokens}
        counted |= {f"shadow_hit_tokens_{number}": tokens for number, tokens in enumerate(hits, 1) if tokens}
        with self._lock:
            for name, amount in counted.items():
                self._counters[name] = self._counters.get(name, 0) + amount

    def _numbers(self, hashes: Sequence[bytes]) -> list[int]:
        whole = self._groups.hashes(list(hashes))
        found: list[int] = []
        for start in range(0, len(whole), _HASHES_AT_ONCE):
            found += [int.from_bytes(one[:8], "little") for one in whole[start : start + _HASHES_AT_ONCE]]
            time.sleep(0)
        return found
