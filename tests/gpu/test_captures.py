"""Beside the capture of a CUDA graph: vLLM captures in a mode in which an unsafe call of any thread voids the capture.

On the fake each such call is noted, and a note fails the test.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from undercroft._core import Arena
from undercroft.device.api import Job
from undercroft.device.cuda import CudaCopier
from undercroft.device.cuda_streams import CudaStreams, pin
from undercroft.device.lane import Lanes
from undercroft.device.layout import GroupCopy
from undercroft.device.synthetic import synthetic_cache

ARENA = 4 << 20
PAGE = 4992
LAYERS = 4
BLOCKS = 16
SLOT = 20480


@pytest.fixture
def work(device: torch.device) -> Callable[[], object]:
    """The model's."""
    to, source = (torch.zeros(PAGE, dtype=torch.int8, device=device) for _ in range(2))
    return lambda: to.copy_(source)


def test_the_arena_is_pinned_and_unpinned_beside_a_capture(device: torch.device, work: Callable[[], object]) -> None:
    arena, graph = Arena.create(ARENA), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
        pinner = pin(device, arena)
        assert pinner.wait(60)
        assert pinner.pinned_bytes == arena.size
        pinner.close()
    graph.replay()


def test_copies_are_queued_beside_a_capture(device: torch.device, work: Callable[[], object]) -> None:
    """The staging buffer is made, and the kernel is loaded."""
    arena = Arena.create(ARENA)
    cache = synthetic_cache(PAGE, BLOCKS + 1, LAYERS, "LBHNC", device)
    for number, pages in enumerate(cache.pages, 1):
        pages.copy_(torch.full_like(pages, number, device="cpu"))
    lanes = Lanes.make(CudaStreams(device))
    copier = CudaCopier(cache.layout, arena, lanes, None, strategy="gather")
    released = threading.Event()
    lanes.save.thread.submit(released.wait)
    blocks = [GroupCopy(0, np.arange(1, BLOCKS + 1), np.arange(BLOCKS) * SLOT)]
    for ticket in (1, 2):
        copier.submit(True, [Job(ticket, blocks)])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
        released.set()
        lanes.save.thread.submit(lambda: None).result()
    copier.drain()
    assert [ended.ok for ended in copier.poll()] == [True, True]
    expected = b"".join(bytes([number]) * PAGE for number in range(1, LAYERS + 1))
    for slot in range(BLOCKS):
        assert ctypes.string_at(arena.address + slot * SLOT, PAGE * LAYERS) == expected
    copier.close()
    graph.replay()
