"""The sizes of vLLM's chunks in the engine's words, and the keys of chunks as blocks of the engine."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import repeat
from operator import add
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from undercroft import compat
from undercroft.connector.groups import EngineGroup, Groups
from undercroft.connector.ranks import divides_by_heads
from undercroft.embed import Blocks, Group

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.base import ReqContext

GROUP_BYTES = 4
"""A key is a block hash and, in so many bytes, the index of the KV cache group."""


class Place(NamedTuple):
    """A chunk as a block of an engine group."""

    engine_group: int
    number: int
    end: int
    """Where the chunk ends, in tokens from the prompt's start."""


class KeyRun(NamedTuple):
    """Chunks of a job, one after the other, as blocks of an engine group."""

    engine_group: int
    number: int
    """Of the first block."""
    at: int
    """Index of its key."""
    length: int


class _Keyed(NamedTuple):
    """The chunks of a KV cache group, as keys tell of them."""

    tokens: int
    """Tokens of a chunk."""
    engine_groups: list[int | None]
    """Of each chunk of a hash block of the engine. None for chunks that are not kept."""


class Chunks:
    """How chunks lie in a chain. A row of vLLM's host memory holds a chunk of any one KV cache group, of all ranks."""

    def __init__(self, offloading_config: Any, kv_cache_config: KVCacheConfig, row_bytes: int, shards: int = 0) -> None:
        """``offloading_config``: vLLM's ``OffloadingConfig``. ``row_bytes``: size of a row. ``shards``: of
        `canonical_shards`."""
        per_chunk = offloading_config.cache.blocks_per_chunk
        self.shards = shards
        tokens = {group.group_id: group.tokens_per_block * per_chunk for group in offloading_config.groups}
        has_drafts = any(group.is_eagle_group for group in kv_cache_config.kv_cache_groups)
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        kinds, windows = [], []
        for index, spec in enumerate(specs):
            kind = compat.group_kind(spec) if index in tokens else "ignored"
            window = 0
            if kind in ("sliding_window", "chunked_local"):
                # vLLM's lookup wants so many whole chunks before the end of a hit, whichever of the two it is. With a
                # draft, whose last chunk it leaves out, the hit ends a chunk earlier in each group.
                wanted = _window_chunks(spec, tokens[index]) + has_drafts
                kind, window = "sliding_window", wanted * tokens[index] + 1
            kinds.append(kind or "ignored")
            windows.append(window)
        sizes = tuple(tokens.get(index, 0) for index in range(len(specs)))
        hash_tokens = offloading_config.cache.tokens_per_hash
        self.groups = Groups(hash_tokens, hash_tokens, tuple(kinds), sizes, tuple(windows), 0)
        self.row_bytes = self.chunk_bytes = row_bytes
        """Bytes at the beginning of a row that a chunk has. In the canonical layout, ranks with the same KV write it
        once, and the rest of the row is unused."""
        if shards:
            self.chunk_bytes = min(row_bytes, offloading_config.worker_kv_bytes_per_block * shards * per_chunk)
        self.engine_groups: list[EngineGroup] = [one for one in self.groups.engine_groups if one.block_tokens]
        """The groups that the engine knows, in its order."""
        self._places: list[list[Place]] = [[] for _ in self.engine_groups]
        """By engine group, its blocks from a prompt's start, as far as a prompt has had them."""
        self._suffixes = [_suffix(one.group) for one in self.engine_groups]
        of = {(one.group, one.index): number for number, one in enumerate(self.engine_groups)}
        self._keyed: dict[bytes, _Keyed] = {}
        """By the end of a key."""
        for group, size in enumerate(self.groups.block_tokens):
            if size:
                positions = range(max(1, self.groups.engine_block_size // size))
                groups_of = [of.get((group, at)) for at in positions]
                self._keyed[_suffix(group)] = _Keyed(size, groups_of)

    def registration(self) -> list[Group]:
        """The groups for `Cache.of`."""
        return [Group((self.chunk_bytes,), one.kind, one.block_tokens, one.window) for one in self.engine_groups]

    def most_tokens(self, rows: int) -> int:
        """Tokens of the longest hit for which so many rows are enough."""
        per_block = sum(1 for one in self.engine_groups if one.kind == "full")
        at_end = sum(len(one.needed(1 << 40)) for one in self.engine_groups if one.kind != "full")
        return max(1, (rows - at_end) // max(1, per_block)) * self.groups.engine_block_size

    def key(self, place: Place, block_hashes: Sequence[bytes]) -> bytes | None:
        """The key of a block. None if the prompt has no hash there."""
        hashes = place.end // self.groups.hash_block_size
        return block_hashes[hashes - 1] + self._suffixes[place.engine_group] if hashes <= len(block_hashes) else None

    def at(self, engine_group: int, number: int) -> Place:
        """The block of an engine group with a number."""
        places, group = self._places[engine_group], self.engine_groups[engine_group]
        while number >= len(places):
            end = (group.position(len(places)) + 1) * self.groups.block_tokens[group.group]
            places.append(Place(engine_group, len(places), end))
        return places[number]

    def keys_of_prefix(self, block_hashes: Sequence[bytes], begin: int) -> Iterator[tuple[bytes, int]]:
        """The keys of the first group with full attention from token ``begin`` on, each with its chunk's end."""
        for one in self.engine_groups:
            if one.kind == "full":
                suffix = _suffix(one.group)
                tokens = self._keyed[suffix].tokens
                step, first = tokens // self.groups.hash_block_size, begin // tokens + 1
                for number, block_hash in enumerate(block_hashes[first * step - 1 :: step], first):
                    yield block_hash + suffix, number * tokens
                return

    def place(self, key: bytes, end: int | None, block_hashes: Sequence[bytes]) -> Place | None:
        """The block of a chunk that ends ``end`` tokens after the prompt's start. None for a chunk that is no block of
        the engine: of a group that is not kept, the beginning of a chunk at a prompt's end, or a key that is not the
        prompt's at this end."""
        keyed = self._keyed.get(key[-GROUP_BYTES:])
        if keyed is None or not end or end % keyed.tokens:
            return None
        number, index = divmod(end // keyed.tokens - 1, len(keyed.engine_groups))
        engine_group = keyed.engine_groups[index]
        if engine_group is None:
            return None
        place = self.at(engine_group, number)
        return place if self.key(place, block_hashes) == key else None

    def in_order(self, keys: Sequence[bytes], context: ReqContext) -> list[int]:
        """The indices of keys, one group after the other, each in the order of a prompt. vLLM names the chunks of a
        store in no order."""
        ends = [end or 0 for end in map(context.get_offload_key_position, keys)]
        order = sorted(range(len(keys)), key=ends.__getitem__)
        if len(self._keyed) > 1:
            order.sort(key=lambda at: keys[at][-GROUP_BYTES:])
        return order

    def runs(
        self, keys: Sequence[bytes], context: ReqContext, block_hashes: Sequence[bytes], most: int
    ) -> list[KeyRun]:
        """The blocks among the chunks of a job that end within a prompt's first ``most`` tokens. vLLM names a group's
        chunks one after the other, so that most keys need no more than a comparison with the next hash. Such a key is
        not asked for its position."""
        found: list[KeyRun] = []
        at = 0
        while at < len(keys):
            place = self.place(keys[at], context.get_offload_key_position(keys[at]), block_hashes)
            count = 1
            if place is not None and place.end <= most:
                count += self._following(keys, at, place, block_hashes, most)
                found.append(KeyRun(place.engine_group, place.number, at, count))
            at += count
        return found

    def _following(self, keys: Sequence[bytes], at: int, place: Place, block_hashes: Sequence[bytes], most: int) -> int:
        """How many keys behind the one of a place are those of the blocks behind it."""
        suffix = keys[at][-GROUP_BYTES:]
        keyed = self._keyed[suffix]
        if len(keyed.engine_groups) > 1:
            return 0
        step, first = keyed.tokens // self.groups.hash_block_size, place.end // self.groups.hash_block_size - 1
        last = min(len(keys) - at - 1, (most - place.end) // keyed.tokens)
        count, piece = 0, 8
        while count < last:
            # Whole pieces are compared without a turn of the interpreter for each key.
            hashes = block_hashes[first + (count + 1) * step : first + (min(count + piece, last) + 1) * step : step]
            wanted = list(map(add, hashes, repeat(suffix)))
            given = keys[at + count + 1 : at + count + 1 + len(wanted)]
            if wanted != given:
                return count + [one == other for one, other in zip(wanted, given, strict=True)].index(False)
            count += len(wanted)
            if len(wanted) < piece:
                break
            piece *= 4
        return count

    def served(
        self, context: ReqContext, block_hashes: Sequence[bytes], begin: int, boundary: int
    ) -> dict[bytes, Place]:
        """The blocks that a hit of ``boundary`` tokens has after the first ``begin`` tokens, by vLLM's keys."""
        found = {}
        for number, group in enumerate(self.engine_groups):
            size = group.block_tokens
            needed = range(begin // size, boundary // size) if group.kind == "full" else group.needed(boundary)
            for block in needed:
                place = self.at(number, block)
                key = self.key(place, block_hashes)
                if key is not None and place.end > begin and context.get_offload_key_position(key) == place.end:
                    found[key] = place
        return found

    def first_at_end(self, boundary: int) -> int:
        """Tokens before the first chunk of a window or a state that a hit of ``boundary`` tokens needs."""
        groups = (one for one in self.engine_groups if one.kind != "full")
        return min((one.needed(boundary).start * one.block_tokens for one in groups), default=boundary)

    @staticmethod
    def blocks(runs: Iterable[KeyRun], addresses: npt.NDArray[np.int64]) -> list[Blocks]:
        """Rows with their blocks, for the cache. ``addresses``: of the rows of all keys."""
        # Few calls of NumPy: between steps of a model each costs more than a turn of this loop.
        of_groups: dict[int, list[KeyRun]] = {}
        for run in runs:
            of_groups.setdefault(run.engine_group, []).append(run)
        made = []
        for group, own in of_groups.items():
            if len(own) == 1:
                [(_, number, at, count)] = own
                numbers, rows = np.arange(number, number + count, dtype=np.int64), addresses[at : at + count]
            else:
                pairs = sorted((run.number + one, run.at + one) for run in own for one in range(run.length))
                numbers = np.array([number for number, _ in pairs], np.int64)
                rows = addresses[[at for _, at in pairs]]
            made.append(Blocks(group, numbers, rows))
        return made


def _suffix(group: int) -> bytes:
    """The end of the keys of a KV cache group."""
    return group.to_bytes(GROUP_BYTES, "big")


def canonical_shards(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, offloading_config: Any) -> int:
    """Number of different pieces that the ranks have of each page, if the rows do not depend on the number of ranks: in
    vLLM's canonical layout, as far as it is known here. Otherwise 0."""
    parallel = offloading_config.parallel
    if not (offloading_config.canonical_layout and parallel.is_parallelism_agnostic):
        return 0
    if parallel.world_size != parallel.tp_size:
        return 0
    heads = vllm_config.model_config.get_total_num_kv_heads()
    specs = [spec for group in kv_cache_config.kv_cache_groups for spec in compat.layer_specs(group.kv_cache_spec)]
    found = {_shards(spec, heads, parallel.tp_size) for spec in specs}
    return found.pop() if len(found) == 1 else 0


def _shards(spec: Any, heads: int, ranks: int) -> int:
    """Number of different pieces of a layer's page among the ranks of a model with so many heads; 0: not known."""
    if type(spec).__name__ == "MLAAttentionSpec":
        return 1
    return min(heads, ranks) if divides_by_heads(spec, heads, ranks) else 0


def why_unsupported(kv_cache_config: KVCacheConfig, offloaded: Collection[int]) -> str | None:
    """The reason, for people, why the tier must stay off for this model; None if there is none."""
    for index in offloaded:
        spec = kv_cache_config.kv_cache_groups[index].kv_cache_spec
        if compat.group_kind(spec) is None:
            names = ", ".join(sorted({type(inner).__name__ for inner in compat.layer_specs(spec)}))
            return f"KV cache group {index} is {names}, which is not known here: the needs of a hit are unknown"
    kinds = {compat.group_kind(kv_cache_config.kv_cache_groups[index].kv_cache_spec) for index in offloaded}
    if "state" in kinds and any(kv_cache_config.kv_cache_groups[index].is_eagle_group for index in offloaded):
        # vLLM leaves out the last chunk of the draft's group, and asks for a state before the one of the hit. It would
        # wait for reads, and compute everything all the same.
        return "vLLM's offloading finds no state beside the layers of an EAGLE or MTP draft"
    return None


def _window_chunks(spec: Any, chunk_tokens: int) -> int:
    """Number of chunks of a window that vLLM's lookup wants before the end of a hit."""
    first = next(compat.layer_specs(spec))
    window = int(getattr(first, "sliding_window", 0) or getattr(first, "attention_chunk_size", 0))
    kept = window - 1 + int(getattr(first, "extra_retained_tokens", 0))
    return max(-(-window // chunk_tokens), -(-kept // chunk_tokens))
