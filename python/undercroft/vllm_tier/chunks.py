"""The sizes of vLLM's chunks in the engine's words, and the keys of chunks as blocks of the engine."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from undercroft import compat
from undercroft.connector.groups import EngineGroup, Groups
from undercroft.embed import Blocks, Group

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

GROUP_BYTES = 4
"""A key is a block hash and, in so many bytes, the index of the KV cache group."""


@dataclass(frozen=True, slots=True)
class Place:
    """A chunk as a block of an engine group."""

    engine_group: int
    number: int


class Chunks:
    """How chunks lie in a chain. A row of vLLM's host memory holds a chunk of any one KV cache group, of all ranks."""

    def __init__(self, offloading_config: Any, kv_cache_config: KVCacheConfig, row_bytes: int, shards: int = 0) -> None:
        """``offloading_config``: vLLM's ``OffloadingConfig``. ``row_bytes``: size of a row. ``shards``: of
        `canonical_shards`."""
        per_chunk = offloading_config.cache.blocks_per_chunk
        self.shards = shards
        tokens = {group.group_id: group.tokens_per_block * per_chunk for group in offloading_config.groups}
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        kinds, windows = [], []
        for index, spec in enumerate(specs):
            kind = compat.group_kind(spec) if index in tokens else "ignored"
            window = 0
            if kind in ("sliding_window", "chunked_local"):
                # vLLM's lookup wants so many whole chunks before the end of a hit, whichever of the two it is.
                kind, window = "sliding_window", _window_chunks(spec, tokens[index]) * tokens[index] + 1
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
        self._of = {(one.group, one.index): number for number, one in enumerate(self.engine_groups)}

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
        group = self.engine_groups[place.engine_group]
        size = self.groups.block_tokens[group.group]
        hashes = (group.position(place.number) + 1) * size // self.groups.hash_block_size
        if hashes > len(block_hashes):
            return None
        return block_hashes[hashes - 1] + group.group.to_bytes(GROUP_BYTES, "big")

    def end(self, place: Place) -> int:
        """Where a chunk ends, in tokens from the prompt's start."""
        group = self.engine_groups[place.engine_group]
        return (group.position(place.number) + 1) * self.groups.block_tokens[group.group]

    def place(self, key: bytes, end: int | None, block_hashes: Sequence[bytes]) -> Place | None:
        """The block of a chunk that ends ``end`` tokens after the prompt's start. None for a chunk that is no block of
        the engine: of a group that is not kept, the beginning of a chunk at a prompt's end, or a key that is not the
        prompt's at this end."""
        group = int.from_bytes(key[-GROUP_BYTES:], "big")
        size = self.groups.block_tokens[group] if group < len(self.groups.block_tokens) else 0
        if not size or not end or end % size:
            return None
        per_block = self.groups.engine_block_size // size
        number, index = divmod(end // size - 1, per_block)
        engine_group = self._of.get((group, index))
        if engine_group is None:
            return None
        place = Place(engine_group, number)
        return place if self.key(place, block_hashes) == key else None

    def serves(self, place: Place, boundary: int) -> bool:
        """Whether a hit of ``boundary`` tokens has this block."""
        group = self.engine_groups[place.engine_group]
        if group.kind == "full":
            return (place.number + 1) * group.block_tokens <= boundary
        return place.number in group.needed(boundary)

    @staticmethod
    def blocks(places: Iterable[Place], addresses: Iterable[int]) -> list[Blocks]:
        """Rows with their blocks, for the cache."""
        found: dict[int, dict[int, int]] = {}
        for place, address in zip(places, addresses, strict=True):
            found.setdefault(place.engine_group, {})[place.number] = address
        made = []
        for group, rows in found.items():
            numbers = sorted(rows)
            at = np.asarray([rows[number] for number in numbers], np.int64)
            made.append(Blocks(group, np.asarray(numbers, np.int64), at))
        return made


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
    kind = type(spec).__name__
    if kind == "MLAAttentionSpec":
        return 1
    own = max(1, heads // ranks)
    is_split = kind in ("FullAttentionSpec", "SlidingWindowSpec") and spec.num_head_slots is None
    return min(heads, ranks) if is_split and spec.num_kv_heads == own else 0


def why_unsupported(kv_cache_config: KVCacheConfig, offloaded: Collection[int]) -> str | None:
    """The reason, for people, why the tier must stay off for this model; None if there is none."""
    for index in offloaded:
        spec = kv_cache_config.kv_cache_groups[index].kv_cache_spec
        if compat.group_kind(spec) is None:
            names = ", ".join(sorted({type(inner).__name__ for inner in compat.layer_specs(spec)}))
            return f"KV cache group {index} is {names}, which is not known here: the needs of a hit are unknown"
    return None


def _window_chunks(spec: Any, chunk_tokens: int) -> int:
    """Number of chunks of a window that vLLM's lookup wants before the end of a hit."""
    first = next(compat.layer_specs(spec))
    window = int(getattr(first, "sliding_window", 0) or getattr(first, "attention_chunk_size", 0))
    kept = window - 1 + int(getattr(first, "extra_retained_tokens", 0))
    return max(-(-window // chunk_tokens), -(-kept // chunk_tokens))
