"""Loads: the copy that fills a request's new device blocks, checked against what vLLM expects to be filled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from undercroft.connector.metadata import CopyJob, GroupCopy

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
) -> CopyJob | None:
    """Pin the payloads of ``external_tokens`` after ``local_tokens`` and pair them with device blocks by position.

    ``tables``: per group, the request's device blocks. None if a payload has gone, or if the plan would leave a block
    unfilled that vLLM takes for filled.
    """
    plan = session.begin_load(request_id, local_tokens, external_tokens)
    if plan is None:
        return None
    job_id, token, extents = plan
    try:
        copies = _pair(extents, local_tokens, local_tokens + external_tokens, tables, groups)
    except BaseException:
        session.end_load(job_id, False)
        raise
    if copies is None:
        session.end_load(job_id, False)
        return None
    return CopyJob(job_id, request_id, token, copies)


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
