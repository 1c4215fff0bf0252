"""Blocks of windows and states that the device holds now, and that a save may copy with the other blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from undercroft.device.layout import NULL_BLOCK

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from undercroft.connector.groups import Groups


@dataclass(frozen=True, slots=True)
class Offer:
    """Blocks of one of the engine's groups, as `_core.Session.begin_save` takes them."""

    group: int
    first_block: int
    end_block: int
    """The block after the last."""


@dataclass(frozen=True, slots=True)
class BoundaryState:
    """A state that vLLM holds in a device block: an entry of vLLM's ``boundary_state_offloads``."""

    group: int
    """Index of the KV cache group."""
    block_id: int
    boundary: int
    """Number of tokens after which this is the model's state."""


def window_offers(groups: Groups, tables: Sequence[Sequence[int]], boundaries: Iterable[int]) -> list[Offer]:
    """The blocks of the windows before ``boundaries`` that the device holds.

    ``tables``: per KV cache group, the request's device blocks by position.
    """
    ends = list(boundaries)
    offers: list[Offer] = []
    for index, of_engine in enumerate(groups.engine_groups):
        if of_engine.kind not in ("sliding_window", "chunked_local"):
            continue
        table = tables[of_engine.group]
        held = {
            block
            for boundary in ends
            for block in of_engine.needed(boundary)
            if of_engine.position(block) < len(table) and table[of_engine.position(block)] != NULL_BLOCK
        }
        for block in sorted(held):
            if offers and offers[-1].group == index and offers[-1].end_block == block:
                offers[-1] = Offer(index, offers[-1].first_block, block + 1)
            else:
                offers.append(Offer(index, block, block + 1))
    return offers


def state_blocks(groups: Groups, states: Iterable[BoundaryState]) -> dict[tuple[int, int], int]:
    """Device blocks of the states at the ends of blocks, by (engine group, block)."""
    found = {}
    for state in states:
        for index, of_engine in enumerate(groups.engine_groups):
            ends_block = state.boundary and state.boundary % of_engine.block_tokens == 0
            if of_engine.group == state.group and of_engine.kind == "state" and ends_block:
                found[index, state.boundary // of_engine.block_tokens - 1] = state.block_id
    return found


def tail_states(groups: Groups, states: Iterable[BoundaryState]) -> dict[int, dict[int, int]]:
    """Device blocks of the states at boundaries inside a block, by boundary and KV cache group."""
    found: dict[int, dict[int, int]] = {}
    for state in states:
        inside = state.boundary % groups.engine_block_size
        if inside and state.boundary % groups.tail_step == 0:
            found.setdefault(state.boundary, {})[state.group] = state.block_id
    return found
