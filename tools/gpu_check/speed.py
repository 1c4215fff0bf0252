"""Speeds of copies, as shares of the speed of one plain copy of pinned memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from gpu_check.report import Row, at_least, at_most
from gpu_check.rig import Copying, Rig, copying

CASES = (("BLHNC", 32, 64 << 10), ("LBHNC", 32, 64 << 10), ("LBHNC", 80, 8 << 10), ("LBHNC", 32, 160 << 10))
"""KV cache layout, layers, bytes of a page."""
CACHE_SHARE = 0.4
"""Share of the free device memory: kernels and address translation behave otherwise on a large cache."""
JOBS = 8
SIZE = 2 << 30
"""Bytes of a round: a prompt of 16k tokens of an 8B model. Half a millisecond of a round is not the bus."""
SHARE = 0.97
BOTH = 1.7
SUBMIT_US = 150.0


def check(rig: Rig) -> list[Row]:
    """Rows for each case; the plain copies are measured in the same rounds."""
    rows: list[Row] = []
    size = rig.pick(SIZE, 4 << 20)
    for layout, layers, page in CASES:
        name = f"{layout}, {layers} x {page >> 10} KiB"
        rig.say(f"speed: {name}")
        many = size // (layers * page) // JOBS * JOBS or JOBS
        blocks = max(2 * many + 1, 0 if rig.small else int(rig.free_bytes() * CACHE_SHARE) // (layers * page))
        with copying(rig, layout, layers, page, blocks, 2 * many) as one:
            rows += _case(rig, one, name, many, blocks, size)
    return rows


def _case(rig: Rig, one: Copying, name: str, many: int, blocks: int, size: int) -> list[Row]:
    host, device = rig.host(size), torch.empty(size, dtype=torch.uint8, device=rig.device)
    order = np.random.default_rng(0)
    ids, slots = order.permutation(np.arange(1, blocks))[: 2 * many], order.permutation(2 * many)
    jobs = list(zip(np.split(ids, 2 * JOBS), np.split(slots, 2 * JOBS), strict=True))
    saves, loads = jobs[:JOBS], jobs[JOBS:]
    submitted: list[float] = []

    def copies(save: bool, load: bool) -> float:
        begin = time.perf_counter()
        if save:
            one.submit(True, saves)
        if load:
            one.submit(False, loads)
        submitted.append((time.perf_counter() - begin) / (save + load))
        one.finish()
        rig.wait()
        return time.perf_counter() - begin

    def plain(to: torch.Tensor, source: torch.Tensor) -> float:
        begin = time.perf_counter()
        to.copy_(source, non_blocking=True)
        rig.wait()
        return time.perf_counter() - begin

    moved = many * one.block_bytes
    ways: dict[str, tuple[Callable[[], float], Callable[[], float]]] = {
        "save": (lambda: copies(True, False), lambda: plain(host, device)),
        "load": (lambda: copies(False, True), lambda: plain(device, host)),
    }
    for measure, raw in ways.values():  # brings buffers into being
        measure(), raw()
    submitted.clear()
    shares: dict[str, list[float]] = {way: [] for way in ways}
    speeds: dict[str, list[float]] = {way: [] for way in ways}
    both = []
    for _ in rig.rounds(7, 2):
        alone = []
        for way, (measure, raw) in ways.items():
            bare, took = size / raw(), measure()
            alone.append(took)
            shares[way].append(moved / took / bare)
            speeds[way].append(moved / took / 1e9)
        both.append(2 * min(alone) / copies(True, True))
    middle = {way: round(statistics.median(values), 3) for way, values in shares.items()}
    rows = [at_least(f"{name}: share of {way}s", middle[way], SHARE) for way in ways]
    rows += [Row(f"{name}: speed of {way}s", round(statistics.median(speeds[way]), 2), "GB/s") for way in ways]
    rows.append(at_least(f"{name}: both directions, over one", round(statistics.median(both), 2), BOTH))
    cost = round(statistics.median(submitted) * 1e6, 1)
    rows.append(at_most(f"{name}: the caller's time for a step of {JOBS} jobs", cost, SUBMIT_US, "us"))
    return rows
