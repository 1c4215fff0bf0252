"""vLLM's KV events for the tiers: they tell routers which blocks are in host memory, on disk and in the remote store.

The engine reports the block hashes that came to a tier or left it. Only the scheduler's requests have the tokens of the
blocks. So this module remembers the tokens of recent requests' blocks. Blocks that no request has asked for since the
start (found on disk, or saved by another vLLM of the same server) are announced without tokens.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import count, islice, repeat
from typing import TYPE_CHECKING, Any

from undercroft import compat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from undercroft._core import Session
    from undercroft.connector.groups import Groups

BLOCKS_REMEMBERED = 1 << 18
"""Most blocks whose tokens are remembered."""
_FORGOTTEN = BLOCKS_REMEMBERED // 8
"""Blocks that are forgotten together, the oldest first."""


@dataclass(frozen=True, slots=True)
class _Source:
    """The request from which a block's tokens are known."""

    tokens: array[int]
    """The request's tokens from `first` on, and the tokens after the last block that its hash covers."""
    first: int
    """The engine's block with which `tokens` begin."""
    lora_id: int | None
    lora_name: str | None
    session_id: str | None


_Change = tuple[bool, str, int, bytes, bytes | None]
"""Stored or removed, tier ("host", "disk" or "remote"), the engine's group, the block's hash, its parent's hash."""
_Place = tuple[_Source | None, int]
"""The request from which a block's tokens are known, and the position of the block in the request."""
_NOWHERE: _Place = (None, 0)


@dataclass(frozen=True, slots=True)
class _Group:
    """The fields of events about a KV cache group."""

    index: int
    kind: str | None
    window: int | None


class Events:
    """The events of one scheduler's tiers."""

    def __init__(self, session: Session, groups: Groups, kv_cache_config: KVCacheConfig) -> None:
        self._session = session
        self._name = compat.event_hasher()
        self._block_size = groups.engine_block_size
        self._groups = groups
        self._event_groups: dict[int, _Group] = {}
        """The groups with events, by the engine's group. A hash block may hold several blocks of a KV cache group. Only
        the last of these has a known hash, so only its engine group has events."""
        for index, of_engine in enumerate(groups.engine_groups):
            if of_engine.block_tokens and of_engine.index == of_engine.per_block - 1:
                spec = kv_cache_config.kv_cache_groups[of_engine.group].kv_cache_spec
                self._event_groups[index] = _Group(of_engine.group, *compat.event_spec(spec))
        self._sources: dict[bytes, _Place] = {}
        self._live: dict[str, tuple[Request, int]] = {}
        """Requests that have not finished, each with the number of its blocks that are remembered."""
        self.more = True
        """Whether the engine has more events, so that vLLM must go on stepping."""
        self._restart = False
        """Whether the engine must report all blocks again."""

    def arrived(self, request: Request) -> None:
        """A request has arrived: the tokens of its blocks are known from now on."""
        self._live[request.request_id] = request, self._remember(request, 0)

    def finished(self, request: Request) -> None:
        """A request has finished. The tokens of its blocks stay known until too many newer blocks are."""
        live, remembered = self._live.pop(request.request_id, (None, 0))
        if live is request:
            self._remember(request, remembered)

    def _remember(self, request: Request, begin: int) -> int:
        """Remember the tokens of a request's engine blocks from ``begin`` on. Returns how many are remembered."""
        hashes = self._groups.hashes(request.block_hashes)
        end = len(hashes)
        if begin >= end:
            return begin
        size, lora = self._block_size, request.lora_request
        source = _Source(
            array("i", request.all_token_ids[begin * size : end * size + self._groups.lookahead_tokens]),
            begin,
            lora.adapter_id if lora is not None else None,
            lora.name if lora is not None else None,
            getattr(request, "session_id", None),
        )
        self._sources.update(zip(islice(hashes, begin, end), zip(repeat(source), count(begin)), strict=False))
        if len(self._sources) > BLOCKS_REMEMBERED:
            for known in list(islice(self._sources, _FORGOTTEN)):
                del self._sources[known]
        return end

    def _remember_new(self) -> None:
        """Remember the blocks that requests have generated meanwhile."""
        for request_id, (request, begin) in self._live.items():
            self._live[request_id] = request, self._remember(request, begin)

    def forgotten(self) -> None:
        """vLLM has published that all blocks are cleared. Routers then drop the tiers' blocks too: report them again.

        In each step vLLM publishes its own events before the events of the tiers.
        """
        self._restart = self.more = True

    def take(self) -> list[Any]:
        """The events since the last call, in vLLM's classes."""
        # Even if a call below fails each time, vLLM must not go on stepping for events.
        self.more = False
        restart, self._restart = self._restart, False
        taken = self._session.take_events(restart)
        if taken is None:
            return []
        cleared, changes, self.more = taken
        if changes:
            self._remember_new()
        events: list[Any] = [compat.AllBlocksCleared()] if cleared else []
        run = _Run(self)
        for change in changes:
            if change[2] not in self._event_groups:
                continue
            at = self._sources.get(change[3], _NOWHERE) if change[0] else _NOWHERE
            if not run.takes(change, at):
                events += run.end()
                run.begin(change, at)
        return events + run.end()

    def event(self, first: _Change, hashes: Sequence[bytes], at: _Place) -> Any:
        """One event for a run of blocks. ``first``: the change of its first block. ``at``: where its tokens are."""
        stored, tier, engine_group, _, parent = first
        group = self._event_groups[engine_group]
        place = {
            "medium": compat.MEDIUM_CPU if tier == "host" else compat.MEDIUM_STORAGE,
            "group_idx": group.index,
            "locality": "REMOTE" if tier == "remote" else "LOCAL",
            # No `ownership`: Dynamo's indexer ignores every event that names one.
        }
        names = [self._name(each) for each in hashes]
        if not stored:
            return compat.block_removed(block_hashes=names, **place)
        source, index = at
        tokens: list[int] = []
        after: list[list[int]] | None = None
        if source is not None:
            size, lookahead = self._block_size, self._groups.lookahead_tokens
            begin = (index - source.first) * size
            end = begin + len(hashes) * size
            tokens = source.tokens[begin:end].tolist()
            if lookahead:
                ends = range(begin + size, end + 1, size)
                after = [source.tokens[block : block + lookahead].tolist() for block in ends]
        return compat.block_stored(
            block_hashes=names,
            parent_block_hash=None if parent is None else self._name(parent),
            token_ids=tokens,
            block_size=self._block_size,
            lora_id=source.lora_id if source is not None else None,
            lora_name=source.lora_name if source is not None else None,
            session_id=source.session_id if source is not None else None,
            kv_cache_spec_kind=group.kind,
            kv_cache_spec_sliding_window=group.window,
            lookahead_token_ids=after,
            **place,
        )


class _Run:
    """Successive changes that make one event: blocks of a chain that were stored, or blocks that were removed."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._first: _Change | None = None
        self._hashes: list[bytes] = []
        self._at: _Place = _NOWHERE

    def begin(self, change: _Change, at: _Place) -> None:
        """Start with the change of a block. ``at``: where the block's tokens are."""
        self._first, self._hashes, self._at = change, [change[3]], at

    def takes(self, change: _Change, at: _Place) -> bool:
        """Add a change to the run if the change continues the run. Returns whether it was added."""
        first = self._first
        if first is None or change[:3] != first[:3]:
            return False
        if change[0]:
            source, index = self._at
            expected = _NOWHERE if source is None else (source, index + len(self._hashes))
            if change[4] != self._hashes[-1] or at[0] is not source or at[1] != expected[1]:
                return False
        self._hashes.append(change[3])
        return True

    def end(self) -> list[Any]:
        """The event, if there is a change."""
        return [] if self._first is None else [self._events.event(self._first, self._hashes, self._at)]


class NoEvents:
    """Stands for `Events` where vLLM publishes no events."""

    more = False

    def arrived(self, request: Request) -> None:
        """See `Events.arrived`."""

    def finished(self, request: Request) -> None:
        """See `Events.finished`."""

    def take(self) -> list[Any]:
        """See `Events.take`."""
        return []


NO_EVENTS = NoEvents()


def events_of(
    vllm_config: VllmConfig, session: Session, groups: Groups, kv_cache_config: KVCacheConfig
) -> Events | NoEvents:
    """The events of a session's tiers, if vLLM publishes events."""
    config = getattr(vllm_config, "kv_events_config", None)
    is_wanted = config is not None and config.enable_kv_cache_events
    return Events(session, groups, kv_cache_config) if is_wanted else NO_EVENTS
