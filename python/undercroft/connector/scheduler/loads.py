"""Loads: plans the copy that fills a request's new device blocks, and checks that it fills all that vLLM expects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from undercroft.connector.metadata import GroupCopy, TransferJob
from undercroft.connector.scheduler.tails import tail_name
from undercroft.device.layout import NULL_BLOCK

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from undercroft._core import Extent, Load, Session
    from undercroft.connector.groups import Groups


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """A load as the workers carry it out."""

    job: TransferJob
    transfers: tuple[int, ...]
    """The engine's loads that this load consists of: whole blocks, a tail, or both."""
    tokens: dict[str, int]
    """The tokens by the tier that had them: "host", "disk" or "remote"."""


def plan_load(
    session: Session,
    request_id: str,
    num_computed_tokens: int,
    num_external_tokens: int,
    tables: Sequence[Sequence[int]],
    groups: Groups,
) -> LoadPlan | None:
    """Begin the load of ``num_external_tokens`` after ``num_computed_tokens``, and pair it with device blocks.

    ``tables``: per group, the request's device blocks. Returns None if a payload is no longer in memory, or if the plan
    would not fill a block that vLLM expects to be filled.
    """
    end = num_computed_tokens + num_external_tokens
    size = groups.engine_block_size
    whole = end // size * size
    begun: list[Load] = []
    extents: list[tuple[Extent, int]] = []
    copies = None
    try:
        for name, after, before, moved in (
            (request_id, num_computed_tokens, whole, 0),
            (tail_name(request_id, end), 0, size if end > whole else 0, whole // size),
        ):
            if before <= after:
                continue
            load = session.begin_load(name, after, before - after)
            if load is None:
                return None
            begun.append(load)
            extents += [(extent, extent.first_block + moved) for extent in load.extents]
        # The two loads belong to different sessions if the connection to the server was lost between them.
        one_session = len({load.session for load in begun}) == 1
        copies = _pair(extents, num_computed_tokens, end, tables, groups) if one_session else None
    finally:
        if copies is None:
            for load in begun:
                session.end_transfer(load.transfer_id, False)
    if copies is None:
        return None
    # For the engine a tail is one whole block. The hit uses only the block's tokens up to the tail's end.
    tokens = _by_tier(begun[0]) if whole > num_computed_tokens else {}
    if tail := end - max(whole, num_computed_tokens):
        tier = next(tier for tier, of_tier in _by_tier(begun[-1]).items() if of_tier)
        tokens[tier] = tokens.get(tier, 0) + tail
    transfers = tuple(load.transfer_id for load in begun)
    return LoadPlan(TransferJob(transfers[0], request_id, begun[0].session, copies), transfers, tokens)


def _by_tier(load: Load) -> dict[str, int]:
    return {"remote": load.remote_tokens, "disk": load.disk_tokens, "host": load.host_tokens}


def _pair(
    extents: Iterable[tuple[Extent, int]],
    begin: int,
    end: int,
    tables: Sequence[Sequence[int]],
    groups: Groups,
) -> list[GroupCopy] | None:
    """Pair payloads with device blocks of the tokens in ``[begin, end)``. ``extents``: each with its first block."""
    runs = [(extent.group, first, np.frombuffer(extent.offsets, dtype="<i8")) for extent, first in extents]
    copies = []
    for group, tokens in enumerate(groups.block_tokens):
        if not tokens:
            continue
        start, stop = begin // tokens, -(-end // tokens)
        blocks = np.array(tables[group][start:stop], dtype=np.int64)
        if len(blocks) < stop - start:
            return None
        offsets = np.full(stop - start, -1, dtype=np.int64)
        for index, first, found in runs:
            of_engine = groups.engine_groups[index]
            if of_engine.group != group:
                continue
            positions = of_engine.position(first) - start + of_engine.per_block * np.arange(len(found))
            inside = (positions >= 0) & (positions < len(offsets))
            offsets[positions[inside]] = found[inside]
        real = blocks != NULL_BLOCK
        if (offsets[real] < 0).any():
            return None
        if real.any():
            copies.append(GroupCopy(group, blocks[real], offsets[real]))
    return copies or None
