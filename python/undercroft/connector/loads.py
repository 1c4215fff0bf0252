"""Loads: the copy that fills a request's new device blocks, checked against what vLLM expects to be filled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from undercroft.connector.metadata import CopyJob, GroupCopy
from undercroft.connector.tails import tail_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from undercroft._core import Session
    from undercroft.connector.groups import Groups

_NULL_BLOCK = 0


def plan_load(
    session: Session,
    request_id: str,
    local_tokens: int,
    external_tokens: int,
    tables: Sequence[Sequence[int]],
    groups: Groups,
) -> tuple[CopyJob, list[int]] | None:
    """Pin the payloads of ``external_tokens`` after ``local_tokens`` and pair them with device blocks by position.

    ``tables``: per group, the request's device blocks. Returns the copy, and the engine's loads that it carries out:
    that of whole blocks, that of a tail, or both. None if a payload has gone, or if the plan would leave a block
    unfilled that vLLM takes for filled.
    """
    end = local_tokens + external_tokens
    whole = end // groups.unit * groups.unit
    begun: list[int] = []
    extents: list[tuple[int, int, bytes]] = []
    tokens: set[int] = set()
    copies = None
    try:
        for name, after, before, moved in (
            (request_id, local_tokens, whole, 0),
            (tail_name(request_id, end), 0, groups.unit if end > whole else 0, whole // groups.unit),
        ):
            if before <= after:
                continue
            plan = session.begin_load(name, after, before - after)
            if plan is None:
                return None
            begun.append(plan[0])
            tokens.add(plan[1])
            extents += [(index, first + moved, offsets) for index, first, offsets in plan[2]]
        # Of two sessions if the server was lost in between.
        copies = _pair(extents, local_tokens, end, tables, groups) if len(tokens) == 1 else None
    finally:
        if copies is None:
            for job_id in begun:
                session.end_load(job_id, False)
    return None if copies is None else (CopyJob(begun[0], request_id, tokens.pop(), copies), begun)


def _pair(
    extents: Sequence[tuple[int, int, bytes]],
    begin: int,
    end: int,
    tables: Sequence[Sequence[int]],
    groups: Groups,
) -> list[GroupCopy] | None:
    copies = []
    for group, tokens in enumerate(groups.block_tokens):
        if not tokens:
            continue
        start, stop = begin // tokens, -(-end // tokens)
        blocks = np.array(tables[group][start:stop], dtype=np.int64)
        if len(blocks) < stop - start:
            return None
        slots = np.full(stop - start, -1, dtype=np.int64)
        for index, first, offsets in extents:
            part = groups.parts[index]
            if part.group != group:
                continue
            found = np.frombuffer(offsets, dtype="<i8")
            places = part.position(first) - start + part.per_block * np.arange(len(found))
            inside = (places >= 0) & (places < len(slots))
            slots[places[inside]] = found[inside]
        real = blocks != _NULL_BLOCK
        if (slots[real] < 0).any():
            return None
        if real.any():
            copies.append(GroupCopy(group, blocks[real], slots[real]))
    return copies or None
