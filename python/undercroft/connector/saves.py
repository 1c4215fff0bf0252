"""Saves: which blocks, from where on the device, and what keeps them in place until all ranks have copied them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from undercroft.connector.metadata import CopyJob, GroupCopy
from undercroft.connector.tails import tail_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    from undercroft._core import Session
    from undercroft.connector.groups import Groups
    from undercroft.connector.metadata import UndercroftWorkerMetadata

_NULL_BLOCK = 0
GRANT_TIMEOUT_S = 1.0
"""Longest wait for the slots of a save, unless a server may take longer: it answers in a fraction of a millisecond, or
has trouble."""


@dataclass(slots=True)
class _Save:
    pinned: list[KVCacheBlock]
    ranks_ended: int = 0
    failed: bool = False


@dataclass(slots=True)
class _Asked:
    """A save whose slots have been asked for."""

    request_id: str
    num_tokens: int
    tables: Sequence[Sequence[int]]
    state_blocks: dict[tuple[int, int], int]
    deadline: float
    """Until when it waits for them (monotonic seconds)."""
    pinned: list[KVCacheBlock] | None = None
    """Blocks that it may take, once it has to wait for its slots."""
    abandoned: bool = False


@dataclass(frozen=True, slots=True)
class Granted:
    """How a request for slots ended."""

    request_id: str
    num_tokens: int
    refused: bool
    """Blocks were left out that may be asked for again."""
    job: CopyJob | None
    """None if there is nothing to copy."""


class Saves:
    """The saves that workers have not acknowledged yet.

    A save holds a reference on each of its source blocks in vLLM's block pool, so that neither a preemption nor a
    finished request hands them to somebody else while they are being copied. Slots come at once from an engine in this
    process, a little later from a server: until then all blocks that the save may take are held.
    """

    def __init__(
        self,
        session: Session,
        groups: Groups,
        world_size: int,
        report: Callable[[str, Exception], None],
        server_timeout_s: float = 0.0,
    ) -> None:
        """``report`` takes an error that was caught, and the hook it happened in."""
        self._grant_timeout_s = max(GRANT_TIMEOUT_S, server_timeout_s)
        self._session = session
        self._groups = groups
        self._world_size = world_size
        self._report = report
        self._pool: BlockPool | None = None
        self._asked: dict[int, _Asked] = {}
        self._saves: dict[int, _Save] = {}

    def __len__(self) -> int:
        return len(self._saves) + len(self._asked)

    def bind(self, pool: BlockPool) -> None:
        """The pool whose blocks are saved."""
        self._pool = pool

    def ask(
        self,
        request_id: str,
        block_hashes: list[Any],
        num_tokens: int,
        tables: Sequence[Sequence[int]],
        boundaries: Iterable[int] = (),
        states: Iterable[tuple[int, int, int]] = (),
        saved_tokens: int = 0,
    ) -> list[Granted]:
        """Ask for slots for what of the first ``num_tokens`` is not here yet; what has been granted by now.

        ``tables``: per group, the request's device blocks by position. ``boundaries``: where the windows are kept.
        ``states``: (group, device block, boundary) of states that the device holds. ``saved_tokens``: saved before.
        """
        offers = window_offers(self._groups, tables, boundaries)
        state_blocks = state_offers(self._groups, states)
        hashes = self._groups.hashes(block_hashes)
        return self._ask(request_id, hashes, num_tokens, tables, offers, state_blocks, saved_tokens)

    def ask_tails(
        self,
        request_id: str,
        block_hashes: list[Any],
        tables: Sequence[Sequence[int]],
        states: Iterable[tuple[int, int, int]],
    ) -> list[Granted]:
        """Ask for slots for the states that lie inside a block, each with that block of full attention.

        Not asked for again if they are refused: vLLM offers them once.
        """
        groups = self._groups
        ends: dict[int, dict[int, int]] = {}
        for group, block_id, end in states:
            if end % groups.unit and end % groups.tail_step == 0:
                ends.setdefault(end, {})[group] = block_id
        granted = []
        for end, of_end in ends.items():
            at, name = end // groups.unit, tail_name(request_id, end)
            # A chain of one block, its first.
            here = [table[at : at + 1] for table in tables]
            state_blocks = {
                (index, 0): of_end[part.group]
                for index, part in enumerate(groups.parts)
                if part.kind == "state" and part.group in of_end
            }
            block_hash = block_hashes[end // groups.hash_tokens - 1]
            granted += self._ask(name, [block_hash], groups.unit, here, [], state_blocks, 0)
            self._session.finish(name)
        return granted

    def _ask(
        self,
        request_id: str,
        hashes: list[Any],
        num_tokens: int,
        tables: Sequence[Sequence[int]],
        offers: list[tuple[int, int, int]],
        state_blocks: dict[tuple[int, int], int],
        saved_tokens: int,
    ) -> list[Granted]:
        offers = offers + [(index, block, block + 1) for index, block in state_blocks]
        save = self._session.begin_save(request_id, hashes, num_tokens, offers)
        if save is None:
            return [Granted(request_id, num_tokens, True, None)]
        deadline = time.monotonic() + self._grant_timeout_s
        asked = self._asked[save] = _Asked(request_id, num_tokens, tables, state_blocks, deadline)
        try:
            granted = self.take()
            if save in self._asked:
                # The tables change, and their blocks go, before the slots come.
                asked.tables = [list(table) for table in tables]
                asked.pinned = self._pin(self._candidates(asked, offers, saved_tokens))
        except BaseException:
            self._asked.pop(save, None)
            raise
        return granted

    def take(self) -> list[Granted]:
        """The saves that have got their slots, or none, since the last call."""
        granted = []
        for save, job_id, token, extents, refused in self._session.grants():
            if (asked := self._asked.pop(save, None)) is not None:
                granted.append(self._granted(asked, job_id, token, extents, refused))
            elif job_id:
                self._session.end_save(job_id, False)
        if self._asked:
            granted += self._give_up(time.monotonic())
        return granted

    def _give_up(self, now: float) -> list[Granted]:
        """A server that does not answer must not keep device blocks, nor vLLM stepping."""
        given_up = []
        for save in [save for save, asked in self._asked.items() if now > asked.deadline]:
            asked = self._asked.pop(save)
            self._unpin(asked)
            self._session.end_save(save, False)
            given_up.append(Granted(asked.request_id, asked.num_tokens, True, None))
        return given_up

    def _granted(self, asked: _Asked, job_id: int, token: int, extents: list[Any], refused: bool) -> Granted:
        copies: list[GroupCopy] = []
        try:
            if job_id and not asked.abandoned:
                parts = [_group_copy(self._groups, *extent, asked.tables, asked.state_blocks) for extent in extents]
                copies = _by_group(copy for copy in parts if len(copy.slots))
                if copies and self._is_held(copies, asked):
                    self._saves[job_id] = _Save(self._pin(_blocks(copies)))
                else:
                    # Refused in whole, or blocks are wanted that may be others by now: they are asked for again.
                    refused = refused or bool(copies)
                    copies = []
        except Exception as error:
            # One request's trouble must not lose the other requests' copies of this step.
            self._report("build_connector_meta", error)
            copies = []
        if job_id and not copies:
            # Nothing will ever be copied into its slots.
            self._session.end_save(job_id, False)
        self._unpin(asked)
        job = CopyJob(job_id, asked.request_id, token, copies) if copies else None
        return Granted(asked.request_id, asked.num_tokens, refused, job)

    def _candidates(self, asked: _Asked, offers: Iterable[tuple[int, int, int]], saved_tokens: int) -> list[int]:
        """Device blocks that the save may take."""
        found = set(asked.state_blocks.values())
        wanted = [(index, block) for index, first, end in offers for block in range(first, end)]
        for index, part in enumerate(self._groups.parts):
            if part.kind == "full":
                blocks = range(saved_tokens // part.block_tokens, asked.num_tokens // part.block_tokens)
                wanted += [(index, block) for block in blocks]
        for index, block in wanted:
            part = self._groups.parts[index]
            table, position = asked.tables[part.group], part.position(block)
            if part.kind != "state" and position < len(table):
                found.add(table[position])
        return sorted(found - {_NULL_BLOCK})

    def _is_held(self, copies: Iterable[GroupCopy], asked: _Asked) -> bool:
        if asked.pinned is None:
            return True
        held = {block.block_id for block in asked.pinned}
        return held.issuperset(_blocks(copies))

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

    def invalidate(self, block_ids: set[int]) -> None:
        """These device blocks do not hold what was thought: what is being saved from them is dropped."""
        for save in self._saves.values():
            save.failed |= any(block.block_id in block_ids for block in save.pinned)
        for asked in self._asked.values():
            asked.abandoned |= any(block.block_id in block_ids for block in asked.pinned or ())

    def abandon(self) -> None:
        """Let go of all device blocks at once. What is being copied from them is dropped when it is acknowledged."""
        for asked in self._asked.values():
            asked.abandoned = True
            self._unpin(asked)
        for save in self._saves.values():
            save.failed = True
            self._unpin(save)

    def blocks_to_free(self) -> bool:
        """Whether an acknowledgement will return a block to the pool that nobody else holds."""
        held = [*self._saves.values(), *self._asked.values()]
        return any(block.ref_cnt == 1 for save in held for block in save.pinned or ())

    def _pin(self, block_ids: Iterable[int]) -> list[KVCacheBlock]:
        if self._pool is None:
            raise RuntimeError("undercroft: a save before vLLM has bound its block pool")
        blocks = [self._pool.blocks[block_id] for block_id in block_ids]
        self._pool.touch(blocks)
        return blocks

    def _unpin(self, save: _Save | _Asked) -> None:
        pinned, save.pinned = save.pinned, []
        if self._pool is not None and pinned:
            # As vLLM frees a request: the deepest block is the first to be reused.
            self._pool.free_blocks(reversed(pinned))


def _blocks(copies: Iterable[GroupCopy]) -> list[int]:
    return [block_id for copy in copies for block_id in copy.block_ids.tolist()]


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


def state_offers(groups: Groups, states: Iterable[tuple[int, int, int]]) -> dict[tuple[int, int], int]:
    """Device blocks of the states at the ends of blocks, by (part, block)."""
    found = {}
    for group, block_id, boundary in states:
        for index, part in enumerate(groups.parts):
            if part.group == group and part.kind == "state" and boundary and boundary % part.block_tokens == 0:
                found[index, boundary // part.block_tokens - 1] = block_id
    return found


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
    elif len(wanted):
        # Of a long table only what is wanted is read.
        low, high = (part.position(first + int(wanted[at])) for at in (0, -1))
        block_ids = np.array(table[low : high + 1], dtype=np.int64)[part.per_block * (wanted - wanted[0])]
    else:
        block_ids = np.zeros(0, dtype=np.int64)
    if (block_ids == _NULL_BLOCK).any():
        raise ValueError(f"undercroft: a save wants null blocks of group {part.group}")
    return GroupCopy(part.group, block_ids, slots[wanted])
