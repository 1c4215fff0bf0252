"""Saves: which blocks, from where on the device, and what keeps them in place until all ranks have copied them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from undercroft.connector.metadata import CopyJob, GroupCopy

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    from undercroft._core import Session
    from undercroft.connector.groups import Groups
    from undercroft.connector.metadata import UndercroftWorkerMetadata

_NULL_BLOCK = 0


@dataclass(slots=True)
class _Save:
    pinned: list[KVCacheBlock]
    ranks_ended: int = 0
    failed: bool = False


class Saves:
    """The saves that workers have not acknowledged yet.

    A save holds a reference on each of its source blocks in vLLM's block pool, so that neither a preemption nor a
    finished request hands them to somebody else while they are being copied.
    """

    def __init__(self, session: Session, groups: Groups, world_size: int) -> None:
        self._session = session
        self._groups = groups
        self._world_size = world_size
        self._pool: BlockPool | None = None
        self._saves: dict[int, _Save] = {}

    def __len__(self) -> int:
        return len(self._saves)

    def bind(self, pool: BlockPool) -> None:
        """The pool whose blocks are saved."""
        self._pool = pool

    def begin(
        self,
        request_id: str,
        block_hashes: list[Any],
        num_tokens: int,
        tables: Sequence[Sequence[int]],
        boundaries: Iterable[int] = (),
        states: Iterable[tuple[int, int, int]] = (),
    ) -> CopyJob | None:
        """Reserve slots for what of the first ``num_tokens`` is not here yet; None if there is nothing to copy.

        ``tables``: per group, the request's device blocks by position. ``boundaries``: where the windows are kept.
        ``states``: (group, device block, boundary) of states that the device holds.
        """
        groups = self._groups
        offers = window_offers(groups, tables, boundaries)
        state_blocks: dict[tuple[int, int], int] = {}
        for index, part in enumerate(groups.parts):
            for group, block_id, boundary in states:
                if part.group == group and part.kind == "state" and boundary % groups.unit == 0:
                    block = boundary // part.block_tokens - 1
                    state_blocks[index, block] = block_id
                    offers.append((index, block, block + 1))
        plan = self._session.begin_save(request_id, groups.hashes(block_hashes), num_tokens, offers)
        if plan is None:
            return None
        job_id, extents = plan
        try:
            copies = [_group_copy(groups, *extent, tables, state_blocks) for extent in extents]
            copies = _by_group(copy for copy in copies if len(copy.slots))
            pinned = self._pin(copies)
        except BaseException:
            self._session.end_save(job_id, False)
            raise
        if not copies:
            # Every slot of this job was refused: nothing will ever be copied into it.
            self._session.end_save(job_id, False)
            return None
        self._saves[job_id] = _Save(pinned)
        return CopyJob(job_id, request_id, copies)

    def acknowledge(self, answer: UndercroftWorkerMetadata) -> list[tuple[int, bool]]:
        """Take the ranks' answers, and let go of the blocks of saves that all ranks have ended.

        Returns these, each with whether it may become visible: not if any rank failed. The engine must be told.
        """
        ended = []
        for job_id in answer.saves_failed:
            if job_id in self._saves:
                self._saves[job_id].failed = True
        for job_id, ranks in answer.saves_ended.items():
            save = self._saves.get(job_id)
            if save is None:
                continue
            save.ranks_ended += ranks
            if save.ranks_ended >= self._world_size:
                del self._saves[job_id]
                self._unpin(save)
                ended.append((job_id, not save.failed))
        return ended

    def abandon(self) -> None:
        """Let go of all device blocks at once. What is being copied from them is dropped when it is acknowledged."""
        for save in self._saves.values():
            save.failed = True
            self._unpin(save)

    def blocks_to_free(self) -> bool:
        """Whether an acknowledgement will return a block to the pool that nobody else holds."""
        return any(block.ref_cnt == 1 for save in self._saves.values() for block in save.pinned)

    def _pin(self, copies: Iterable[GroupCopy]) -> list[KVCacheBlock]:
        if self._pool is None:
            raise RuntimeError("undercroft: a save before vLLM has bound its block pool")
        blocks = [self._pool.blocks[block_id] for copy in copies for block_id in copy.block_ids.tolist()]
        self._pool.touch(blocks)
        return blocks

    def _unpin(self, save: _Save) -> None:
        pinned, save.pinned = save.pinned, []
        if self._pool is not None and pinned:
            # As vLLM frees a request: the deepest block is the first to be reused.
            self._pool.free_blocks(reversed(pinned))


def window_offers(
    groups: Groups, tables: Sequence[Sequence[int]], boundaries: Iterable[int]
) -> list[tuple[int, int, int]]:
    """What the device holds of the windows before ``boundaries``: (part, first block, block after the last)."""
    ends = list(boundaries)
    offers = []
    for index, part in enumerate(groups.parts):
        if part.kind not in ("sliding_window", "chunked_local"):
            continue
        table = tables[part.group]
        held = {
            block
            for boundary in ends
            for block in part.needed(boundary)
            if part.position(block) < len(table) and table[part.position(block)] != _NULL_BLOCK
        }
        for block in sorted(held):
            if offers and offers[-1][0] == index and offers[-1][2] == block:
                offers[-1] = (index, offers[-1][1], block + 1)
            else:
                offers.append((index, block, block + 1))
    return offers


def _by_group(copies: Iterable[GroupCopy]) -> list[GroupCopy]:
    """One copy for each group, of those of its parts."""
    found: dict[int, GroupCopy] = {}
    for copy in copies:
        if (first := found.get(copy.group)) is None:
            found[copy.group] = copy
        else:
            first.block_ids = np.concatenate([first.block_ids, copy.block_ids])
            first.slots = np.concatenate([first.slots, copy.slots])
    return list(found.values())


def _group_copy(
    groups: Groups,
    index: int,
    first: int,
    offsets: bytes,
    tables: Sequence[Sequence[int]],
    state_blocks: dict[tuple[int, int], int],
) -> GroupCopy:
    part = groups.parts[index]
    slots = np.frombuffer(offsets, dtype="<i8")
    wanted = np.flatnonzero(slots >= 0)
    table = tables[part.group]
    if part.kind == "state":
        # Its table is not in the order of positions.
        block_ids = np.array([state_blocks[index, first + at] for at in wanted.tolist()], dtype=np.int64)
    elif len(wanted) and part.position(first + int(wanted[-1])) >= len(table):
        raise ValueError(
            f"undercroft: a save wants blocks {part.position(first)} to {part.position(first + int(wanted[-1]))} of "
            f"group {part.group}, but the request has {len(table)}"
        )
    else:
        block_ids = np.array(table, dtype=np.int64)[part.position(first) + part.per_block * wanted]
    if (block_ids == _NULL_BLOCK).any():
        raise ValueError(f"undercroft: a save wants null blocks of group {part.group}")
    return GroupCopy(part.group, block_ids, slots[wanted])
