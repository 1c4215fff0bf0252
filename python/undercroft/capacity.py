"""The number of tokens that a tier holds, for people and metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

INDEX_BYTES_PER_NODE = 112
"""Most bytes of the index for each hash block; `undercroft bench recover` measures them."""
INDEX_BYTES_PER_GROUP = 24
"""Further bytes for each group of a model with several groups."""
BOUNDARY_TOKENS = 8192
"""Tokens between two boundaries where a hit may end, if no interval is configured. Equals the default of
``state_interval_tokens``."""


class Group(Protocol):
    """A KV cache group, in the engine's terms."""

    @property
    def kind(self) -> str:
        """The blocks that a hit needs, in the engine's words."""

    @property
    def block_tokens(self) -> int:
        """Tokens of one block; 0 if the group is neither saved nor loaded."""

    @property
    def payload_bytes(self) -> int:
        """Bytes of one block, all ranks together."""

    @property
    def window_tokens(self) -> int:
        """Tokens of the group's window or chunk; 0 if it has neither."""


def boundary_blocks(group: Group) -> int:
    """Blocks of a group that each boundary of hits needs (for chunks: needs at most). 0 for full attention."""
    if group.kind == "state":
        return 1
    if group.kind == "sliding_window":
        return max(1, -(-(group.window_tokens - 1) // group.block_tokens))
    return group.window_tokens // group.block_tokens if group.kind == "chunked_local" else 0


def token_bytes(groups: Sequence[Group]) -> float:
    """Bytes of full attention that each token needs, without the rounding to slots."""
    full = [group for group in groups if group.kind == "full" and group.block_tokens]
    return sum(group.payload_bytes / group.block_tokens for group in full)


def boundary_bytes(groups: Sequence[Group]) -> int:
    """Bytes of windows and states that each boundary of hits needs."""
    return sum(boundary_blocks(group) * group.payload_bytes for group in groups if group.block_tokens)


def tokens_in(capacity: int, groups: Sequence[Group], interval: int = BOUNDARY_TOKENS) -> int:
    """Tokens of prompts that a tier of ``capacity`` bytes holds, with a boundary of hits every ``interval`` tokens
    (0: every `BOUNDARY_TOKENS`).

    Counts the bytes that slots and pages leave unused. 0 if a block fits no slot.
    """
    from undercroft import _core

    each = 0.0
    interval = interval or BOUNDARY_TOKENS
    for group in groups:
        if not group.block_tokens or group.kind == "ignored":
            continue
        slots = _core.slots_in(capacity, group.payload_bytes) if capacity else 0
        if not slots:
            return 0
        blocks = 1 / group.block_tokens if group.kind == "full" else _kept(group, interval) / interval
        each += capacity / slots * blocks
    return int(capacity / each) if each else 0


def _kept(group: Group, interval: int) -> float:
    """Blocks of a group with windows, chunks or states that are kept in each ``interval`` tokens."""
    if group.kind == "chunked_local" and interval % group.window_tokens == 0:
        return 0.0
    return min(boundary_blocks(group), interval / group.block_tokens)


def index_bytes(tokens: int, groups: Sequence[Group]) -> int:
    """Bytes of the index for ``tokens`` tokens whose blocks are in any tier."""
    block = max(group.block_tokens for group in groups)
    several = INDEX_BYTES_PER_GROUP * len(groups) if len(groups) > 1 else 0
    return tokens // block * (INDEX_BYTES_PER_NODE + several)
