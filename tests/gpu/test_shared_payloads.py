"""Payloads of any number of ranks, copied by the device: each is NumPy's transpose of all heads."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from undercroft._core import Arena
from undercroft.device.api import Job
from undercroft.device.cuda import STRATEGIES, CudaCopier
from undercroft.device.cuda_streams import CudaStreams, pin
from undercroft.device.lane import Lanes
from undercroft.device.layout import SUPPORTED_LAYOUTS, GroupCopy, Part, device_layout
from undercroft.device.synthetic import synthetic_cache

LAYERS, HEADS, TOKENS, BYTES = 3, 8, 4, 32
PAYLOAD = LAYERS * HEADS * TOKENS * BYTES
BLOCKS = {3: 4096, 1: 4096 + PAYLOAD, 6: 20480}
"""Device blocks, and where their payloads begin in the arena."""
AWAY = 7
"""A block is loaded into the one so many further on."""


def order_of(layout: str) -> tuple[int, int, int]:
    """The order of heads, tokens and bytes in a page."""
    return (0, 1, 2) if layout.endswith("HNC") else (1, 0, 2)


class Rank:
    """A KV cache with some of the heads, in the device's memory."""

    def __init__(self, shard: int, shards: int, layout: str, device: torch.device, arena: Arena, pinner: Any) -> None:
        self._heads = slice(shard * HEADS // shards, (shard + 1) * HEADS // shards)
        self._order, own = order_of(layout), HEADS // shards
        cache = synthetic_cache(own * TOKENS * BYTES, 2 * AWAY, LAYERS, layout, device)
        self._pages = cache.pages
        shape = np.array((own, TOKENS, BYTES))[list(self._order)]
        # vLLM's views have heads before tokens, however they lie. The order is its own inverse.
        views = [pages.view(2 * AWAY, *shape.tolist()).permute(0, *np.add(self._order, 1)) for pages in cache.pages]
        found = device_layout(cache.config, dict(zip(cache.views, views, strict=True)), Part(shard, shards))
        self.lanes = Lanes.make(CudaStreams(device), 4 * PAYLOAD)
        self._arena, self._layout, self._pinner = arena, found, pinner

    def copy(self, strategy: str, to_arena: bool) -> None:
        copier = CudaCopier(self._layout, self._arena, self.lanes, self._pinner, strategy=strategy)
        ids = np.array(list(BLOCKS)) + (0 if to_arena else AWAY)
        copier.submit(to_arena, [Job(1, [GroupCopy(0, ids, np.array(list(BLOCKS.values())))])])
        copier.drain()
        assert [ended.ok for ended in copier.poll()] == [True]
        copier.close()

    def write(self, block: int, content: np.ndarray) -> None:
        """``content``: [layer, head, token, byte]."""
        for pages, page in zip(self._pages, self._own(content), strict=True):
            pages[block].copy_(torch.from_numpy(page))

    def holds(self, block: int, content: np.ndarray) -> bool:
        found = [pages[block].cpu().numpy() for pages in self._pages]
        return bool((np.stack(found) == self._own(content)).all())

    def _own(self, content: np.ndarray) -> np.ndarray:
        """The bytes of each layer's page on this rank."""
        return np.stack([layer[self._heads].transpose(self._order).flatten() for layer in content])


@pytest.fixture
def arena(device: torch.device) -> Iterator[tuple[Arena, Any]]:
    """Memory of an engine, and what has pinned it."""
    made = Arena.create(1 << 20)
    pinner = pin(device, made)
    assert pinner.wait(60)
    yield made, pinner
    torch.cuda.synchronize()
    pinner.close()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("layout", SUPPORTED_LAYOUTS)
def test_every_number_of_ranks_saves_and_loads_the_same_payload(
    device: torch.device, arena: tuple[Arena, Any], layout: str, strategy: str
) -> None:
    memory, pinner = arena
    random = np.random.default_rng(3)
    contents = {block: random.integers(-128, 128, (LAYERS, HEADS, TOKENS, BYTES), dtype=np.int8) for block in BLOCKS}
    expected = np.full(memory.size, 0xAB, dtype=np.uint8)
    for block, content in contents.items():
        ordered = np.stack([layer.transpose(order_of(layout)) for layer in content])
        expected[BLOCKS[block] : BLOCKS[block] + PAYLOAD] = ordered.flatten().view(np.uint8)
    for shards in (1, 2, 4, 8):
        ctypes.memset(memory.address, 0xAB, memory.size)
        ranks = [Rank(shard, shards, layout, device, memory, pinner) for shard in range(shards)]
        for rank in ranks:
            for block, content in contents.items():
                rank.write(block, content)
            rank.copy(strategy, True)
        assert ctypes.string_at(memory.address, memory.size) == expected.tobytes(), shards
        for rank in ranks:
            rank.copy(strategy, False)
            torch.cuda.synchronize()
            for block, content in contents.items():
                assert rank.holds(block + AWAY, content), shards
                assert rank.holds(block, content), shards
