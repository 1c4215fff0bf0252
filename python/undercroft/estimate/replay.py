"""The replay of a trace on the engine without payloads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from undercroft.estimate.trace import Trace

_ENGINE_BLOCKS_MIN = 64
"""Least blocks of an engine's memory: the memory has pages, and each page holds some blocks."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Prompt tokens that a cache would have had, and tokens that it would have written."""

    tokens: int
    """Tokens of all prompts."""
    host_tokens: int
    """Tokens found in host memory."""
    disk_tokens: int
    """Tokens found on disk only."""
    disk_write_tokens: int

    @property
    def hit_percent(self) -> float:
        """Hits in percent of all prompt tokens."""
        return 100 * (self.host_tokens + self.disk_tokens) / max(1, self.tokens)


@dataclass(frozen=True, slots=True)
class Tiers:
    """Capacities in tokens, and the policy."""

    host_tokens: int
    disk_tokens: int = 0
    leafhd: bool = False
    second_touch: bool = False


def replay(trace: Trace, tiers: Tiers, progress: Callable[[int], object] | None = None) -> Outcome:
    """Serve the requests one after the other, with an engine of this size."""
    from undercroft import _core

    size = trace.block_tokens
    engine = _core.Replay(
        max(_ENGINE_BLOCKS_MIN, tiers.host_tokens // size),
        tiers.disk_tokens // size,
        tiers.leafhd,
        tiers.second_touch,
    )
    host = disk = 0
    for request in trace.requests:
        found = engine.request(request.prompt_blocks, request.blocks)
        host, disk = host + found[0], disk + found[1]
        if progress is not None:
            progress(1)
    return Outcome(trace.tokens, host * size, disk * size, engine.disk_writes * size)
