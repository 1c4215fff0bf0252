"""The bytes that a real vLLM engine saves and loads, seen in the arena itself."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from real_engine import Engine, prompt
from undercroft._core import Arena

pytestmark = pytest.mark.vllm

BLOCKS = 7
"""Full blocks of 128 tokens in the prompt."""
PAGE = 128 * 2 * 128 * 4
LAYERS = 4


def test_the_arena_holds_the_device_pages_and_wrong_bytes_change_the_tokens(
    engine: Callable[..., Engine], llama: Path
) -> None:
    one = engine(llama, {"host_memory": "64MiB"}, max_model_len=2048, blocks=64)
    ids = prompt(BLOCKS * 128 + 1)
    cold = one.generate(ids, 16)
    one.idle_steps()
    assert one.device_blocks_in_use() == 0

    pages = device_pages(one)
    assert len(pages) == LAYERS * BLOCKS
    arena = arena_bytes(one)
    places = [find(arena, page) for page in pages]
    assert all(place >= 0 for place in places), "a block's page is nowhere in the arena"

    assert one.reset_device_cache()
    for cache in kv_caches(one):
        cache.zero_()
    warm = one.generate(ids, 16)
    assert (warm.tokens, warm.cached) == (cold.tokens, BLOCKS * 128)

    assert one.reset_device_cache()
    for place in places:  # real values, but of other tokens
        arena[place : place + PAGE] = np.roll(arena[place : place + PAGE], PAGE // 8)
    wrong = one.generate(ids, 16)
    assert wrong.cached == BLOCKS * 128
    assert wrong.tokens != cold.tokens


def kv_caches(one: Engine) -> list[torch.Tensor]:
    return one.core.model_executor.driver_worker.worker.model_runner.kv_caches


def device_pages(one: Engine) -> list[np.ndarray]:
    """Each layer's page of each device block that the prompt filled; the pool gives out blocks from 1 on."""
    return [
        cache[block].contiguous().flatten().view(torch.uint8).numpy()
        for cache in kv_caches(one)
        for block in range(1, BLOCKS + 1)
    ]


def arena_bytes(one: Engine) -> np.ndarray:
    address = one.connector._engine.arena
    arena = Arena.attach(address.socket, address.session)
    memory = (ctypes.c_uint8 * arena.size).from_address(arena.address)
    memory.arena = arena  # the array keeps the mapping
    return np.frombuffer(memory, dtype=np.uint8)


def find(arena: np.ndarray, page: np.ndarray) -> int:
    """Where the page lies in the arena, or -1. Pages lie at multiples of their size here."""
    assert page.size == PAGE
    starts = np.arange(0, arena.size - PAGE + 1, PAGE)
    hits = [start for start in starts if (arena[start : start + 64] == page[:64]).all()]
    return next((int(start) for start in hits if (arena[start : start + PAGE] == page).all()), -1)
