"""Saves: selects the blocks and their device blocks, and holds references on these until all ranks have copied."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from undercroft.connector.metadata import GroupCopy, TransferJob
from undercroft.connector.scheduler.offers import Offer, state_blocks, tail_states, window_offers
from undercroft.connector.scheduler.tails import tail_name
from undercroft.device.layout import NULL_BLOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    from undercroft._core import Extent, SaveGrant, Session
    from undercroft.connector.groups import Groups
    from undercroft.connector.metadata import UndercroftWorkerMetadata
    from undercroft.connector.scheduler.offers import BoundaryState

GRANT_TIMEOUT_S = 1.0
"""Longest wait for the slots of a save, unless ``server_timeout_ms`` is longer. A healthy server answers in a fraction
of a millisecond."""


SAVE_TIMEOUT_S = 60.0
"""Longest time in which the workers copy a save."""
SAVE_TIMEOUT_STEPS = 16
"""Least number of steps before a save is late: workers report in steps, and vLLM may run none for a long time."""


@dataclass(slots=True)
class _Save:
    """A save that workers copy."""

    pinned: list[KVCacheBlock]
    tables: Sequence[Sequence[int]]
    """The device blocks of the request, also those that are not copied: the KV of later blocks depends on them."""
    deadline: float
    """End of the time for the copy (seconds of a monotonic clock)."""
    last_step: int
    """The number of the step before which the save is not late."""
    ranks_ended: int = 0
    failed: bool = False
    given_up: str | None = None
    """Why nobody wants the save any more, although no copy failed: a reason of `Session.give_up`."""


@dataclass(slots=True)
class _Pending:
    """A save whose slots have been asked for."""

    request_id: str
    num_tokens: int
    tables: Sequence[Sequence[int]]
    states: Mapping[tuple[int, int], int]
    """Device blocks of states, by (engine group, block)."""
    deadline: float
    """End of the wait for slots (seconds of a monotonic clock)."""
    pinned: list[KVCacheBlock] | None = None
    """Device blocks that the save may copy, referenced while it waits for its slots."""
    failed: bool = False
    given_up: str | None = None
    """See `_Save.given_up`."""

    @property
    def is_unwanted(self) -> bool:
        """Whether its slots are of no use any more."""
        return self.failed or self.given_up is not None


@dataclass(frozen=True, slots=True)
class EndedSave:
    """A save that all ranks have ended."""

    transfer_id: int
    ok: bool
    """Whether all ranks have copied."""
    given_up: str | None
    """Why the save is not wanted any more; None if it is."""


@dataclass(frozen=True, slots=True)
class SaveResult:
    """The answer to a request for slots."""

    request_id: str
    num_tokens: int
    """The tokens whose blocks were asked for; 0 if the save is not wanted any more."""
    refused: bool
    """Whether blocks were left out for which slots may be requested again."""
    job: TransferJob | None
    """The copy of the blocks; None if there is nothing to copy."""


class Saves:
    """The saves that workers have not acknowledged yet.

    A save holds a reference on each of its source blocks in vLLM's block pool. So vLLM gives these blocks to no other
    request while they are copied, even if their request is preempted or finishes. An engine in this process grants
    slots at once. A server grants them later: until then the save holds references on all blocks that it may copy.
    """

    def __init__(
        self,
        session: Session,
        groups: Groups,
        world_size: int,
        report: Callable[[str, Exception], None],
        server_timeout_s: float = 0.0,
    ) -> None:
        """``report`` takes the hook's name and the error that was caught there."""
        self._grant_timeout_s = max(GRANT_TIMEOUT_S, server_timeout_s)
        self._session = session
        self._groups = groups
        self._world_size = world_size
        self._report = report
        self._pool: BlockPool | None = None
        self._pending: dict[int, _Pending] = {}
        self._saves: dict[int, _Save] = {}
        """Saves that the workers copy, the oldest first."""
        self._may_come_late = False
        """Whether a save was given up before its slots were granted: the grant may come in any later step."""
        self._late: dict[int, _Save] = {}
        """Saves that the workers have not ended in time, which hold no device blocks any more."""
        self._is_stuck = False
        """Whether a save was late, and no save has ended since."""
        self._step = 0
        self.wants: Callable[[str], bool] = lambda _: False
        """Whether a hint names the blocks of a request, by the request's id."""

    def __len__(self) -> int:
        """The number of saves that need steps of vLLM: they are copied, or wait for their slots."""
        return len(self._saves) + len(self._pending)

    def bind(self, pool: BlockPool) -> None:
        """Take the pool whose blocks are saved."""
        self._pool = pool

    def begin(
        self,
        request_id: str,
        block_hashes: list[Any],
        num_tokens: int,
        tables: Sequence[Sequence[int]],
        boundaries: Iterable[int] = (),
        states: Iterable[BoundaryState] = (),
        saved_tokens: int = 0,
    ) -> list[SaveResult]:
        """Ask for slots for the blocks of the first ``num_tokens`` tokens that are not cached.

        Returns the results that are known now; `poll` returns the others.

        ``tables``: per group, the request's device blocks by position. ``boundaries``: ends of windows to save.
        ``states``: states that the device holds. ``saved_tokens``: tokens that were saved before.
        """
        offers = window_offers(self._groups, tables, boundaries)
        states_here = state_blocks(self._groups, states)
        hashes = self._groups.hashes(block_hashes)
        wanted = self.wants(request_id)
        return self._begin(request_id, hashes, num_tokens, tables, offers, states_here, saved_tokens, wanted=wanted)

    def begin_tails(
        self,
        request_id: str,
        block_hashes: list[Any],
        tables: Sequence[Sequence[int]],
        states: Iterable[BoundaryState],
    ) -> list[SaveResult]:
        """Ask for slots for tails: states at boundaries inside a block, each with that block of full attention.

        A refused tail is not retried: vLLM offers its state once.
        """
        groups = self._groups
        results = []
        for end, of_end in tail_states(groups, states).items():
            at, name = end // groups.engine_block_size, tail_name(request_id, end)
            # The tail is a chain of one block. Its block is number 0.
            here = [table[at : at + 1] for table in tables]
            states_here = {
                (index, 0): of_end[of_engine.group]
                for index, of_engine in enumerate(groups.engine_groups)
                if of_engine.kind == "state" and of_engine.group in of_end
            }
            block_hash = block_hashes[end // groups.hash_block_size - 1]
            wanted, size = self.wants(request_id), groups.engine_block_size
            results += self._begin(name, [block_hash], size, here, [], states_here, 0, wanted=wanted)
            self._session.finish_request(name)
        return results

    def _begin(
        self,
        request_id: str,
        hashes: list[Any],
        num_tokens: int,
        tables: Sequence[Sequence[int]],
        offers: list[Offer],
        states: Mapping[tuple[int, int], int],
        saved_tokens: int,
        *,
        wanted: bool,
    ) -> list[SaveResult]:
        if self._is_stuck and len(self):
            # Otherwise each further save would hold device blocks until it is late. One save at a time is an attempt.
            return [SaveResult(request_id, num_tokens, True, None)]
        offers = offers + [Offer(index, block, block + 1) for index, block in states]
        grant = self._session.begin_save(request_id, hashes, num_tokens, offers, wanted=wanted)
        if grant is None:
            return [SaveResult(request_id, num_tokens, True, None)]
        deadline = time.monotonic() + self._grant_timeout_s
        save = _Pending(request_id, num_tokens, tables, states, deadline)
        if not grant.pending:
            return [self._granted(save, grant)]
        # Before the slots are granted, the tables change and vLLM may free their blocks.
        save.tables = [list(table) for table in tables]
        save.pinned = self._pin(self._candidates(save, offers, saved_tokens))
        self._pending[grant.transfer_id] = save
        return []

    def poll(self) -> list[SaveResult]:
        """The results of pending saves since the last call. Called in each step."""
        # An engine of this process grants at once, and then nothing is known in most steps.
        if not (self._pending or self._saves or self._may_come_late):
            return []
        self._step += 1
        results = []
        try:
            for grant in self._session.poll_saves():
                if (save := self._pending.pop(grant.transfer_id, None)) is not None:
                    results.append(self._granted(save, grant))
                elif grant.extents:
                    self._drop_slots(grant.transfer_id)
        except Exception as error:
            # The deadlines below hold all the same.
            self._report("build_connector_meta", error)
        if self._pending or self._saves:
            now = time.monotonic()
            results += self._give_up(now)
            self._release_late(now)
        return results

    def _give_up(self, now: float) -> list[SaveResult]:
        """Drop the saves whose wait is over: a server that does not answer must not keep device blocks in use."""
        given_up = []
        for transfer_id in [transfer_id for transfer_id, save in self._pending.items() if now > save.deadline]:
            save = self._pending.pop(transfer_id)
            self._may_come_late = True
            self._unpin(save)
            self._drop_slots(transfer_id)
            given_up.append(SaveResult(save.request_id, save.num_tokens, True, None))
        return given_up

    def _release_late(self, now: float) -> None:
        """Release the device blocks of saves that the workers have not ended in time: vLLM waits for these blocks.

        A worker may still read these blocks, which soon hold other KV. So the save counts as failed, and nobody reads
        its slots. The slots stay taken until all ranks have ended the copy, because a worker may still write there.
        """
        late = list(takewhile(lambda one: self._is_late(one[1], now), self._saves.items()))
        for transfer_id, save in late:
            self._late[transfer_id] = self._saves.pop(transfer_id)
            save.failed = True
            self._unpin(save)
        if late:
            self._is_stuck = True
            error = TimeoutError(
                f"undercroft: saves that the workers have not ended within {SAVE_TIMEOUT_S:g} s: {len(late)}. Their "
                "device blocks are free again. Their host memory stays taken until the workers end the copies"
            )
            self._report("build_connector_meta", error)

    def _is_late(self, save: _Save, now: float) -> bool:
        return now >= save.deadline and self._step >= save.last_step

    def _drop_slots(self, transfer_id: int, given_up: str | None = None) -> None:
        """Tell the engine that no worker copies into the slots of a save: the save has failed, or was ``given_up`` for
        this reason. Raises nothing: other saves must go on."""
        try:
            if given_up is None:
                self._session.end_transfer(transfer_id, False)
            else:
                self._session.give_up(transfer_id, given_up)
        except Exception as error:
            self._report("build_connector_meta", error)

    def _granted(self, save: _Pending, grant: SaveGrant) -> SaveResult:
        copies: list[GroupCopy] = []
        refused = grant.refused is not None
        given_up = save.given_up
        try:
            if grant.extents and not save.is_unwanted:
                found = [_group_copy(self._groups, extent, save.tables, save.states) for extent in grant.extents]
                copies = _by_group(copy for copy in found if len(copy.offsets))
                if copies and self._is_held(copies, save):
                    deadline = time.monotonic() + SAVE_TIMEOUT_S
                    pinned = self._pin(_blocks(copies))
                    self._saves[grant.transfer_id] = _Save(
                        pinned, save.tables, deadline, self._step + SAVE_TIMEOUT_STEPS
                    )
                else:
                    # No block needs a copy, or the engine wants device blocks without a reference: these are retried.
                    refused = refused or bool(copies)
                    copies, given_up = [], "retry"
        except Exception as error:
            # An error of one request must not lose the other requests' copies of this step.
            self._report("build_connector_meta", error)
            copies = []
        if grant.extents and not copies:
            self._drop_slots(grant.transfer_id, given_up)
        self._unpin(save)
        job = TransferJob(grant.transfer_id, save.request_id, grant.session, copies) if copies else None
        # Such a save has saved nothing: its windows are offered again.
        return SaveResult(save.request_id, 0 if save.is_unwanted else save.num_tokens, refused, job)

    def _candidates(self, save: _Pending, offers: Iterable[Offer], saved_tokens: int) -> list[int]:
        """Device blocks that the save may copy."""
        found = set(save.states.values())
        wanted = [(offer.group, block) for offer in offers for block in range(offer.first_block, offer.end_block)]
        for index, of_engine in enumerate(self._groups.engine_groups):
            if of_engine.kind == "full":
                blocks = range(saved_tokens // of_engine.block_tokens, save.num_tokens // of_engine.block_tokens)
                wanted += [(index, block) for block in blocks]
        for index, block in wanted:
            of_engine = self._groups.engine_groups[index]
            table, position = save.tables[of_engine.group], of_engine.position(block)
            if of_engine.kind != "state" and position < len(table):
                found.add(table[position])
        return sorted(found - {NULL_BLOCK})

    def _is_held(self, copies: Iterable[GroupCopy], save: _Pending) -> bool:
        if save.pinned is None:
            return True
        held = {block.block_id for block in save.pinned}
        return held.issuperset(_blocks(copies))

    def acknowledge(self, answer: UndercroftWorkerMetadata) -> list[EndedSave]:
        """Take the ranks' answers, and release the blocks of saves that all ranks have ended.

        Returns the ended saves. The caller must tell the engine.
        """
        ended = []
        for transfer_id in answer.saves_failed:
            if transfer_id in self._saves:
                self._saves[transfer_id].failed = True
        for transfer_id, ranks in answer.saves_ended.items():
            of_id = self._saves if transfer_id in self._saves else self._late
            save = of_id.get(transfer_id)
            if save is None:
                continue
            save.ranks_ended += ranks
            if save.ranks_ended >= self._world_size:
                del of_id[transfer_id]
                self._is_stuck = False
                self._unpin(save)
                ended.append(EndedSave(transfer_id, not save.failed, save.given_up))
        return ended

    def invalidate(self, block_ids: set[int]) -> None:
        """Drop the saves of requests with these device blocks, which do not hold the tokens that undercroft assumed.

        A save may copy none of these blocks, because the tiers hold other copies of them. The KV of the blocks that it
        copies was computed from them all the same.
        """
        for save in self._saves.values():
            save.failed |= any(not block_ids.isdisjoint(table) for table in save.tables)
        for pending in self._pending.values():
            pending.failed |= any(not block_ids.isdisjoint(table) for table in pending.tables)

    def abandon(self) -> None:
        """The caches are reset: release all device blocks at once, and drop the saves when the workers end them."""
        self.give_up("reset")
        for save in self._unended():
            self._unpin(save)

    def give_up(self, reason: str) -> None:
        """Drop all saves when the workers end them. The device blocks stay in use until then."""
        for save in self._unended():
            save.given_up = save.given_up or reason

    def _unended(self) -> list[_Save | _Pending]:
        return [*self._saves.values(), *self._pending.values()]

    def blocks_to_free(self) -> bool:
        """Whether a save holds the last reference on a block, so that its end will return the block to the pool."""
        return any(block.ref_cnt == 1 for save in self._unended() for block in save.pinned or ())

    def _pin(self, block_ids: Iterable[int]) -> list[KVCacheBlock]:
        if self._pool is None:
            raise RuntimeError("undercroft: a save before vLLM has bound its block pool")
        blocks = [self._pool.blocks[block_id] for block_id in block_ids]
        self._pool.touch(blocks)
        return blocks

    def _unpin(self, save: _Save | _Pending) -> None:
        pinned, save.pinned = save.pinned, []
        if self._pool is not None and pinned:
            # Like vLLM when it frees a request: the deepest block is reused first.
            self._pool.free_blocks(reversed(pinned))


def _blocks(copies: Iterable[GroupCopy]) -> list[int]:
    return [block_id for copy in copies for block_id in copy.block_ids.tolist()]


def _by_group(copies: Iterable[GroupCopy]) -> list[GroupCopy]:
    """Merge the copies of engine groups into one copy for each KV cache group."""
    found: dict[int, GroupCopy] = {}
    for copy in copies:
        if (first := found.get(copy.group)) is None:
            found[copy.group] = copy
        else:
            first.block_ids = np.concatenate([first.block_ids, copy.block_ids])
            first.offsets = np.concatenate([first.offsets, copy.offsets])
    return list(found.values())


def _group_copy(
    groups: Groups,
    extent: Extent,
    tables: Sequence[Sequence[int]],
    states: Mapping[tuple[int, int], int],
) -> GroupCopy:
    of_engine = groups.engine_groups[extent.group]
    offsets = np.frombuffer(extent.offsets, dtype="<i8")
    table, first = tables[of_engine.group], extent.first_block
    low, end = of_engine.position(first), of_engine.position(first + offsets.size - 1) + 1
    if of_engine.kind != "state" and offsets.size and end <= len(table) and offsets.min() >= 0:
        # The engine wants all blocks. That is the case with most new prompts.
        block_ids = np.array(table[low : end : of_engine.per_block], dtype=np.int64)
        if block_ids.min() > NULL_BLOCK:
            return GroupCopy(of_engine.group, block_ids, offsets)
    wanted = np.flatnonzero(offsets >= 0)
    if of_engine.kind == "state":
        # A table of states has another order than positions.
        block_ids = np.array([states[extent.group, first + at] for at in wanted.tolist()], dtype=np.int64)
    elif len(wanted) and of_engine.position(first + int(wanted[-1])) >= len(table):
        raise ValueError(
            f"undercroft: a save wants block {of_engine.position(first + int(wanted[-1]))} of group "
            f"{of_engine.group}, but the request has {len(table)} blocks"
        )
    elif len(wanted):
        # Read only the part of a long table that the engine wants.
        low, high = (of_engine.position(first + int(wanted[at])) for at in (0, -1))
        block_ids = np.array(table[low : high + 1], dtype=np.int64)[of_engine.per_block * (wanted - wanted[0])]
    else:
        block_ids = np.zeros(0, dtype=np.int64)
    if (block_ids == NULL_BLOCK).any():
        raise ValueError(f"undercroft: a save wants null blocks of group {of_engine.group}")
    return GroupCopy(of_engine.group, block_ids, offsets[wanted])
