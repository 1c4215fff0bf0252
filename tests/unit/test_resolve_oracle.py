"""Where a hit may end, against vLLM's own managers over thousands of random caches."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import pytest
import torch
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from fake_config import vllm_config
from undercroft import _core
from undercroft.connector.groups import Groups, why_unsupported

HASH = 16
CASES = 250
SEEDS = range(20)


class Pool:
    """The part of a block pool that vLLM's managers use; the hash of a block is the number of its last granule."""

    hash_block_size = HASH

    def __init__(self, held: set[tuple[int, int]]) -> None:
        self.held = held
        self.null_block = KVCacheBlock(block_id=0)
        self.block = KVCacheBlock(block_id=1)

    def get_cached_block(self, block_hash: int, group_ids: list[int]) -> list[KVCacheBlock] | None:
        held = all((group, block_hash) in self.held for group in group_ids)
        return [self.block] * len(group_ids) if held else None


def longest_hit(specs: list[KVCacheSpec], held: set[tuple[int, int]], hashes: int, most: int) -> int:
    """As `HybridKVCacheCoordinator.find_longest_cache_hit`: every kind of group shortens the hit until none does."""
    alignment = math.lcm(*(spec.block_size for spec in specs))
    kinds: list[tuple[KVCacheSpec, list[int]]] = []
    for group, spec in enumerate(specs):
        for known, members in kinds:
            if known == spec:
                members.append(group)
                break
        else:
            kinds.append((spec, [group]))
    kinds.sort(key=lambda kind: not isinstance(kind[0], FullAttentionSpec))
    length, shorter = most, most + 1
    while length < shorter:
        shorter = length
        for spec, members in kinds:
            _, length = KVCacheSpecRegistry.get_manager_class(spec).find_longest_cache_hit(
                block_hashes=list(range(hashes)),
                max_length=length,
                kv_cache_group_ids=members,
                block_pool=Pool(held),
                kv_cache_spec=spec,
                drop_eagle_block=False,
                alignment_tokens=alignment,
            )
            # The managers count whole blocks of their own; a hit is a multiple of all.
            length = length // alignment * alignment
    return length


def random_specs(draw: random.Random) -> list[KVCacheSpec]:
    sizes = {"num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
    mixed = draw.random() < 0.4

    def spec() -> KVCacheSpec:
        block = HASH * draw.choice([1, 2, 3] if mixed else [2])
        window = draw.choice([1, 2, block, block + 1, 2 * block, 2 * block + 1, draw.randint(1, 9 * HASH)])
        makers: list[Any] = [
            lambda: FullAttentionSpec(block_size=block, **sizes),
            lambda: MLAAttentionSpec(block_size=block, **{**sizes, "num_kv_heads": 1}),
            lambda: SlidingWindowSpec(block_size=block, sliding_window=window, **sizes),
            lambda: SlidingWindowMLASpec(block_size=block, sliding_window=window, **{**sizes, "num_kv_heads": 1}),
            lambda: MambaSpec(block_size=block, shapes=((4, 4),), dtypes=(torch.float32,), mamba_cache_mode="align"),
        ]
        if not mixed:
            chunk = block * draw.randint(1, 4)
            makers.append(lambda: ChunkedLocalAttentionSpec(block_size=block, attention_chunk_size=chunk, **sizes))
        return draw.choice(makers)()

    specs = [spec() for _ in range(draw.randint(1, 4))]
    return specs if draw.random() < 0.2 else [FullAttentionSpec(block_size=specs[0].block_size, **sizes), *specs]


def random_cache(draw: random.Random, specs: list[KVCacheSpec], hashes: int) -> set[tuple[int, int]]:
    """Per group, blocks by the number of their last granule: runs and gaps of many lengths."""
    held = set()
    for group, spec in enumerate(specs):
        step = spec.block_size // HASH
        blocks = hashes // step
        chance = draw.choice([0.2, 0.6, 0.9, 0.97, 1.0])
        present = [draw.random() < chance for _ in range(blocks)]
        if isinstance(spec, FullAttentionSpec) and draw.random() < 0.8:
            reach = draw.randint(0, blocks)
            present = [block < reach or (alone and draw.random() < 0.5) for block, alone in enumerate(present)]
        held |= {(group, (block + 1) * step - 1) for block, here in enumerate(present) if here}
    return held


def our_hit(specs: list[KVCacheSpec], held: set[tuple[int, int]], hashes: int, most: int) -> int:
    config = KVCacheConfig(
        num_blocks=8,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec([f"layers.{index}"], spec) for index, spec in enumerate(specs)],
        hash_block_size=HASH,
        cache_hit_alignment_tokens=math.lcm(*(spec.block_size for spec in specs)),
    )
    assert why_unsupported(vllm_config(), config) is None
    groups = Groups.of(vllm_config(), config)
    present = []
    for part in groups.engine_groups:
        step = specs[part.group].block_size // HASH
        blocks = range(hashes * HASH // part.block_tokens)
        present.append([(part.group, (part.position(block) + 1) * step - 1) in held for block in blocks])
    registration = groups.registration([64] * len(specs))
    return _core.resolve(registration, groups.engine_block_size, groups.alignment, present, most)


@pytest.mark.parametrize("seed", SEEDS)
def test_hits_end_where_vllm_says(seed: int) -> None:
    draw = random.Random(seed)
    hits = 0
    for case in range(CASES):
        specs = random_specs(draw)
        hashes = draw.randint(1, 48)
        held = random_cache(draw, specs, hashes)
        most = min(hashes * HASH, draw.randint(0, hashes * HASH + HASH))
        expected = longest_hit(specs, held, hashes, most)
        found = our_hit(specs, held, hashes, most)
        kinds = [(type(spec).__name__, dataclasses.asdict(spec)) for spec in specs]
        assert found == expected, f"case {case} of seed {seed}: {kinds}, {hashes} hashes, at most {most}"
        hits += expected > 0
    # Neither everything nor nothing hits.
    assert CASES // 10 < hits < CASES
