"""How fast blocks go between the device and the arena, against one large memcpy of as many bytes."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from undercroft._core import Arena
from undercroft.device.api import DeviceCopier, Job
from undercroft.device.cpu import CpuCopier
from undercroft.device.layout import GroupCopy, Part
from undercroft.device.synthetic import synthetic_cache
from undercroft.errors import ConfigError
from undercroft_bench import _bench

PAGE_ALIGN = 4096


def run_copy_bench(
    *,
    block_bytes: int = 2 << 20,
    blocks: int = 256,
    layers: int = 32,
    rounds: int = 7,
    layout: str = "LBHNC",
    ranks: int = 1,
) -> dict[str, Any]:
    """Copy ``blocks`` blocks of ``block_bytes`` bytes, spread over ``layers`` layers, ``rounds`` times each way.

    The blocks are those of the first of ``ranks`` ranks: each page is a part of a larger one in the arena.

    Every round also copies as many bytes by one memcpy in the same direction. Speeds are medians in 1e9 bytes/s,
    shares the medians of the rounds' own ratios. ``routine`` names the routine that copies, ``checksum_gbps`` is the
    speed at which one thread compares blocks with their checksums. ``layout`` is one of
    `undercroft.device.layout.SUPPORTED_LAYOUTS`.
    """
    page = block_bytes // layers
    if page == 0:
        raise ConfigError(f"block_bytes {block_bytes} is less than a byte for each of {layers} layers; give more")
    device = synthetic_cache(page, blocks + 1, layers, layout, part=Part(0, ranks)).layout
    slot = -(-page * layers * ranks // PAGE_ALIGN) * PAGE_ALIGN
    arena = Arena.create(blocks * slot)
    copier = CpuCopier(device, arena)

    order = np.random.default_rng(0)
    ids = order.permutation(np.arange(1, blocks + 1, dtype=np.int64))
    slots = order.permutation(np.arange(blocks, dtype=np.int64) * slot)
    job = [GroupCopy(0, ids, slots)]
    total = page * layers * blocks
    start = int(device.groups[0].addresses[0])
    ways: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "save": (lambda: _run(copier, True, job), lambda: ctypes.memmove(arena.address, start, total)),
        "load": (lambda: _run(copier, False, job), lambda: ctypes.memmove(start, arena.address, total)),
    }
    for ours, raw in ways.values():  # the first pass only brings memory and threads into being
        ours()
        raw()
    seconds: dict[str, list[float]] = {"save": [], "load": [], "raw": []}
    shares: dict[str, list[float]] = {"save": [], "load": []}
    for _ in range(rounds):
        for way, (ours, raw) in ways.items():
            took, bare = _timed(ours), _timed(raw)
            seconds[way].append(took)
            seconds["raw"].append(bare)
            shares[way].append(bare / took)
    speeds = {f"{name}_gbps": round(total / statistics.median(times) / 1e9, 3) for name, times in seconds.items()}
    return {
        "device": "cpu",
        "routine": copier.routine,
        "layout": layout,
        "block_bytes": page * layers,
        "blocks": blocks,
        "layers": layers,
        "ranks": ranks,
        **speeds,
        **{f"{way}_share": round(statistics.median(ratios), 3) for way, ratios in shares.items()},
        "checksum_gbps": round(_bench.checksum_gbps(page * layers, blocks, rounds), 3),
    }


def _run(copier: DeviceCopier, to_arena: bool, job: list[GroupCopy]) -> None:
    copier.submit(to_arena, [Job(1, job)])
    copier.drain()
    copier.poll()


def _timed(action: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin
