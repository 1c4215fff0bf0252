"""The replay of a trace on the engine without payloads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from undercroft.estimate.trace import Trace

BLOCKS_MIN = 4
"""Least blocks of a tier: tiers have pages, and the smallest page of the engine without payloads holds some blocks."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Prompt tokens that a cache would have had, and tokens that it would have written."""

    tokens: int
    """Tokens of all prompts."""
    host_tokens: int
    """Tokens found in host memory."""
    disk_tokens: int
    """Tokens found on disk only."""
    host_hits: int
    """Requests whose hit was in host memory as a whole."""
    disk_hits: int
    """Requests of whose hit a part was on disk only."""
    disk_write_tokens: int
    disk_dropped_tokens: int
    """Tokens that the disk had no time to write."""
    remote_tokens: int = 0
    """Tokens found in the remote store only."""
    remote_hits: int = 0
    """Requests of whose hit a part was in the remote store only."""

    @property
    def hit_tokens(self) -> int:
        """Tokens found in any tier."""
        return self.host_tokens + self.disk_tokens + self.remote_tokens

    @property
    def hit_percent(self) -> float:
        """Hits in percent of all prompt tokens."""
        return 100 * self.hit_tokens / max(1, self.tokens)


@dataclass(frozen=True, slots=True)
class Tiers:
    """Capacities in tokens, and what is written to disk."""

    host_tokens: int
    disk_tokens: int = 0
    second_touch: bool = False
    disk_write_tokens_s: float = 0.0
    """Tokens a second that the disk can write; 0 if it takes every write at once."""


def replay(trace: Trace, tiers: Tiers, progress: Callable[[int], object] | None = None) -> Outcome:
    """Serve the requests one after the other, with an engine of this size.

    A disk with a rate writes in the trace's time. Writes that wait take host memory, at most half of it. Writes beyond
    that are not made, so their blocks are missing later.
    """
    from undercroft import _core

    size = trace.block_tokens
    engine = _core.Replay(
        tiers.host_tokens // size,
        tiers.disk_tokens // size,
        tiers.second_touch,
        tiers.disk_write_tokens_s / size,
    )
    host = disk = host_hits = disk_hits = 0
    for request in trace.requests:
        if tiers.disk_write_tokens_s:
            engine.pass_time(request.time_s - trace.requests[0].time_s)
        found = engine.request(request.prompt_blocks, request.blocks)
        host, disk = host + found[0], disk + found[1]
        disk_hits += found[1] > 0
        host_hits += found[0] > 0 == found[1]
        if progress is not None:
            progress(1)
    writes, dropped = engine.disk_writes, engine.dropped_writes
    return Outcome(trace.tokens, host * size, disk * size, host_hits, disk_hits, writes * size, dropped * size)


@dataclass(frozen=True, slots=True)
class Reference:
    """The hits of other policies in one tier of the same size, in percent of all prompt tokens."""

    lru_hit_percent: float
    optimum_hit_percent: float
    """With knowledge of the future: no policy finds more."""


def reference(trace: Trace, capacity_tokens: int) -> Reference:
    """The hits of LRU and of the optimum in a cache of ``capacity_tokens``."""
    from undercroft import _core

    size = trace.block_tokens
    prompts = [request.prompt_blocks for request in trace.requests]
    blocks = [request.blocks for request in trace.requests]
    lru, optimum = _core.reference_hits(prompts, blocks, capacity_tokens // size)
    each = 100 * size / max(1, trace.tokens)
    return Reference(lru * each, optimum * each)
